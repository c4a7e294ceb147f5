"""The last launch of a backward whose rows do not all see the same keys; `repair` is that of such a forward."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..portable.backward import key_gradients, query_gradient
from ..tile import band, load_rows, locate, row_statistics, store_rows

ROWS: tl.constexpr = tl.constexpr(32)
STEP: tl.constexpr = tl.constexpr(16)


@triton.jit
def repair_queries(
    q, k, v, do, lse2, delta, dq, w, cu_q, before, after, scale, terms, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    i = w.first + tl.arange(0, ROWS)
    at = w.first + w.n_k - w.n_q
    span = band(at, at + ROWS - 1, w.n_k, before, after, STEP)
    acc = query_gradient(
        load_rows(q, w.b, w.h, w.q0, w.first, w.n_q, D, ROWS, BLOCK_D, False),
        load_rows(do, w.b, w.h, w.q0, w.first, w.n_q, DV, ROWS, BLOCK_DV, False),
        tl.load(row_statistics(lse2, w, w.h, w.first, cu_q, ROWS)),
        tl.load(row_statistics(delta, w, w.h, w.first, cu_q, ROWS)),
        k, v, w, w.h // GROUP, i, span, before, after, scale, terms, SCORE_MOD, MASK_MOD,
        D, DV, ROWS, STEP, BLOCK_D, BLOCK_DV, False, False, "ieee", True,
    )  # fmt: skip
    store_rows(dq, acc * scale, w.b, w.h, w.q0, w.first, w.n_q, D, ROWS, BLOCK_D)


@triton.jit
def repair_keys(
    q, k, v, do, lse2, delta, dk, dv, w, heads, cu_q, before, after, scale, terms, SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    j = w.first + tl.arange(0, ROWS)
    at = w.first + w.n_q - w.n_k
    span = band(at, at + ROWS - 1, w.n_q, after, before, STEP)
    dk_acc, dv_acc = key_gradients(
        load_rows(k, w.b, w.h, w.k0, w.first, w.n_k, D, ROWS, BLOCK_D, False),
        load_rows(v, w.b, w.h, w.k0, w.first, w.n_k, DV, ROWS, BLOCK_DV, False),
        q, do, lse2, delta, cu_q, w, heads, j, span, before, after, scale, terms, SCORE_MOD, MASK_MOD,
        GROUP, D, DV, STEP, ROWS, BLOCK_D, BLOCK_DV, False, False, "ieee", True, True, True,
    )  # fmt: skip
    store_rows(dk, dk_acc * scale, w.b, w.h, w.k0, w.first, w.n_k, D, ROWS, BLOCK_D)
    store_rows(dv, dv_acc, w.b, w.h, w.k0, w.first, w.n_k, DV, ROWS, BLOCK_DV)


@triton.jit(do_not_specialize=["n_q", "n_k", "before", "after", "q_total", "k_total", "q_tiles", "k_tiles", "batch"])
def repair_backward_kernel(
    q, k, v, do, lse2, delta, dq, dk, dv, flag, cu_q, cu_k, n_q, n_k, before, after, scale,
    q_total, k_total, q_tiles, k_tiles, heads, kv_heads, batch, terms,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    if tl.load(flag) > 0:
        for pid in range(tl.program_id(0), q_total, tl.num_programs(0)):
            w = locate(pid, q_tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, ROWS)
            if w.first < w.n_q:
                repair_queries(
                    q, k, v, do, lse2, delta, dq, w, cu_q, before, after, scale, terms, SCORE_MOD, MASK_MOD,
                    GROUP, D, DV, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
        for pid in range(tl.program_id(0), k_total, tl.num_programs(0)):
            w = locate(pid, k_tiles, kv_heads, batch, cu_q, cu_k, n_q, n_k, cu_k, ROWS)
            if w.first < w.n_k:
                repair_keys(
                    q, k, v, do, lse2, delta, dk, dv, w, kv_heads, cu_q, before, after, scale, terms,
                    SCORE_MOD, MASK_MOD, GROUP, D, DV, BLOCK_D, BLOCK_DV,
                )  # fmt: skip
