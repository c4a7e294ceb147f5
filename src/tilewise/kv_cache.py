"""The public functions of the KV cache."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from .backends.protocol import Runner
from .backends.registry import choose
from .errors import AttentionError
from .kv_request import KvCall, KvPlan, KvRequest, attend_arguments, structure_of
from .ops import kv as ops
from .options import shown
from .plan_cache import plans, positions, signature
from .torch_internals import is_eager, is_traced
from .validation import kv as checks
from .validation import kv_contents as contents
from .validation.dense import ALWAYS
from .validation.kv import KvOptions

KV_TILE = "TILEWISE_KV_TILE"  # overrides the tile of the decode kernels, for measurements


def _takes_options(function: Any) -> Any:
    return shown(function, KvOptions, checks.defaults())


@_takes_options
def attention_kv(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor | int, **options: Unpack[KvOptions]
) -> Any:
    """Attention over a KV cache, dense or paged, for any number of queries of every sequence. Nothing is read back.

    >>> import torch
    >>> k_cache, v_cache = torch.randn(2, 8, 16, 2, 64).unbind(0)            # 8 pages of 16 tokens, 2 heads
    >>> table = torch.tensor([[5, 2], [0, 7]], dtype=torch.int32)            # of two sequences
    >>> lengths = torch.tensor([20, 3], dtype=torch.int32)
    >>> q, k, v = torch.randn(2, 1, 4, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
    >>> attention_kv(q, k_cache, v_cache, lengths, page_table=table, k_new=k, v_new=v).shape
    torch.Size([2, 1, 4, 64])

    q (B, Sq, H, D), or packed (T, H, D) with cu_seqlens_q; rows past the last sequence get out 0 and lse -inf.
    k_cache, v_cache: (rows, tokens, Hk, D) and (.., Dv), or with a page table (pages, page, Hk, ..): any strides, any
        page from 1 token on. lengths (B,) int32: tokens in the cache before this call.
    k_new, v_new: (B, Sn, Hk, D), or packed with cu_seqlens_new (by default cu_seqlens_q): written in place first, at
        lengths and on, or at `slots` (row * page + place; below 0: not at all). `rotary` turns them, and q.
    page_table: (B, pages) int32; or a pair (indptr (B + 1,), pages (N,)). Entries past the end are never looked at.
    cache_rows (B,): which row of a dense cache is whose. starts (B,): the first valid key, of padding on the left.
    causal (True), window: a query sits so that the last one is at the last key. tree: which of its sequence's last
        keys, as many as queries, each query sees: bools (B, Sq, Sq), packed (T, drafts), or int64 bits for each query.
    scale, softcap, sinks, alibi_slopes, score_mod, mask_mod, return_lse, backend: as in `attention`; kv_idx counts from
        the sequence's first place in the cache.
    plan: of `plan_kv`, made once a step for all layers that are alike.
    split: keys summed so many at a time: the same bits whatever else is in the batch. 0: never divided.
    max_seqlen_q: no sequence has more queries; chooses a tile, where q is packed.
    out: where to write.
    """
    tensors: list[Any] = [q, k_cache, v_cache, lengths]
    key = _signature("attention_kv", tensors, options)
    known: Prepared | None = None if key is None else plans.get(key)
    if known is None:
        asked = checks.kv_options(options)
        call = _call(q, k_cache, v_cache, lengths, asked)
        if is_traced(*call.request.call[:3]):
            traced = ops.traced_attend(call)
            return traced if asked["return_lse"] else traced[0]
        runner = ops.runner_of("attend", call, lambda: ops.kv_backend(call.request).attend(call))
        known = _prepared(key, tensors, call, runner, asked["return_lse"])
        results = known.runner(structure_of(call)[0])
    else:
        results = known.runner([tensors[n] for n in known.order])
    return tuple(results[:2]) if known.returns_lse else results[0]


@_takes_options
def plan_kv(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor | int, **options: Unpack[KvOptions]) -> KvPlan:
    """How `attention_kv`, called with the same arguments, deals keys to processors: made once, used by every layer.

    >>> import torch
    >>> q, cache, lengths = torch.randn(2, 1, 4, 64), torch.randn(2, 32, 2, 64), torch.tensor([5, 20]).int()
    >>> plan = plan_kv(q, cache, cache, lengths)
    >>> attention_kv(q, cache, cache, lengths, plan=plan).shape
    torch.Size([2, 1, 4, 64])

    Of q, the caches, k_new and v_new only shapes matter: those of any layer will do. One small kernel, which a CUDA
    graph may record; a graph that only uses a plan does not hold it: keep both. A plan is good for as long as lengths
    (and cu_seqlens, starts) stay; a layer with another window wants its own. With `plan`, an earlier one is made again
    in its place.
    """
    asked = checks.kv_options(options)
    request = checks.attend_request(q, k_cache, v_cache, lengths, asked)
    shape = _shape_of(request)
    old: KvPlan | None = asked["plan"]
    if old is not None:
        _check_plan(old, request)
    traced = is_traced(*request.call[:3])
    if old is None and traced:
        schedule, workspace = torch.ops.tilewise.new_plan_kv(*attend_arguments(request))
        return KvPlan(schedule, workspace, ops.new_lse(request.call.q), shape)
    if old is None:
        old = KvPlan(*ops.new_schedule(request), ops.new_lse(request.call.q), shape)
    if traced:
        torch.ops.tilewise.plan_kv(old.schedule, *attend_arguments(request))
    else:
        ops.schedule(request, old.schedule)
    return old


@_takes_options
def check_kv(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor | int, **options: Unpack[KvOptions]) -> None:
    """Everything that can be wrong with a call of `attention_kv`, contents included: reads them, and waits for the GPU.

    >>> import torch
    >>> q, cache = torch.randn(2, 1, 4, 64), torch.randn(2, 32, 2, 64)
    >>> check_kv(q, cache, cache, torch.tensor([5, 40], dtype=torch.int32))
    Traceback (most recent call last):
    ...
    tilewise.errors.AttentionError: tokens of sequence 1: found 40; expected at most 32, which the cache holds

    A `plan` is compared with the one that plan_kv makes for these arguments: one made for other lengths raises.
    With TILEWISE_CHECK=1 in the environment, every call begins with it.
    """
    asked = checks.kv_options(options)
    request = checks.attend_request(q, k_cache, v_cache, lengths, asked)
    _check_contents(request, asked)
    choose(request)


def append_kv(
    k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor | int, *,
    q: Tensor | None = None, backend: str = "auto", **options: Any,
) -> Tensor | None:  # fmt: skip
    """Write new keys and values into a cache in place; with `rotary` turned, and q (returned) with them.

    >>> import torch
    >>> cache, new = torch.zeros(1, 8, 2, 4), torch.ones(1, 3, 2, 4)
    >>> append_kv(new, new, cache, cache.clone(), torch.tensor([2], dtype=torch.int32))
    >>> cache[0, :, 0, 0]
    tensor([0., 0., 1., 1., 1., 0., 0., 0.])

    Arguments as in `attention_kv`: cu_seqlens_new, cu_seqlens_q (of a packed q), page_table, slots, cache_rows, rotary.
    What has no place in the cache is not written; two tokens for one slot: either of them.
    """
    tensors: list[Any] = [k_new, v_new, k_cache, v_cache, lengths]
    key = _signature("append_kv", tensors, {"q": q, "backend": backend, **options})
    known: Prepared | None = None if key is None else plans.get(key)
    if known is not None:
        results = known.runner([tensors[n] for n in known.order])
        return results[0] if results else q
    asked = checks.kv_options(options)  # type: ignore[arg-type]
    places = checks.places_of(k_new, k_cache, lengths, asked)
    request = checks.append_request(k_new, v_new, k_cache, v_cache, places, q, asked)
    if is_traced(k_new, v_new, k_cache, v_cache):
        rotated = ops.traced_append(request, backend)
        return q if rotated is None else rotated
    runner = ops.runner_of(f"append {backend}", request, lambda: ops.append_backend(request, backend).append(request))
    known = _prepared(key, tensors, request, runner)
    results = known.runner(structure_of(request)[0])
    return results[0] if results else q


class Prepared(NamedTuple):
    """The plan of a call with a KV cache: its runner, and where the runner's tensors stand among the arguments."""

    runner: Runner
    order: tuple[int, ...]
    returns_lse: bool = False


def _signature(name: str, tensors: list[Any], options: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """None if the call is not kept: traced calls, and with TILEWISE_CHECK=1 all calls."""
    if ALWAYS or not is_eager():
        return None
    return signature(name, tensors, options, os.environ.get(KV_TILE) if options.get("plan") is None else None)


def _prepared(
    key: tuple[Any, ...] | None, tensors: Sequence[Any], call: Any, runner: Runner, returns_lse: bool = False
) -> Prepared:
    """The plan of a call, kept for the next one unless a tensor was made for this call, or requires a gradient: whether
    that is an error depends on the grad mode."""
    given = structure_of(call)[0]
    order = positions(given, [x for x in tensors if isinstance(x, Tensor)])
    found = Prepared(runner, order or (), returns_lse)  # type: ignore[arg-type]
    if order is not None and not any(x.requires_grad for x in given):
        plans.keep(key, found)
    return found


def _call(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor | int, asked: KvOptions) -> KvCall:
    """The checked call of `attention_kv`."""
    request = checks.attend_request(q, k_cache, v_cache, lengths, asked)
    if ALWAYS:
        _check_contents(request, asked)
    new = None
    if asked["k_new"] is not None:
        new = checks.append_request(asked["k_new"], asked["v_new"], k_cache, v_cache, request.places, q, asked)
    elif asked["rotary"] is not None or asked["slots"] is not None:
        raise AttentionError("rotary and slots", "given without new tokens", "k_new and v_new too")
    plan = asked["plan"]
    if plan is not None:
        _check_plan(plan, request)
    out = asked["out"]
    if out is not None:
        _check_out(request, out)
    if plan is None:
        return KvCall(request, new, out=out)
    return KvCall(request, new, plan.schedule, plan.workspace, out, None if asked["return_lse"] else plan.lse)


def _check_contents(request: KvRequest, asked: KvOptions) -> None:
    """What only the numbers in a call's tensors say. Reads them, which on a GPU waits for it."""
    contents.check(request, asked["slots"])
    plan: KvPlan | None = asked["plan"]
    if plan is not None:
        _check_plan(plan, request)
        schedule, _ = ops.new_schedule(request)
        ops.schedule(request, schedule)
        backend = ops.kv_backend(request)
        contents.check_plan(backend.planned(request, plan.schedule), backend.planned(request, schedule))


def _check_plan(plan: KvPlan, request: KvRequest) -> None:
    shape = _shape_of(request)
    if plan.shape != shape:
        raise AttentionError("plan", f"one made for {plan.shape}", f"one made by plan_kv for this call, {shape}")


def _shape_of(request: KvRequest) -> tuple[Any, ...]:
    """What a plan depends on, beside what lives on the device."""
    (q, k, v, spec, *_), places = request.call, request.places
    return (
        *q.shape, *k.shape[1:], v.shape[3], q.dtype, q.device, spec.before, spec.after, spec.backend, request.split,
        request.most, request.call.cu_q is not None, places.capacity(k), places.new, places.cu_new is not None,
        places.starts is not None, os.environ.get(KV_TILE),
    )  # fmt: skip


def _check_out(request: KvRequest, out: Tensor) -> None:
    q, _, v, *_ = request.call
    shape = (*q.shape[:-1], v.shape[-1])
    if tuple(out.shape) != shape or out.dtype != q.dtype or out.device != q.device:
        raise AttentionError(
            "out", f"{out.dtype} {tuple(out.shape)} on {out.device}", f"{q.dtype} {shape} on {q.device}"
        )
