"""Calls that a plan must serve, and how right they must be: no more than twice the error of one process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tilewise.distributed import Plan, plan

HEADS, KV_HEADS, D, DV = 6, 2, 8, 5
DOCUMENTS = [0, 1, 20, 20, 23, 37]


@tilewise.score_mod
def by_place(score, b, h, q_idx, kv_idx, table):
    return score * table[b, h, q_idx] + table[b, h, kv_idx]


@tilewise.mask_mod
def checkered(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx * 2 + h + b) % 3 != 0


class Case(NamedTuple):
    """Words for `attention`; `terms` makes the tensors among them, given the number of tokens and of batch rows."""

    name: str
    band: dict[str, Any]
    options: Mapping[str, Any] = MappingProxyType({})
    terms: Any = None
    packed: bool = False
    heads: tuple[int, int] = (HEADS, KV_HEADS)


def _table(tokens: int, rows: int) -> dict[str, Any]:
    return {"score_mod": [torch.randn(rows, HEADS, max(tokens, 1))]}


CAUSAL: dict[str, Any] = {"causal": True}
CASES = {
    case.name: case
    for case in (
        Case("full", {}),
        Case("causal", CAUSAL),
        Case("window", {"window": (6, 3)}),
        Case("far", {"window": (None, 5)}),
        Case("one head each", CAUSAL, heads=(3, 3)),
        Case("one kv head", CAUSAL, heads=(5, 1)),
        Case("groups across", CAUSAL, heads=(10, 5)),
        Case("softcap", CAUSAL, {"softcap": 2.0}),
        Case("scale", CAUSAL, {"scale": -0.3}),
        Case("alibi", CAUSAL, terms=lambda n, b: {"alibi_slopes": torch.rand(b, HEADS)}),
        Case("sinks", {"window": (6, 0)}, terms=lambda n, b: {"sinks": torch.randn(HEADS)}),
        Case("bias", CAUSAL, terms=lambda n, b: {"bias": torch.randn(1, HEADS, n, n)}),
        Case("bias of keys", {}, terms=lambda n, b: {"bias": torch.randn(1, 1, n)}),
        Case("score mod", {"window": (9, 9)}, terms=_table),
        Case("mask mod", {}, {"mask_mod": checkered()}),
        Case("dropout", CAUSAL, {"dropout_p": 0.3, "seed": 11}),
        Case("documents", CAUSAL, packed=True),
        Case("documents, window", {"window": (4, 2)}, packed=True),
        Case("documents, all", CAUSAL, {"dropout_p": 0.2, "seed": 3, "mask_mod": checkered(), "softcap": 3.0},
             lambda n, b: {"alibi_slopes": torch.rand(b, HEADS), "sinks": torch.randn(HEADS)} | _table(n, b),
             packed=True),
    )
}  # fmt: skip


def along_queries(case: Case) -> bool:
    return case.name == "bias"


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    terms: dict[str, Any]
    cu: Tensor | None


def make(case: Case, tokens: int = 37, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """The whole tensors; the same on every rank, and every time."""
    return _made(case.name, tokens, dtype, seed)


@cache
def _made(name: str, tokens: int, dtype: torch.dtype, seed: int) -> Inputs:
    case = CASES[name]
    torch.manual_seed(seed)
    heads, kv_heads = case.heads
    cu = torch.tensor(DOCUMENTS, dtype=torch.int32) if case.packed else None
    tokens = DOCUMENTS[-1] if case.packed else tokens
    batch = () if case.packed else (2,)
    shapes = ((heads, D), (kv_heads, D), (kv_heads, DV), (heads, DV))
    q, k, v, dout = (torch.randn(*batch, tokens, *shape).to(dtype) for shape in shapes)
    dlse = torch.randn(*batch, heads, tokens)
    terms = case.terms(tokens, len(DOCUMENTS) - 1 if case.packed else 2) if case.terms else {}
    return Inputs(q, k, v, dout, dlse, terms, cu)


def planned(case: Case, mesh: Any, tokens: int = 37, **words: Any) -> Plan:
    given = {"cu_seqlens": DOCUMENTS} if case.packed else {"seqlen": tokens}
    return plan(mesh, **given, **case.band, **words)


def run(case: Case, inputs: Inputs, call: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
    """out, lse and every gradient, of call(q, k, v, **options)."""
    cast = (lambda x: x) if dtype is None else (lambda x: x.to(dtype))
    leaves = [cast(x).detach().requires_grad_() for x in inputs[:3]]
    options, terms = dict(case.options), []
    for name, x in inputs.terms.items():
        x = cast(x[0] if isinstance(x, list) else x).detach().requires_grad_()
        terms.append(x)
        options[name] = by_place(x) if name == "score_mod" else x
    out, lse = call(*leaves, return_lse=True, **options)
    loss = (out * inputs.dout.to(out.dtype)).sum() + (lse * inputs.dlse).masked_fill(lse == -torch.inf, 0).sum()
    if not loss.requires_grad:
        return [out, lse, *(torch.zeros_like(x) for x in (*leaves, *terms))]
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, (*leaves, *terms))]


def alone(case: Case, inputs: Inputs, dtype: torch.dtype | None = None) -> list[Tensor]:
    """One process, in the dtype of the inputs or another."""

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if inputs.cu is None:
            return tilewise.attention(q, k, v, **case.band, **options)
        n = max(b - a for a, b in pairwise(DOCUMENTS))
        return tilewise.attention_varlen(
            q, k, v, inputs.cu, inputs.cu, max_seqlen_q=n, max_seqlen_k=n, **case.band, **options
        )

    return run(case, inputs, call, dtype)


_TRUTHS: dict[int, tuple[Tensor, list[Tensor], list[list[Tensor]]]] = {}


def faults(ours: list[Tensor], case: Case, inputs: Inputs) -> list[str]:
    """Where an error against float64 is more than twice that of one process: of a kernel, or of the reference, of which
    either may have luck with a sum of few numbers."""
    known = _TRUTHS.get(id(inputs.q))
    if known is None:  # with q, which keeps its number
        single = [alone(case, inputs)]
        if inputs.q.is_cuda:
            single.append(alone(case._replace(options={**case.options, "backend": "reference"}), inputs))
        known = _TRUTHS[id(inputs.q)] = inputs.q, alone(case, inputs, torch.float64), single
    _, exact, single = known
    found = []
    for n, (x, truth, *each) in enumerate(zip(ours, exact, *single, strict=True)):
        truth = truth.double()
        if not torch.equal(x.isfinite(), truth.isfinite()):
            found.append(f"result {n} is not finite where it should be")
            continue
        seen = truth.isfinite()
        error, *others = (((y.double() - truth)[seen].abs().max().item() if seen.any() else 0.0) for y in (x, *each))
        own = max(others)
        largest = truth[seen].abs().max().item() if seen.any() else 0.0
        rounding = 16 * torch.finfo(torch.float32).eps * (1 + largest)  # where one process is exact by luck
        if error > 2 * own + rounding:
            found.append(f"result {n}: error {error:.1e}, of one process {own:.1e}, rounding {rounding:.1e}")
    return found
