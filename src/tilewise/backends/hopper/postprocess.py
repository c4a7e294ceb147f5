"""What comes before and after the Hopper backward: row statistics and zeros; dQ from its sums in register order."""

import triton
import triton.language as tl

from ..common.device.structs import ANY_SIZE, PAD, Grid, Rows, Sequences
from ..common.device.tile_io import store_rows
from ..common.device.tile_range import locate
from ..common.pdl import gdc_launch_dependents, gdc_wait
from ..common.preprocess import RowConfig, RowTensors, store_row_statistics

ROWS: tl.constexpr = tl.constexpr(64)


@triton.jit(**ANY_SIZE)
def start_kernel(
    o, do, lse, dlse, lse2, delta, sums, counts, cu_q, cu_k, n_q, n_k, tiles, heads, batch,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, NATURAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The row statistics of BLOCK_M rows, zeros where their dQ is summed, and zero for four counts per program and the
    64 after the last."""
    if OVERLAP:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    tl.store(sums + tl.cast(pid, tl.int64) * BLOCK_M * BLOCK_D + tl.arange(0, BLOCK_M * BLOCK_D), 0.0)
    tl.store(counts + 4 * pid + tl.arange(0, 64), 0)
    tensors = RowTensors(o, do, lse, dlse, lse2, delta)
    grid = Grid(tiles, heads, batch)
    CONFIG: tl.constexpr = RowConfig(DV, BLOCK_M, BLOCK_DV, NATURAL)
    store_row_statistics(tensors, grid, Sequences(cu_q, cu_k, n_q, n_k), CONFIG)


@triton.jit(**ANY_SIZE)
def finish_kernel(
    acc, dq, flag, cu_q, cu_k, n_q, n_k, scale, padded, tiles, heads, batch,
    D: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """dq = scale * acc, 64 rows at a time; *flag is set where they are not finite.

    In `acc` a tile is [group of 8 columns, warp, row, pair, upper or lower 8 rows, column], as
    `in_register_order` wrote it.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    w = locate(pid // 2, Grid(tiles, heads, batch), Sequences(cu_q, cu_k, n_q, n_k), cu_q, PAD)
    first = w.first + pid % 2 * ROWS
    if first < w.n_q:
        b = w.b if cu_q is None else 0
        row = (tl.cast(b, tl.int64) * heads + w.h) * padded + w.r0 + first
        x = tl.load(acc + row * BLOCK_D + tl.arange(0, ROWS * BLOCK_D))
        x = tl.reshape(x, [BLOCK_D // 8, 4, 8, 4, 2, 2])
        x = tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), [ROWS, BLOCK_D]) * scale
        if flag is not None:
            bad = tl.sum(x - x, 1)
            tl.store(flag + tl.arange(0, ROWS) * 0, 1, mask=bad != bad)
        store_rows(Rows(dq, w.b, w.h, w.q0, first, w.n_q), x, D)
