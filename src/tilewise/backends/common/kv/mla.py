"""Decode of multi-head latent attention (MLA, absorbed): a token of the cache is 512 latent numbers and up to 64 more.
The latent numbers are the value too, so a tile of the cache is read once and used in both products.

The rows of a tile, the schedule of keys and the workspace are those of `decode`. Where rows of a tile see different
keys, a program whose results have a nan sets its flag (FLAG_NAN), and a second launch (REPAIR) computes them once more
so that a value cannot reach a row that does not see it.

A cache in DeepSeek's fp8 format (tilewise.kv_formats) is four parts of 128 numbers in e4m3. Their scales, one for each
token and part, are factors of the columns of S and P: products have operands in float16, which holds e4m3 exactly. So
are caches of 576 numbers of 8 bits, with one scale for each token, or for all.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.matmul import dot, raise_flag
from ..device.score import scores
from ..device.softmax import log2_scale, row_logsumexp, softmax_step
from ..device.structs import Pairs, ScoreParams, Work
from ..pdl import gdc_launch_dependents, gdc_wait
from .cache_tiles import KeyRange, key_offsets, load_keys, load_pages, pages_of
from .combine import (
    Partial,
    SplitSizes,
    columns,
    load_partial,
    merge,
    partials_of,
    row_pointers,
    rows_of_partial,
    slot_of,
    store_partial,
    store_rows,
    tile_rows,
)
from .decode import visible_keys
from .formats import head_scale, power_of_two, side_by_side, unpack_words
from .schedule import RUNTIME_SIZES, load_item, load_split, split_record
from .visibility import TreeMask, mask_pairs, pairs_seen, seen_by_all

LATENT: tl.constexpr = tl.constexpr(512)
REST: tl.constexpr = tl.constexpr(64)
LATENT_GROUPS: tl.constexpr = tl.constexpr(4)


class LatentCache(NamedTuple):
    """Views of a cache: the latent numbers (of bytes if they are quantised), the rest of the key, the values where they
    are not the latent numbers, and their `formats.Scale`; and where its tokens are, as in `KvCacheView`."""

    latent: tl.tuple
    rest: tl.tuple
    v: tl.tuple
    scale: tl.tuple
    page_table: tl.tensor
    indptr: tl.tensor
    rows: tl.tensor


class LatentConfig(NamedTuple):
    """What the kernel is compiled for. Beside those of `DecodeConfig`:

    FORMAT: of the latent numbers, None for floats that attention computes in. SCALE: None, "head" (the same for all
    keys of a sequence and head), "token", or "group" for DeepSeek's fp8 format, whose REST is bfloat16. NATIVE_FP8: the
    GPU converts e4m3. SHARED: the values are the latent numbers. OPERAND: of both products, or of that of a REST in
    bfloat16; None for the dtype of q and the cache. BY_TOKEN: the page table has the slot of each key.
    """

    GROUP: int
    D: int
    DV: int
    BLOCK_M: int
    BLOCK_N: int
    FORMAT: str | None
    SCALE: str | None
    NATIVE_FP8: bool
    SHARED: bool
    OPERAND: str | None
    PRECISION: str
    FOLD: bool
    LARGE_SCORES: bool
    OVERLAP: bool
    PAGE_SIZE: int | None
    BY_TOKEN: bool
    KV_HEADS: int
    FIXED_SPLIT: bool
    HAS_STARTS: bool
    FLAG_NAN: bool
    REPAIR: bool
    MAX_LOGIT: bool
    MERGE_PREFIX: bool = False  # see `DecodeConfig`


class LatentQueries(NamedTuple):
    """The latent columns of a tile of queries, in one part or four, with the factor of each row's products, and the
    rest."""

    parts: tl.tuple
    factor: tl.tensor
    rest: tl.tensor


@triton.jit
def as_operand(x, CONFIG: tl.constexpr):
    if CONFIG.OPERAND == "float32":
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def load_latent_queries(q, rows, exists, scale, CONFIG: tl.constexpr):
    """If the cache is quantised, rows of bfloat16 queries are divided by a power of two, so that float16 holds them.
    `scale`: of the cache, if it is the same for all keys."""
    mask = exists[:, None]
    c = tl.arange(0, REST)[None, :]
    rest = tl.load(rows[:, None] + columns(q, LATENT + c), mask=mask & (LATENT + c < CONFIG.D), other=0.0)
    factor = tl.full([rows.shape[0]], 1.0, tl.float32)
    if CONFIG.SCALE == "head":
        factor *= scale
    parts = ()
    if CONFIG.FORMAT is None or CONFIG.SCALE == "group":
        rest = as_operand(rest, CONFIG)
    if CONFIG.FORMAT is None:
        d = tl.arange(0, LATENT)[None, :]
        parts += (as_operand(tl.load(rows[:, None] + columns(q, d), mask=mask, other=0.0), CONFIG),)
    else:
        d = tl.arange(0, LATENT // LATENT_GROUPS)[None, :]
        WIDTH: tl.constexpr = LATENT // LATENT_GROUPS
        most = tl.full([rows.shape[0]], 0.0, tl.float32)
        for g in tl.static_range(LATENT_GROUPS):
            x = tl.load(rows[:, None] + columns(q, g * WIDTH + d), mask=mask, other=0.0)
            most = tl.maximum(most, tl.max(tl.abs(x.to(tl.float32)), 1))
            parts += (x,)
        if CONFIG.SCALE != "group":
            most = tl.maximum(most, tl.max(tl.abs(rest.to(tl.float32)), 1))
        if q.ptr.dtype.element_ty == tl.bfloat16:
            power, inverse = power_of_two(most)
            factor *= power
            halves = ()
            for g in tl.static_range(LATENT_GROUPS):
                halves += ((parts[g].to(tl.float32) * inverse[:, None]).to(tl.float16),)
            parts = halves
            if CONFIG.SCALE != "group":
                rest = (rest.to(tl.float32) * inverse[:, None]).to(tl.float16)
    return LatentQueries(parts, factor, rest)


@triton.jit
def unpack_latent(x, q_tile, CONFIG: tl.constexpr):
    """Bytes of quantised numbers as an operand of the product with a tile of queries."""
    if CONFIG.NATIVE_FP8:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(q_tile.dtype)
    else:
        FORMAT: tl.constexpr = CONFIG.FORMAT
        return unpack_words(x, 0, FORMAT).to(q_tile.dtype)


@triton.jit
def token_offsets(x, page, h, at, page_size, inside, CONFIG: tl.constexpr):
    """(offset of all, offset of each) of the keys from `at` on. BY_TOKEN: `page` has their slots."""
    if CONFIG.BY_TOKEN:
        slot = tl.where(inside, page, 0)
        rows = (slot // page_size).to(tl.int64) * x.strides[0] + (slot % page_size).to(tl.int64) * x.strides[1]
        return h.to(tl.int64) * x.strides[2], rows
    else:
        return key_offsets(x, page, h, at, CONFIG.PAGE_SIZE, CONFIG.BLOCK_N)


@triton.jit
def load_places(keys, at, CONFIG: tl.constexpr):
    """The pages, or slots, of the keys from `at` on."""
    if CONFIG.BY_TOKEN:
        j = at + tl.arange(0, CONFIG.BLOCK_N)
        return tl.load(keys.pages + j, mask=j < keys.hi, other=-1)
    else:
        return load_pages(keys, at, CONFIG.PAGE_SIZE, CONFIG.BLOCK_N)


@triton.jit
def load_scales(keys, page, h, at, page_size, inside, CONFIG: tl.constexpr):
    """The scales of the keys from `at` on, for each part of the latent numbers: one by token is that of all parts."""
    x = keys.cache.scale.x
    base, rows = token_offsets(x, page, h, at, page_size, inside, CONFIG)
    found = ()
    if CONFIG.SCALE == "group":
        for g in tl.static_range(LATENT_GROUPS):
            found += (tl.load(x.ptr + base + rows + g, mask=inside, other=0.0),)
    elif CONFIG.SCALE == "token":
        scale = tl.load(x.ptr + base + rows, mask=inside, other=0.0)
        for _ in tl.static_range(LATENT_GROUPS):
            found += (scale,)
    return found


@triton.jit
def quantised_scores(queries, latent, scales, rest, CONFIG: tl.constexpr):
    """q.k of a tile of a quantised cache whose REST is quantised too."""
    product = tl.dot(queries.rest, tl.trans(rest), input_precision=CONFIG.PRECISION)
    for g in tl.static_range(LATENT_GROUPS):
        product = tl.dot(queries.parts[g], tl.trans(latent[g]), product, input_precision=CONFIG.PRECISION)
    if CONFIG.SCALE == "token":
        product *= scales[0][None, :]
    return product * queries.factor[:, None]


@triton.jit
def packed_scores(queries, latent, scales, rest, CONFIG: tl.constexpr):
    """q.k of a tile in DeepSeek's fp8 format."""
    product = tl.dot(queries.parts[0], tl.trans(latent[0]), input_precision=CONFIG.PRECISION) * scales[0][None, :]
    for g in tl.static_range(1, LATENT_GROUPS):
        part = tl.dot(queries.parts[g], tl.trans(latent[g]), input_precision=CONFIG.PRECISION)
        product += part * scales[g][None, :]
    product *= queries.factor[:, None]
    return product + tl.dot(queries.rest, tl.trans(rest), input_precision=CONFIG.PRECISION)


@triton.jit
def attend_latent(queries, keys, w, rows, params, tree, page_size, CONFIG: tl.constexpr):
    """(out, m, l, top) as `decode.attend`."""
    N: tl.constexpr = CONFIG.BLOCK_N
    PARTS: tl.constexpr = 1 if CONFIG.FORMAT is None else LATENT_GROUPS
    WIDTH: tl.constexpr = LATENT // PARTS
    cache = keys.cache
    full_lo, full_hi = seen_by_all(keys.start, w, params, CONFIG)
    scale_log2 = log2_scale(params.scale, CONFIG.FOLD)
    m = tl.full([CONFIG.BLOCK_M], float("-inf"), tl.float32)
    l = tl.full([CONFIG.BLOCK_M], 0.0, tl.float32)
    acc = ()
    for _ in tl.static_range(PARTS):
        acc += (tl.full([CONFIG.BLOCK_M, WIDTH], 0.0, tl.float32),)
    unit = 1e-30  # of acc, if tokens have scales: the largest so far
    top = tl.full([CONFIG.BLOCK_M], float("-inf"), tl.float32)
    i = rows.i[:, None]
    h = rows.h[:, None]
    page = load_places(keys, keys.lo, CONFIG)
    for at in tl.range(keys.lo, keys.hi, N, num_stages=1 if CONFIG.REPAIR else None):
        j = (at + tl.arange(0, N))[None, :]
        next_page = load_places(keys, at + N, CONFIG)
        inside = at + tl.arange(0, N) < keys.hi
        if CONFIG.HAS_STARTS or params.before is not None:
            inside = inside & (at + tl.arange(0, N) >= keys.first)
        if CONFIG.BY_TOKEN:
            inside = inside & (page >= 0) & (page < keys.num_pages * page_size)
        base, offsets = token_offsets(cache.rest, page, w.h, at, page_size, inside, CONFIG)
        rest = load_keys(cache.rest, base, offsets, inside, CONFIG.D - LATENT, REST)
        if CONFIG.FORMAT is None or CONFIG.SCALE == "group":
            rest = as_operand(rest, CONFIG)
        else:
            rest = unpack_latent(rest, queries.rest, CONFIG)
        base, offsets = token_offsets(cache.latent, page, w.h, at, page_size, inside, CONFIG)
        latent = ()
        scales = ()
        if CONFIG.FORMAT is not None:
            d = tl.arange(0, WIDTH)[None, :]
            for g in tl.static_range(PARTS):
                p_bytes = cache.latent.ptr + base + (offsets[:, None] + columns(cache.latent, g * WIDTH + d))
                x = tl.load(p_bytes, mask=inside[:, None], other=0)
                latent += (unpack_latent(x, queries.parts[g], CONFIG),)
            scales = load_scales(keys, page, w.h, at, page_size, inside, CONFIG)
            if CONFIG.SCALE == "group":
                product = packed_scores(queries, latent, scales, rest, CONFIG)
            else:
                product = quantised_scores(queries, latent, scales, rest, CONFIG)
        else:
            latent += (as_operand(load_keys(cache.latent, base, offsets, inside, LATENT, LATENT), CONFIG),)
            product = tl.dot(queries.parts[0], tl.trans(latent[0]), input_precision=CONFIG.PRECISION)
            product = tl.dot(queries.rest, tl.trans(rest), product, input_precision=CONFIG.PRECISION)
        pairs = Pairs(w, h, i, j)
        s = scores(product, pairs, params.scale, params.terms, params.SCORE_MOD, CONFIG.FOLD)
        edge = CONFIG.REPAIR or (at < full_lo) or (at + N > full_hi)
        s = mask_pairs(s, pairs, keys.start, tree, at, edge, params, CONFIG)
        if CONFIG.BY_TOKEN:
            s = tl.where(inside[None, :], s, float("-inf"))
        if CONFIG.MAX_LOGIT:
            top = tl.maximum(top, tl.max(s, 1))
        p, alpha, m, l = softmax_step(m, l, s, scale_log2, params.terms.large_scores, False)
        mask = None
        if CONFIG.REPAIR:
            mask = pairs_seen(pairs, keys.start, tree, at, params, CONFIG)
        if CONFIG.FORMAT is not None:
            acc, unit = add_quantised_values(acc, p, alpha, latent, scales, unit, mask, CONFIG)
        else:
            v_tile = latent[0]
            if not CONFIG.SHARED:
                base, offsets = token_offsets(cache.v, page, w.h, at, page_size, inside, CONFIG)
                v_tile = as_operand(load_keys(cache.v, base, offsets, inside, CONFIG.DV, LATENT), CONFIG)
            acc = (dot(p.to(v_tile.dtype), v_tile, acc[0] * alpha[:, None], mask, CONFIG),)
        page = next_page
    out = acc[0]
    if CONFIG.FORMAT is not None:
        out = side_by_side(side_by_side(acc[0], acc[1]), side_by_side(acc[2], acc[3]))
    if CONFIG.SCALE == "group" or CONFIG.SCALE == "token":
        out *= unit
    if CONFIG.FOLD:
        top *= params.scale
    return out, m, l, top


@triton.jit
def add_quantised_values(acc, p, alpha, latent, scales, unit, mask, CONFIG: tl.constexpr):
    """(acc * alpha + p v, unit): p times the scales of tokens could be too small for float16, so sums are kept in units
    of the largest scale so far. With a mask (the repair launch), a token whose scale is not finite has values of
    nan."""
    BY_TOKEN: tl.constexpr = CONFIG.SCALE == "group" or CONFIG.SCALE == "token"
    largest = unit
    finite_scales = ()
    if BY_TOKEN:
        for g in tl.static_range(LATENT_GROUPS):
            scale = scales[g]
            if mask is not None:
                scale = tl.where(tl.abs(scale) < float("inf"), scale, 0.0)
            finite_scales += (scale,)
            largest = tl.maximum(largest, tl.max(tl.abs(scale), 0))
        alpha = alpha * (unit / largest)
    found = ()
    for g in tl.static_range(LATENT_GROUPS):
        v_tile = latent[g]
        weights = p
        if BY_TOKEN:
            if mask is not None:
                v_tile = tl.where((finite_scales[g] == scales[g])[:, None], v_tile, float("nan")).to(latent[g].dtype)
            weights = p * (finite_scales[g] / largest)[None, :]
        found += (dot(weights.to(v_tile.dtype), v_tile, acc[g] * alpha[:, None], mask, CONFIG),)
    return found, largest


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def mla_kernel(
    q,
    cache,
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
    table_stride,
    num_pages,
    page_size,
    batch,
    n_q,
    tree_words,
    terms,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Attend to the keys of one split, for one KV head, as `decode_kernel`."""
    if CONFIG.OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    number = program // CONFIG.KV_HEADS
    head = program % CONFIG.KV_HEADS
    sizes = SplitSizes(items, num_splits, slots, whole_slots, num_slots, rows, batch, target)
    record = split_record(buffers.schedule, number)
    item = load_item(record)
    split = load_split(record)
    chunk = split.chunk
    going = chunk < split.stop
    partials = partials_of(buffers.workspace, sizes, CONFIG.DV)
    flag = partials.flags + program
    if CONFIG.REPAIR:
        going = going & (tl.load(flag) > 0)
    elif CONFIG.FLAG_NAN:
        tl.store(flag, 0.0)
    while going:
        stop = split.stop
        if CONFIG.FIXED_SPLIT:
            stop = tl.minimum(stop, chunk + 1)
        w = Work(item.b, head, item.first, item.q0, item.n_q, 0, item.n_k, item.q0 + item.b * n_q)
        r = tl.arange(0, CONFIG.BLOCK_M)
        at = tile_rows(item, head, r, None, CONFIG.GROUP)
        key_scale = 1.0
        if CONFIG.SCALE == "head":
            key_scale = head_scale(cache.scale, tl.minimum(item.b, batch - 1), head)
        queries = load_latent_queries(q, row_pointers(q, item, at), at.exists, key_scale, CONFIG)
        first_key, hi = visible_keys(item, before, after, CONFIG)
        lo = tl.maximum((item.first_chunk + chunk) * chunk_size, first_key // CONFIG.BLOCK_N * CONFIG.BLOCK_N)
        hi = tl.minimum(hi, (item.first_chunk + stop) * chunk_size)
        pages = pages_of(cache, tl.minimum(item.b, batch - 1), table_stride, num_pages)
        out, m, l, top = attend_latent(
            queries,
            KeyRange(cache, pages, num_pages, item.start, first_key, lo, hi),
            w,
            at,
            ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD),
            TreeMask(tree, tree_words),
            page_size,
            CONFIG,
        )
        if CONFIG.MAX_LOGIT:
            line = buffers.max_logit + tl.where(n_q > 0, item.b, 0) * (CONFIG.KV_HEADS * CONFIG.GROUP)
            counts = at.exists & (item.b < batch) & (top > float("-inf"))
            tl.atomic_max(line + at.h, top, mask=counts, sem="relaxed")
        out = out / tl.where(l == 0.0, 1.0, l)[:, None]
        if CONFIG.SCALE == "head":
            out *= head_scale(cache.scale, tl.minimum(item.b, batch - 1), head)
        partial = Partial(out, m if CONFIG.LARGE_SCORES else row_logsumexp(m, l, None), l)
        # 0, which the compiler does not know: addresses are computed here, not kept in registers during the loop
        late = tl.multiple_of(stop - stop * tl.num_programs(1), 128)
        if CONFIG.FLAG_NAN:
            if not CONFIG.REPAIR:
                raise_flag(flag + late, out)
        r += late
        d = tl.arange(0, LATENT)[None, :] + late
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
        going = chunk < split.stop
