"""The NaN repair pass: a launch that follows kernels whose rows do not all see the same keys.

A matrix product cannot leave a value out: 0 * nan and 0 * inf are nan. The kernels raise a flag where a result is nan.
The repair kernels, which follow on the stream, compute the flagged tiles again with products that leave out hidden
pairs (NAN_SAFE), 16 rows of the other side at a time, which needs few registers. Nearly always no flag is raised.
There is a flag for each tile, which its program has set to 0 or 1. The Hopper kernels repair their results themselves.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .device.attend import attend
from .device.gradients import key_gradients, query_gradient, store_key_gradients, store_query_gradient
from .device.structs import ANY_SIZE, Grid, ScoreParams, Sequences, Work
from .device.tile_range import locate
from .jvp import jvp_tile, store_jvp_tile
from .pdl import gdc_launch_dependents, gdc_wait

CHECKED: tl.constexpr = tl.constexpr(128)  # flags that a program loads at once
LINE: tl.constexpr = tl.constexpr(16)


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Let the next launch start, and wait for the launch before."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def end_of_checked(flags, first, total):
    """The end of the CHECKED tiles of this program that start at `first`, or `first` if no flag of them is raised."""
    end = tl.minimum(first + tl.num_programs(0) * CHECKED, total)
    n = first + tl.arange(0, CHECKED) * tl.num_programs(0)
    raised = tl.max(tl.load(flags + n, mask=n < total, other=0), 0)
    return tl.where(raised > 0, end, first)


@triton.jit(**ANY_SIZE)
def repair_forward_kernel(
    tensors,  # attend.Tensors
    cu_q,
    cu_k,
    n_q,
    n_k,
    before,
    after,
    scale,
    tiles,
    heads,
    batch,
    splits,
    terms,
    total,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Repairs a forward of `total` tiles, before its splits are merged."""
    begin(CONFIG.OVERLAP)
    grid = Grid(tiles, heads, batch)
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    for first in range(tl.program_id(0), total, tl.num_programs(0) * CHECKED):
        for n in range(first, end_of_checked(tensors.flags, first, total), tl.num_programs(0)):
            if tl.load(tensors.flags + n) > 0:
                attend(
                    n,
                    tensors,
                    grid,
                    seqs,
                    splits,
                    ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD),
                    CONFIG,
                    True,
                )


class Flagged(NamedTuple):
    """The tiles of one kernel of the backward: their flags, how many, and their grid."""

    flags: tl.tensor
    total: tl.tensor
    grid: tl.tuple


@triton.jit
def repair_query_rows(tensors, w, first, rate, params, ROWS: tl.constexpr, CONFIG: tl.constexpr):
    """dQ of ROWS queries from `first` on, BLOCK_M at a time."""
    for row in range(first, tl.minimum(first + ROWS, w.n_q), CONFIG.BLOCK_M):
        u = Work(w.b, w.h, row, w.q0, w.n_q, w.k0, w.n_k, w.r0)
        store_query_gradient(tensors, query_gradient(tensors, u, params, CONFIG, True), u, rate, CONFIG)


@triton.jit
def repair_key_rows(tensors, w, first, kv_heads, rate, params, ROWS: tl.constexpr, CONFIG: tl.constexpr):
    """dK and dV of ROWS keys from `first` on, BLOCK_N at a time."""
    for row in range(first, tl.minimum(first + ROWS, w.n_k), CONFIG.BLOCK_N):
        u = Work(w.b, w.h, row, w.q0, w.n_q, w.k0, w.n_k, w.r0)
        dk_acc, dv_acc = key_gradients(tensors, u, kv_heads, params, CONFIG, True)
        store_key_gradients(tensors, dk_acc, dv_acc, u, rate, CONFIG)


@triton.jit
def repair_queries(tensors, tiles, seqs, rate, params, ROWS: tl.constexpr, CONFIG: tl.constexpr):
    """dQ of the flagged tiles of ROWS queries, BLOCK_M at a time: products of 64 rows and more need the warps of the
    kernel before."""
    total = tiles.total
    for first in range(tl.program_id(0), total, tl.num_programs(0) * CHECKED):
        for n in range(first, end_of_checked(tiles.flags, first, total), tl.num_programs(0)):
            if tl.load(tiles.flags + n) > 0:
                w = locate(n, tiles.grid, seqs, seqs.cu_q, ROWS)
                repair_query_rows(tensors, w, w.first, rate, params, ROWS, CONFIG)


@triton.jit
def repair_keys(tensors, tiles, seqs, rate, params, ROWS: tl.constexpr, CONFIG: tl.constexpr):
    """dK and dV of the flagged tiles of ROWS keys, BLOCK_N at a time."""
    total = tiles.total
    for first in range(tl.program_id(0), total, tl.num_programs(0) * CHECKED):
        for n in range(first, end_of_checked(tiles.flags, first, total), tl.num_programs(0)):
            if tl.load(tiles.flags + n) > 0:
                w = locate(n, tiles.grid, seqs, seqs.cu_k, ROWS)
                repair_key_rows(tensors, w, w.first, tiles.grid.heads, rate, params, ROWS, CONFIG)


@triton.jit(**ANY_SIZE)
def repair_backward_kernel(
    tensors,  # BackwardTensors
    cu_q,
    cu_k,
    n_q,
    n_k,
    before,
    after,
    scale,
    rate,
    q_total,
    k_total,
    q_tiles,
    k_tiles,
    heads,
    kv_heads,
    batch,
    q_terms,
    k_terms,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    QUERY: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
):
    """Repairs a backward. QUERY, KEY and VALUE are the Plans of the kernels that computed dQ, dK and dV, with fewer
    rows; VALUE is None if one kernel computed dK and dV. Flags are for tiles of QUERIES queries and KEYS keys: those of
    the queries, of the keys and of the values, each from a multiple of LINE on."""
    begin(QUERY.OVERLAP)
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    flags = tensors.flags
    of_queries = Flagged(flags, q_total, Grid(q_tiles, heads, batch))
    repair_queries(
        tensors,
        of_queries,
        seqs,
        rate,
        ScoreParams(before, after, scale, q_terms, SCORE_MOD, MASK_MOD),
        QUERIES,
        QUERY,
    )
    flags += tl.cdiv(q_total, LINE) * LINE
    of_keys = Flagged(flags, k_total, Grid(k_tiles, kv_heads, batch))
    repair_keys(
        tensors, of_keys, seqs, rate, ScoreParams(before, after, scale, k_terms, SCORE_MOD, MASK_MOD), KEYS, KEY
    )
    if VALUE is not None:
        of_values = Flagged(flags + tl.cdiv(k_total, LINE) * LINE, k_total, Grid(k_tiles, kv_heads, batch))
        repair_keys(
            tensors,
            of_values,
            seqs,
            rate,
            ScoreParams(before, after, scale, k_terms, SCORE_MOD, MASK_MOD),
            KEYS,
            VALUE,
        )


@triton.jit(**ANY_SIZE)
def repair_jvp_kernel(
    tensors,  # JvpTensors
    cu_q,
    cu_k,
    n_q,
    n_k,
    before,
    after,
    scale,
    rate,
    tiles,
    heads,
    batch,
    terms,
    total,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Repairs a forward-mode pass of `total` tiles."""
    begin(CONFIG.OVERLAP)
    grid = Grid(tiles, heads, batch)
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    for first in range(tl.program_id(0), total, tl.num_programs(0) * CHECKED):
        for n in range(first, end_of_checked(tensors.flags, first, total), tl.num_programs(0)):
            if tl.load(tensors.flags + n) > 0:
                w = locate(n, grid, seqs, cu_q, CONFIG.BLOCK_M)
                if w.first < w.n_q:
                    dlse, acc = jvp_tile(
                        tensors,
                        grid,
                        seqs,
                        w,
                        rate,
                        ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD),
                        CONFIG,
                        True,
                    )
                    store_jvp_tile(dlse, acc, tensors, grid, seqs, w, CONFIG)
