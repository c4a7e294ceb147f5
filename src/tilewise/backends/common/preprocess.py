"""What every backward starts with: delta = rowsum(do * o) - dlse, and lse in log2 units, for each row."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...request import BackwardInputs, Request, padded
from .device.gradients import BackwardTensors
from .device.structs import ANY_SIZE, LOG2E, PAD, Grid, Rows, Sequences, View
from .device.tile_io import load_rows, row_pointers, statistic_pointers
from .device.tile_range import locate
from .kernel_call import call_shape, view
from .launch import Launch, Memory
from .pdl import gdc_launch_dependents
from .score_terms import has_large_scores


class RowTensors(NamedTuple):
    """Views of o and do, of None if dlse is all of -delta; lse and dlse; and the padded row statistics."""

    o: tl.tuple
    do: tl.tuple
    lse: tl.tensor
    dlse: tl.tensor
    lse2: tl.tuple
    delta: tl.tuple


class RowConfig(NamedTuple):
    DV: int
    BLOCK_M: int
    BLOCK_DV: int
    NATURAL: bool  # lse2 is lse in natural units: see `softmax.py` on large scores
    OVERLAP: bool = False


@triton.jit
def load_row_inputs(tensors, w, grid, seqs, CONFIG: tl.constexpr):
    """o and do of BLOCK_M rows from w.first on, their lse and dlse; zeros for what is None."""
    PACKED: tl.constexpr = seqs.cu_q is not None
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    i = w.first + tl.arange(0, BLOCK_M)
    exists = i < w.n_q
    lse_pointers = row_pointers(tensors.lse, seqs.n_q, grid.heads, w.b, w.h, w.q0, i, PACKED)
    lse_i = tl.load(lse_pointers, mask=exists, other=float("-inf"))
    dlse_i = tl.full([BLOCK_M], 0.0, tl.float32)
    if tensors.dlse is not None:
        dlse_pointers = row_pointers(tensors.dlse, seqs.n_q, grid.heads, w.b, w.h, w.q0, i, PACKED)
        dlse_i += tl.load(dlse_pointers, mask=exists, other=0.0)
    if tensors.o.ptr is not None:
        o_rows = Rows(tensors.o, w.b, w.h, w.q0, w.first, w.n_q)
        do_rows = Rows(tensors.do, w.b, w.h, w.q0, w.first, w.n_q)
        o_tile = load_rows(o_rows, CONFIG.DV, BLOCK_M, CONFIG.BLOCK_DV, False)
        do_tile = load_rows(do_rows, CONFIG.DV, BLOCK_M, CONFIG.BLOCK_DV, False)
    else:
        o_tile = tl.full([BLOCK_M, 1], 0.0, tl.float32)
        do_tile = o_tile
    return o_tile, do_tile, lse_i, dlse_i


@triton.jit
def store_row_statistics(tensors, row_inputs, w, seqs, CONFIG: tl.constexpr):
    """Store delta and lse2 of BLOCK_M rows from w.first on. Rows without visible keys, and padding, get lse2 = +inf:
    their p is exp2(-inf) = 0, and no later kernel needs to mask a query."""
    PACKED: tl.constexpr = seqs.cu_q is not None
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    o_tile, do_tile, lse_i, dlse_i = row_inputs
    delta_i = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1) - dlse_i
    empty = lse_i == float("-inf")
    lse2_i = tl.where(empty, float("inf"), lse_i if CONFIG.NATURAL else lse_i * LOG2E)
    tl.store(statistic_pointers(tensors.lse2, w, w.h, w.first, BLOCK_M, PACKED), lse2_i)
    tl.store(statistic_pointers(tensors.delta, w, w.h, w.first, BLOCK_M, PACKED), tl.where(empty, 0.0, delta_i))


@triton.jit(**ANY_SIZE)
def preprocess_kernel(tensors, cu_q, cu_k, n_q, n_k, tiles, heads, batch, CONFIG: tl.constexpr):
    """delta = rowsum(do * o) - dlse, and lse in log2 units."""
    if CONFIG.OVERLAP:
        gdc_launch_dependents()
    grid = Grid(tiles, heads, batch)
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    w = locate(tl.program_id(0), grid, seqs, cu_q, CONFIG.BLOCK_M)
    if w.first < w.n_q:
        store_row_statistics(tensors, load_row_inputs(tensors, w, grid, seqs, CONFIG), w, seqs, CONFIG)


def row_statistics(request: Request, memory: Memory) -> tuple[Tensor, Tensor]:
    """Workspace for lse2 and delta, padded."""
    size = call_shape(request)
    shape = 1 if size.packed else size.batch, size.heads, size.tiles(size.n_q, PAD.value) * PAD.value
    return memory.empty(shape, torch.float32), memory.empty(shape, torch.float32)


def preprocess_launch(
    request: Request, bwd_inputs: BackwardInputs, statistics: tuple[Tensor, Tensor], overlap: bool = False
) -> tuple[Launch, BackwardTensors]:
    """The launch that computes the row statistics, and what every kernel that uses them reads."""
    q, k, v, *_ = request
    out, lse, dout, dlse = bwd_inputs
    size, pad = call_shape(request), PAD.value
    lse2, delta = (View(x, x.stride()[:2]) for x in statistics)
    tensors = RowTensors(view(out), view(dout), lse, dlse, lse2, delta)
    config = RowConfig(size.dv, pad, padded(size.dv), has_large_scores(request), overlap)
    preprocess = Launch(
        preprocess_kernel,
        size.programs(size.n_q, size.heads, pad),
        (tensors, request.cu_q, request.cu_k, size.n_q, size.n_k, *size.grid(size.n_q, size.heads, pad)),
        {"CONFIG": config, "num_warps": 8 if size.dv > 128 else 4},
    )
    return preprocess, BackwardTensors(*(view(x) for x in (q, k, v, dout)), lse2, delta)
