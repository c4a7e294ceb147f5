"""The gradients of one tile: dQ of a tile of queries, dK and dV of a tile of keys.

With p = exp(s - lse) recomputed from the saved lse, dp = do v^T and delta = rowsum(do * o) - dlse:
    dv = p^T do        ds = p * (dp - delta)        dq = scale * ds k        dk = scale * ds^T q
With a score mod, ds is multiplied by its derivative. With dropout, dv is computed from the kept p, and dp is masked and
rescaled as they are. No sum is split between programs, so that two runs agree bit for bit. Tiles of keys are computed
transposed (s^T = k q^T): p^T and ds^T are then left operands of the two sums.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .mask import hidden, visible
from .matmul import dot_nt_pieces, dot_pieces, load_pieces, zeros_in_pieces
from .score import dropout, scores_and_derivative, times_derivative
from .softmax import exponent, log2_scale
from .structs import Pairs, Rows, Work
from .tile_io import statistic_pointers, store_pieces
from .tile_range import key_range, loop_range, query_range, tile_at


class BackwardTensors(NamedTuple):
    """Views of the inputs, of the gradient of the output, of the row statistics, and of the gradients that a kernel
    computes; and the flags of the NaN repair pass, or None."""

    q: tl.tuple
    k: tl.tuple
    v: tl.tuple
    do: tl.tuple
    lse2: tl.tuple
    delta: tl.tuple
    dq: tl.tuple = None
    dk: tl.tuple = None
    dv: tl.tuple = None
    flags: tl.tensor = None


@triton.jit
def recompute_p(product, pairs, lse2, edge, partial, params, FOLD: tl.constexpr, BRANCH: tl.constexpr = True):
    """p = exp(s - lse) of one tile, 0 for hidden pairs; and the derivative of the score mod."""
    s, derivative = scores_and_derivative(product, pairs, params.scale, params.terms, params.SCORE_MOD, FOLD)
    p = tl.exp2(exponent(s, lse2, log2_scale(params.scale, FOLD), params.terms.large_scores))
    return hidden(p, 0.0, pairs, edge, partial, params, BRANCH), derivative


@triton.jit
def score_gradient(p, derivative, dp, delta, pairs, terms):
    """ds, the gradient of scale * q.k."""
    return times_derivative(p, derivative, terms) * (dropout(dp, pairs, terms) - delta)


@triton.jit
def query_gradient(tensors, w, params, CONFIG: tl.constexpr, NAN_SAFE: tl.constexpr):
    """dQ / scale of the tile of queries at w, in pieces of its columns (see `matmul.zeros_in_pieces`)."""
    STEP: tl.constexpr = 16 if NAN_SAFE else CONFIG.BLOCK_N
    # float32 operands are two halves each: no registers are left for loop invariants
    LEAN: tl.constexpr = NAN_SAFE or CONFIG.PRECISION != "ieee"
    terms = params.terms
    h_kv = w.h // CONFIG.GROUP
    i = w.first + tl.arange(0, CONFIG.BLOCK_M)
    q_rows = Rows(tensors.q, w.b, w.h, w.q0, w.first, w.n_q)
    do_rows = Rows(tensors.do, w.b, w.h, w.q0, w.first, w.n_q)
    q_tile = load_pieces(q_rows, CONFIG.D, CONFIG.BLOCK_M, CONFIG.BLOCK_D, CONFIG.PIECE, False)
    do_tile = load_pieces(do_rows, CONFIG.DV, CONFIG.BLOCK_M, CONFIG.BLOCK_DV, CONFIG.PIECE, False)
    lse2_i = tl.load(statistic_pointers(tensors.lse2, w, w.h, w.first, CONFIG.BLOCK_M, CONFIG.PACKED))
    delta_i = tl.load(statistic_pointers(tensors.delta, w, w.h, w.first, CONFIG.BLOCK_M, CONFIG.PACKED))
    span = key_range(w, params.before, params.after, CONFIG.BLOCK_M, CONFIG.BLOCK_N)
    acc = zeros_in_pieces(CONFIG.BLOCK_M, CONFIG.D, CONFIG.BLOCK_D, CONFIG.PIECE)
    lo, hi = loop_range(span, w, w.h, terms.blocks, STEP)
    for at in tl.range(lo, hi, STEP, num_stages=1 if NAN_SAFE else None, disable_licm=LEAN):
        first, edge, partial = tile_at(at, span, terms.blocks, STEP, NAN_SAFE)
        j = first + tl.arange(0, STEP)
        k_rows = Rows(tensors.k, w.b, h_kv, w.k0, first, w.n_k)
        v_rows = Rows(tensors.v, w.b, h_kv, w.k0, first, w.n_k)
        k_tile = load_pieces(k_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.PIECE, CONFIG.EVEN)
        v_tile = load_pieces(v_rows, CONFIG.DV, STEP, CONFIG.BLOCK_DV, CONFIG.PIECE, CONFIG.EVEN)
        product = dot_nt_pieces(q_tile, k_tile, q_rows, k_rows, CONFIG.D, CONFIG)
        dp = dot_nt_pieces(do_tile, v_tile, do_rows, v_rows, CONFIG.DV, CONFIG)
        pairs = Pairs(w, w.h, i[:, None], j[None, :])
        p, derivative = recompute_p(product, pairs, lse2_i[:, None], edge, partial, params, CONFIG.FOLD, CONFIG.BRANCH)
        ds = score_gradient(p, derivative, dp, delta_i[:, None], pairs, terms)
        sees = None
        if NAN_SAFE:
            sees = visible(pairs, params)
            ds = tl.where(sees, ds, 0.0)
        if CONFIG.BLOCK_D > CONFIG.CHUNK:  # k_tile was not kept during the products: no registers are left for it
            k_tile = load_pieces(k_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.PIECE, CONFIG.EVEN)
        acc = dot_pieces(ds.to(tensors.k.ptr.dtype.element_ty), k_tile, acc, sees, CONFIG)
    return acc


@triton.jit
def key_gradients(tensors, w, heads, params, CONFIG: tl.constexpr, NAN_SAFE: tl.constexpr):
    """dK / scale and dV of the tile of keys at w, in pieces of their columns; zeros for one that is not computed
    (SUM_K, SUM_V)."""
    STEP: tl.constexpr = 16 if NAN_SAFE else CONFIG.BLOCK_M
    # float32 operands are two halves each: no registers are left for loop invariants
    LEAN: tl.constexpr = NAN_SAFE or CONFIG.PRECISION != "ieee"
    GROUP: tl.constexpr = CONFIG.GROUP
    terms = params.terms
    j = w.first + tl.arange(0, CONFIG.BLOCK_N)
    k_rows = Rows(tensors.k, w.b, w.h, w.k0, w.first, w.n_k)
    v_rows = Rows(tensors.v, w.b, w.h, w.k0, w.first, w.n_k)
    k_tile = load_pieces(k_rows, CONFIG.D, CONFIG.BLOCK_N, CONFIG.BLOCK_D, CONFIG.PIECE, False)
    v_tile = k_tile
    if CONFIG.SUM_K:
        v_tile = load_pieces(v_rows, CONFIG.DV, CONFIG.BLOCK_N, CONFIG.BLOCK_DV, CONFIG.PIECE, False)
    span = query_range(w, params.before, params.after, CONFIG.BLOCK_M, CONFIG.BLOCK_N)
    dk_acc = zeros_in_pieces(CONFIG.BLOCK_N, CONFIG.D, CONFIG.BLOCK_D, CONFIG.PIECE)
    dv_acc = zeros_in_pieces(CONFIG.BLOCK_N, CONFIG.DV, CONFIG.BLOCK_DV, CONFIG.PIECE)
    for g in tl.range(GROUP, disable_licm=True):
        h = w.h * GROUP + g
        u = w
        if GROUP > 1:  # the batch row is computed in each iteration, so that it needs no register outside the loop
            line = w.b * heads * GROUP + h
            h = line % (heads * GROUP)
            u = Work(line // (heads * GROUP), h, w.first, w.q0, w.n_q, w.k0, w.n_k, w.r0)
        lo, hi = loop_range(span, u, h, terms.blocks, STEP)
        for at in tl.range(lo, hi, STEP, num_stages=1 if NAN_SAFE else None, disable_licm=LEAN):
            first, edge, partial = tile_at(at, span, terms.blocks, STEP, NAN_SAFE)
            i = first + tl.arange(0, STEP)
            q_rows = Rows(tensors.q, u.b, h, u.q0, first, u.n_q)
            do_rows = Rows(tensors.do, u.b, h, u.q0, first, u.n_q)
            q_tile = load_pieces(q_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.PIECE, CONFIG.EVEN)
            do_tile = load_pieces(do_rows, CONFIG.DV, STEP, CONFIG.BLOCK_DV, CONFIG.PIECE, CONFIG.EVEN)
            lse2_i = tl.load(statistic_pointers(tensors.lse2, u, h, first, STEP, CONFIG.PACKED))
            product = dot_nt_pieces(k_tile, q_tile, k_rows, q_rows, CONFIG.D, CONFIG)
            pairs = Pairs(u, h, i[None, :], j[:, None])
            p, derivative = recompute_p(
                product, pairs, lse2_i[None, :], edge, partial, params, CONFIG.FOLD, CONFIG.BRANCH
            )
            sees = None
            if NAN_SAFE:
                sees = visible(pairs, params)
                p = tl.where(sees, p, 0.0)  # a mask mod may show a key to queries past the end
            if CONFIG.SUM_V:
                kept = dropout(p, pairs, terms)
                if CONFIG.BLOCK_DV > CONFIG.CHUNK:
                    do_tile = load_pieces(do_rows, CONFIG.DV, STEP, CONFIG.BLOCK_DV, CONFIG.PIECE, CONFIG.EVEN)
                dv_acc = dot_pieces(kept.to(tensors.do.ptr.dtype.element_ty), do_tile, dv_acc, sees, CONFIG)
            if CONFIG.SUM_K:
                delta_i = tl.load(statistic_pointers(tensors.delta, u, h, first, STEP, CONFIG.PACKED))
                dp = dot_nt_pieces(v_tile, do_tile, v_rows, do_rows, CONFIG.DV, CONFIG)
                ds = score_gradient(p, derivative, dp, delta_i[None, :], pairs, terms)
                if NAN_SAFE:
                    ds = tl.where(sees, ds, 0.0)
                if CONFIG.BLOCK_D > CONFIG.CHUNK:
                    q_tile = load_pieces(q_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.PIECE, CONFIG.EVEN)
                dk_acc = dot_pieces(ds.to(tensors.q.ptr.dtype.element_ty), q_tile, dk_acc, sees, CONFIG)
    return dk_acc, dv_acc


@triton.jit
def store_query_gradient(tensors, acc, w, rate, CONFIG: tl.constexpr):
    """Store dQ = rate * acc."""
    store_pieces(Rows(tensors.dq, w.b, w.h, w.q0, w.first, w.n_q), acc, rate, CONFIG.D)


@triton.jit
def store_key_gradients(tensors, dk_acc, dv_acc, w, rate, CONFIG: tl.constexpr):
    """Store dK = rate * dk_acc and dV, those that are computed."""
    if CONFIG.SUM_K:
        store_pieces(Rows(tensors.dk, w.b, w.h, w.k0, w.first, w.n_k), dk_acc, rate, CONFIG.D)
    if CONFIG.SUM_V:
        store_pieces(Rows(tensors.dv, w.b, w.h, w.k0, w.first, w.n_k), dv_acc, None, CONFIG.DV)
