"""The forward pass: one program owns BLOCK_M queries of one head and streams the keys they see past them. Queries too
few to fill a tile share it with those of the other heads of their group, which see the same keys (PLAN.HEADS).

Where there are few queries, several programs own them, each streams a part of the keys, and `merge_kernel` puts their
results together: softmax over a union of keys follows from (o, lse) over its parts (tilewise.merge).
"""

import triton
import triton.language as tl

from ..overlap import gdc_launch_dependents, gdc_wait
from ..tile.memory import load_rows, row_pointers, store_rows
from ..tile.product import dot, inner, raise_flag
from ..tile.score import dropped, worth
from ..tile.sight import masked, seen
from ..tile.softmax import logsumexp, measured, row_logsumexp, softmax_step, unit_of
from ..tile.tuples import ANY_SIZE, LOG2E, Law, Rows
from ..tile.walk import band, column, head_of, locate, share, walk


@triton.jit
def stream_keys(q, k, v, w, part, parts, law, PLAN: tl.constexpr, CAREFUL: tl.constexpr):
    """(acc, m, l) of online softmax over the keys that the tile of queries at w sees, or over one of so many parts of
    them: o = acc / l, lse = m (`measured`) + log l. CAREFUL: what a row does not see cannot reach it, whatever it
    holds."""
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
        v_tile = load_rows(Rows(v, w.b, h_kv, w.k0, first, w.n_k), PLAN.DV, STEP, PLAN.BLOCK_DV, PLAN.EVEN)
        met = seen(i, j, w, h, law) if CAREFUL else None
        p = dropped(p, w, h, i, j, terms)
        acc = dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], met, PLAN)
    return acc, m, l


@triton.jit
def store_attention(acc, m, l, o, lse, n_q, heads, w, b, terms, PLAN: tl.constexpr):
    """o and lse, which has n_q tokens of each head, of the tile of queries at w, in batch row b."""
    r = w.first + tl.arange(0, PLAN.BLOCK_M)
    i = r // PLAN.HEADS
    h = head_of(w, r, PLAN.HEADS)
    out = Rows(o, b, w.h, w.q0, w.first, w.n_q * PLAN.HEADS, None if PLAN.HEADS == 1 else PLAN.HEADS)
    store_rows(out, acc / tl.where(l == 0.0, 1.0, l)[:, None], PLAN.DV)
    total = row_logsumexp(m, l, terms.far)
    tl.store(row_pointers(lse, n_q, heads * PLAN.HEADS, b, h, w.q0, i, PLAN.PACKED), total, mask=i < w.n_q)


@triton.jit(**ANY_SIZE)
def forward_kernel(
    q, k, v, o, lse, flags, cu_q, cu_k, n_q, n_k, before, after, scale, tiles, heads, batch, parts, terms,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """flags[program] = 1 where the results have a nan, perhaps 0 * nan from a value that its row does not see:
    `repair_forward_kernel` looks at them."""
    if PLAN.OVERLAP:
        gdc_launch_dependents()
    # the last tiles of a causal head see the most keys: they start first
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    flag = pid
    if flags is not None:
        tl.store(flags + flag, 0)
    part = 0
    if parts is not None:
        part = pid % parts
        pid = pid // parts
    w = locate(pid, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, PLAN.BLOCK_M, PLAN.HEADS)
    if w.first < w.n_q * PLAN.HEADS:
        acc, m, l = stream_keys(
            q, k, v, w, part, parts, Law(before, after, scale, terms, SCORE_MOD, MASK_MOD), PLAN, False
        )  # fmt: skip
        if flags is not None:
            raise_flag(flags + flag, acc)
        b = w.b
        if parts is not None:
            b += part * batch
        store_attention(acc, m, l, o, lse, n_q, heads, w, b, terms, PLAN)


@triton.jit(**ANY_SIZE)
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
