"""Attention over a KV cache, dense or paged: as many programs as the GPU runs at once, each with an equal share of a
head's keys (`kv_plan`). The queries of a tile and the heads of their group are its rows, so that keys are read once.

A row set that several programs share is put together by `kv_combine`. Where rows of a tile see different keys, a second
launch of the same kernel follows, which nearly always finds nothing to do: see CAREFUL.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.mask import masked, visible
from ..device.matmul import dot, raise_flag
from ..device.score import scores
from ..device.softmax import log2_scale, rounding_correction, row_logsumexp, softmax_step
from ..device.structs import Pairs, ScoreParams, Work
from ..device.tile_range import clamp
from ..pdl import gdc_launch_dependents, gdc_wait
from .combine import columns, row_pointers, sums_of, union, with_sink
from .schedule import items_of, load_item, load_stretch, work_of


class Cache(NamedTuple):
    """Keys and values as views, and what leads to a sequence's: a table of pages (with `indptr`, of all sequences in a
    row), or the row of a dense cache."""

    k: tl.tuple
    v: tl.tuple
    table: tl.tensor
    indptr: tl.tensor
    rows: tl.tensor


@triton.jit
def pages_of(cache, b, stride, count):
    """A pointer to the sequence's page numbers; or, of a dense cache, its row."""
    if cache.table is None:
        if cache.rows is None:
            return b
        else:
            return clamp(tl.load(cache.rows + b), 0, count - 1)
    elif cache.indptr is None:
        return cache.table + b.to(tl.int64) * stride
    else:
        return cache.table + tl.maximum(tl.load(cache.indptr + b), 0)


@triton.jit
def page_at(pages, at, lo, hi, count, PAGE: tl.constexpr, N: tl.constexpr):
    """The pages of the N keys from `at` on, a multiple of N: one for all of them where a tile lies within a page, else
    one for each."""
    if PAGE is None:
        return pages
    elif PAGE % N == 0:
        return clamp(tl.load(pages + at // PAGE, mask=at < hi, other=0), 0, count - 1)
    else:
        r = tl.arange(0, N)
        j = at + r
        index = at // PAGE + r // PAGE if N % PAGE == 0 else j // PAGE
        return clamp(tl.load(pages + index, mask=(j >= lo) & (j < hi), other=0), 0, count - 1)


@triton.jit
def key_offsets(x, page, h, at, PAGE: tl.constexpr, N: tl.constexpr):
    """Where the rows of the N keys from `at` on begin: (offset of them all, offsets of each)."""
    r = tl.arange(0, N)
    base = h.to(tl.int64) * x.strides[2]
    if PAGE is None or PAGE % N == 0:
        place = at if PAGE is None else at % PAGE
        if x.wide is not None:
            r = r.to(tl.int64)
        return base + page.to(tl.int64) * x.strides[0] + place.to(tl.int64) * x.strides[1], r * x.strides[1]
    else:
        place = r % PAGE if N % PAGE == 0 else (at + r) % PAGE
        return base, page.to(tl.int64) * x.strides[0] + place.to(tl.int64) * x.strides[1]


@triton.jit
def load_keys(x, base, rows, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a cache; zero where they are not inside, which is not read, and past D columns."""
    d = tl.arange(0, BLOCK_D)[None, :]
    if x.wide is not None:
        d = d.to(tl.int64)
    held = inside[:, None]
    if D != BLOCK_D:
        held = held & (d < D)
    return tl.load(x.ptr + base + (rows[:, None] + d * x.strides[3]), mask=held, other=0.0)


@triton.jit
def on_branch(tree, words, w, i, draft, first, N: tl.constexpr):
    """Which of the N keys from draft number `first` on the queries i see: those before all drafts, and those whose bits
    are set in their 64-bit words."""
    seen = draft < 0
    word = tl.maximum(first, 0) // 64
    for n in tl.static_range((N + 63) // 64 + 1):
        at = tree + tl.cast(w.r0, tl.int64) * words + (i * words + word + n)
        bits = tl.load(at, mask=(i < w.n_q) & (word + n < words), other=0)
        place = draft - (word + n) * 64
        inside = (place >= 0) & (place < 64)
        seen |= inside & (((bits >> tl.where(inside, place, 0).to(tl.int64)) & 1) != 0)
    return seen


@triton.jit
def stream(
    q_tile, cache, pages, w, i, h, start, lo, hi, params, tree, words, count, PLAN: tl.constexpr, PAGE: tl.constexpr,
    CARRY: tl.constexpr, ALIKE: tl.constexpr, STARTS: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """(acc, m, l) of online softmax over the keys [lo, hi) for the rows (i, h), lo a multiple of BLOCK_N. `tree` has
    so many `words` for each query, those of this sequence from its row w.r0 on. CAREFUL: a value that a row does not
    see cannot reach it, whatever it holds."""
    N: tl.constexpr = PLAN.BLOCK_N
    offset = w.n_k - w.n_q
    at0 = w.first // PLAN.GROUP + offset  # key positions of the first row and of the last
    at1 = tl.minimum((w.first + PLAN.BLOCK_M - 1) // PLAN.GROUP, w.n_q - 1) + offset
    least = start  # keys that some row sees
    full_lo = start  # keys that all do
    full_hi = w.n_k
    if params.before is not None:
        least = tl.maximum(least, at0 - params.before)
        full_lo = tl.maximum(full_lo, at1 - params.before)
    if params.after is not None:
        full_hi = tl.minimum(full_hi, at0 + params.after + 1)
    unit = log2_scale(params.scale, PLAN.FOLD)
    m = tl.full([PLAN.BLOCK_M], 0.0 if PLAN.BOUNDED else float("-inf"), tl.float32)
    l = tl.full([PLAN.BLOCK_M], 0.0, tl.float32)
    rounded = tl.full([PLAN.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([PLAN.BLOCK_M, PLAN.BLOCK_DV], 0.0, tl.float32)
    i2 = i[:, None]
    h2 = h[:, None]
    page = page_at(pages, lo, least, hi, count, PAGE, N)
    for at in tl.range(lo, hi, N, num_stages=1 if CAREFUL else None):
        j = (at + tl.arange(0, N))[None, :]
        if CARRY:
            later = page_at(pages, at + N, least, hi, count, PAGE, N)
        else:
            page = page_at(pages, at, least, hi, count, PAGE, N)
        inside = at + tl.arange(0, N) < hi
        if STARTS or params.before is not None:
            inside = inside & (at + tl.arange(0, N) >= least)
        base, rows = key_offsets(cache.k, page, w.h, at, PAGE, N)
        k_tile = load_keys(cache.k, base, rows, inside, PLAN.D, PLAN.BLOCK_D)
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PLAN.PRECISION)
        pairs = Pairs(w, h2, i2, j)
        s = scores(product, pairs, params.scale, params.terms, params.SCORE_MOD, PLAN.FOLD)
        edge = CAREFUL or (at < full_lo) or (at + N > full_hi)
        s = masked(s, float("-inf"), pairs, edge, True, params)
        if STARTS:
            if edge:
                s = tl.where(j >= start, s, float("-inf"))
        if tree is not None:
            if at + N > offset:
                s = tl.where(on_branch(tree, words, w, i2, j - offset, at - offset, N), s, float("-inf"))
        p, alpha, m, l = softmax_step(m, l, s, unit, params.terms.large_scores, PLAN.BOUNDED)
        if not ALIKE:
            base, rows = key_offsets(cache.v, page, w.h, at, PAGE, N)
        v_tile = load_keys(cache.v, base, rows, inside, PLAN.DV, PLAN.BLOCK_DV)
        met = None
        if CAREFUL:
            met = visible(pairs, params)
            if STARTS:
                met = met & (j >= start)
            if tree is not None:
                met = met & on_branch(tree, words, w, i2, j - offset, at - offset, N)
        p = p.to(v_tile.dtype)
        if PLAN.BOUNDED:
            rounded += tl.sum(p.to(tl.float32), 1)
        acc = dot(p, v_tile, acc * alpha[:, None], met, PLAN)
        if CARRY:
            page = later
    if PLAN.BOUNDED:
        acc *= rounding_correction(l, rounded)[:, None]
    return acc, m, l


@triton.jit
def flag_of(room, programs, slots, rows, program, DV: tl.constexpr):
    return room + tl.cast(programs, tl.int64) * slots * rows * (DV + 1) + program


@triton.jit(
    do_not_specialize=[
        "before",
        "after",
        "items",
        "programs",
        "unit",
        "slots",
        "rows",
        "stride",
        "count",
        "batch",
        "n_q",
    ]
)
def attend_kernel(
    q, cache, o, lse, room, ledger, tree, before, after, scale, items, programs, unit, slots, rows, stride, count,
    batch, n_q, words, terms, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, PLAN: tl.constexpr, PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr, SPLIT: tl.constexpr, CARRY: tl.constexpr, ALIKE: tl.constexpr, STARTS: tl.constexpr,
    BESIDE: tl.constexpr, FLAGGED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """SPLIT: every unit of keys is summed by itself, and a row set's units are joined in their order, whoever has them:
    what the program has of them so far in its first slot, and each of a row set that it goes on with in a slot of its
    own. Without, all of the program's units of a row set are one. `n_q`: of each sequence, 0 where q is packed. ALIKE:
    K and V have the same strides. STARTS: sequences may begin past the cache's first key. BESIDE: the
    launch before this one writes nothing that is read here, and ends no later.

    FLAGGED: rows of a tile may see different keys, and 0 * nan is nan: a program whose results have a nan raises its
    flag, behind the workspace. CAREFUL: the launch that follows, where such programs compute their stretch once more.
    """
    if PLAN.OVERLAP:
        gdc_launch_dependents()
        if not BESIDE:
            gdc_wait()
    FAR: tl.constexpr = terms.large_scores is not None
    me = tl.program_id(0)
    team = me // KV_HEADS
    head = me % KV_HEADS
    item, block = load_stretch(work_of(ledger, team))
    it = load_item(work_of(ledger, team) + 4)
    end = load_stretch(work_of(ledger, team + 1))
    entered = block
    going = (item < end.item) | ((item == end.item) & (block < end.unit))
    if CAREFUL:
        going = going & (tl.load(flag_of(room, programs, slots, rows, me, PLAN.DV)) > 0)
    elif FLAGGED:
        tl.store(flag_of(room, programs, slots, rows, me, PLAN.DV), 0.0)
    while going:
        last = item == end.item
        stop = tl.where(last, end.unit, it.units)
        if SPLIT:
            stop = tl.minimum(stop, block + 1)
        w = Work(it.b, head, it.first, it.q0, it.n_q, 0, it.n_k, it.q0 + it.b * n_q)
        r = tl.arange(0, PLAN.BLOCK_M)
        dq = tl.arange(0, PLAN.BLOCK_D)[None, :]
        i = (it.first + r) // PLAN.GROUP
        h = head * PLAN.GROUP + (it.first + r) % PLAN.GROUP
        exists = i < it.n_q
        q_rows = row_pointers(q, w, i, h)[:, None] + columns(q, dq)
        q_tile = tl.load(q_rows, mask=exists[:, None] & (dq < PLAN.D), other=0.0)
        hi = it.n_k
        if after is not None:
            at1 = tl.minimum((it.first + PLAN.BLOCK_M - 1) // PLAN.GROUP, it.n_q - 1) + it.n_k - it.n_q
            hi = tl.minimum(hi, at1 + after + 1)
        least = it.start
        if before is not None:
            least = tl.maximum(least, it.first // PLAN.GROUP + it.n_k - it.n_q - before)
        lo = tl.maximum((it.unit + block) * unit, least // PLAN.BLOCK_N * PLAN.BLOCK_N)
        hi = tl.minimum(hi, (it.unit + stop) * unit)
        pages = pages_of(cache, tl.minimum(it.b, batch - 1), stride, count)
        acc, m, l = stream(
            q_tile, cache, pages, w, i, h, it.start, lo, hi,
            ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD), tree, words, count, PLAN, PAGE, CARRY,
            ALIKE, STARTS, CAREFUL,
        )  # fmt: skip
        o_tile = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        log = m if FAR else row_logsumexp(m, l, None)
        late = tl.multiple_of(
            stop - stop * tl.num_programs(1), 128
        )  # 0: addresses are computed here, not kept since the kernel began
        if FLAGGED:
            if not CAREFUL:
                raise_flag(flag_of(room, programs, slots, rows, me + late, PLAN.DV), o_tile)
        r += late
        d = tl.arange(0, PLAN.BLOCK_DV)[None, :] + late
        i = (it.first + r) // PLAN.GROUP
        h = head * PLAN.GROUP + (it.first + r) % PLAN.GROUP
        exists = i < it.n_q
        slot = tl.cast(me, tl.int64) * slots * rows
        if entered > 0:
            slot += (1 + block - entered) * rows
        logs = room + tl.cast(programs, tl.int64) * slots * rows * PLAN.DV
        sums = sums_of(room, programs, slots, rows, PLAN.DV)
        o_part = room + slot * PLAN.DV + (r[:, None] * PLAN.DV + d)
        fits = (r < rows)[:, None] & (d < PLAN.DV)
        if SPLIT:
            if (entered == 0) & (block > 0):
                o_old = tl.load(o_part, mask=fits, other=0.0)
                log_old = tl.load(logs + slot + r, mask=r < rows, other=float("-inf"))
                l_old = log_old
                if FAR:
                    l_old = tl.load(sums + slot + r, mask=r < rows, other=0.0)
                o_tile, log, l = union(o_old, log_old, l_old, o_tile, log, l, FAR)
        if (entered == 0) & (stop == it.units):
            o_tile, log = with_sink(o_tile, log, l, terms.sinks, h, exists & (it.b < batch), FAR)
            o_rows = row_pointers(o, w, i, h)[:, None] + columns(o, d)
            tl.store(o_rows, o_tile.to(o.ptr.dtype.element_ty), mask=exists[:, None] & (d < PLAN.DV))
            tl.store(row_pointers(lse, w, i, h), log, mask=exists)
        else:
            tl.store(o_part, o_tile, mask=fits)
            tl.store(logs + slot + r, log, mask=r < rows)
            if FAR:
                tl.store(sums + slot + r, l, mask=r < rows)
        block = stop
        if last & (block >= end.unit):
            going = False
        elif block >= it.units:
            block = 0
            entered = 0
            item += 1
            it = load_item(items_of(ledger, programs // KV_HEADS, items) + tl.minimum(item, items - 1).to(tl.int64) * 8)
            going = (item < end.item) | (end.unit > 0)
    if PLAN.OVERLAP and BESIDE:
        gdc_wait()
