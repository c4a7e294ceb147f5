"""What every backward starts with: delta = rowsum(do * o) - dlse, and lse in log2 units, for each row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...request import BackwardInputs, Request
from .device.gradients import Saved
from .device.structs import ANY_SIZE, LOG2E, PAD, Rows, View
from .device.tile_io import load_rows, row_pointers, statistic_pointers
from .device.tile_range import locate
from .launch import Launch, Memory
from .pdl import gdc_launch_dependents
from .score_terms import is_far
from .shapes import padded, problem, view


@triton.jit(**ANY_SIZE)
def prepare_kernel(
    o, do, lse, dlse, lse2, delta, cu_q, cu_k, n_q, n_k, tiles, heads, batch,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, NATURAL: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """The row statistics: delta, and lse in log2 units (NATURAL: as it is; see `measured`). Rows that saw nothing, and
    the padding, get lse2 = +inf: their every p is exp2(-inf) = 0, and no later kernel needs to mask a query."""
    if OVERLAP:
        gdc_launch_dependents()
    PACKED: tl.constexpr = cu_q is not None
    w = locate(tl.program_id(0), tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, BLOCK_M)
    if w.first < w.n_q:
        i = w.first + tl.arange(0, BLOCK_M)
        o_tile = load_rows(Rows(o, w.b, w.h, w.q0, w.first, w.n_q), DV, BLOCK_M, BLOCK_DV, False).to(tl.float32)
        do_tile = load_rows(Rows(do, w.b, w.h, w.q0, w.first, w.n_q), DV, BLOCK_M, BLOCK_DV, False).to(tl.float32)
        delta_i = tl.sum(o_tile * do_tile, 1)
        if dlse is not None:
            delta_i -= tl.load(row_pointers(dlse, n_q, heads, w.b, w.h, w.q0, i, PACKED), mask=i < w.n_q, other=0.0)
        lse_i = tl.load(row_pointers(lse, n_q, heads, w.b, w.h, w.q0, i, PACKED), mask=i < w.n_q, other=float("-inf"))
        empty = lse_i == float("-inf")
        lse2_i = tl.where(empty, float("inf"), lse_i if NATURAL else lse_i * LOG2E)
        tl.store(statistic_pointers(lse2, w, w.h, w.first, BLOCK_M, PACKED), lse2_i)
        tl.store(statistic_pointers(delta, w, w.h, w.first, BLOCK_M, PACKED), tl.where(empty, 0.0, delta_i))


def row_statistics(request: Request, memory: Memory) -> tuple[Tensor, Tensor]:
    """Workspace for lse2 and delta, padded."""
    size = problem(request)
    shape = 1 if size.packed else size.batch, size.heads, size.tiles(size.n_q, PAD.value) * PAD.value
    return memory.empty(shape, torch.float32), memory.empty(shape, torch.float32)


def prepare_launch(
    request: Request, bwd_inputs: BackwardInputs, statistics: tuple[Tensor, Tensor], overlap: bool = False
) -> tuple[Launch, Saved]:
    """The launch that computes the row statistics, and what every kernel that uses them reads."""
    q, k, v, *_ = request
    out, lse, dout, dlse = bwd_inputs
    size, pad = problem(request), PAD.value
    lse2, delta = (View(x, x.stride()[:2]) for x in statistics)
    prepare = Launch(
        prepare_kernel,
        size.programs(size.n_q, size.heads, pad),
        (
            view(out), view(dout), lse, dlse,
            lse2, delta, request.cu_q, request.cu_k, size.n_q, size.n_k, size.tiles(size.n_q, pad), size.heads,
            size.batch,
        ),
        {
            "DV": size.dv, "BLOCK_M": pad, "BLOCK_DV": padded(size.dv), "NATURAL": is_far(request),
            "OVERLAP": overlap, "num_warps": 8 if size.dv > 128 else 4,
        },
    )  # fmt: skip
    return prepare, Saved(*(view(x) for x in (q, k, v, dout)), lse2, delta)
