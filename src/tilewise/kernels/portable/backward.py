"""The backward pass, without atomics: dQ by the programs that own queries, dK and dV by those that own keys.

With p = exp(s - lse) recomputed from the saved lse, dp = do v^T and delta = rowsum(do * o) - dlse:
    dv = p^T do        ds = p * (dp - delta)        dq = scale * ds k        dk = scale * ds^T q
(with a score mod, ds is multiplied by the mod's slope; with dropout, dv takes the weights that stayed and dp theirs).
Each sum has one owner and one order, so two runs agree bit for bit. The owner of keys works on transposed tiles
(s^T = k q^T), whose p^T and ds^T are already the left operands of its two sums.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..tile import (
    LOG2E,
    Rows,
    Work,
    band,
    column,
    dot,
    dropped,
    has_nan,
    inner,
    load_rows,
    locate,
    masked,
    row_pointers,
    row_statistics,
    steepened,
    store_rows,
    unit_of,
    visible,
    walk,
    worth_and_slope,
)


@triton.jit(do_not_specialize=["n_q", "n_k", "tiles", "batch"])
def prepare_kernel(
    o, do, lse, dlse, lse2, delta, cu_q, cu_k, n_q, n_k, tiles, heads, batch,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """The row statistics: delta, and lse in log2 units. Rows that saw nothing, and the padding, get lse2 = +inf: their
    every p is exp2(-inf) = 0, and no later kernel needs to mask a query."""
    if OVERLAP:
        gdc_launch_dependents()
    w = locate(tl.program_id(0), tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, BLOCK_M)
    if w.first < w.n_q:
        i = w.first + tl.arange(0, BLOCK_M)
        o_tile = load_rows(o, w.b, w.h, w.q0, w.first, w.n_q, DV, BLOCK_M, BLOCK_DV, False).to(tl.float32)
        do_tile = load_rows(do, w.b, w.h, w.q0, w.first, w.n_q, DV, BLOCK_M, BLOCK_DV, False).to(tl.float32)
        delta_i = tl.sum(o_tile * do_tile, 1)
        if dlse.ptr is not None:
            delta_i -= tl.load(row_pointers(dlse, w.b, w.h, w.q0, i), mask=i < w.n_q, other=0.0)
        lse_i = tl.load(row_pointers(lse, w.b, w.h, w.q0, i), mask=i < w.n_q, other=float("-inf"))
        empty = lse_i == float("-inf")
        tl.store(row_statistics(lse2, w, w.h, w.first, cu_q, BLOCK_M), tl.where(empty, float("inf"), lse_i * LOG2E))
        tl.store(row_statistics(delta, w, w.h, w.first, cu_q, BLOCK_M), tl.where(empty, 0.0, delta_i))


@triton.jit
def weights(
    product, w, h, i, j, lse2, before, after, scale, edge, picky, terms, FOLD: tl.constexpr, SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
):  # fmt: skip
    """p = exp(s - lse) of one tile, 0 for the pairs that do not see each other, and the slope of the
    score mod."""
    s, slope = worth_and_slope(product, w, h, i, j, scale, terms, FOLD, SCORE_MOD)
    p = tl.exp2(s * unit_of(scale, FOLD) - lse2)
    return masked(p, 0.0, edge, picky, i, j, w, before, after, h, terms, MASK_MOD), slope


@triton.jit
def score_gradient(p, slope, dp, delta, w, h, i, j, terms):
    """The gradient of scale * q.k: through softmax, dropout and the score mod."""
    return steepened(p, slope, terms) * (dropped(dp, w, h, i, j, terms) - delta)


@triton.jit
def query_gradient(
    q_tile, do_tile, lse2_i, delta_i, k, v, w, h_kv, i, span, before, after, scale, terms,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, FOLD: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, CAREFUL: tl.constexpr, q=None, do=None, CHUNK: tl.constexpr = 512,
):  # fmt: skip
    LEAN: tl.constexpr = CAREFUL or PRECISION != "ieee"  # float32 is two halves: no registers for what can wait
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    lo, hi = walk(span, w, w.h, terms.blocks, BLOCK_N)
    for at in tl.range(lo, hi, BLOCK_N, num_stages=1 if CAREFUL else None, disable_licm=LEAN):
        first, edge, picky = column(at, span, terms.blocks, BLOCK_N, CAREFUL)
        j = first + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k, w.b, h_kv, w.k0, first, w.n_k, D, BLOCK_N, BLOCK_D, EVEN)
        v_tile = load_rows(v, w.b, h_kv, w.k0, first, w.n_k, DV, BLOCK_N, BLOCK_DV, EVEN)
        product = inner(
            q_tile, k_tile, Rows(q, w.b, w.h, w.q0, w.first, w.n_q), Rows(k, w.b, h_kv, w.k0, first, w.n_k),
            D, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION,
        )  # fmt: skip
        dp = inner(
            do_tile, v_tile, Rows(do, w.b, w.h, w.q0, w.first, w.n_q), Rows(v, w.b, h_kv, w.k0, first, w.n_k),
            DV, BLOCK_M, BLOCK_N, BLOCK_DV, CHUNK, PRECISION,
        )  # fmt: skip
        p, slope = weights(
            product, w, w.h, i[:, None], j[None, :], lse2_i[:, None], before, after, scale, edge, picky, terms,
            FOLD, SCORE_MOD, MASK_MOD,
        )  # fmt: skip
        ds = score_gradient(p, slope, dp, delta_i[:, None], w, w.h, i[:, None], j[None, :], terms)
        seen = None
        if CAREFUL:
            seen = visible(i[:, None], j[None, :], w, before, after, w.h, terms, MASK_MOD)
            ds = tl.where(seen, ds, 0.0)
        if BLOCK_D > CHUNK:  # the first half of an iteration has no room for it
            k_tile = load_rows(k, w.b, h_kv, w.k0, first, w.n_k, D, BLOCK_N, BLOCK_D, EVEN)
        acc = dot(ds.to(k_tile.dtype), k_tile, acc, seen, PRECISION)
    return acc


@triton.jit(do_not_specialize=["n_q", "n_k", "before", "after", "tiles", "batch"])
def query_kernel(
    q, k, v, do, lse2, delta, dq, cu_q, cu_k, n_q, n_k, before, after, scale, rate, tiles, heads, batch, terms,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, FOLD: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    w = locate(pid, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, BLOCK_M)
    if w.first < w.n_q:
        h_kv = w.h // GROUP
        i = w.first + tl.arange(0, BLOCK_M)
        q_tile = load_rows(q, w.b, w.h, w.q0, w.first, w.n_q, D, BLOCK_M, BLOCK_D, False)
        do_tile = load_rows(do, w.b, w.h, w.q0, w.first, w.n_q, DV, BLOCK_M, BLOCK_DV, False)
        lse2_i = tl.load(row_statistics(lse2, w, w.h, w.first, cu_q, BLOCK_M))
        delta_i = tl.load(row_statistics(delta, w, w.h, w.first, cu_q, BLOCK_M))
        at = w.first + w.n_k - w.n_q
        span = band(at, at + BLOCK_M - 1, w.n_k, before, after, BLOCK_N)
        acc = query_gradient(
            q_tile, do_tile, lse2_i, delta_i, k, v, w, h_kv, i, span, before, after, scale, terms,
            SCORE_MOD, MASK_MOD, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, FOLD, EVEN, PRECISION, False,
            q, do, CHUNK,
        )  # fmt: skip
        if has_nan(acc):
            acc = query_gradient(
                q_tile, do_tile, lse2_i, delta_i, k, v, w, h_kv, i, span, before, after, scale, terms,
                SCORE_MOD, MASK_MOD, D, DV, BLOCK_M, 16, BLOCK_D, BLOCK_DV, FOLD, EVEN, PRECISION, True,
                q, do, CHUNK,
            )  # fmt: skip
        store_rows(dq, acc * rate, w.b, w.h, w.q0, w.first, w.n_q, D, BLOCK_M, BLOCK_D)
    if OVERLAP:
        gdc_wait()


@triton.jit
def key_gradients(
    k_tile, v_tile, q, do, lse2, delta, cu_q, w, heads, j, span, before, after, scale, terms,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, FOLD: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, SUM_K: tl.constexpr, SUM_V: tl.constexpr, CAREFUL: tl.constexpr,
    k=None, v=None, CHUNK: tl.constexpr = 512,
):  # fmt: skip
    LEAN: tl.constexpr = CAREFUL or PRECISION != "ieee"  # float32 is two halves: no registers for what can wait
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for g in tl.range(GROUP, disable_licm=True):
        h = w.h * GROUP + g
        u = w
        if GROUP > 1:  # a batch row that is computed here, and what follows from it, is kept in no register meanwhile
            line = w.b * heads * GROUP + h
            h = line % (heads * GROUP)
            u = Work(line // (heads * GROUP), h, w.first, w.q0, w.n_q, w.k0, w.n_k, w.r0)
        lo, hi = walk(span, u, h, terms.blocks, BLOCK_M)
        for at in tl.range(lo, hi, BLOCK_M, num_stages=1 if CAREFUL else None, disable_licm=LEAN):
            first, edge, picky = column(at, span, terms.blocks, BLOCK_M, CAREFUL)
            i = first + tl.arange(0, BLOCK_M)
            q_tile = load_rows(q, u.b, h, u.q0, first, u.n_q, D, BLOCK_M, BLOCK_D, EVEN)
            do_tile = load_rows(do, u.b, h, u.q0, first, u.n_q, DV, BLOCK_M, BLOCK_DV, EVEN)
            lse2_i = tl.load(row_statistics(lse2, u, h, first, cu_q, BLOCK_M))
            product = inner(
                k_tile, q_tile, Rows(k, w.b, w.h, w.k0, w.first, w.n_k), Rows(q, u.b, h, u.q0, first, u.n_q),
                D, BLOCK_N, BLOCK_M, BLOCK_D, CHUNK, PRECISION,
            )  # fmt: skip
            p, slope = weights(
                product, u, h, i[None, :], j[:, None], lse2_i[None, :], before, after, scale, edge, picky, terms,
                FOLD, SCORE_MOD, MASK_MOD,
            )  # fmt: skip
            seen = visible(i[None, :], j[:, None], u, before, after, h, terms, MASK_MOD) if CAREFUL else None
            if SUM_V:
                stayed = dropped(p, u, h, i[None, :], j[:, None], terms)
                if BLOCK_DV > CHUNK:
                    do_tile = load_rows(do, u.b, h, u.q0, first, u.n_q, DV, BLOCK_M, BLOCK_DV, EVEN)
                dv_acc = dot(stayed.to(do_tile.dtype), do_tile, dv_acc, seen, PRECISION)
            if SUM_K:
                delta_i = tl.load(row_statistics(delta, u, h, first, cu_q, BLOCK_M))
                dp = inner(
                    v_tile, do_tile, Rows(v, w.b, w.h, w.k0, w.first, w.n_k), Rows(do, u.b, h, u.q0, first, u.n_q),
                    DV, BLOCK_N, BLOCK_M, BLOCK_DV, CHUNK, PRECISION,
                )  # fmt: skip
                ds = score_gradient(p, slope, dp, delta_i[None, :], u, h, i[None, :], j[:, None], terms)
                if CAREFUL:
                    ds = tl.where(seen, ds, 0.0)
                if BLOCK_D > CHUNK:
                    q_tile = load_rows(q, u.b, h, u.q0, first, u.n_q, D, BLOCK_M, BLOCK_D, EVEN)
                dk_acc = dot(ds.to(q_tile.dtype), q_tile, dk_acc, seen, PRECISION)
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=["n_q", "n_k", "before", "after", "tiles", "batch"])
def key_kernel(
    q, k, v, do, lse2, delta, dk, dv, cu_q, cu_k, n_q, n_k, before, after, scale, rate, tiles, heads, batch, terms,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, FOLD: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, SUM_K: tl.constexpr, SUM_V: tl.constexpr,
    CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """dK, dV, or both. `heads` counts KV heads; each program sums over the GROUP query heads that share its own.

    OVERLAP: the next kernel, which needs nothing of this one, starts where this one's last programs leave room, and
    ends after it; so does this one beside the kernel before, unless that is `prepare_kernel`, whose sums it waits for
    and lets nobody start before.
    """
    if OVERLAP:
        if SUM_K:
            gdc_wait()
        gdc_launch_dependents()
    w = locate(tl.program_id(0), tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_k, BLOCK_N)
    if w.first < w.n_k:
        j = w.first + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k, w.b, w.h, w.k0, w.first, w.n_k, D, BLOCK_N, BLOCK_D, False)
        v_tile = k_tile
        if SUM_K:
            v_tile = load_rows(v, w.b, w.h, w.k0, w.first, w.n_k, DV, BLOCK_N, BLOCK_DV, False)
        at = w.first + w.n_q - w.n_k
        span = band(at, at + BLOCK_N - 1, w.n_q, after, before, BLOCK_M)  # the same band, read sideways
        dk_acc, dv_acc = key_gradients(
            k_tile, v_tile, q, do, lse2, delta, cu_q, w, heads, j, span, before, after, scale, terms,
            SCORE_MOD, MASK_MOD, GROUP, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, FOLD, EVEN, PRECISION,
            SUM_K, SUM_V, False, k, v, CHUNK,
        )  # fmt: skip
        bad = has_nan(dk_acc, dv_acc) if SUM_K and SUM_V else has_nan(dk_acc if SUM_K else dv_acc)
        if GROUP > 1 or cu_k is not None:
            pid = tl.program_id(0) * tl.num_programs(1)  # times 1: found again, not kept in registers since
            w = locate(pid, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_k, BLOCK_N)
        if bad:
            j = w.first + tl.arange(0, BLOCK_N)
            at = w.first + w.n_q - w.n_k
            span = band(at, at + BLOCK_N - 1, w.n_q, after, before, BLOCK_M)
            dk_acc, dv_acc = key_gradients(
                k_tile, v_tile, q, do, lse2, delta, cu_q, w, heads, j, span, before, after, scale, terms,
                SCORE_MOD, MASK_MOD, GROUP, D, DV, 16, BLOCK_N, BLOCK_D, BLOCK_DV, FOLD, EVEN, PRECISION,
                SUM_K, SUM_V, True, k, v, CHUNK,
            )  # fmt: skip
        if SUM_K:
            store_rows(dk, dk_acc * rate, w.b, w.h, w.k0, w.first, w.n_k, D, BLOCK_N, BLOCK_D)
        if SUM_V:
            store_rows(dv, dv_acc, w.b, w.h, w.k0, w.first, w.n_k, DV, BLOCK_N, BLOCK_DV)
    if OVERLAP and not SUM_K:
        gdc_wait()
