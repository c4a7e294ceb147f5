"""Calls of `attention_kv` that the rows of cache.tsv describe, and what they should return and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilewise
from tests.covering import Row
from tests.kv_cases import KvCase, KvInputs, compare, expected, inputs
from tests.properties.calls import numbers
from tests.quantised_cases import E4M3, E5M2, INT4, INT8, places, quantised

# the formats of k_cache and v_cache, and their scales; None: the other dtype of 16 bits
STORED: dict[str, Any] = {
    "e4m3 none": ((E4M3, E4M3), ("none", "none")),
    "e4m3 head": ((E4M3, E4M3), ("head", "float")),
    "e5m2 batch": ((E5M2, E5M2), ("batch", "tensor")),
    "int8 token": ((INT8, INT8), ("token", "token")),
    "int4 group": ((INT4, INT4), ("group", "token")),
    "int8, int4": ((INT8, INT4), ("head", "group")),
}
BANDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (6, 0)},
    "both sides": {"window": (3, 2), "causal": False},
}
DIMS = {"cpu": {"square": (16, 16), "uneven": (20, 12), "odd": (15, 7)},
        "cuda": {"square": (128, 128), "uneven": (64, 96), "odd": (15, 7)}}  # fmt: skip
LENGTHS = {"cpu": (20, 3, 0, 135), "cuda": (300, 3, 0, 1500)}
STARTS = (5, 3, 0, 40)


@tilewise.mask_mod
def some_keys(b, h, q_idx, kv_idx, offsets):  # type: ignore[no-untyped-def]
    return (kv_idx + offsets[b]) % 3 != 0


@tilewise.score_mod
def by_head(score, b, h, q_idx, kv_idx, shift):  # type: ignore[no-untyped-def]
    return score * 0.5 + shift[h]


@dataclass
class Call:
    """x: the tensors. options: of the call, beside those of x. truth: the same, for `expected`. wanted: the bytes of
    caches and scales after the call."""

    x: KvInputs
    options: dict[str, Any]
    truth: dict[str, Any]
    wanted: dict[str, Tensor]

    def run(self, backend: str, **changes: Any) -> tuple[Tensor, ...]:
        x = self.x
        options = x.options | self.options | {"return_lse": True, "backend": backend} | changes
        found: tuple[Tensor, ...] = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **options)
        return found


def case_of(row: Row, device: str) -> KvCase:
    heads, kv_heads = numbers(row["heads"])
    dim, dim_v = DIMS[device][row["dims"]]
    packed = row["queries"].startswith("packed")
    queries: Any = (2, 1, 0, 5) if packed else {"one": 1, "three": 3}[row["queries"]]
    new: Any = {"-": 0, "as many": queries, "more": (2, 3, 0, 6) if packed else queries + 2}
    kind, _, page = row["memory"].partition(" of ")
    return KvCase(
        LENGTHS[device],
        queries=queries,
        new=new[row["new"]],
        page=int(page or 0),
        csr=kind == "csr",
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dim_v=dim_v,
        layout=row["layout"],
        starts=STARTS if row["starts"] != "no" else (),
        padding=3 if row["queries"] == "packed padded" else 0,
    )


def call(row: Row, device: str, seed: int = 0) -> Call:
    case, dtype = case_of(row, device), getattr(torch, row["dtype"])
    x = inputs(case, dtype, device, seed)
    before = x.k.clone(), x.v.clone()
    wanted: dict[str, Tensor] = {}
    if row["stored"] == "16 bits":
        other = torch.bfloat16 if dtype == torch.float16 else torch.float16
        x, wanted = quantised(x, (other, dtype), ("", ""), seed)
        before = before[0].to(other), before[1]
    elif row["stored"] != "-":
        x, wanted = quantised(x, *STORED[row["stored"]], seed)
    for name, cache, tokens in zip("kv", before, (x.keys, x.values), strict=True):
        if name not in wanted:
            wanted[name] = written(x, cache, tokens)
    options: dict[str, Any] = dict(BANDS[row["band"]])
    truth: dict[str, Any] = dict(options)
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    if row["scale"] != "-":
        options["scale"] = truth["scale"] = float(row["scale"])
    if row["softcap"] != "no":
        options["softcap"] = truth["softcap"] = 0.7
    if row["sinks"] != "no":
        options["sinks"] = truth["sinks"] = randn(case.heads)
    if row["alibi"] != "no":
        options["alibi_slopes"] = truth["alibi"] = randn(case.heads).abs() / 4
    if row["mod"] == "mask_mod":
        offsets = [0, 1, 2, 0]
        options["mask_mod"] = some_keys(torch.tensor(offsets, device=device))
        truth["hides"] = lambda b, i, j: (j + offsets[b]) % 3 == 0
    if row["mod"] == "score_mod":
        shift = randn(case.heads)
        options["score_mod"] = by_head(shift)
        truth["score"] = lambda s, b: s * 0.5 + shift.to(s.dtype)[:, None, None]
    if row["tree"] != "-":
        options["tree"], truth["tree"] = tree(case, row["tree"] == "tree bits", device)
    if row["split"] != "-":
        options["split"] = 0 if row["split"] == "one split" else 128
    return Call(x, options, truth, wanted)


def written(x: KvInputs, cache: Tensor, tokens: list[Tensor]) -> Tensor:
    """The cache with the tokens that a call appends."""
    after = cache.clone()
    for b, (length, n) in enumerate(zip(x.case.lengths, x.case.each(x.case.new), strict=True)):
        for j in range(length, length + n):
            after[places(x, b, j)] = tokens[b][j].to(after)
    return after


def tree(case: KvCase, bits: bool, device: str) -> tuple[Tensor, Any]:
    """Every draft sees itself and those before it but one; as an option, and as lists for each sequence."""
    queries = case.each(case.queries)
    most = max(queries)
    one = torch.tril(torch.ones(most, most)) - torch.diag(torch.ones(max(most - 2, 0)), -2)[:most, :most]
    seen = [one[:n, :n].bool() for n in queries]
    truth = [one[: max(n, 1), : max(n, 1)].tolist() for n in queries]  # rows of a sequence without queries are not read
    packed = isinstance(case.queries, tuple)
    rows = [torch.nn.functional.pad(x, (0, most - x.shape[1])) for x in seen]
    option = torch.cat([*rows, torch.zeros(case.padding, most, dtype=torch.bool)]) if packed else torch.stack(rows)
    if bits:
        option = (option.long() << torch.arange(most)).sum(-1)
    return option.to(device), truth


def check(found: tuple[Tensor, ...], given: Call) -> None:
    """Results are within the error budget of float64, and the caches have the wanted bytes."""
    x, (out, lse, *others) = given.x, found
    compare((out, lse), x, **given.truth)
    if others:
        most: list[Tensor] = []
        expected(x, **given.truth, most=most)
        logits = torch.stack(most)
        theirs = others[0] if x.q.dim() == 4 else others[0][None]
        logits = logits if x.q.dim() == 4 else logits.amax(0, keepdim=True)
        size = logits[logits.isfinite()].abs().max().item() if logits.isfinite().any() else 0.0
        fine = 64 * torch.finfo(torch.float32).eps + (2.0**-11 if "softcap" in given.truth else 0.0)
        torch.testing.assert_close(theirs.double(), logits, rtol=0, atol=fine * max(size, 1.0))
    for name, cache in (("k", x.k), ("v", x.v)):
        assert same_bytes(cache, given.wanted[name]), f"{name}_cache"
        if f"{name}_scale" in given.wanted:
            scale, wanted = x.options[f"{name}_scale"], given.wanted[f"{name}_scale"]
            assert torch.equal(scale.cpu().nan_to_num(-1), wanted.cpu().nan_to_num(-1)), f"{name}_scale"


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same bits; any nan is like any other."""
    if x.element_size() == 1:
        return torch.equal(x.contiguous().view(torch.uint8).cpu(), y.contiguous().view(torch.uint8).cpu())
    return torch.equal(x.nan_to_num(7.0).cpu(), y.to(x).nan_to_num(7.0).cpu())
