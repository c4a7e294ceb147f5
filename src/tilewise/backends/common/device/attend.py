"""Online softmax of one tile of queries over the keys that it sees."""

import triton
import triton.language as tl

from .mask import masked, seen
from .matmul import dot, inner
from .score import dropped, worth
from .softmax import measured, row_logsumexp, softmax_step, unit_of, unrounded
from .structs import LOG2E, Rows
from .tile_io import load_rows, row_pointers, store_rows
from .tile_range import band, column, head_of, share, walk


@triton.jit
def stream_keys(q, k, v, w, part, parts, law, PLAN: tl.constexpr, CAREFUL: tl.constexpr):
    """(acc, m, l) of online softmax over the keys that the tile of queries at w sees, or over one of so many parts of
    them: o = acc / l, lse = m (`measured`) + log l. CAREFUL: what a row does not see cannot reach it, whatever it
    holds. Where v.ptr is None, acc stays 0."""
    STEP: tl.constexpr = 16 if CAREFUL else PLAN.BLOCK_N
    LEAN: tl.constexpr = CAREFUL or PLAN.PRECISION != "ieee"  # float32 is two halves: no registers for what can wait
    terms = law.terms
    h_kv = w.h * PLAN.HEADS // PLAN.GROUP
    r = w.first + tl.arange(0, PLAN.BLOCK_M)
    i = (r // PLAN.HEADS)[:, None]
    h = head_of(w, r[:, None], PLAN.HEADS)
    q_rows = Rows(q, w.b, w.h, w.q0, w.first, w.n_q * PLAN.HEADS, None if PLAN.HEADS == 1 else PLAN.HEADS)
    q_tile = load_rows(q_rows, PLAN.D, PLAN.BLOCK_M, PLAN.BLOCK_D, False)
    at = w.first // PLAN.HEADS + w.n_k - w.n_q  # the key position of the first query
    last = at + (PLAN.BLOCK_M + PLAN.HEADS - 2) // PLAN.HEADS  # where the last row's query sits, or the next one
    span = band(at, last, w.n_k, law.before, law.after, PLAN.BLOCK_N)
    if parts is not None:
        span = share(span, part, parts, PLAN.BLOCK_N)
    unit = unit_of(law.scale, PLAN.FOLD)
    m = tl.full([PLAN.BLOCK_M], 0.0 if PLAN.BOUNDED else float("-inf"), tl.float32)
    l = tl.full([PLAN.BLOCK_M], 0.0, tl.float32)
    rounded = tl.full([PLAN.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([PLAN.BLOCK_M, PLAN.BLOCK_DV], 0.0, tl.float32)
    if terms.sinks.ptr is not None:  # a key without a value, seen before all others
        sink = tl.load(terms.sinks.ptr + head_of(w, r, PLAN.HEADS) * terms.sinks.stride).to(tl.float32)
        sink = tl.where(part == 0, sink, float("-inf"))
        m = l + measured(sink, LOG2E, terms.far)
        l += tl.where(sink == float("-inf"), 0.0, 1.0)
    lo, hi = walk(span, w, w.h, terms.blocks, STEP)
    for at in tl.range(lo, hi, STEP, num_stages=1 if CAREFUL else None, disable_licm=LEAN):
        first, edge, picky = column(at, span, terms.blocks, STEP, CAREFUL)
        j = (first + tl.arange(0, STEP))[None, :]
        k_rows = Rows(k, w.b, h_kv, w.k0, first, w.n_k)
        k_tile = load_rows(k_rows, PLAN.D, STEP, PLAN.BLOCK_D, PLAN.EVEN)
        product = inner(q_tile, k_tile, q_rows, k_rows, PLAN.D, PLAN)
        s = worth(product, w, h, i, j, law.scale, terms, PLAN.FOLD, law.SCORE_MOD)
        s = masked(s, float("-inf"), edge, picky, i, j, w, h, law)
        p, alpha, m, l = softmax_step(m, l, s, unit, terms.far, PLAN.BOUNDED)
        if v.ptr is not None:
            v_tile = load_rows(Rows(v, w.b, h_kv, w.k0, first, w.n_k), PLAN.DV, STEP, PLAN.BLOCK_DV, PLAN.EVEN)
            met = seen(i, j, w, h, law) if CAREFUL else None
            p = dropped(p, w, h, i, j, terms).to(v_tile.dtype)
            if PLAN.BOUNDED:
                rounded += tl.sum(p.to(tl.float32), 1)
            acc = dot(p, v_tile, acc * alpha[:, None], met, PLAN)
    if PLAN.BOUNDED:
        acc *= unrounded(l, rounded)[:, None]
    return acc, m, l


@triton.jit
def store_attention(acc, m, l, o, lse, n_q, heads, w, b, rows, terms, PLAN: tl.constexpr):
    """o and lse, which has n_q tokens of each head, of the tile of queries at w, in batch row b. `rows`: None, or of
    parts of the keys their batch rows; where scores may be far out, m is then stored in place of lse, and l so many
    batch rows further: their lse would not tell how many keys each part has (see `renormalise`)."""
    r = w.first + tl.arange(0, PLAN.BLOCK_M)
    i = r // PLAN.HEADS
    h = head_of(w, r, PLAN.HEADS)
    out = Rows(o, b, w.h, w.q0, w.first, w.n_q * PLAN.HEADS, None if PLAN.HEADS == 1 else PLAN.HEADS)
    store_rows(out, acc / tl.where(l == 0.0, 1.0, l)[:, None], PLAN.DV)
    if rows is not None and terms.far is not None:
        total = m
        lines = row_pointers(lse, n_q, heads * PLAN.HEADS, b + rows, h, w.q0, i, PLAN.PACKED)
        tl.store(lines, l, mask=i < w.n_q)
    else:
        total = row_logsumexp(m, l, terms.far)
    tl.store(row_pointers(lse, n_q, heads * PLAN.HEADS, b, h, w.q0, i, PLAN.PACKED), total, mask=i < w.n_q)
