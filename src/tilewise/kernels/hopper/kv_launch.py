"""Many queries over a KV cache on Hopper: the forward kernel, whose producer fetches keys page by page.

Few queries, which wait for memory and not for products, are the portable kernels' (`limits.yields`). Where sequences of
both kinds are packed together, each kernel has its own, and the portable one starts where the other leaves room. New
tokens are written by the portable kernels in either case.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ...kv_spec import KvRequest, Ran
from .. import replay
from ..gpu import Gpu
from ..launch import Launch, multiprocessors, on
from ..portable import kv_launch as portable
from ..portable.kv_launch import append
from ..shapes import Problem
from .descriptors import both
from .launch import State, forward_launch, plan_of, state
from .limits import GPU, MANY_QUERIES
from .pipeline import Cached

__all__ = ["append", "attend", "plan", "room_for"]


FEW = MANY_QUERIES - 1


def of_few(request: KvRequest) -> KvRequest:
    """A packed request, to the portable kernels, which take the sequences with at most FEW queries."""
    return request._replace(most=min(request.most or FEW, FEW))


def room_for(request: KvRequest) -> tuple[int, int]:
    """Tiles of many queries are handed out one by one: nothing is planned."""
    return (0, 0) if request.call.cu_q is None else portable.room_for(of_few(request))


def plan(request: KvRequest, ledger: Tensor, recordings: dict[Any, Any] | None = None) -> Ran | None:
    if request.call.cu_q is None:
        return None
    tensors = (ledger, *request.tensors())
    with on(ledger):
        build = lambda: [portable.plan_launch(of_few(request), ledger, GPU, FEW)]  # noqa: E731
        return portable.ran(replay.launch(("few", ledger.numel()), tensors, build, recordings), tensors)


def attend(
    request: KvRequest, out: Tensor, lse: Tensor, ledger: Tensor, room: Tensor,
    recordings: dict[Any, Any] | None = None,
) -> None:  # fmt: skip
    if request.q.shape[:-1].numel() == 0:
        return
    with on(out):
        zeros = state(out.get_device())

        def build() -> list[Launch]:
            return attend_launches(request, out, lse, ledger, room, zeros, multiprocessors(out.device))

        tensors = (*request.tensors(), out, lse, ledger, room, *zeros)
        key = "many", ledger.numel(), *replay.layout_of((out, lse, ledger, room), request.tensors())
        replay.launch(key, tensors, build, recordings)


def attend_launches(
    request: KvRequest, out: Tensor, lse: Tensor, ledger: Tensor, room: Tensor, zeros: State, processors: int,
    gpu: Gpu = GPU,
) -> list[Launch]:  # fmt: skip
    """`gpu`: where those of few queries run."""
    many = many_launch(request, out, lse, zeros, processors)
    if request.call.cu_q is None:
        return [many]
    return [many, *portable.attend_launches(of_few(request), out, lse, ledger, room, gpu, beside=True)]


def many_launch(request: KvRequest, out: Tensor, lse: Tensor, zeros: State, processors: int) -> Launch:
    call, places = request.call, request.places
    q, k, v, spec = call[:4]
    cu_q, longest = call.cu_q, places.capacity(k)
    size = Problem(
        places.batch, q.shape[-3], longest, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], packed=cu_q is not None
    )
    made = plan_of(size, spec, False)
    box, page = made.BLOCK_N, None
    if places.table is not None:
        page = k.shape[1]
        box = math.gcd(page, made.BLOCK_N)
    boxes = made.BLOCK_N // box
    most = 4 if made.WARPGROUPS == 3 else 8 if made.BLOCK_DV <= 128 else 1  # as the producer has registers
    ahead = boxes if boxes <= most else math.gcd(boxes, most)
    made = made._replace(PAGE=page, BOXES=boxes, AHEAD=ahead, FEW=0 if cu_q is None else FEW)
    cache = Cached(
        places.lengths, places.cu_new, places.table, places.rows, places.new, longest,
        0 if places.table is None else places.table.stride(0), k.shape[0], steps(k), steps(v),
    )  # fmt: skip
    keys = *both(k, box, in_a_row=True), *both(v, box, in_a_row=True)
    asked = call._replace(cu_k=cu_q)  # which no packed keys have: the cache says where they are
    return forward_launch(asked, keys, out, lse, zeros, processors, size, made, cache)


def steps(x: Tensor) -> int:
    """Tokens from a page, or row, of a cache to the next one."""
    return 0 if x.shape[0] == 1 else x.stride(0) // x.stride(1)
