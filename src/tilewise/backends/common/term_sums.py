"""Gradients of what enters a score: biases, and the tensors that a score mod reads.

The gradient g of a score (or g times the mod's derivative by what it read at one site) is computed once more, tile by
tile, and summed by the program that stores the sum, in one fixed order and without atomics:

    line_sums_kernel    over the keys of each query, or over the queries of each key
    tile_sums_kernel    over batch rows and heads, each program owning one tile of (i, j)
"""

import triton
import triton.language as tl

from .device.gradients import recompute_p
from .device.mask import mod_indices, visible
from .device.matmul import dot_nt
from .device.score import dropout
from .device.structs import ANY_SIZE, Grid, Pairs, Rows, ScoreParams, Sequences, Work
from .device.tile_io import load_rows, row_pointers, statistic_pointers
from .device.tile_range import key_range, locate, packed_tile, query_range


@triton.jit
def product_of(a, b, D: tl.constexpr, COLS: tl.constexpr, CONFIG: tl.constexpr):
    """a b^T of BLOCK_M rows at a and BLOCK_N at b."""
    a_tile = load_rows(a, D, CONFIG.BLOCK_M, COLS, False)
    b_tile = load_rows(b, D, CONFIG.BLOCK_N, COLS, False)
    return dot_nt(a_tile, b_tile, a, b, D, CONFIG)


@triton.jit
def gradient(saved, w, h, i0, j0, params, SITE: tl.constexpr, CONFIG: tl.constexpr):
    """g (queries, keys) of the tile at (i0, j0), 0 for hidden pairs."""
    h_kv = h // CONFIG.GROUP
    q_rows = Rows(saved.q, w.b, h, w.q0, i0, w.n_q)
    do_rows = Rows(saved.do, w.b, h, w.q0, i0, w.n_q)
    product = product_of(q_rows, Rows(saved.k, w.b, h_kv, w.k0, j0, w.n_k), CONFIG.D, CONFIG.BLOCK_D, CONFIG)
    dp = product_of(do_rows, Rows(saved.v, w.b, h_kv, w.k0, j0, w.n_k), CONFIG.DV, CONFIG.BLOCK_DV, CONFIG)
    lse2_i = tl.load(statistic_pointers(saved.lse2, w, h, i0, CONFIG.BLOCK_M, CONFIG.PACKED))
    delta_i = tl.load(statistic_pointers(saved.delta, w, h, i0, CONFIG.BLOCK_M, CONFIG.PACKED))
    i = i0 + tl.arange(0, CONFIG.BLOCK_M)[:, None]
    j = j0 + tl.arange(0, CONFIG.BLOCK_N)[None, :]
    pairs = Pairs(w, h, i, j)
    p, _ = recompute_p(product, pairs, lse2_i[:, None], True, True, params, CONFIG.FOLD)
    g = p * (dropout(dp, pairs, params.terms) - delta_i[:, None])
    if SITE is not None:
        at = mod_indices(pairs, params.terms)
        g *= SITE(product * params.scale, at.b, at.h, at.i, at.j, at.n_q, at.n_k, params.terms.score)
    return tl.where(visible(pairs, params), g, 0.0)


@triton.jit(**ANY_SIZE)
def line_sums_kernel(
    saved,  # BackwardTensors
    sums,
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
    terms,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    SITE: tl.constexpr,
    KEYS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """sums[b, h, query], or with KEYS sums[b, h, key]."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    grid = Grid(tiles, heads, batch)
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    if KEYS:
        w = locate(tl.program_id(0), grid, seqs, cu_k, BLOCK_N)
        span = query_range(w, before, after, BLOCK_M, BLOCK_N)
        j = w.first + tl.arange(0, BLOCK_N)
        n = w.n_k
        acc = tl.zeros([BLOCK_N], tl.float32)
        STEP: tl.constexpr = BLOCK_M
    else:
        w = locate(tl.program_id(0), grid, seqs, cu_q, BLOCK_M)
        span = key_range(w, before, after, BLOCK_M, BLOCK_N)
        i = w.first + tl.arange(0, BLOCK_M)
        n = w.n_q
        acc = tl.zeros([BLOCK_M], tl.float32)
        STEP: tl.constexpr = BLOCK_N
    if w.first < n:
        for first in range(span.lo, span.hi, STEP):
            if KEYS:
                i0 = first
                j0 = w.first
            else:
                i0 = w.first
                j0 = first
            g = gradient(
                saved, w, w.h, i0, j0, ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD), SITE, CONFIG
            )
            acc += tl.sum(g, 0 if KEYS else 1)
        if KEYS:
            tl.store(row_pointers(sums, n_k, heads, w.b, w.h, w.k0, j, CONFIG.PACKED), acc, mask=j < w.n_k)
        else:
            tl.store(row_pointers(sums, n_q, heads, w.b, w.h, w.q0, i, CONFIG.PACKED), acc, mask=i < w.n_q)


@triton.jit(**ANY_SIZE)
def tile_sums_kernel(
    saved,  # BackwardTensors
    sums,  # Bias
    cu_q,
    cu_k,
    n_q,
    n_k,
    before,
    after,
    scale,
    row0,
    rows,
    columns,
    batch,
    heads,
    terms,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    SITE: tl.constexpr,
    BATCHES: tl.constexpr,
    HEADS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """sums[b, h, i - row0, j] for the rows row0 .. row0 + rows; without BATCHES or HEADS their axis has size 1."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    pid = tl.program_id(0)
    across = tl.cdiv(columns, BLOCK_N)
    down = tl.cdiv(rows, BLOCK_M)
    j0 = pid % across * BLOCK_N
    i0 = row0 + pid // across % down * BLOCK_M
    line = pid // across // down
    heads_out = heads if HEADS else 1
    h_out = line % heads_out
    b_out = line // heads_out
    i = i0 + tl.arange(0, BLOCK_M)
    j = j0 + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for x in range(1 if BATCHES else batch):
        b = b_out + x
        seqs = Sequences(cu_q, cu_k, n_q, n_k)
        w = Work(b, 0, i0, 0, n_q, 0, n_k, 0) if cu_q is None else packed_tile(b, 0, i0, seqs)
        span = key_range(w, before, after, BLOCK_M, BLOCK_N)
        if (i0 < w.n_q) & (j0 >= span.lo) & (j0 < span.hi):
            for y in range(1 if HEADS else heads):
                acc += gradient(
                    saved,
                    w,
                    h_out + y,
                    i0,
                    j0,
                    ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD),
                    SITE,
                    CONFIG,
                )
    p = sums.ptr + tl.cast(b_out, tl.int64) * sums.strides[0] + tl.cast(h_out, tl.int64) * sums.strides[1]
    p = p + (i - row0).to(tl.int64)[:, None] * sums.strides[2] + j.to(tl.int64)[None, :] * sums.strides[3]
    keep = (i < row0 + rows)[:, None] & (j < columns)[None, :]
    tl.store(p, acc.to(sums.ptr.dtype.element_ty), mask=keep)
