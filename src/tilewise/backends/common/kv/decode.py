"""Attention over a KV cache, dense or paged (decode): each program attends to the keys of one split (`schedule`), for
one KV head. The rows of a tile are its queries times the heads of their group, so that keys are read once for the whole
group.

Rows that several splits share are merged by the last of their programs (FUSED), or by `combine_kernel`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.matmul import raise_flag
from ..device.score import scores
from ..device.softmax import log2_scale, rounding_correction, row_logsumexp, softmax_step
from ..device.structs import Pairs, ScoreParams, Work
from ..device.tile_range import clamp
from ..pdl import gdc_launch_dependents, gdc_wait
from .cache_tiles import KeyRange, key_offsets, key_places, load_blocks, load_pages, pages_of
from .combine import (
    DividedItem,
    Partial,
    SplitSizes,
    columns,
    combine_item,
    load_partial,
    merge,
    partials_of,
    row_pointers,
    rows_of_partial,
    slot_of,
    store_empty_rows,
    store_partial,
    store_rows,
    tile_rows,
)
from .formats import (
    Stored,
    add_values,
    factors_of_weights,
    head_scale,
    join_parts,
    key_product,
    load_queries,
    token_scales,
    value_dims,
)
from .schedule import RUNTIME_SIZES, load_item, load_split, split_counters, split_record
from .visibility import TreeMask, mask_pairs, pairs_seen, seen_by_all


class NewTokens(NamedTuple):
    """Keys and values of one new token of each sequence as views, and the lengths of sequences without it; or None."""

    k: tl.tuple = None
    v: tl.tuple = None
    lengths: tl.tensor = None


class DecodeConfig(NamedTuple):
    """What the decode kernel is compiled for.

    GROUP to PRECISION, BOUNDED and OVERLAP are those of `KernelConfig`. PAGE_SIZE: None for a dense cache.
    K, V: how they are stored. PREFETCH_PAGES: page numbers are loaded a tile ahead of their keys. SAME_STRIDES: those
    of k and v are equal. HAS_STARTS: sequences may begin past the cache's first key.

    FIXED_SPLIT: every chunk of keys is summed by itself and a tile's chunks are merged in order, so that results do not
    depend on the batch: the first split of a work item keeps those merged so far in its slot, the others each chunk in
    a slot of its own. Otherwise a program sums all of its chunks together.

    CONCURRENT: this kernel runs beside the launch before it, reads nothing that that one writes, and waits for its end.
    MERGE_PREFIX: the launch before writes the results over prefixes, which are read after that wait.

    NAN_SAFE: rows of a tile may see different keys, and 0 * nan is nan: if results have a nan, the program computes
    them once more, so that a value cannot reach a row that does not see it. MAX_LOGIT: the largest score of each head
    is computed too.

    FUSED: the last program of a divided work item merges its partial results, BLOCK_C at a time, of BLOCK_R rows.

    OF_PREFIX: a work item has rows of all sequences of a group (`prefix`), which see the same keys. MERGE_PREFIX: the
    results over keys from item.start on are merged with those over the prefix before.

    APPEND: the program that reads the last key of a sequence writes it first, from `NewTokens`; with the schedule of
    other lengths, which has another last key, it is written all the same.
    """

    GROUP: int
    D: int
    DV: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_DV: int
    FOLD: bool
    PRECISION: str
    BOUNDED: bool
    LARGE_SCORES: bool
    OVERLAP: bool
    PAGE_SIZE: int | None
    KV_HEADS: int
    K: Stored
    V: Stored
    FIXED_SPLIT: bool
    PREFETCH_PAGES: bool
    SAME_STRIDES: bool
    HAS_STARTS: bool
    CONCURRENT: bool
    NAN_SAFE: bool
    MAX_LOGIT: bool
    FUSED: bool
    BLOCK_R: int
    BLOCK_C: int
    OF_PREFIX: bool
    MERGE_PREFIX: bool
    APPEND: bool


@triton.jit
def query_pointers(q, item, rows, n_q, CONFIG: tl.constexpr):
    """Pointers to the queries of rows. `n_q`: queries of each sequence; OF_PREFIX: tokens of a batch row of q."""
    if CONFIG.OF_PREFIX:
        token = item.q0 + rows.i
        base = q.ptr + (token // n_q).to(tl.int64) * q.strides[0]
        return base + (token % n_q).to(tl.int64) * q.strides[1] + rows.h.to(tl.int64) * q.strides[2]
    else:
        return row_pointers(q, item, rows)


@triton.jit
def visible_keys(item, before, after, CONFIG: tl.constexpr):
    """(first, hi): the keys in [first, hi) are visible to some row of a work item."""
    hi = item.n_k
    if after is not None:
        last_query = tl.minimum((item.first + CONFIG.BLOCK_M - 1) // CONFIG.GROUP, item.n_q - 1)
        hi = tl.minimum(hi, last_query + item.n_k - item.n_q + after + 1)
    first = item.start
    if before is not None:
        first = tl.maximum(first, item.first // CONFIG.GROUP + item.n_k - item.n_q - before)
    return first, hi


@triton.jit
def attend(queries, keys, page, tile, params, tree, CONFIG: tl.constexpr, REPAIR: tl.constexpr):
    """(acc, m, l, top) of online softmax over a range of keys, whose `lo` is a multiple of BLOCK_N and lies in `page`;
    `top` is the largest score of each row. `tile`: the work and its rows. The tree mask of this sequence begins at its
    row w.r0. REPAIR: a value that is not finite does not reach rows that do not see it."""
    w, rows = tile
    N: tl.constexpr = CONFIG.BLOCK_N
    PAGE_SIZE: tl.constexpr = CONFIG.PAGE_SIZE
    STORED_K: tl.constexpr = CONFIG.K
    STORED_V: tl.constexpr = CONFIG.V
    TURNED: tl.constexpr = CONFIG.BLOCK_M < 16
    cache = keys.cache
    full_lo, full_hi = seen_by_all(keys.start, w, params, CONFIG)
    scale_log2 = log2_scale(params.scale, CONFIG.FOLD)
    m = tl.full([CONFIG.BLOCK_M], 0.0 if CONFIG.BOUNDED else float("-inf"), tl.float32)
    l = tl.full([CONFIG.BLOCK_M, N] if TURNED else [CONFIG.BLOCK_M], 0.0, tl.float32)
    rounded = tl.full([CONFIG.BLOCK_M], 0.0, tl.float32)
    acc = ()
    TILES_V: tl.constexpr = STORED_V.PARTS * STORED_V.BLOCKS
    WORDS_K: tl.constexpr = CONFIG.BLOCK_D // (STORED_K.PARTS * STORED_K.BLOCKS)  # of a block
    WORDS_V: tl.constexpr = CONFIG.BLOCK_DV // (STORED_V.PARTS * STORED_V.JOINED)
    for _ in tl.static_range(TILES_V):
        acc += (tl.full([CONFIG.BLOCK_M, WORDS_V], 0.0, tl.float32),)
    unit = 1e-30  # of acc: see `factors_of_weights`
    top = tl.full([CONFIG.BLOCK_M], float("-inf"), tl.float32)
    i = rows.i[:, None]
    h = rows.h[:, None]
    for at in tl.range(keys.lo, keys.hi, N, num_stages=1 if REPAIR else None):
        j = (at + tl.arange(0, N))[None, :]
        if CONFIG.PREFETCH_PAGES:
            next_page = load_pages(keys, at + N, PAGE_SIZE, N)
        else:
            page = load_pages(keys, at, PAGE_SIZE, N)
        inside = at + tl.arange(0, N) < keys.hi
        if CONFIG.HAS_STARTS or params.before is not None:
            inside = inside & (at + tl.arange(0, N) >= keys.first)
        base, offsets = key_offsets(cache.k, page, w.h, at, PAGE_SIZE, N)
        places = key_places(cache.k, offsets, WORDS_K)
        needs_mask = None if PAGE_SIZE is not None and STORED_K.FORMAT is not None else inside
        k_words = load_blocks(cache.k, base, places, needs_mask, CONFIG.D, False, STORED_K)
        k_scales = ()
        if STORED_K.SCALE == "token":
            scale_base, scale_rows = key_offsets(cache.k_scale.x, page, w.h, at, PAGE_SIZE, N)
            k_scales = token_scales(cache.k_scale, scale_base, scale_rows, inside, STORED_K)
        product = key_product(queries, k_words, k_scales, N, STORED_K)
        pairs = Pairs(w, h, i, j)
        s = scores(product, pairs, params.scale, params.terms, params.SCORE_MOD, CONFIG.FOLD)
        edge = REPAIR or (at < full_lo) or (at + N > full_hi)
        s = mask_pairs(s, pairs, keys.start, tree, at, edge, params, CONFIG)
        if CONFIG.MAX_LOGIT:
            top = tl.maximum(top, tl.max(s, 1))
        p, alpha, m, l = softmax_step(m, l, s, scale_log2, params.terms.large_scores, CONFIG.BOUNDED)
        if not CONFIG.SAME_STRIDES:
            base, offsets = key_offsets(cache.v, page, w.h, at, PAGE_SIZE, N)
        if not CONFIG.SAME_STRIDES or places.shape[1] != WORDS_V:
            places = key_places(cache.v, offsets, WORDS_V)
        needs_mask = None if PAGE_SIZE is not None and STORED_V.INTEGER else inside  # 0 * nan is nan
        v_words = load_blocks(cache.v, base, places, needs_mask, CONFIG.DV, TURNED, STORED_V)
        v_scales = ()
        if STORED_V.SCALE == "token":
            scale_base, scale_rows = key_offsets(cache.v_scale.x, page, w.h, at, PAGE_SIZE, N)
            v_scales = token_scales(cache.v_scale, scale_base, scale_rows, inside, STORED_V)
        mask = None
        if REPAIR:
            mask = pairs_seen(pairs, keys.start, tree, at, params, CONFIG)
        if CONFIG.BOUNDED:
            p = p.to(v_words[0].dtype)
            rounded += tl.sum(p.to(tl.float32), 1)
        factors, alpha, unit = factors_of_weights(alpha, v_scales, unit, mask, STORED_V)
        acc = add_values(acc, p, factors, alpha, v_words, v_scales, mask, STORED_V)
        if CONFIG.PREFETCH_PAGES:
            page = next_page
    if TURNED:
        l = tl.sum(l, 1)
    out = join_parts(acc, STORED_V)
    if CONFIG.BOUNDED:
        out *= rounding_correction(l, rounded)[:, None]
    if STORED_V.SCALE == "token" and STORED_V.OPERAND == "float16":
        out *= unit
    if CONFIG.FOLD:
        top *= params.scale
    return out, m, l, top


@triton.jit
def row_pointer(x, b, t, h):
    return x.ptr + b.to(tl.int64) * x.strides[0] + t.to(tl.int64) * x.strides[1] + h.to(tl.int64) * x.strides[2]


@triton.jit
def new_page(cache, pages, b, j, capacity, PAGE_SIZE: tl.constexpr):
    """The page of key j of a sequence, -1 if it has none."""
    entries = capacity // PAGE_SIZE
    if cache.indptr is not None:
        begin = clamp(tl.load(cache.indptr + b), 0, entries)
        entries = clamp(tl.load(cache.indptr + b + 1), 0, entries) - begin
    return tl.load(pages + j // PAGE_SIZE, mask=(j >= 0) & (j // PAGE_SIZE < entries), other=-1)


@triton.jit
def write_new_token(new, keys, item, h, is_last, capacity, CONFIG: tl.constexpr):
    """Write the last key of a sequence and its value, if this program reads them next. All loads wait for the work item
    alone: none is in a branch or after a store, unless the schedule is that of other lengths. `capacity`: keys that the
    cache holds, as in `BatchSizes`."""
    d = tl.arange(0, CONFIG.BLOCK_D)
    d_v = tl.arange(0, CONFIG.BLOCK_DV)
    k_new = new.k
    v_new = new.v
    cache_k = keys.cache.k
    cache_v = keys.cache.v
    k = tl.load(row_pointer(k_new, item.b, item.q0, h) + columns(k_new, d), mask=is_last & (d < CONFIG.D))
    v = tl.load(row_pointer(v_new, item.b, item.q0, h) + columns(v_new, d_v), mask=is_last & (d_v < CONFIG.DV))
    j = item.n_k - 1
    page = keys.pages
    if CONFIG.PAGE_SIZE is not None:
        page = tl.load(page + j // CONFIG.PAGE_SIZE, mask=is_last, other=0)
    elif keys.cache.rows is not None:
        page = tl.load(keys.cache.rows + item.b, mask=is_last, other=0)
    length = tl.load(new.lengths + item.b, mask=is_last, other=-1)
    offset = length
    exists = (length >= 0) & (length < capacity)
    if CONFIG.PAGE_SIZE is not None:
        if is_last & (length != j):  # the cache is full, or the schedule is that of other lengths
            page = new_page(keys.cache, keys.pages, item.b, length, capacity, CONFIG.PAGE_SIZE)
        offset = length % CONFIG.PAGE_SIZE
    exists = exists & (page >= 0) & (page < keys.num_pages)
    tl.store(row_pointer(cache_k, page, offset, h) + columns(cache_k, d), k, mask=exists & (d < CONFIG.D))
    tl.store(row_pointer(cache_v, page, offset, h) + columns(cache_v, d_v), v, mask=exists & (d_v < CONFIG.DV))
    tl.debug_barrier()


@triton.jit
def has_nan(flag, x):
    """Whether x has a nan, by way of a flag in memory (see `raise_flag`)."""
    tl.store(flag, 0.0)
    raise_flag(flag, x)
    tl.debug_barrier()
    return tl.load(flag, volatile=True) > 0.0


@triton.jit
def combine_last(buffers, item, split, head, sinks, sizes, CONFIG: tl.constexpr):
    """Count the partial result that this program has stored. The last program of a work item combines them all."""
    counter = split_counters(buffers.schedule, sizes) + (split.item * CONFIG.KV_HEADS + head)
    tl.debug_barrier()  # all threads have stored
    if tl.atomic_add(counter, 1, sem="acq_rel") == split.num_splits - 1:
        tl.store(counter, 0)  # for the next launch
        r = tl.arange(0, CONFIG.BLOCK_R)
        d = tl.arange(0, CONFIG.BLOCK_DV)
        divided = DividedItem(item, split.item, split.first, split.num_splits, head)
        combine_item(buffers, divided, r, d, sinks, sizes, CONFIG)


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def decode_kernel(
    q,
    cache,
    new,
    buffers,
    tree,
    before,
    after,
    scale,
    items,
    num_splits,
    chunk_size,
    slots,
    whole_slots,
    num_slots,
    rows,
    target,
    tile_height,
    table_stride,
    num_pages,
    batch,
    n_q,
    tree_words,
    capacity,
    terms,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Attend to the keys of one split, for one KV head. `n_q`: queries of each sequence, 0 where q is packed;
    OF_PREFIX: tokens of a batch row of q. `capacity`: None without APPEND."""
    STORED_K: tl.constexpr = CONFIG.K
    STORED_V: tl.constexpr = CONFIG.V
    if CONFIG.OVERLAP and CONFIG.OF_PREFIX:
        gdc_wait()  # before the next launch starts, which reads what earlier ones wrote and does not wait for them
        gdc_launch_dependents()
    elif CONFIG.OVERLAP:
        gdc_launch_dependents()
        if not CONFIG.CONCURRENT:
            gdc_wait()
    program = tl.program_id(0)
    number = program // CONFIG.KV_HEADS
    head = program % CONFIG.KV_HEADS
    sizes = SplitSizes(items, num_splits, slots, whole_slots, num_slots, rows, batch, target)
    record = split_record(buffers.schedule, number)
    item = load_item(record)
    split = load_split(record)
    empties = 0
    if CONFIG.FUSED:
        empties = tl.load(buffers.schedule + 1).to(tl.int32)
    chunk = split.chunk
    partials = partials_of(buffers.workspace, sizes, CONFIG.DV)
    while chunk < split.stop:
        stop = split.stop
        if CONFIG.FIXED_SPLIT:
            stop = tl.minimum(stop, chunk + 1)
        w = Work(item.b, head, item.first, item.q0, item.n_q, 0, item.n_k, item.q0 + item.b * n_q)
        r = tl.arange(0, CONFIG.BLOCK_M)
        at = tile_rows(item, head, r, None, CONFIG.GROUP)
        first_key, hi = visible_keys(item, before, after, CONFIG)
        lo = tl.maximum((item.first_chunk + chunk) * chunk_size, first_key // CONFIG.BLOCK_N * CONFIG.BLOCK_N)
        hi = tl.minimum(hi, (item.first_chunk + stop) * chunk_size)
        pages = pages_of(cache, tl.minimum(item.b, batch - 1), table_stride, num_pages)
        keys = KeyRange(cache, pages, num_pages, item.start, first_key, lo, hi)
        page = load_pages(keys, lo, CONFIG.PAGE_SIZE, CONFIG.BLOCK_N)  # before the queries: keys wait for both
        k_scale = 1.0
        if STORED_K.SCALE == "head":
            k_scale = head_scale(cache.k_scale, tl.minimum(item.b, batch - 1), head)
        q_rows = query_pointers(q, item, at, n_q, CONFIG)
        queries = load_queries(q, q_rows, at.exists, k_scale, CONFIG.D, CONFIG.BLOCK_D, STORED_K)
        if CONFIG.APPEND:
            write_new_token(new, keys, item, head, stop == item.num_chunks, capacity, CONFIG)
        draft = TreeMask(tree, tree_words)
        # Triton cannot keep the mods in a variable of a loop
        acc, m, l, top = attend(
            *(queries, keys, page, (w, at), ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD), draft),
            CONFIG,
            False,
        )
        if CONFIG.MAX_LOGIT:
            line = buffers.max_logit + tl.where(n_q > 0, item.b, 0) * (CONFIG.KV_HEADS * CONFIG.GROUP)
            counts = at.exists & (item.b < batch) & (top > float("-inf"))
            tl.atomic_max(line + at.h, top, mask=counts, sem="relaxed")
        if CONFIG.NAN_SAFE:
            if has_nan(partials.flags + program, acc):
                acc, m, l, top = attend(
                    *(
                        queries,
                        keys,
                        page,
                        (w, at),
                        ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD),
                        draft,
                    ),
                    CONFIG,
                    True,
                )
        if CONFIG.OVERLAP and CONFIG.CONCURRENT and CONFIG.MERGE_PREFIX:
            gdc_wait()
        out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        if STORED_V.SCALE == "head":
            out *= head_scale(cache.v_scale, tl.minimum(item.b, batch - 1), head)
        partial = Partial(out, m if CONFIG.LARGE_SCORES else row_logsumexp(m, l, None), l)
        # 0, which the compiler does not know: addresses are computed here, not kept in registers during the loop
        late = tl.multiple_of(stop - stop * tl.num_programs(1), 128)
        r += late
        d = value_dims(tl.arange(0, CONFIG.BLOCK_DV)[None, :] + late, CONFIG.DV, CONFIG.BLOCK_DV, STORED_V)
        at = tile_rows(item, head, r, None, CONFIG.GROUP)
        first = split.chunk == 0
        slot = slot_of(partials, number, split.item, tl.where(first, 0, 1 + chunk - split.chunk), head, CONFIG)
        stored = rows_of_partial(partials, slot, r, d, CONFIG.DV)
        if CONFIG.FIXED_SPLIT:
            if first & (chunk > 0):
                partial = merge(load_partial(stored, CONFIG.LARGE_SCORES), partial, CONFIG.LARGE_SCORES)
        if first & (stop == item.num_chunks):
            store_rows(buffers, partial, item, at, d, terms.sinks, batch, CONFIG)
        else:
            store_partial(stored, partial, CONFIG.LARGE_SCORES)
        chunk = stop
    if CONFIG.FUSED:
        if split.num_splits > 1:
            combine_last(buffers, item, split, head, terms.sinks, sizes, CONFIG)
        store_empty_rows(buffers, empties, terms.sinks, sizes, tile_height, CONFIG)
    if CONFIG.OVERLAP and CONFIG.CONCURRENT:
        gdc_wait()
