"""Before and after the Hopper backward: row statistics and zeros; dQ from its float32 sums."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.structs import ANY_SIZE, PAD, Grid, Rows, Sequences
from ..common.device.tile_io import store_columns
from ..common.device.tile_range import locate
from ..common.pdl import gdc_launch_dependents, gdc_wait
from ..common.preprocess import RowTensors, store_row_statistics

ROWS: tl.constexpr = tl.constexpr(64)


class PreprocessTensors(NamedTuple):
    """o, do, lse, dlse (or None); and what is written: lse2, delta, zeros for dq_acc and the counters."""

    o: tl.tuple
    do: tl.tuple
    lse: tl.tensor
    dlse: tl.tensor
    lse2: tl.tuple
    delta: tl.tuple
    dq_acc: tl.tensor
    counters: tl.tensor


class PreprocessConfig(NamedTuple):
    """PARTS: the columns of dq_acc as powers of two; COLUMNS: their sum. NATURAL: lse2 is lse, not times log2(e).
    OVERLAP: programmatic dependent launch."""

    DV: int
    BLOCK_M: int
    PARTS: tuple[int, ...]
    COLUMNS: int
    BLOCK_DV: int
    NATURAL: bool
    OVERLAP: bool


class PostprocessConfig(NamedTuple):
    """PARTS, COLUMNS: as above."""

    D: int
    PARTS: tuple[int, ...]
    COLUMNS: int
    OVERLAP: bool


@triton.jit(**ANY_SIZE)
def preprocess_kernel(tensors, cu_q, cu_k, n_q, n_k, tiles, heads, batch, CONFIG: tl.constexpr):
    """The row statistics of BLOCK_M rows; zeros for their dQ, for four counters a program and the 64 after the last."""
    if CONFIG.OVERLAP:
        gdc_launch_dependents()
    o, do, lse, dlse, lse2, delta, dq_acc, counters = tensors
    pid = tl.program_id(0)
    for part in tl.static_range(len(CONFIG.PARTS)):
        zeros = dq_acc + (tl.cast(pid, tl.int64) * CONFIG.COLUMNS + part * CONFIG.PARTS[0]) * CONFIG.BLOCK_M
        tl.store(zeros + tl.arange(0, CONFIG.BLOCK_M * CONFIG.PARTS[part]), 0.0)
    tl.store(counters + 4 * pid + tl.arange(0, 64), 0)
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    store_row_statistics(RowTensors(o, do, lse, dlse, lse2, delta), Grid(tiles, heads, batch), seqs, CONFIG)


@triton.jit(**ANY_SIZE)
def postprocess_kernel(tensors, cu_q, cu_k, n_q, n_k, scale, padded, tiles, heads, batch, CONFIG: tl.constexpr):
    """dq = scale * dq_acc, 64 rows at a time; *flag is set if they are not finite. `tensors`: dq_acc, dq, flag.

    In `dq_acc` a tile is [group of 8 columns, warp, row, pair, upper or lower 8 rows, column], as `in_register_order`
    wrote it.
    """
    if CONFIG.OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    dq_acc, dq, flag = tensors
    pid = tl.program_id(0)
    w = locate(pid // 2, Grid(tiles, heads, batch), Sequences(cu_q, cu_k, n_q, n_k), cu_q, PAD)
    first = w.first + pid % 2 * ROWS
    if first < w.n_q:
        b = w.b if cu_q is None else 0
        row = (tl.cast(b, tl.int64) * heads + w.h) * padded + w.r0 + first
        rows = Rows(dq, w.b, w.h, w.q0, first, w.n_q)
        for part in tl.static_range(len(CONFIG.PARTS)):
            x = dq_acc + row * CONFIG.COLUMNS + part * CONFIG.PARTS[0] * ROWS
            store_dq(x, rows, scale, flag, part * CONFIG.PARTS[0], CONFIG.PARTS[part], CONFIG.D)


@triton.jit
def store_dq(dq_acc, rows, scale, flag, column, WIDTH: tl.constexpr, D: tl.constexpr):
    """WIDTH columns of dq, from `column` on."""
    x = tl.load(dq_acc + tl.arange(0, ROWS * WIDTH))
    x = tl.reshape(x, [WIDTH // 8, 4, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), [ROWS, WIDTH]) * scale
    if flag is not None:
        bad = tl.sum(x - x, 1)
        tl.store(flag + tl.arange(0, ROWS) * 0, 1, mask=bad != bad)
    store_columns(rows, x, column, D)
