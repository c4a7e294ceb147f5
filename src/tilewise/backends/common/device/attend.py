"""The forward of one tile of queries: online softmax over the keys that it sees."""

from typing import NamedTuple

import triton
import triton.language as tl

from .mask import hidden, visible
from .matmul import dot_nt_pieces, dot_pieces, load_pieces, raise_flag_of_pieces, zeros_in_pieces
from .score import dropout, scores
from .softmax import log2_scale, rounding_correction, row_logsumexp, sink_maximum, softmax_step
from .structs import Pairs, Rows
from .tile_io import row_pointers, store_rows
from .tile_range import band, head_of, locate, loop_range, split_range, tile_at


class Tensors(NamedTuple):
    """Views of q, k, v and o; lse; the flags of the NaN repair pass, or None; and the largest score of each head, or
    None."""

    q: tl.tuple
    k: tl.tuple
    v: tl.tuple
    o: tl.tuple
    lse: tl.tensor
    flags: tl.tensor
    max_logit: tl.tensor = None


class Softmax(NamedTuple):
    """The state of online softmax for the rows of a tile: o = acc / l. The largest scores, m, l and the sums of
    the rounded p are (BLOCK_M,); acc is in pieces of its columns, (BLOCK_M, PIECE) each."""

    top: tl.tensor
    m: tl.tensor
    l: tl.tensor
    rounded: tl.tensor
    acc: tl.tuple


class Queries(NamedTuple):
    """The rows of a tile of queries: in memory, loaded in pieces of their columns, and the indices and heads of their
    queries, (BLOCK_M, 1) or the same for all."""

    rows: tl.tuple
    tile: tl.tuple
    i: tl.tensor
    h: tl.tensor
    h_kv: tl.tensor


@triton.jit
def add_keys(
    state,
    first,
    edge,
    partial,
    queries,
    tensors,
    w,
    qk_scale,
    params,
    CONFIG: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    BRANCH: tl.constexpr,
    NAN_SAFE: tl.constexpr,
):
    """The state of online softmax after the keys first .. first + STEP - 1. EVEN: they all exist."""
    top, m, l, rounded, acc = state
    terms = params.terms
    pairs = Pairs(w, queries.h, queries.i, (first + tl.arange(0, STEP))[None, :])
    k_rows = Rows(tensors.k, w.b, queries.h_kv, w.k0, first, w.n_k)
    k_tile = load_pieces(k_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.PIECE, EVEN)
    product = dot_nt_pieces(queries.tile, k_tile, queries.rows, k_rows, CONFIG.D, CONFIG)
    s = scores(product, pairs, params.scale, terms, params.SCORE_MOD, CONFIG.FOLD)
    s = hidden(s, float("-inf"), pairs, edge, partial, params, BRANCH)
    if CONFIG.MAX_LOGIT:
        top = tl.maximum(top, tl.max(s, 1))
    p, alpha, m, l = softmax_step(m, l, s, qk_scale, terms.large_scores, CONFIG.BOUNDED)
    if tensors.v.ptr is not None:
        v_rows = Rows(tensors.v, w.b, queries.h_kv, w.k0, first, w.n_k)
        v_tile = load_pieces(v_rows, CONFIG.DV, STEP, CONFIG.BLOCK_DV, CONFIG.PIECE, EVEN)
        sees = visible(pairs, params) if NAN_SAFE else None
        p = dropout(p, pairs, terms).to(tensors.v.ptr.dtype.element_ty)
        if CONFIG.BOUNDED:
            rounded += tl.sum(p.to(tl.float32), 1)
        acc = dot_pieces(p, v_tile, scaled_pieces(acc, alpha), sees, CONFIG)
    return Softmax(top, m, l, rounded, acc)


@triton.jit
def scaled_pieces(pieces, factor):
    """The rows of a tile in pieces, times a factor each."""
    found = (pieces[0] * factor[:, None],)
    for n in tl.static_range(1, len(pieces)):
        found += (pieces[n] * factor[:, None],)
    return found


@triton.jit
def stream_keys(tensors, w, split, splits, params, CONFIG: tl.constexpr, NAN_SAFE: tl.constexpr):
    """(acc, m, l, top) of online softmax over the keys that the tile of queries at w sees, or over one of `splits`
    parts of them (None: all): o = acc / l, acc in pieces of its columns. NAN_SAFE: values that a row does not see
    cannot reach it, even if they are nan. If tensors.v.ptr is None, acc stays 0. `top` is the largest score of each
    row, -inf without CONFIG.MAX_LOGIT: m starts from the sink, and may be 0 or in other units."""
    STEP: tl.constexpr = 16 if NAN_SAFE else CONFIG.BLOCK_N
    # float32 operands are two halves each: no registers are left for loop invariants
    LEAN: tl.constexpr = NAN_SAFE or CONFIG.PRECISION != "ieee"
    terms = params.terms
    h_kv = w.h * CONFIG.HEADS // CONFIG.GROUP
    r = w.first + tl.arange(0, CONFIG.BLOCK_M)
    i = (r // CONFIG.HEADS)[:, None]
    h = head_of(w, r[:, None], CONFIG.HEADS)
    q_rows = Rows(tensors.q, w.b, w.h, w.q0, w.first, w.n_q * CONFIG.HEADS, None if CONFIG.HEADS == 1 else CONFIG.HEADS)
    q_tile = load_pieces(q_rows, CONFIG.D, CONFIG.BLOCK_M, CONFIG.BLOCK_D, CONFIG.PIECE, False)
    queries = Queries(q_rows, q_tile, i, h, h_kv)
    at = w.first // CONFIG.HEADS + w.n_k - w.n_q  # the key position of the first query
    last = at + (CONFIG.BLOCK_M + CONFIG.HEADS - 2) // CONFIG.HEADS  # that of the last query, or the one after it
    span = band(at, last, w.n_k, params.before, params.after, CONFIG.BLOCK_N)
    if splits is not None:
        span = split_range(span, split, splits, CONFIG.BLOCK_N)
    qk_scale = log2_scale(params.scale, CONFIG.FOLD)
    m = tl.full([CONFIG.BLOCK_M], 0.0 if CONFIG.BOUNDED else float("-inf"), tl.float32)
    l = tl.full([CONFIG.BLOCK_M], 0.0, tl.float32)
    rounded = tl.full([CONFIG.BLOCK_M], 0.0, tl.float32)
    acc = zeros_in_pieces(CONFIG.BLOCK_M, CONFIG.DV, CONFIG.BLOCK_DV, CONFIG.PIECE)
    top = tl.full([CONFIG.BLOCK_M], float("-inf"), tl.float32)
    if terms.sinks.ptr is not None:  # a sink is a key without a value, in the first split
        sink = tl.load(terms.sinks.ptr + head_of(w, r, CONFIG.HEADS) * terms.sinks.stride).to(tl.float32)
        sink = tl.where(split == 0, sink, float("-inf"))
        m = l + sink_maximum(sink, terms.large_scores)
        l += tl.where(sink == float("-inf"), 0.0, 1.0)
    lo, hi = loop_range(span, w, w.h, terms.blocks, STEP)
    state = Softmax(top, m, l, rounded, acc)
    if not CONFIG.BRANCH and not NAN_SAFE and terms.blocks.offsets is None and params.MASK_MOD is None:
        # first the keys lo <= full_lo .. full_hi <= hi, which all exist and are visible; then those on either side
        full_lo = tl.minimum(tl.cdiv(tl.maximum(span.full_lo, lo), STEP) * STEP, hi)
        full_hi = tl.maximum(tl.minimum(span.full_hi, hi) // STEP * STEP, full_lo)
        for first in tl.range(full_lo, full_hi, STEP, disable_licm=LEAN):
            state = add_keys(
                state, first, False, False, queries, tensors, w, qk_scale, params, CONFIG, STEP, True, True, False
            )
        if params.before is None:  # full_lo is lo
            for first in tl.range(full_hi, hi, STEP, disable_licm=LEAN):
                state = add_keys(
                    state, first, True, True, queries, tensors, w, qk_scale, params, CONFIG, STEP, CONFIG.EVEN, True,
                    False,
                )  # fmt: skip
        else:
            for at in tl.range(lo, hi - (full_hi - full_lo), STEP, disable_licm=LEAN):
                first = tl.where(at < full_lo, at, at + (full_hi - full_lo))
                state = add_keys(
                    state, first, True, True, queries, tensors, w, qk_scale, params, CONFIG, STEP, CONFIG.EVEN, True,
                    False,
                )  # fmt: skip
    else:
        for at in tl.range(lo, hi, STEP, num_stages=1 if NAN_SAFE else None, disable_licm=LEAN):
            first, edge, partial = tile_at(at, span, terms.blocks, STEP, NAN_SAFE)
            state = add_keys(
                state, first, edge, partial, queries, tensors, w, qk_scale, params, CONFIG, STEP, CONFIG.EVEN,
                CONFIG.BRANCH, NAN_SAFE,
            )  # fmt: skip
    top, m, l, rounded, acc = state
    if CONFIG.BOUNDED:
        acc = scaled_pieces(acc, rounding_correction(l, rounded))
    if CONFIG.FOLD:
        top *= params.scale
    return acc, m, l, top


@triton.jit
def store_max_logit(max_logit, top, w, h, exists, heads, CONFIG: tl.constexpr):
    """max_logit[b, h], or packed [h], becomes the maximum of itself and the rows of a tile. NaNs do not count."""
    top = tl.where(exists & (top > float("-inf")), top, float("-inf"))
    if not CONFIG.PACKED:
        max_logit += w.b * heads
    if CONFIG.HEADS == 1:
        tl.atomic_max(max_logit + w.h, tl.max(top, 0), sem="relaxed")
    else:
        tl.atomic_max(max_logit + h, top, mask=exists, sem="relaxed")


@triton.jit
def attend(pid, tensors, grid, seqs, splits, params, CONFIG: tl.constexpr, NAN_SAFE: tl.constexpr):
    """Compute and store o and lse of tile pid of the queries; with splits, of pid % splits of its keys.

    The results of splits are further batch rows: split s of batch row b is row s * batch + b. With large scores, m is
    stored instead of lse, and l after the rows of all splits: m + log l could lose l to rounding (see `renormalise`).
    """
    flag = pid
    split = 0
    if splits is not None:
        split = pid % splits
        pid = pid // splits
    w = locate(pid, grid, seqs, seqs.cu_q, CONFIG.BLOCK_M, CONFIG.HEADS)
    if w.first < w.n_q * CONFIG.HEADS:
        acc, m, l, top = stream_keys(tensors, w, split, splits, params, CONFIG, NAN_SAFE)
        if tensors.flags is not None and not NAN_SAFE:
            raise_flag_of_pieces(tensors.flags + flag, acc)
        b = w.b
        rows = 0
        if splits is not None:
            b += split * grid.batch
            rows = splits * grid.batch
        r = w.first + tl.arange(0, CONFIG.BLOCK_M)
        i = r // CONFIG.HEADS
        h = head_of(w, r, CONFIG.HEADS)
        o_rows = Rows(
            tensors.o, b, w.h, w.q0, w.first, w.n_q * CONFIG.HEADS, None if CONFIG.HEADS == 1 else CONFIG.HEADS
        )
        divisor = tl.where(l == 0.0, 1.0, l)[:, None]
        for n in tl.static_range(len(acc)):
            store_rows(o_rows, acc[n] / divisor, CONFIG.DV, n * acc[n].shape[1])
        lse = m
        if splits is not None and params.terms.large_scores is not None:
            heads = grid.heads * CONFIG.HEADS
            l_pointers = row_pointers(tensors.lse, seqs.n_q, heads, b + rows, h, w.q0, i, CONFIG.PACKED)
            tl.store(l_pointers, l, mask=i < w.n_q)
        else:
            lse = row_logsumexp(m, l, params.terms.large_scores)
        exists = i < w.n_q
        heads = grid.heads * CONFIG.HEADS
        if tensors.max_logit is not None:
            store_max_logit(tensors.max_logit, top, w, h, exists, heads, CONFIG)
        tl.store(row_pointers(tensors.lse, seqs.n_q, heads, b, h, w.q0, i, CONFIG.PACKED), lse, mask=exists)
