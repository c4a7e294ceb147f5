"""Forward mode: how out and lse move when q, k and v do, in one pass over the keys and O(S) memory.

With p = exp(s - lse) from the saved lse, and a dot for the movement:
    s. = scale * (q. k^T + q k.^T)        lse. = sum p s.        o. = sum (p s.) v + p v. - lse. o
"""

import triton
import triton.language as tl

from ..tile import (
    LOG2E,
    Rows,
    band,
    dot,
    has_nan,
    inner,
    load_rows,
    locate,
    row_pointers,
    scores,
    store_rows,
    unit_of,
    visible,
)


@triton.jit
def moves(
    q, dq, q_tile, dq_tile, lse2_i, k, v, dk, dv, w, h_kv, i, span, before, after, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """lse. and sum (p s.) v + p v., over the span."""
    moved = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for first in tl.range(span.lo, span.hi, BLOCK_N, num_stages=1 if CAREFUL else None, disable_licm=True):
        j = first + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k, w.b, h_kv, w.k0, first, w.n_k, D, BLOCK_N, BLOCK_D, False)
        dk_tile = load_rows(dk, w.b, h_kv, w.k0, first, w.n_k, D, BLOCK_N, BLOCK_D, False)
        q_rows, dq_rows = Rows(q, w.b, w.h, w.q0, w.first, w.n_q), Rows(dq, w.b, w.h, w.q0, w.first, w.n_q)
        k_rows, dk_rows = Rows(k, w.b, h_kv, w.k0, first, w.n_k), Rows(dk, w.b, h_kv, w.k0, first, w.n_k)
        product = inner(q_tile, k_tile, q_rows, k_rows, D, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION)
        ds = inner(dq_tile, k_tile, dq_rows, k_rows, D, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION)
        ds += inner(q_tile, dk_tile, q_rows, dk_rows, D, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION)
        ds *= scale
        s = scores(product, w, w.h, i[:, None], j[None, :], scale, FOLD)
        seen = visible(i[:, None], j[None, :], w, before, after)
        p = tl.where(seen, tl.exp2(s * unit_of(scale, FOLD) - lse2_i[:, None]), 0.0)
        pds = tl.where(seen, p * ds, 0.0)
        moved += tl.sum(pds, 1)
        met = seen if CAREFUL else None
        v_tile = load_rows(v, w.b, h_kv, w.k0, first, w.n_k, DV, BLOCK_N, BLOCK_DV, False)
        acc = dot(pds.to(v_tile.dtype), v_tile, acc, met, PRECISION)
        dv_tile = load_rows(dv, w.b, h_kv, w.k0, first, w.n_k, DV, BLOCK_N, BLOCK_DV, False)
        acc = dot(p.to(v_tile.dtype), dv_tile, acc, met, PRECISION)
    return moved, acc


@triton.jit(do_not_specialize=["n_q", "n_k", "before", "after", "tiles", "batch"])
def jvp_kernel(
    q, k, v, dq, dk, dv, o, lse, do, dlse, cu_q, cu_k, n_q, n_k, before, after, scale, tiles, heads, batch,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    w = locate(tl.program_id(0), tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, BLOCK_M)
    if w.first < w.n_q:
        h_kv = w.h // GROUP
        i = w.first + tl.arange(0, BLOCK_M)
        q_tile = load_rows(q, w.b, w.h, w.q0, w.first, w.n_q, D, BLOCK_M, BLOCK_D, False)
        dq_tile = load_rows(dq, w.b, w.h, w.q0, w.first, w.n_q, D, BLOCK_M, BLOCK_D, False)
        lse_i = tl.load(row_pointers(lse, w.b, w.h, w.q0, i), mask=i < w.n_q, other=float("-inf"))
        lse2_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E)
        at = w.first + w.n_k - w.n_q
        span = band(at, at + BLOCK_M - 1, w.n_k, before, after, BLOCK_N)
        moved, acc = moves(
            q, dq, q_tile, dq_tile, lse2_i, k, v, dk, dv, w, h_kv, i, span, before, after, scale,
            D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, FOLD, PRECISION, CHUNK, False,
        )  # fmt: skip
        if has_nan(acc):  # perhaps 0 * nan, from a value that the row does not see
            moved, acc = moves(
                q, dq, q_tile, dq_tile, lse2_i, k, v, dk, dv, w, h_kv, i, span, before, after, scale,
                D, DV, BLOCK_M, 16, BLOCK_D, BLOCK_DV, FOLD, PRECISION, CHUNK, True,
            )  # fmt: skip
        pid = tl.program_id(0) * tl.num_programs(1)  # times 1: found again, not kept in registers since
        w = locate(pid, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, BLOCK_M)
        i = w.first + tl.arange(0, BLOCK_M)
        o_tile = load_rows(o, w.b, w.h, w.q0, w.first, w.n_q, DV, BLOCK_M, BLOCK_DV, False).to(tl.float32)
        acc = tl.fma(tl.broadcast_to(-moved[:, None], acc.shape), o_tile, acc)  # of the product, no tile is kept
        store_rows(do, acc, w.b, w.h, w.q0, w.first, w.n_q, DV, BLOCK_M, BLOCK_DV)
        tl.store(row_pointers(dlse, w.b, w.h, w.q0, i), moved, mask=i < w.n_q)
