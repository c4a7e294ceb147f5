"""From a request with a KV cache to launches: the Hopper forward for sequences with many queries (prefill), the decode
kernels for the others."""

import math

from torch import Tensor

from ...kv_request import KvCall, KvRequest, PlannedTile
from ..common.kv import launches as decode
from ..common.launch import Launch, Memory, Target
from ..common.shapes import Problem
from .descriptors import both
from .launches import State, config_of, forward_launch, new_state
from .pipeline import Cached
from .support import MANY_QUERIES

FEW = MANY_QUERIES - 1


def of_few(request: KvRequest) -> KvRequest:
    """A packed request, as the decode kernels see it: they take the sequences with at most FEW queries."""
    return request._replace(most=min(request.most or FEW, FEW))


def schedule_sizes(request: KvRequest, target: Target | None = None) -> tuple[int, int]:
    """The tile scheduler hands out tiles of many queries one by one, so only packed requests have a schedule."""
    return (0, 0) if request.call.cu_q is None else decode.schedule_sizes(of_few(request), target)


def schedule_launch(request: KvRequest, schedule: Tensor, target: Target) -> Launch | None:
    if request.call.cu_q is None:
        return None
    return decode.schedule_launch(of_few(request), schedule, target, FEW)


def planned(request: KvRequest, schedule: Tensor) -> list[PlannedTile]:
    return [] if request.call.cu_q is None else decode.planned(of_few(request), schedule)


def attend_launches(call: KvCall, target: Target, memory: Memory) -> list[Launch]:
    request, out, lse = call.request, call.out, call.lse
    assert out is not None
    assert lse is not None
    many = many_launch(request, out, lse, new_state(memory), target.processors)
    if request.call.cu_q is None:
        return [many]
    return [many, *decode.attend_launches(call._replace(request=of_few(request)), target, memory, concurrent=True)]


def many_launch(request: KvRequest, out: Tensor, lse: Tensor, zeros: State, processors: int) -> Launch:
    call, places = request.call, request.places
    q, k, v, spec = call[:4]
    cu_q, longest = call.cu_q, places.capacity(k)
    size = Problem(
        places.batch, q.shape[-3], longest, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], packed=cu_q is not None
    )
    made = config_of(size, spec, False)
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
