"""The forward pass: one program owns BLOCK_M queries of one head and streams the keys they see past them.

Where there are few queries, several programs own them, each streams a part of the keys, and `merge_kernel` puts their
results together: softmax over a union of keys follows from (o, lse) over its parts (tilewise.merge).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..tile import (
    LOG2E,
    Rows,
    band,
    column,
    dot,
    dropped,
    has_nan,
    inner,
    load_rows,
    locate,
    logsumexp,
    masked,
    row_pointers,
    share,
    softmax_step,
    store_rows,
    unit_of,
    visible,
    walk,
    worth,
)


@triton.jit
def attend(
    q_tile, k, v, w, h_kv, i, span, before, after, scale, terms, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, FOLD: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, CAREFUL: tl.constexpr,
    BOUNDED: tl.constexpr = False, q=None, CHUNK: tl.constexpr = 512, part=0,
):  # fmt: skip
    """(acc, m, l) of online softmax over the span, a part of the keys: o = acc / l, lse = m * ln 2 + log l."""
    LEAN: tl.constexpr = CAREFUL or PRECISION != "ieee"  # float32 is two halves: no registers for what can wait
    unit = unit_of(scale, FOLD)
    m = tl.full([BLOCK_M], 0.0 if BOUNDED else float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if terms.sinks is not None:  # a key without a value, seen before all others
        sink = tl.where(part == 0, tl.load(terms.sinks + w.h).to(tl.float32), float("-inf"))
        m = l + sink * LOG2E
        l += tl.where(sink == float("-inf"), 0.0, 1.0)
    lo, hi = walk(span, w, w.h, terms.blocks, BLOCK_N)
    for at in tl.range(lo, hi, BLOCK_N, num_stages=1 if CAREFUL else None, disable_licm=LEAN):
        first, edge, picky = column(at, span, terms.blocks, BLOCK_N, CAREFUL)
        j = first + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k, w.b, h_kv, w.k0, first, w.n_k, D, BLOCK_N, BLOCK_D, EVEN)
        product = inner(
            q_tile, k_tile, Rows(q, w.b, w.h, w.q0, w.first, w.n_q), Rows(k, w.b, h_kv, w.k0, first, w.n_k),
            D, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION,
        )  # fmt: skip
        s = worth(product, w, w.h, i[:, None], j[None, :], scale, terms, FOLD, SCORE_MOD)
        s = masked(s, float("-inf"), edge, picky, i[:, None], j[None, :], w, before, after, w.h, terms, MASK_MOD)
        p, alpha, m, l = softmax_step(m, l, s, unit, BOUNDED)
        v_tile = load_rows(v, w.b, h_kv, w.k0, first, w.n_k, DV, BLOCK_N, BLOCK_DV, EVEN)
        seen = visible(i[:, None], j[None, :], w, before, after, w.h, terms, MASK_MOD) if CAREFUL else None
        p = dropped(p, w, w.h, i[:, None], j[None, :], terms)
        acc = dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], seen, PRECISION)
    return acc, m, l


@triton.jit(do_not_specialize=["n_q", "n_k", "before", "after", "tiles", "batch", "parts"])
def forward_kernel(
    q, k, v, o, lse, cu_q, cu_k, n_q, n_k, before, after, scale, tiles, heads, batch, parts, terms,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, FOLD: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, BOUNDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    # the last tiles of a causal head see the most keys: they start first
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    part = 0
    if parts is not None:
        part = pid % parts
        pid = pid // parts
    w = locate(pid, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, BLOCK_M)
    if w.first < w.n_q:
        h_kv = w.h // GROUP
        i = w.first + tl.arange(0, BLOCK_M)
        q_tile = load_rows(q, w.b, w.h, w.q0, w.first, w.n_q, D, BLOCK_M, BLOCK_D, False)
        at = w.first + w.n_k - w.n_q  # the key position of the first query
        span = band(at, at + BLOCK_M - 1, w.n_k, before, after, BLOCK_N)
        b = w.b
        if parts is not None:
            span = share(span, part, parts, BLOCK_N)
            b += part * batch
        acc, m, l = attend(
            q_tile, k, v, w, h_kv, i, span, before, after, scale, terms, SCORE_MOD, MASK_MOD,
            D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, FOLD, EVEN, PRECISION, False, BOUNDED, q, CHUNK, part,
        )  # fmt: skip
        if has_nan(acc):  # perhaps 0 * nan, from a value that the row does not see
            acc, m, l = attend(
                q_tile, k, v, w, h_kv, i, span, before, after, scale, terms, SCORE_MOD, MASK_MOD,
                D, DV, BLOCK_M, 16, BLOCK_D, BLOCK_DV, FOLD, EVEN, PRECISION, True, BOUNDED, q, CHUNK, part,
            )  # fmt: skip
        store_rows(o, acc / tl.where(l == 0.0, 1.0, l)[:, None], b, w.h, w.q0, w.first, w.n_q, DV, BLOCK_M, BLOCK_DV)
        tl.store(row_pointers(lse, b, w.h, w.q0, i), logsumexp(m, l), mask=i < w.n_q)


@triton.jit(do_not_specialize=["parts", "batch", "n_q"])
def merge_kernel(
    o_parts, lse_parts, o, lse, parts, batch, n_q, heads,
    DV: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_DV: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """o and lse of one query of one head, over all keys, from those over the parts, which lie one after the other."""
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0)  # of (batch, query, head)
    h = row % heads
    i = row // heads % n_q
    b = row // heads // n_q
    p = tl.arange(0, BLOCK_P)
    at = ((p * batch + b) * heads + h) * n_q + i
    x = tl.load(lse_parts + at, mask=p < parts, other=float("-inf"))
    m = tl.max(x, 0)
    m = tl.where(m == float("-inf"), 0.0, m)
    weight = tl.exp2((x - m) * LOG2E)
    l = tl.sum(weight, 0)
    d = tl.arange(0, BLOCK_DV)
    tile = o_parts + (p[:, None] * batch * n_q * heads + row) * DV + d[None, :]
    parts_of_o = tl.load(tile, mask=(p[:, None] < parts) & (d[None, :] < DV), other=0.0)
    total = tl.sum(parts_of_o * weight[:, None], 0) / tl.where(l == 0.0, 1.0, l)
    tl.store(o + row * DV + d, total.to(o.dtype.element_ty), mask=d < DV)
    tl.store(lse + (b * heads + h) * n_q + i, m + logsumexp(0.0, l))
