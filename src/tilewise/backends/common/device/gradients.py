"""The gradients of one tile: dQ of a tile of queries, dK and dV of a tile of keys.

With p = exp(s - lse) recomputed from the saved lse, dp = do v^T and delta = rowsum(do * o) - dlse:
    dv = p^T do        ds = p * (dp - delta)        dq = scale * ds k        dk = scale * ds^T q
(with a score mod, ds is multiplied by the mod's slope; with dropout, dv takes the weights that stayed and dp theirs).
Each sum has one owner and one order, so two runs agree bit for bit. The owner of keys works on transposed tiles
(s^T = k q^T), whose p^T and ds^T are already the left operands of its two sums.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .mask import masked, seen
from .matmul import dot, inner
from .score import dropped, steepened, worth_and_slope
from .softmax import exponent, unit_of
from .structs import Rows, Work
from .tile_io import load_rows, statistic_pointers, store_rows
from .tile_range import band, column, walk


class Saved(NamedTuple):
    """Views of what the gradients are made of: inputs, the gradient of the output, and the row statistics."""

    q: tl.tuple
    k: tl.tuple
    v: tl.tuple
    do: tl.tuple
    lse2: tl.tuple
    delta: tl.tuple


@triton.jit
def weights(product, w, h, i, j, lse2, edge, picky, law, FOLD: tl.constexpr):
    """p = exp(s - lse) of one tile, 0 for the pairs that do not see each other, and the slope of the
    score mod."""
    s, slope = worth_and_slope(product, w, h, i, j, law.scale, law.terms, FOLD, law.SCORE_MOD)
    p = tl.exp2(exponent(s, lse2, unit_of(law.scale, FOLD), law.terms.far))
    return masked(p, 0.0, edge, picky, i, j, w, h, law), slope


@triton.jit
def score_gradient(p, slope, dp, delta, w, h, i, j, terms):
    """The gradient of scale * q.k: through softmax, dropout and the score mod."""
    return steepened(p, slope, terms) * (dropped(dp, w, h, i, j, terms) - delta)


@triton.jit
def query_gradient(saved, w, law, PLAN: tl.constexpr, CAREFUL: tl.constexpr):
    """dQ / scale of the tile of queries at w."""
    STEP: tl.constexpr = 16 if CAREFUL else PLAN.BLOCK_N
    LEAN: tl.constexpr = CAREFUL or PLAN.PRECISION != "ieee"  # float32 is two halves: no registers for what can wait
    terms = law.terms
    h_kv = w.h // PLAN.GROUP
    i = w.first + tl.arange(0, PLAN.BLOCK_M)
    q_rows = Rows(saved.q, w.b, w.h, w.q0, w.first, w.n_q)
    do_rows = Rows(saved.do, w.b, w.h, w.q0, w.first, w.n_q)
    q_tile = load_rows(q_rows, PLAN.D, PLAN.BLOCK_M, PLAN.BLOCK_D, False)
    do_tile = load_rows(do_rows, PLAN.DV, PLAN.BLOCK_M, PLAN.BLOCK_DV, False)
    lse2_i = tl.load(statistic_pointers(saved.lse2, w, w.h, w.first, PLAN.BLOCK_M, PLAN.PACKED))
    delta_i = tl.load(statistic_pointers(saved.delta, w, w.h, w.first, PLAN.BLOCK_M, PLAN.PACKED))
    at = w.first + w.n_k - w.n_q
    span = band(at, at + PLAN.BLOCK_M - 1, w.n_k, law.before, law.after, PLAN.BLOCK_N)
    acc = tl.full([PLAN.BLOCK_M, PLAN.BLOCK_D], 0.0, tl.float32)
    lo, hi = walk(span, w, w.h, terms.blocks, STEP)
    for at in tl.range(lo, hi, STEP, num_stages=1 if CAREFUL else None, disable_licm=LEAN):
        first, edge, picky = column(at, span, terms.blocks, STEP, CAREFUL)
        j = first + tl.arange(0, STEP)
        k_rows = Rows(saved.k, w.b, h_kv, w.k0, first, w.n_k)
        v_rows = Rows(saved.v, w.b, h_kv, w.k0, first, w.n_k)
        k_tile = load_rows(k_rows, PLAN.D, STEP, PLAN.BLOCK_D, PLAN.EVEN)
        v_tile = load_rows(v_rows, PLAN.DV, STEP, PLAN.BLOCK_DV, PLAN.EVEN)
        product = inner(q_tile, k_tile, q_rows, k_rows, PLAN.D, PLAN)
        dp = inner(do_tile, v_tile, do_rows, v_rows, PLAN.DV, PLAN)
        p, slope = weights(
            product, w, w.h, i[:, None], j[None, :], lse2_i[:, None], edge, picky, law, PLAN.FOLD
        )  # fmt: skip
        ds = score_gradient(p, slope, dp, delta_i[:, None], w, w.h, i[:, None], j[None, :], terms)
        met = None
        if CAREFUL:
            met = seen(i[:, None], j[None, :], w, w.h, law)
            ds = tl.where(met, ds, 0.0)
        if PLAN.BLOCK_D > PLAN.CHUNK:  # the first half of an iteration has no room for it
            k_tile = load_rows(k_rows, PLAN.D, STEP, PLAN.BLOCK_D, PLAN.EVEN)
        acc = dot(ds.to(k_tile.dtype), k_tile, acc, met, PLAN)
    return acc


@triton.jit
def key_gradients(saved, w, heads, law, PLAN: tl.constexpr, CAREFUL: tl.constexpr):
    """dK / scale and dV of the tile of keys at w, or one of them and zeros."""
    STEP: tl.constexpr = 16 if CAREFUL else PLAN.BLOCK_M
    LEAN: tl.constexpr = CAREFUL or PLAN.PRECISION != "ieee"  # float32 is two halves: no registers for what can wait
    GROUP: tl.constexpr = PLAN.GROUP
    terms = law.terms
    j = w.first + tl.arange(0, PLAN.BLOCK_N)
    k_rows = Rows(saved.k, w.b, w.h, w.k0, w.first, w.n_k)
    v_rows = Rows(saved.v, w.b, w.h, w.k0, w.first, w.n_k)
    k_tile = load_rows(k_rows, PLAN.D, PLAN.BLOCK_N, PLAN.BLOCK_D, False)
    v_tile = k_tile
    if PLAN.SUM_K:
        v_tile = load_rows(v_rows, PLAN.DV, PLAN.BLOCK_N, PLAN.BLOCK_DV, False)
    at = w.first + w.n_q - w.n_k
    # the same band, read sideways
    span = band(at, at + PLAN.BLOCK_N - 1, w.n_q, law.after, law.before, PLAN.BLOCK_M)
    dk_acc = tl.full([PLAN.BLOCK_N, PLAN.BLOCK_D], 0.0, tl.float32)
    dv_acc = tl.full([PLAN.BLOCK_N, PLAN.BLOCK_DV], 0.0, tl.float32)
    for g in tl.range(GROUP, disable_licm=True):
        h = w.h * GROUP + g
        u = w
        if GROUP > 1:  # a batch row that is computed here, and what follows from it, is kept in no register meanwhile
            line = w.b * heads * GROUP + h
            h = line % (heads * GROUP)
            u = Work(line // (heads * GROUP), h, w.first, w.q0, w.n_q, w.k0, w.n_k, w.r0)
        lo, hi = walk(span, u, h, terms.blocks, STEP)
        for at in tl.range(lo, hi, STEP, num_stages=1 if CAREFUL else None, disable_licm=LEAN):
            first, edge, picky = column(at, span, terms.blocks, STEP, CAREFUL)
            i = first + tl.arange(0, STEP)
            q_rows = Rows(saved.q, u.b, h, u.q0, first, u.n_q)
            do_rows = Rows(saved.do, u.b, h, u.q0, first, u.n_q)
            q_tile = load_rows(q_rows, PLAN.D, STEP, PLAN.BLOCK_D, PLAN.EVEN)
            do_tile = load_rows(do_rows, PLAN.DV, STEP, PLAN.BLOCK_DV, PLAN.EVEN)
            lse2_i = tl.load(statistic_pointers(saved.lse2, u, h, first, STEP, PLAN.PACKED))
            product = inner(k_tile, q_tile, k_rows, q_rows, PLAN.D, PLAN)
            p, slope = weights(
                product, u, h, i[None, :], j[:, None], lse2_i[None, :], edge, picky, law, PLAN.FOLD
            )  # fmt: skip
            met = None
            if CAREFUL:
                met = seen(i[None, :], j[:, None], u, h, law)
                p = tl.where(met, p, 0.0)  # a mask mod may show a key to queries that do not exist
            if PLAN.SUM_V:
                stayed = dropped(p, u, h, i[None, :], j[:, None], terms)
                if PLAN.BLOCK_DV > PLAN.CHUNK:
                    do_tile = load_rows(do_rows, PLAN.DV, STEP, PLAN.BLOCK_DV, PLAN.EVEN)
                dv_acc = dot(stayed.to(do_tile.dtype), do_tile, dv_acc, met, PLAN)
            if PLAN.SUM_K:
                delta_i = tl.load(statistic_pointers(saved.delta, u, h, first, STEP, PLAN.PACKED))
                dp = inner(v_tile, do_tile, v_rows, do_rows, PLAN.DV, PLAN)
                ds = score_gradient(p, slope, dp, delta_i[None, :], u, h, i[None, :], j[:, None], terms)
                if CAREFUL:
                    ds = tl.where(met, ds, 0.0)
                if PLAN.BLOCK_D > PLAN.CHUNK:
                    q_tile = load_rows(q_rows, PLAN.D, STEP, PLAN.BLOCK_D, PLAN.EVEN)
                dk_acc = dot(ds.to(q_tile.dtype), q_tile, dk_acc, met, PLAN)
    return dk_acc, dv_acc


@triton.jit
def store_key_gradients(dk, dv, dk_acc, dv_acc, w, rate, PLAN: tl.constexpr):
    if PLAN.SUM_K:
        store_rows(Rows(dk, w.b, w.h, w.k0, w.first, w.n_k), dk_acc * rate, PLAN.D)
    if PLAN.SUM_V:
        store_rows(Rows(dv, w.b, w.h, w.k0, w.first, w.n_k), dv_acc, PLAN.DV)
