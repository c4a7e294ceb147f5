"""The public functions: attention of one rank, and of all ranks in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor

from ..errors import AttentionError
from ..mods.blocks import BlockMask
from ..options import Options, takes_options
from ..request import Request, band, differentiable
from ..validation import dense as checks
from . import ops
from .plan import Plan

_in_use: list[Plan | None] = []  # of the process, not of a thread: autograd has threads of its own


@contextmanager
def use(plan: Plan | None) -> Iterator[Plan | None]:
    """Attention within is over this plan, wherever a model's adapter asks (`current`), or `attention` is given none.

        with tilewise.distributed.use(plan):
            logits = model(plan.shard(tokens), position_ids=plan.positions()[None])
            loss(logits, plan.labels(tokens)).backward()

    The backward belongs inside where layers are checkpointed, which compute attention once more. Within `use(None)`
    there is no plan: for a part of a model that each rank computes whole, such as one that looks at images.
    """
    _in_use.append(plan)
    try:
        yield plan
    finally:
        _in_use.pop()


def current() -> Plan | None:
    """The plan in use, or None."""
    return _in_use[-1] if _in_use else None


@takes_options
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, plan: Plan | None = None, layout: str = "bshd", **options: Unpack[Options]
) -> Any:
    """`tilewise.attention` over a sequence that is sharded by a plan: this rank's queries, all ranks' keys.

        plan = tilewise.distributed.plan(mesh["cp"], seqlen=tokens.shape[1], causal=True)
        x, positions = plan.shard(x), plan.positions()
        ...
        out = tilewise.distributed.attention(q, k, v, plan=plan, softcap=30.0)

    q, k, v (B, tokens of this rank, heads, dim), as `plan.shard` deals them; of packed documents (tokens, heads, dim),
    or with a batch of 1. Exact: the same as `attention` (`attention_varlen`) over all tokens, to float32's rounding of
    the sums, for everything that takes: mods, ALiBi and dropout go by positions in the whole (give the same `seed` to
    get the mask of one GPU), sinks count once. The band is the plan's: causal and window, if said here, must be the
    same (`plan.banded` has the tokens of a plan and another band).

    A bias has this rank's rows and all tokens' columns, in the order of the sequence: (B or 1, H or 1, rows or 1,
    tokens or 1). Gradients of what all ranks have (sinks, slopes, the tensors of mods, broadcast biases) are this
    rank's part, as those of every weight are: DDP and FSDP add them up, or `torch.distributed.all_reduce`.

    All ranks must call it. Gradients flow through out and lse; results are the same bits in every run where those of
    `attention` are.
    """
    plan = plan or current()
    if not isinstance(plan, Plan):
        raise AttentionError("plan", repr(plan), "one of tilewise.distributed.plan(...), or attention within use(plan)")
    q, k, v = checks.arranged(q, k, v, layout)
    flat = plan.packed and isinstance(q, Tensor) and q.dim() == 3
    if flat:
        q, k, v = q[None], k[None], v[None]
    request = _request(plan, q, k, v, options, rank=plan.rank)
    out, lse = ops.attend(plan, request)
    if layout != "bshd":
        out = out.transpose(1, 2)
    if flat:
        out, lse = out[0], lse[0]
    return (out, lse) if options.get("return_lse") else out


@takes_options
def rehearse(q: Tensor, k: Tensor, v: Tensor, *, plan: Plan, **options: Unpack[Options]) -> Any:
    """What all ranks together would compute, in this process: whole tensors in, whole tensors out, every rank and every
    message in turn. For tests, and to try a plan before there is a cluster.

    >>> import tilewise
    >>> q = torch.randn(1, 10, 2, 8)
    >>> plan = tilewise.distributed.plan(4, seqlen=10, causal=True)
    >>> torch.allclose(rehearse(q, q, q, plan=plan), tilewise.attention(q, q, q, causal=True), atol=1e-6)
    True
    """
    q, k, v = checks.arranged(q, k, v)
    flat = plan.packed and q.dim() == 3
    if flat:
        q, k, v = q[None], k[None], v[None]
    request = _request(plan, q, k, v, options, rank=None)
    out, lse = ops.Rehearsed.apply(plan, request.spec, *request.tensors())  # type: ignore[no-untyped-call]
    if flat:
        out, lse = out[0], lse[0]
    return (out, lse) if options.get("return_lse") else out


def _request(plan: Plan, q: Tensor, k: Tensor, v: Tensor, given: Options, rank: int | None) -> Request:
    """The call of a rank, checked; of all ranks, for None."""
    options = checks.options_of(given)
    said = band(options["causal"], options["window"])
    if said not in ((None, None), plan.band):
        raise AttentionError("causal and window", said, f"the plan's, {plan.band}, or nothing: the plan knows; for a"
                             " layer with another window, plan=plan.banded(causal=..., window=...)")  # fmt: skip
    if isinstance(options["mask_mod"], BlockMask):
        raise AttentionError("mask_mod", "a block mask, whose tiles lie in one sequence on one GPU",
                             "the mask mod it was made of")  # fmt: skip
    if plan.mask is not None:
        if options["mask_mod"] is not None:
            raise AttentionError("mask_mod", "one, with a plan that has a mask", "one of the two")
        options["mask_mod"] = plan.mask
    before, after = plan.band
    options["causal"], options["window"] = False, None
    n = plan.tokens if rank is None else plan.counts()[rank]
    asked = plan.queries or n
    request = checks.sharded(
        q, k, v, (asked, n), (asked, plan.tokens), len(plan.lengths) if plan.packed else None, options
    )
    if plan.width > 1 and request.bias is not None and request.bias.shape[2] > 1:
        raise AttentionError(f"a bias along queries with strategy={plan.strategy!r}", tuple(request.bias.shape),
                             "strategy='ring', 'allgather' or 'halo', which leave the heads in place")  # fmt: skip
    if plan.strategy == "tree" and torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in request.tensors()[: differentiable(request.spec)]
    ):  # fmt: skip
        raise AttentionError("a gradient with strategy='tree'", "a tensor that requires one",
                             "torch.no_grad() for decoding; 'ring' for training")  # fmt: skip
    return request._replace(spec=request.spec._replace(before=before, after=after))
