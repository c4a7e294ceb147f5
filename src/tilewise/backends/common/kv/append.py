"""Append new keys and values to a cache, where their sequences end or at given slots: normalise and rotate keys and
queries, quantise keys and values. One program handles one token, all of its heads."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.structs import View
from ..device.tile_range import clamp
from ..pdl import gdc_launch_dependents, gdc_wait
from .combine import columns
from .formats import encode, head_scale
from .schedule import RUNTIME_SIZES


class KeyValue(NamedTuple):
    """Keys and values as views: the new ones, or the cache."""

    k: tl.tuple
    v: tl.tuple


class Queries(NamedTuple):
    """Queries as a view, and the view that their rotated copy is written to."""

    q: tl.tuple
    rotated: tl.tuple


class AppendPlaces(NamedTuple):
    """Sequence lengths, page table, its offsets, batch rows of a dense cache; offsets of packed new tokens and packed
    queries; slots. All but the lengths may be None."""

    lengths: tl.tensor
    page_table: tl.tensor
    indptr: tl.tensor
    rows: tl.tensor
    cu_new: tl.tensor
    cu_q: tl.tensor
    slots: tl.tensor


class RotaryTables(NamedTuple):
    """cos and sin (positions, width / 2), and the positions of tokens and queries, None for their places in the
    cache."""

    cos: tl.tensor = None
    sin: tl.tensor = None
    positions: tl.tensor = None
    q_positions: tl.tensor = None


class Angles(NamedTuple):
    """cos and sin of `num_positions` positions, and the position of one token. cos is None where nothing is rotated."""

    cos: tl.tensor
    sin: tl.tensor
    position: tl.tensor
    num_positions: tl.tensor


class NormWeights(NamedTuple):
    """Weights (dims,) of qk-norm, or None."""

    q: tl.tensor = None
    k: tl.tensor = None


class HeadNorm(NamedTuple):
    """RMSNorm of heads: x * factor * (weight + offset). The weight of all dims, or None; the factor 1 / rms of each
    head, or eps where it is not computed yet."""

    weight: tl.tensor
    factor: tl.tensor
    offset: tl.tensor


class NewToken(NamedTuple):
    """A token to read: where its heads begin and their strides; its norm and angles as in `HeadNorm` and `Angles`."""

    ptr: tl.tensor
    strides: tl.tuple
    weight: tl.tensor
    factor: tl.tensor
    offset: tl.tensor
    cos: tl.tensor
    sin: tl.tensor
    position: tl.tensor
    num_positions: tl.tensor


class Slot(NamedTuple):
    """Where a token is written: page (or batch row) and offset there; and its sequence, for scales by sequence."""

    page: tl.tensor
    offset: tl.tensor
    sequence: tl.tensor


class CacheFormat(NamedTuple):
    """What K or V is written as: the format, None for a float; the groups of dims with a scale of their own, as in
    `Stored`, and the dims of a group padded; SCALE as in `Stored`; the largest number, to which a token's scale maps
    its largest magnitude; the first dim of a new token that is written; the head dim, and that padded."""

    FORMAT: str | None
    GROUPS: int
    BLOCK_GROUP: int
    SCALE: str | None
    LARGEST: float
    FIRST: int
    D: int
    BLOCK_D: int


class CacheSizes(NamedTuple):
    """Stride of the page table, pages (or rows) of the cache, pages of a sequence (with `indptr`, of all) in the table,
    tokens of a page (or row)."""

    table_stride: tl.tensor
    num_pages: tl.tensor
    table_pages: tl.tensor
    page_size: tl.tensor


class AppendConfig(NamedTuple):
    """KV heads, query heads; head dim of queries, and that padded; heads of a tile; half the dims that are rotated;
    whether neighbouring dims form a pair; the first dim that is rotated; sequences that are searched at once; K and V:
    the formats of the cache; V is None if the values are columns of the keys. PACKED: DeepSeek's fp8 format; then K is
    that of the latent numbers, and V that of the other columns of the key. OVERLAP: the launch overlaps the one
    before."""

    KV_HEADS: int
    HEADS: int
    D: int
    BLOCK_D: int
    BLOCK_H: int
    HALF: int
    INTERLEAVED: bool
    FIRST_ROTATED: int
    BLOCK_BATCH: int
    K: CacheFormat
    V: CacheFormat | None
    PACKED: bool
    OVERLAP: bool


@triton.jit
def sequence_of(t, cu, n, batch, BLOCK_BATCH: tl.constexpr):
    """(b, i, n) of token t: its sequence, its index there, the sequence's tokens. Past the last sequence, b is `batch`.
    The search loads BLOCK_BATCH offsets at once: a binary search would wait for one load after another."""
    if cu is None:
        return t // n, t % n, n
    else:
        b = t * 0
        for first in range(0, batch, BLOCK_BATCH):
            ends = first + tl.arange(0, BLOCK_BATCH)
            b += tl.sum((tl.load(cu + 1 + ends, mask=ends < batch, other=2147483647) <= t).to(tl.int32), 0)
        start = tl.load(cu + b)
        return b, t - start, tl.load(cu + b + 1, mask=b < batch, other=0) - start


@triton.jit
def token_pointer(x, b, t):
    return x.ptr + b.to(tl.int64) * x.strides[0] + t.to(tl.int64) * x.strides[1]


@triton.jit
def norm_factor(x, h, mask, eps, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """1 / rms of the heads h of the token where the view x begins."""
    d = tl.arange(0, BLOCK_D)[None, :]
    p = x.ptr + h.to(tl.int64) * x.strides[2]
    tile = tl.load(p + columns(x, d), mask=mask & (d < D), other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(tile * tile, 1)[:, None] / D + eps)


@triton.jit
def load_heads(x, h, d, mask):
    """Dims d of the heads h of the token x, normalised."""
    tile = tl.load(x.ptr + h.to(tl.int64) * x.strides[2] + columns(x, d), mask=mask, other=0.0)
    if x.weight is None:
        return tile
    else:
        weight = tl.load(x.weight + d + h * 0, mask=mask, other=0.0).to(tl.float32)
        return tile.to(tl.float32) * x.factor * (weight + x.offset)


@triton.jit
def apply_rotary(x, h, d, mask, CONFIG: tl.constexpr):
    """The same, each pair of dims rotated by the angle of the token's position."""
    tile = load_heads(x, h, d, mask)
    if x.cos is None:
        return tile
    else:
        HALF: tl.constexpr = CONFIG.HALF
        n = d - CONFIG.FIRST_ROTATED
        if CONFIG.INTERLEAVED:
            first = n % 2 == 0
            pair = (n ^ 1) + CONFIG.FIRST_ROTATED
            frequency = n // 2
        else:
            first = n < HALF
            pair = tl.where(first, d + HALF, d - HALF)
            frequency = tl.where(first, n, n - HALF)
        rotated = n < 2 * HALF
        if CONFIG.FIRST_ROTATED > 0:
            rotated = rotated & (n >= 0)
        other = load_heads(x, h, pair, mask & rotated).to(tl.float32)
        at = clamp(x.position, 0, x.num_positions - 1).to(tl.int64) * HALF + frequency
        cos = tl.load(x.cos + at, mask=rotated, other=1.0).to(tl.float32)
        sin = tl.load(x.sin + at, mask=rotated, other=0.0).to(tl.float32)
        tile = tile.to(tl.float32)
        turned = tile * cos + tl.where(first, -other, other) * sin
        return tl.where(rotated, turned, tile)  # -0.0 * 1 + 0.0 * 0 is 0.0


@triton.jit
def store_heads(x, p, tile, h, d, mask):
    """Write heads h and dims d of the token at p, in the dtype of the view x."""
    p = p + h.to(tl.int64) * x.strides[2]
    if tile.dtype.is_floating() and tile.dtype != x.ptr.dtype.element_ty:
        tile = tile.to(tl.float32)
    tl.store(p + columns(x, d), tile.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def append_slot(t, b, j, exists, places, sizes):
    """(page, offset, exists): where new token t, number j of sequence b, is written. It is not if there is no such
    sequence or place. Without a page table, page is the batch row."""
    offset = j
    if places.slots is not None:
        slot = tl.load(places.slots + t).to(tl.int64)
        page = slot // sizes.page_size
        offset = (slot % sizes.page_size).to(tl.int32)
        exists = exists & (slot >= 0)
    elif places.page_table is None:
        page = b.to(tl.int64)
        if places.rows is not None:
            page = tl.load(places.rows + b, mask=exists, other=0).to(tl.int64)
        exists = exists & (j >= 0) & (j < sizes.page_size)
    else:
        entry = j // sizes.page_size
        if places.indptr is None:
            exists = exists & (j >= 0) & (entry < sizes.table_pages)
            entries = places.page_table + b.to(tl.int64) * sizes.table_stride
        else:
            start = clamp(tl.load(places.indptr + b, mask=exists, other=0), 0, sizes.table_pages)
            end = clamp(tl.load(places.indptr + b + 1, mask=exists, other=0), 0, sizes.table_pages)
            exists = exists & (j >= 0) & (entry < end - start)
            entries = places.page_table + start
        page = tl.load(entries + entry, mask=exists, other=0).to(tl.int64)
        offset = j % sizes.page_size
    return page, offset, exists & (page >= 0) & (page < sizes.num_pages)


@triton.jit
def new_scale(tile, LARGEST: tl.constexpr):
    """The scale of each head of a new token: its largest magnitude / LARGEST, or 1 if that is 0; nan if one is."""
    scale = tl.div_rn(tl.max(tl.abs(tile), 1)[:, None], LARGEST)
    scale = tl.where(scale == 0.0, 1.0, scale)
    return tl.where(tl.max((tile != tile).to(tl.int32), 1)[:, None] > 0, float("nan"), scale)


@triton.jit
def stored_scale(scale, tile, slot, h, mask, group, CACHE: tl.constexpr):
    """The scale of a new token's heads; one by token is computed from the tile and written."""
    if CACHE.SCALE == "token":
        LARGEST: tl.constexpr = CACHE.LARGEST
        found = new_scale(tile, LARGEST)
        x = scale.x
        p = token_pointer(x, slot.page, slot.offset) + h.to(tl.int64) * x.strides[2] + group * x.strides[3]
        tl.store(p, found, mask=mask)
        return found
    else:
        return head_scale(scale, slot.sequence, h * mask.to(tl.int32))


@triton.jit
def quantised(tile, scale, CACHE: tl.constexpr):
    """A tile as it is stored."""
    FORMAT: tl.constexpr = CACHE.FORMAT
    if CACHE.SCALE is not None:
        tile = tl.div_rn(tile, scale + tl.zeros_like(tile))
    return encode(tile, FORMAT)


@triton.jit
def write_heads(x, h, cache, scale, slot, CACHE: tl.constexpr, CONFIG: tl.constexpr):
    """Write the heads h of the token x to its slot, in the format of the cache."""
    p = token_pointer(cache, slot.page, slot.offset)
    exists = h < CONFIG.KV_HEADS
    D: tl.constexpr = CACHE.D
    BLOCK_D: tl.constexpr = CACHE.BLOCK_D
    if CACHE.FORMAT == "int4" and CACHE.GROUPS > 1:
        GROUP: tl.constexpr = D // CACHE.GROUPS
        HALF: tl.constexpr = CACHE.GROUPS // 2
        i = tl.arange(0, CACHE.BLOCK_GROUP)[None, :]
        mask = exists & (i < GROUP)
        for n in tl.static_range(HALF):
            d = n * GROUP + i
            lower = apply_rotary(x, h, d, mask, CONFIG).to(tl.float32)
            upper = apply_rotary(x, h, d + D // 2, mask, CONFIG).to(tl.float32)
            lower = quantised(lower, stored_scale(scale, lower, slot, h, exists, n, CACHE), CACHE)
            upper = quantised(upper, stored_scale(scale, upper, slot, h, exists, HALF + n, CACHE), CACHE)
            store_heads(cache, p, lower | (upper << 4), h, d, mask)
    elif CACHE.FORMAT == "int4":
        d = tl.arange(0, BLOCK_D // 2)[None, :]
        mask = exists & (d < D // 2)
        lower = apply_rotary(x, h, d, mask, CONFIG).to(tl.float32)
        upper = apply_rotary(x, h, d + D // 2, mask, CONFIG).to(tl.float32)
        # a nan of either half, else the larger magnitude
        most = tl.where(lower != lower, lower, tl.where(tl.abs(upper) > tl.abs(lower), upper, lower))
        most = tl.where(upper != upper, upper, most)
        found = stored_scale(scale, most, slot, h, exists, 0, CACHE)
        store_heads(cache, p, quantised(lower, found, CACHE) | (quantised(upper, found, CACHE) << 4), h, d, mask)
    else:
        GROUPS: tl.constexpr = CACHE.GROUPS
        GROUP: tl.constexpr = D // GROUPS
        i = tl.arange(0, CACHE.BLOCK_GROUP)[None, :]
        mask = exists & (i < GROUP)
        for n in tl.static_range(GROUPS):
            d = n * GROUP + i
            tile = apply_rotary(x, h, d + CACHE.FIRST, mask, CONFIG)
            if CACHE.FORMAT is not None:
                tile = tile.to(tl.float32)
                tile = quantised(tile, stored_scale(scale, tile, slot, h, exists, n, CACHE), CACHE)
            store_heads(cache, p, tile, h, d, mask)


@triton.jit
def append_token(new, source, cache, scales, slot, angles, norms, CONFIG: tl.constexpr):
    """Write a token from (batch row, index) in `new` to its slot in the cache, its key normalised and rotated."""
    CACHE_K: tl.constexpr = CONFIG.K
    CACHE_V: tl.constexpr = CONFIG.V
    k_new = new.k
    v_new = new.v
    for first in range(0, CONFIG.KV_HEADS, CONFIG.BLOCK_H):
        h = first + tl.arange(0, CONFIG.BLOCK_H)[:, None]
        p = token_pointer(k_new, source[0], source[1])
        factor = norms.factor
        if norms.weight is not None:
            factor = norm_factor(View(p, k_new.strides), h, h < CONFIG.KV_HEADS, factor, CACHE_K.D, CACHE_K.BLOCK_D)
        cos, sin, position, num_positions = angles
        x = NewToken(p, k_new.strides, norms.weight, factor, norms.offset, cos, sin, position, num_positions)
        write_heads(x, h, cache.k, scales.k, slot, CACHE_K, CONFIG)
        if CONFIG.PACKED:
            write_heads(x, h, cache.v, scales.v, slot, CACHE_V, CONFIG)
        elif CONFIG.V is not None:
            p = token_pointer(v_new, source[0], source[1])
            x = NewToken(p, v_new.strides, None, 1.0, 0.0, None, None, 0, 0)
            write_heads(x, h, cache.v, scales.v, slot, CACHE_V, CONFIG)


@triton.jit
def rotate_query(queries, b, t, angles, norms, CONFIG: tl.constexpr):
    """Write the query at (batch row, index), normalised and rotated."""
    q = queries.q
    d = tl.arange(0, CONFIG.BLOCK_D)[None, :]
    for first in range(0, CONFIG.HEADS, CONFIG.BLOCK_H):
        h = first + tl.arange(0, CONFIG.BLOCK_H)[:, None]
        mask = (h < CONFIG.HEADS) & (d < CONFIG.D)
        p = token_pointer(q, b, t)
        factor = norms.factor
        if norms.weight is not None:
            factor = norm_factor(View(p, q.strides), h, h < CONFIG.HEADS, factor, CONFIG.D, CONFIG.BLOCK_D)
        cos, sin, position, num_positions = angles
        x = NewToken(p, q.strides, norms.weight, factor, norms.offset, cos, sin, position, num_positions)
        tile = apply_rotary(x, h, d, mask, CONFIG)
        store_heads(queries.rotated, token_pointer(queries.rotated, b, t), tile, h, d, mask)


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def append_kernel(
    new,
    cache,
    scales,
    queries,
    places,
    rotary,
    weights,
    eps,
    norm_offset,
    tokens,
    n_new,
    n_q,
    batch,
    num_positions,
    table_stride,
    num_pages,
    table_pages,
    page_size,
    CONFIG: tl.constexpr,
):
    """The first `tokens` programs append a new token each, the others rotate a query. n_new and n_q: new tokens and
    queries of every sequence, where they are not packed."""
    if CONFIG.OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0)
    if t < tokens:
        b, i, n = sequence_of(t, places.cu_new, n_new, batch, CONFIG.BLOCK_BATCH)
        exists = (b < batch) & (i >= 0)
        j = tl.load(places.lengths + b, mask=exists, other=0) + i
        position = j
        if rotary.positions is not None:
            position = tl.load(rotary.positions + t).to(tl.int32)
        sizes = CacheSizes(table_stride, num_pages, table_pages, page_size)
        page, offset, exists = append_slot(t, b, j, exists, places, sizes)
        if exists:
            source = (b, i)
            if places.cu_new is not None:
                source = (b * 0, t)
            angles = Angles(rotary.cos, rotary.sin, position, num_positions)
            norms = HeadNorm(weights.k, eps, norm_offset)
            append_token(new, source, cache, scales, Slot(page, offset, b), angles, norms, CONFIG)
    elif queries.q.ptr is not None:
        t -= tokens
        b, i, n = sequence_of(t, places.cu_q, n_q, batch, CONFIG.BLOCK_BATCH)
        if rotary.q_positions is not None:
            position = tl.load(rotary.q_positions + t).to(tl.int32)
        elif rotary.positions is not None:
            position = tl.load(rotary.positions + t).to(tl.int32)
        else:
            exists = b < batch
            appended = n_new
            if places.cu_new is not None:
                new_end = tl.load(places.cu_new + b + 1, mask=exists, other=0)
                appended = new_end - tl.load(places.cu_new + b, mask=exists, other=0)
            position = tl.load(places.lengths + b, mask=exists, other=0) + appended - n + i
        angles = Angles(rotary.cos, rotary.sin, position, num_positions)
        norms = HeadNorm(weights.q, eps, norm_offset)
        if places.cu_q is None:
            rotate_query(queries, b, i, angles, norms, CONFIG)
        else:
            rotate_query(queries, b * 0, t, angles, norms, CONFIG)
