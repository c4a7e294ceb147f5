"""The public functions of the KV cache."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from ..checks import ALWAYS
from ..checks.options import shown
from ..dispatch import choose
from ..kv_spec import KvPlan, KvRequest, Ran
from ..spec import AttentionError
from . import checks, contents, memory, ops
from .checks import KvOptions


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
    look = None if ALWAYS else memory.kv_look("attend", [q, k_cache, v_cache, lengths], options)
    known = memory.repeated(look)
    if known is not memory.UNKNOWN:
        return known
    asked = checks.kv_options(options)
    request = checks.attend_request(q, k_cache, v_cache, lengths, asked)
    if ALWAYS:
        contents.check(request, asked["slots"])
    ran, turned = [], None
    if asked["k_new"] is not None:
        new = checks.append_request(asked["k_new"], asked["v_new"], k_cache, v_cache, request.places, q, asked)
        ran.append(ops.append(new, request.call.spec.backend))
        turned = new.turned
        if turned is not None:
            request = request._replace(call=request.call._replace(q=turned))
    elif asked["rotary"] is not None or asked["slots"] is not None:
        raise AttentionError("rotary and slots", "given without new tokens", "k_new and v_new too")
    given = asked["plan"]
    if given is not None and given.shape != _shape_of(request):
        raise AttentionError("plan", f"one of {given.shape}", f"one of {_shape_of(request)}, by plan_kv")
    plan = given or _plan(request, None, ran)
    out = _out(request, asked["out"])
    lse = _new_lse(request) if given and (look is None or asked["return_lse"]) else plan.lse
    ran.append(ops.attend(out, lse, plan.room, plan.ledger, request))
    results, finish = ((out, lse), _both) if asked["return_lse"] else ((out,), _one)
    made = (*((lse,) if given else plan[:3]), turned, out)
    memory.learn(look, ran, made, results, finish)
    return finish(*results)


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
    look = None if ALWAYS else memory.kv_look("plan", [q, k_cache, v_cache, lengths], options)
    known = memory.repeated(look)
    if known is not memory.UNKNOWN:
        made: KvPlan = options.get("plan") or known
        return made
    asked = checks.kv_options(options)
    request = checks.attend_request(q, k_cache, v_cache, lengths, asked)
    ran: list[Ran | None] = []
    plan = _plan(request, asked["plan"], ran)
    memory.learn(look, ran, plan[:3] if asked["plan"] is None else (), plan[:3], partial(KvPlan, shape=plan.shape))
    return plan


@_takes_options
def check_kv(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor | int, **options: Unpack[KvOptions]) -> None:
    """Everything that can be wrong with a call of `attention_kv`, contents included: reads them, and waits for the GPU.

    >>> import torch
    >>> q, cache = torch.randn(2, 1, 4, 64), torch.randn(2, 32, 2, 64)
    >>> check_kv(q, cache, cache, torch.tensor([5, 40], dtype=torch.int32))
    Traceback (most recent call last):
    ...
    tilewise.spec.AttentionError: tokens of sequence 1: found 40; expected at most 32, which the cache holds

    With TILEWISE_CHECK=1 in the environment, every call begins with it.
    """
    asked = checks.kv_options(options)
    request = checks.attend_request(q, k_cache, v_cache, lengths, asked)
    contents.check(request, asked["slots"])
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
    there, words = [k_new, v_new, k_cache, v_cache, lengths], {"q": q, "backend": backend, **options}
    look = None if ALWAYS else memory.kv_look("append", there, words)
    known: Tensor | None = memory.repeated(look)
    if known is not memory.UNKNOWN:
        return known
    asked = checks.kv_options(options)  # type: ignore[arg-type]
    places = checks.places_of(k_new, k_cache, lengths, asked)
    request = checks.append_request(k_new, v_new, k_cache, v_cache, places, q, asked)
    ran = ops.append(request, backend)
    found = q if request.turned is None else request.turned
    memory.learn(look, [ran], [request.turned], [] if found is None else [found], _one)
    return found


def _one(x: Tensor | None = None) -> Tensor | None:
    return x


def _both(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out, lse


def _plan(request: KvRequest, old: KvPlan | None, ran: list[Ran | None]) -> KvPlan:
    """`ran` is told what did."""
    shape = _shape_of(request)
    if old is None:
        ledger, room, one = ops.new_plan(request)
        ran.append(one)
        return KvPlan(ledger, room, _new_lse(request), shape)
    if old.shape != shape:
        raise AttentionError("plan", f"one of {old.shape}", f"one of {shape}, or none")
    ran.append(ops.plan(old.ledger, request))
    return old


def _shape_of(request: KvRequest) -> tuple[Any, ...]:
    """What a plan depends on, beside what lives on the device."""
    (q, k, v, spec, *_), places = request.call, request.places
    return (
        *q.shape, *k.shape[1:], v.shape[3], q.dtype, q.device, spec.before, spec.after, spec.backend, request.split,
        request.most, request.call.cu_q is not None, places.capacity(k), places.new, places.cu_new is not None,
        places.starts is not None, os.environ.get("TILEWISE_KV_TILE"),
    )  # fmt: skip


def _out(request: KvRequest, given: Tensor | None) -> Tensor:
    q, _, v, *_ = request.call
    shape = (*q.shape[:-1], v.shape[-1])
    if given is None:
        return q.new_empty(shape)
    if tuple(given.shape) != shape or given.dtype != q.dtype or given.device != q.device:
        raise AttentionError(
            "out", f"{given.dtype} {tuple(given.shape)} on {given.device}", f"{q.dtype} {shape} on {q.device}"
        )
    return given


def _new_lse(request: KvRequest) -> Tensor:
    q = request.call.q
    statistic = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=statistic)
