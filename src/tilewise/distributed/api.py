"""The public functions: attention of one rank, and of all ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from ..api import returned
from ..call.fields import ATTENTION
from ..call.options import Layout, Options, OtherOptions, OutLse, OutLseMaxLogit, OutMaxLogit, Result
from ..errors import AttentionError, shown
from ..mods.blocks import BlockMask
from ..request import Request, band
from ..torch_internals import inherit, inherited
from ..validation import dense as checks
from . import ops
from .plans import Plan

_thread = threading.local()  # `plans`: those in use; torch.compile traces this, and not a ContextVar
IN_USE = "tilewise.distributed.use"  # for autograd's threads, in which checkpointed layers run again


@contextmanager
def use(plan: Plan | None) -> Iterator[Plan | None]:
    """Makes a plan the current one of this thread: `attention` uses it if it gets none, and so do the adapters of
    models.

    >>> import tilewise
    >>> plan = tilewise.distributed.plan(4, seqlen=10, causal=True)
    >>> with tilewise.distributed.use(plan):
    ...     tilewise.distributed.current() is plan
    True

        with tilewise.distributed.use(plan):
            logits = model(plan.shard(tokens), position_ids=plan.positions()[None])
            loss(logits, plan.labels(tokens)).backward()

    Call the backward inside if layers are checkpointed, since they compute attention again; autograd's threads have the
    plan of the thread that calls it. `use(None)` is for a part
    of a model that is not sharded, such as a vision tower.

    Args:
        plan: a plan from `tilewise.distributed.plan`, or None.

    Yields:
        The plan.
    """
    outer = getattr(_thread, "plans", ())
    _set((*outer, plan))
    try:
        yield plan
    finally:
        _set(outer)


def _set(plans: tuple[Plan | None, ...]) -> None:
    _thread.plans = plans
    if not torch.compiler.is_compiling():
        inherit(IN_USE, plans[-1] if plans else None)


def current() -> Plan | None:
    """The plan that `attention` uses if it gets none.

    Returns:
        The plan of the innermost `use` of this thread, or None.
    """
    plans: tuple[Plan | None, ...] = getattr(_thread, "plans", ())
    if plans or torch.compiler.is_compiling():
        return plans[-1] if plans else None
    found: Plan | None = inherited(IN_USE)
    return found


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan | None = ...,
    layout: Layout = ...,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[OtherOptions],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan | None = ...,
    layout: Layout = ...,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[OtherOptions],
) -> OutLse: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan | None = ...,
    layout: Layout = ...,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **options: Unpack[OtherOptions],
) -> OutMaxLogit: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan | None = ...,
    layout: Layout = ...,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[OtherOptions],
) -> OutLseMaxLogit: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan | None = ...,
    layout: Layout = ...,
    return_lse: bool = ...,
    return_max_logit: bool = ...,
    **options: Unpack[OtherOptions],
) -> Result: ...


@ATTENTION.shown
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, plan: Plan | None = None, layout: Layout = "bshd", **options: Unpack[Options]
) -> Result:
    """`tilewise.attention` of this rank's queries over the keys of all ranks.

    >>> import torch, tilewise
    >>> import torch.distributed as dist
    >>> store = dist.HashStore()  # as torchrun does it, here for one rank
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    >>> plan = tilewise.distributed.plan(mesh, seqlen=10, causal=True)
    >>> q, k, v = plan.shard(*torch.randn(3, 1, 10, 2, 8))
    >>> out = tilewise.distributed.attention(q, k, v, plan=plan, softcap=30.0)
    >>> plan.unshard(out).shape
    torch.Size([1, 10, 2, 8])
    >>> dist.destroy_process_group()

    Exact: the result and the gradients of `attention` (`attention_varlen`) over all tokens, up to float32 rounding of
    the sums, and bitwise reproducible where those are. Mods, ALiBi and dropout use positions in the whole sequence (the
    same `seed` drops the same weights as on one GPU); sinks count once. All ranks must call it.

    Gradients of tensors that all ranks have (sinks, slopes, tensors of mods, broadcast biases) are this rank's part, as
    those of every replicated weight: DDP and FSDP sum them, or `torch.distributed.all_reduce`.

    Args:
        q: (B, tokens of this rank, heads, dim), as `plan.shard` returns it. Packed documents: (tokens, heads, dim), or
            with a batch of 1.
        k: as q, with KV heads.
        v: as q, with KV heads.
        plan: the plan. Default: that of `use`.
        layout: "bshd", or "bhsd" for (B, heads, tokens, dim).
        options: as in `tilewise.attention`. causal and window, if given, must be the plan's (`plan.banded` returns
            a plan with another band). A bias has this rank's rows and the columns of all tokens, in the order of the
            sequence: (B or 1, H or 1, rows or 1, tokens or 1).

    Returns:
        out, or (out, lse) with return_lse=True, of this rank's queries. Both are differentiable. With
        return_max_logit=True the last result is the largest score of each head over the queries of all ranks, (B, H),
        or (H,) for packed documents without a batch axis.

    Raises:
        AttentionError: if there is no plan, the tensors do not have its tokens, or an option is not supported.
    """
    plan = plan or current()
    if not isinstance(plan, Plan):
        raise AttentionError("plan", shown(plan), "tilewise.distributed.plan(...), or a call within use(plan)")
    return _attend(plan, (q, k, v), layout, options, rehearsed=False)


@overload
def rehearse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[OtherOptions],
) -> Tensor: ...


@overload
def rehearse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[OtherOptions],
) -> OutLse: ...


@overload
def rehearse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **options: Unpack[OtherOptions],
) -> OutMaxLogit: ...


@overload
def rehearse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[OtherOptions],
) -> OutLseMaxLogit: ...


@overload
def rehearse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan,
    return_lse: bool = ...,
    return_max_logit: bool = ...,
    **options: Unpack[OtherOptions],
) -> Result: ...


@ATTENTION.shown
def rehearse(q: Tensor, k: Tensor, v: Tensor, *, plan: Plan, **options: Unpack[Options]) -> Result:
    """Computes attention of all ranks of a plan in this process, with every message: for tests, and to try a plan
    without a cluster.

    >>> import tilewise
    >>> q = torch.randn(1, 10, 2, 8)
    >>> plan = tilewise.distributed.plan(4, seqlen=10, causal=True)
    >>> whole = tilewise.attention(q, q, q, causal=True)
    >>> torch.allclose(rehearse(q, q, q, plan=plan), whole, atol=1e-6)
    True

    Args:
        q: (B, all tokens, heads, dim); packed documents as in `attention`.
        k: as q, with KV heads.
        v: as q, with KV heads.
        plan: a plan made for a number of ranks.
        options: as in `attention`.

    Returns:
        As `attention`, of all queries.

    Raises:
        AttentionError: as in `attention`.
    """
    return _attend(plan, (q, k, v), "bshd", options, rehearsed=True)


def _attend(
    plan: Plan, tensors: tuple[Tensor, Tensor, Tensor], layout: str, options: Options, rehearsed: bool
) -> Result:
    q, k, v = checks.to_bshd(*tensors, layout)
    is_flat = plan.packed and isinstance(q, Tensor) and q.dim() == 3
    if is_flat:
        q, k, v = q[None], k[None], v[None]
    tokens = plan.tokens if rehearsed else plan.counts()[plan.rank]
    found = ops.attend(plan, _request(plan, q, k, v, options, tokens=tokens), rehearsed)
    out, *others = (x[0] for x in found) if is_flat else found
    if layout != "bshd":
        out = out.transpose(-3, -2)
    return returned(out, others, options)


def _request(plan: Plan, q: Tensor, k: Tensor, v: Tensor, given: Options, *, tokens: int) -> Request:
    """The checked request of a call on `tokens` of the plan's tokens."""
    options = ATTENTION.completed(given)
    own = band(options["causal"], options["window"])
    if own not in ((None, None), plan.band):
        raise AttentionError(
            "causal and window",
            own,
            f"the plan's, {plan.band}, or none; for a layer with another mask plan.banded(causal=..., window=...)",
        )
    if isinstance(options["mask_mod"], BlockMask):
        raise AttentionError(
            "mask_mod", "a block mask, whose tiles are of one sequence on one GPU", "the mask mod it was made of"
        )
    if plan.mask is not None:
        if options["mask_mod"] is not None:
            raise AttentionError("mask_mod", "one, with a plan that has a mask", "one of the two")
        options["mask_mod"] = plan.mask
    options["causal"], options["window"] = False, None
    n_q = plan.queries or tokens
    documents = len(plan.lengths) if plan.packed else None
    request = sharded(q, k, v, (n_q, tokens), (n_q, plan.tokens), documents, options)
    if plan.ulysses_size > 1 and request.bias is not None and request.bias.shape[2] > 1:
        raise AttentionError(
            f"a bias along queries with strategy={plan.strategy!r}",
            tuple(request.bias.shape),
            "strategy='ring', 'allgather' or 'halo', which do not exchange heads",
        )
    if plan.strategy == "tree" and torch.is_grad_enabled() and ops.needs_grad(request):
        raise AttentionError(
            "a gradient with strategy='tree'",
            "a tensor that requires one",
            "torch.no_grad() for decoding; 'ring' for training",
        )
    before, after = plan.band
    return request._replace(spec=request.spec._replace(before=before, after=after))


def sharded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    here: tuple[int, int],
    whole: tuple[int, int],
    documents: int | None,
    options: Options,
) -> Request:
    """A call of `distributed.attention`: a rank has `here` tokens of q and k, and the bias has as many columns as
    `whole` has keys; `documents`, for a packed plan, is the number of batch rows that slopes may have."""
    checks.check_tensors(q, k, v, rank=4, axes="(batch, tokens, heads, dim)")
    for name, x, n in (("q", q, here[0]), ("k", k, here[1])):
        if x.shape[1] != n:
            raise AttentionError(f"tokens of {name}", x.shape[1], f"the {n} that the plan gives this rank: plan.shard")
    if q.shape[0] != k.shape[0] or (documents is not None and q.shape[0] != 1):
        found = (q.shape[0], k.shape[0])
        raise AttentionError("batch of q and k", found, "equal" if documents is None else "1, of packed documents")
    if options["precision"] is not None:
        raise AttentionError("precision", shown(options["precision"]), "None: distributed calls compute in q's dtype")
    batch = q.shape[0] if documents is None else documents
    return checks.request_of(q, k, v, (batch, q.shape[2], here[0], whole[1]), options)
