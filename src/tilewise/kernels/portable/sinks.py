"""The gradient of sinks, -Σ_i exp(sink - lse_i) delta_i of each head: two small launches, which are recorded.

Only rows matter, not whose they are: a packed call's tokens are one sequence here. Those that lie in none are empty.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...spec import Request, Upstream
from .. import replay
from ..gpu import Gpu
from ..launch import Launch, can_overlap, gpu_for, on, overlapped
from ..overlap import gdc_wait
from ..shapes import lined
from ..terms import is_far
from ..tile.tuples import ANY_SIZE, LOG2E
from .backward_launch import prepare_launch, row_statistics

BLOCK = 4096  # rows that a program looks at at once


@triton.jit(**ANY_SIZE)
def sink_kernel(
    lse2, delta, sinks, step, total, batch, rows,
    NATURAL: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """total[h], by one program, in one order. NATURAL: lse2 are in natural units."""
    h = tl.program_id(0).to(tl.int64)
    sink = tl.load(sinks + h * step).to(tl.float32)
    if not NATURAL:
        sink *= LOG2E
    if OVERLAP:
        gdc_wait()
    acc = tl.zeros([BLOCK], tl.float32)
    for b in range(batch):
        line = tl.cast(b, tl.int64) * lse2.strides[0] + h * lse2.strides[1]
        for first in range(0, rows, BLOCK):
            i = first + tl.arange(0, BLOCK)
            x = sink - tl.load(lse2.ptr + line + i, mask=i < rows, other=float("inf"))
            p = tl.exp(x) if NATURAL else tl.exp2(x)
            acc += p * tl.load(delta.ptr + line + i, mask=i < rows, other=0.0)
    tl.store(total + h, -tl.sum(acc))


def sink_launches(
    request: Request, upstream: Upstream, total: Tensor, statistics: tuple[Tensor, Tensor], gpu: Gpu
) -> list[Launch]:
    sinks, overlap = request.sinks, can_overlap(gpu)
    assert sinks is not None
    prepare, saved = prepare_launch(_together(request), upstream, statistics, overlap)
    batch, heads, rows = statistics[0].shape
    options = {"NATURAL": is_far(request), "BLOCK": BLOCK, "num_warps": 8} | overlapped(overlap)
    args = saved.lse2, saved.delta, sinks, sinks.stride(0), total, batch, rows
    return [prepare, Launch(sink_kernel, heads, args, options)]


def sink_rooms(request: Request) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """For the gradient and the row statistics."""
    assert request.sinks is not None
    return request.sinks.new_empty(request.sinks.shape), row_statistics(_together(request))


def sink_gradient(request: Request, upstream: Upstream, recordings: dict[Any, Any] | None = None) -> Tensor:
    """`recordings` remembers the launches of calls that look alike."""
    name = f"{replay.of_gradients(upstream)} of sinks"
    given = [x for x in (*upstream, request.sinks) if x is not None]
    known = None if recordings is None else recordings.get(name)
    there = None if known is None else known.where(given)
    if known is not None and there is not None:
        found: list[Tensor] = known.run(there)
        return found[0]
    upstream = lined(upstream)
    total, statistics = sink_rooms(request)
    given = [x for x in (*upstream, request.sinks) if x is not None]
    with on(request.q):
        replay.whole(
            name, given, (total, *statistics),
            lambda: sink_launches(request, upstream, total, statistics, gpu_for(request.q)),
            recordings, key=replay.layout_of(upstream, request.tensors()),
        )  # fmt: skip
    return total


def _together(request: Request) -> Request:
    """A packed call's tokens as one sequence, as far as statistics of rows are concerned."""
    if request.cu_q is None:
        return request
    q, k, v = (x[None] for x in request[:3])
    return request._replace(q=q, k=k, v=v, cu_q=None, cu_k=None)
