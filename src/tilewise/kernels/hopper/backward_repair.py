"""The last launch of a backward whose rows do not all see the same keys; `repair` is that of such a forward."""

import triton
import triton.language as tl

from ..tile import LOG2E, band, dot, load_rows, locate, row_statistics, store_rows, visible

ROWS: tl.constexpr = tl.constexpr(32)
STEP: tl.constexpr = tl.constexpr(16)


@triton.jit
def repair_queries(
    q, k, v, do, lse2, delta, dq, w, cu_q, before, after, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    i = w.first + tl.arange(0, ROWS)[:, None]
    at = w.first + w.n_k - w.n_q
    span = band(at, at + ROWS - 1, w.n_k, before, after, STEP)
    q_tile = load_rows(q, w.b, w.h, w.q0, w.first, w.n_q, D, ROWS, BLOCK_D, False)
    do_tile = load_rows(do, w.b, w.h, w.q0, w.first, w.n_q, DV, ROWS, BLOCK_DV, False)
    lse2_i = tl.load(row_statistics(lse2, w, w.h, w.first, cu_q, ROWS))[:, None]
    delta_i = tl.load(row_statistics(delta, w, w.h, w.first, cu_q, ROWS))[:, None]
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in tl.range(span.lo, span.hi, STEP, num_stages=1):
        k_tile = load_rows(k, w.b, w.h // GROUP, w.k0, first, w.n_k, D, STEP, BLOCK_D, False)
        v_tile = load_rows(v, w.b, w.h // GROUP, w.k0, first, w.n_k, DV, STEP, BLOCK_DV, False)
        seen = visible(i, first + tl.arange(0, STEP)[None, :], w, before, after)
        p = tl.exp2(tl.dot(q_tile, tl.trans(k_tile)) * (scale * LOG2E) - lse2_i)
        ds = tl.where(seen, p * (tl.dot(do_tile, tl.trans(v_tile)) - delta_i), 0.0)
        acc = dot(ds.to(k_tile.dtype), k_tile, acc, seen, "ieee")
    store_rows(dq, acc * scale, w.b, w.h, w.q0, w.first, w.n_q, D, ROWS, BLOCK_D)


@triton.jit
def repair_keys(
    q, k, v, do, lse2, delta, dk, dv, w, cu_q, before, after, scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    j = w.first + tl.arange(0, ROWS)[:, None]
    at = w.first + w.n_q - w.n_k
    span = band(at, at + ROWS - 1, w.n_q, after, before, STEP)
    k_tile = load_rows(k, w.b, w.h, w.k0, w.first, w.n_k, D, ROWS, BLOCK_D, False)
    v_tile = load_rows(v, w.b, w.h, w.k0, w.first, w.n_k, DV, ROWS, BLOCK_DV, False)
    dk_acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for g in range(GROUP):
        h = w.h * GROUP + g
        for first in tl.range(span.lo, span.hi, STEP, num_stages=1):
            q_tile = load_rows(q, w.b, h, w.q0, first, w.n_q, D, STEP, BLOCK_D, False)
            do_tile = load_rows(do, w.b, h, w.q0, first, w.n_q, DV, STEP, BLOCK_DV, False)
            lse2_i = tl.load(row_statistics(lse2, w, h, first, cu_q, STEP))[None, :]
            delta_i = tl.load(row_statistics(delta, w, h, first, cu_q, STEP))[None, :]
            seen = visible(first + tl.arange(0, STEP)[None, :], j, w, before, after)
            p = tl.exp2(tl.dot(k_tile, tl.trans(q_tile)) * (scale * LOG2E) - lse2_i)
            p = tl.where(seen, p, 0.0)
            dv_acc = dot(p.to(do_tile.dtype), do_tile, dv_acc, seen, "ieee")
            ds = tl.where(seen, p * (tl.dot(v_tile, tl.trans(do_tile)) - delta_i), 0.0)
            dk_acc = dot(ds.to(q_tile.dtype), q_tile, dk_acc, seen, "ieee")
    store_rows(dk, dk_acc * scale, w.b, w.h, w.k0, w.first, w.n_k, D, ROWS, BLOCK_D)
    store_rows(dv, dv_acc, w.b, w.h, w.k0, w.first, w.n_k, DV, ROWS, BLOCK_DV)


@triton.jit(do_not_specialize=["n_q", "n_k", "before", "after", "q_total", "k_total", "q_tiles", "k_tiles", "batch"])
def repair_backward_kernel(
    q, k, v, do, lse2, delta, dq, dk, dv, flag, cu_q, cu_k, n_q, n_k, before, after, scale,
    q_total, k_total, q_tiles, k_tiles, heads, kv_heads, batch,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    if tl.load(flag) > 0:
        for pid in range(tl.program_id(0), q_total, tl.num_programs(0)):
            w = locate(pid, q_tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, ROWS)
            if w.first < w.n_q:
                repair_queries(
                    q, k, v, do, lse2, delta, dq, w, cu_q, before, after, scale, GROUP, D, DV, BLOCK_D, BLOCK_DV
                )
        for pid in range(tl.program_id(0), k_total, tl.num_programs(0)):
            w = locate(pid, k_tiles, kv_heads, batch, cu_q, cu_k, n_q, n_k, cu_k, ROWS)
            if w.first < w.n_k:
                repair_keys(
                    q, k, v, do, lse2, delta, dk, dv, w, cu_q, before, after, scale, GROUP, D, DV, BLOCK_D, BLOCK_DV
                )
