"""Before the Hopper backward: row statistics, and zeros for the sums of dQ and for the counters."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.structs import ANY_SIZE, PAD, Grid, Sequences, Work
from ..common.device.tile_range import locate
from ..common.pdl import gdc_launch_dependents, gdc_wait
from ..common.preprocess import RowTensors, load_row_inputs, store_row_statistics

ROWS: tl.constexpr = tl.constexpr(64)


class PreprocessTensors(NamedTuple):
    """o, do, lse, dlse (or None); and what is written: lse2, delta, zeros for dq_acc (if it is not None) and the
    counters. `lines`, if dQ is scattered: the line of each query, heads rows, which begin after ROWS rows for
    padding; `dq_lines`: see `Outputs`."""

    o: tl.tuple
    do: tl.tuple
    lse: tl.tensor
    dlse: tl.tensor
    lse2: tl.tuple
    delta: tl.tuple
    dq_acc: tl.tensor
    counters: tl.tensor
    lines: tl.tensor = None
    dq_lines: tl.tensor = None


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


@triton.jit(**ANY_SIZE)
def preprocess_kernel(tensors, cu_q, cu_k, n_q, n_k, tiles, heads, batch, CONFIG: tl.constexpr):
    """The row statistics of BLOCK_M rows, a part of a tile of PAD; zeros for their dQ, and for four counters a tile and
    the 60 after the last."""
    if CONFIG.OVERLAP and cu_q is not None:
        gdc_wait()  # `locate` reads cu_q
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    grid = Grid(tiles, heads, batch)
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    pid = tl.program_id(0)
    tile = locate(pid // (PAD // BLOCK_M), grid, seqs, cu_q, PAD)
    first = tile.first + pid % (PAD // BLOCK_M) * BLOCK_M
    w = Work(tile.b, tile.h, first, tile.q0, tile.n_q, tile.k0, tile.n_k, tile.r0)
    if CONFIG.OVERLAP:
        # First wait, then trigger: the backward, which may start after the trigger, loads Q, K, V and dO before its own
        # `gdc_wait` (`backward_common.load_first`), so the launch before this one must have ended.
        gdc_wait()
        gdc_launch_dependents()
    o, do, lse, dlse, lse2, delta, dq_acc, counters, lines, dq_lines = tensors
    rows = RowTensors(o, do, lse, dlse, lse2, delta)
    # The loads come before the zeros: ptxas moves no load past a store, so all of them are in flight at once. Without
    # stores between loads and products, it saves registers and loads two values at a time.
    row_inputs = load_row_inputs(rows, w, grid, seqs, CONFIG)
    if dq_acc is not None:
        for part in tl.static_range(len(CONFIG.PARTS)):
            zeros = dq_acc + (tl.cast(pid, tl.int64) * CONFIG.COLUMNS + part * CONFIG.PARTS[0]) * BLOCK_M
            tl.store(zeros + tl.arange(0, BLOCK_M * CONFIG.PARTS[part]), 0.0)
    tl.store(counters + BLOCK_M // 32 * pid + tl.arange(0, 64), 0)
    if tile.first < tile.n_q:
        store_row_statistics(rows, row_inputs, w, seqs, CONFIG)
        if lines is not None:
            i = w.first + tl.arange(0, BLOCK_M)
            line = ROWS + tl.load(lines + w.q0 + i, mask=i < w.n_q, other=0) * heads + w.h
            tl.store(dq_lines + w.h * (tiles * PAD) + w.r0 + i, tl.where(i < w.n_q, line, i % ROWS))
