"""The gradient of sinks, -Σ_i exp(sink - lse_i) delta_i of each head, in two small launches.

The sum does not depend on which sequence a row belongs to, so the tokens of a packed call are one sequence here. Tokens
that belong to no sequence are empty rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...request import BackwardInputs, Request, Spec
from .device.softmax import sink_maximum
from .device.structs import ANY_SIZE
from .launch import Build, Built, Launch, Memory, Target, can_overlap, named, overlapped
from .pdl import gdc_wait
from .preprocess import preprocess_launch, row_statistics
from .renormalise import renormalised
from .score_terms import has_large_scores

BLOCK: tl.constexpr = tl.constexpr(4096)  # rows that a program loads at once


class SinkTensors(NamedTuple):
    """Views of the padded row statistics; the sinks and their stride."""

    lse2: tl.tuple
    delta: tl.tuple
    sinks: tl.tensor
    stride: tl.tensor


@triton.jit(**ANY_SIZE)
def sink_kernel(tensors, total, batch, rows, NATURAL: tl.constexpr, OVERLAP: tl.constexpr):
    """total[h], the gradient of the sink of head h: one program for each, so that the order of the sum is fixed.
    NATURAL: lse2 is in natural units."""
    h = tl.program_id(0).to(tl.int64)
    sink = sink_maximum(tl.load(tensors.sinks + h * tensors.stride).to(tl.float32), 1 if NATURAL else None)
    rounding = tl.where(sink == float("-inf"), 0.0, tl.abs(sink) * 2.0**-22)
    if OVERLAP:
        gdc_wait()
    acc = tl.zeros([BLOCK], tl.float32)
    for b in range(batch):
        line = tl.cast(b, tl.int64) * tensors.lse2.strides[0] + h * tensors.lse2.strides[1]
        for first in range(0, rows, BLOCK):
            i = first + tl.arange(0, BLOCK)
            x = sink - tl.load(tensors.lse2.ptr + line + i, mask=i < rows, other=float("inf"))
            # The sink is at most lse. A row without keys has lse = sink, but for the rounding of lse.
            x = tl.where((tl.abs(x) <= rounding) | (x > 0.0), 0.0, x)
            p = tl.exp(x) if NATURAL else tl.exp2(x)
            acc += p * tl.load(tensors.delta.ptr + line + i, mask=i < rows, other=0.0)
    tl.store(total + h, -tl.sum(acc))


def build_sink_gradient(spec: Spec) -> Build:
    """Tensors: `Request.tensors()`, out, lse, dout, dlse. Result: the gradient of the sinks."""

    def build(tensors: Sequence[Any], target: Target, memory: Memory) -> Built:
        request, bwd_inputs = Request.of(spec, tensors[:-4]), BackwardInputs(*tensors[-4:])
        assert request.sinks is not None
        total = memory.empty(request.sinks.shape, request.sinks.dtype)
        return Built((total,), sink_launches(request, bwd_inputs, total, target, memory))

    return build


def sink_launches(
    request: Request, bwd_inputs: BackwardInputs, total: Tensor, target: Target, memory: Memory
) -> list[Launch]:
    sinks, overlap = request.sinks, can_overlap(target.gpu)
    assert sinks is not None
    first, bwd_inputs = renormalised(request, bwd_inputs, target.gpu, memory)
    together = _together(request)
    statistics = row_statistics(together, memory)
    preprocess, saved = preprocess_launch(together, bwd_inputs, statistics, overlap)
    batch, heads, rows = statistics[0].shape
    options = {"NATURAL": has_large_scores(request), "num_warps": 8} | overlapped(overlap)
    args = SinkTensors(saved.lse2, saved.delta, sinks, sinks.stride(0)), total, batch, rows
    return [*first, preprocess, Launch(sink_kernel, heads, args, options)]


def named_sink_launches(
    request: Request, bwd_inputs: BackwardInputs, target: Target, memory: Memory
) -> dict[str, Launch]:
    """The launches of the gradient of sinks, if there are any, for an offline compiler."""
    if request.sinks is None:
        return {}
    total = memory.empty(request.sinks.shape, request.sinks.dtype)
    *first, preprocess, sums = sink_launches(request, bwd_inputs, total, target, memory)
    return named("(sink renormalise)", first) | {"(sink rows)": preprocess, "(sink sums)": sums}


def _together(request: Request) -> Request:
    """A packed call's tokens as one sequence, as far as statistics of rows are concerned."""
    if request.cu_q is None:
        return request
    q, k, v = (x[None] for x in request[:3])
    return request._replace(q=q, k=k, v=v, cu_q=None, cu_k=None)
