"""Many queries over a KV cache on Hopper: the forward kernel, whose producer fetches keys page by page.

Few queries, which wait for memory and not for products, are the portable kernels' (`limits.yields`). New tokens are
written by theirs in either case.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...cache.request import KvRequest
from .. import replay
from ..launch import Launch, multiprocessors, on
from ..portable.kv_launch import append
from ..portable.launch import clear_launches
from ..shapes import Problem
from .descriptors import both
from .launch import State, forward_launch, plan_of, state
from .limits import GPU
from .pipeline import Cached

__all__ = ["append", "attend", "plan", "room_for"]


def room_for(request: KvRequest) -> tuple[int, int]:
    """Nothing is planned: tiles of queries are handed out one by one."""
    return 0, 0


def plan(request: KvRequest, ledger: Tensor, recordings: dict[Any, Any] | None = None) -> None:
    return None


def attend(
    request: KvRequest, out: Tensor, lse: Tensor, ledger: Tensor, room: Tensor,
    recordings: dict[Any, Any] | None = None,
) -> None:  # fmt: skip
    if request.q.shape[:-1].numel() == 0:
        return
    with on(out):
        zeros = state(out.get_device())

        def build() -> list[Launch]:
            return attend_launches(request, out, lse, zeros, multiprocessors(out.device))

        tensors = (*request.tensors(), out, lse, *zeros)
        key = "many", *replay.layout_of((out, lse), request.tensors())
        replay.launch(key, tensors, build, recordings)


def attend_launches(request: KvRequest, out: Tensor, lse: Tensor, zeros: State, processors: int) -> list[Launch]:
    call, places = request.call, request.places
    q, k, v, spec = call[:4]
    cu_q, most = call.cu_q, places.capacity(k)
    size = Problem(
        places.batch, q.shape[-3], most, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], packed=cu_q is not None
    )
    made = plan_of(size, spec, False)
    box, page = made.BLOCK_N, None
    if places.table is not None:
        page = k.shape[1]
        box = math.gcd(page, made.BLOCK_N)
    made = made._replace(PAGE=page, BOXES=made.BLOCK_N // box)
    cache = Cached(
        places.lengths, places.cu_new, places.table, places.rows, places.new, most,
        0 if places.table is None else places.table.stride(0), k.shape[0], steps(k), steps(v),
    )  # fmt: skip
    keys = *both(k, box, in_a_row=True), *both(v, box, in_a_row=True)
    asked = call._replace(cu_k=cu_q)  # which no packed keys have: the cache says where they are
    forward = forward_launch(asked, keys, out, lse, zeros, processors, size, made, cache)
    return [forward, *clear_launches(out, lse, None, cu_q, cu_q, GPU, -torch.inf)]


def steps(x: Tensor) -> int:
    """Tokens from a page, or row, of a cache to the next one."""
    return 0 if x.shape[0] == 1 else x.stride(0) // x.stride(1)
