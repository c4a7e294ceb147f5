"""Append new keys and values to a cache, where their sequences end or at given slots, and apply the rotary embedding to
keys and queries on the way. One program handles one token, all of its heads."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.structs import View
from ..device.tile_range import clamp
from ..pdl import gdc_launch_dependents, gdc_wait
from .combine import columns
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
    """cos and sin of `num_positions` positions, and the position of one token."""

    cos: tl.tensor
    sin: tl.tensor
    position: tl.tensor
    num_positions: tl.tensor


class CacheSizes(NamedTuple):
    """Stride of the page table, pages (or rows) of the cache, pages of a sequence (with `indptr`, of all) in the table,
    tokens of a page (or row)."""

    table_stride: tl.tensor
    num_pages: tl.tensor
    table_pages: tl.tensor
    page_size: tl.tensor


class AppendConfig(NamedTuple):
    """KV heads, query heads; head dims; heads and padded head dims of a tile; half the dims that are rotated; whether
    neighbouring dims form a pair; sequences that are searched at once; whether the launch overlaps the one before."""

    KV_HEADS: int
    HEADS: int
    D: int
    DV: int
    BLOCK_H: int
    BLOCK_D: int
    BLOCK_DV: int
    HALF: int
    INTERLEAVED: bool
    BLOCK_BATCH: int
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
def apply_rotary(x, h, d, mask, angles, CONFIG: tl.constexpr):
    """The heads h of the token where the view x begins, each pair of dims rotated by the angle of its position."""
    p = x.ptr + h.to(tl.int64) * x.strides[2]
    tile = tl.load(p + columns(x, d), mask=mask, other=0.0)
    if angles.cos is None:
        return tile
    else:
        HALF: tl.constexpr = CONFIG.HALF
        if CONFIG.INTERLEAVED:
            first = d % 2 == 0
            pair = d ^ 1
            frequency = d // 2
        else:
            first = d < HALF
            pair = tl.where(first, d + HALF, d - HALF)
            frequency = tl.where(first, d, d - HALF)
        rotated = d < 2 * HALF
        other = tl.load(p + columns(x, pair), mask=mask & rotated, other=0.0).to(tl.float32)
        at = clamp(angles.position, 0, angles.num_positions - 1).to(tl.int64) * HALF + frequency
        cos = tl.load(angles.cos + at, mask=rotated, other=1.0).to(tl.float32)
        sin = tl.load(angles.sin + at, mask=rotated, other=0.0).to(tl.float32)
        return tile.to(tl.float32) * cos + tl.where(first, -other, other) * sin


@triton.jit
def store_heads(x, p, tile, h, d, mask):
    """Write heads h and dims d of the token at p, in the dtype of the view x."""
    p = p + h.to(tl.int64) * x.strides[2]
    tl.store(p + columns(x, d), tile.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def append_slot(t, b, j, exists, places, sizes):
    """(page, offset, exists): where new token t, number j of sequence b, is written. It is not if there is no such
    place. Without a page table, page is the batch row."""
    offset = j
    if places.slots is not None:
        slot = tl.load(places.slots + t).to(tl.int64)
        page = slot // sizes.page_size
        offset = (slot % sizes.page_size).to(tl.int32)
        exists = (slot >= 0) & (page < sizes.num_pages)
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
    return clamp(page, 0, sizes.num_pages - 1), offset, exists


@triton.jit
def append_token(new, cache, source, target, d, angles, CONFIG: tl.constexpr):
    """Copy a token from (batch row, index) in `new` to (page, offset) in the cache, its key rotated."""
    k_new = new.k
    v_new = new.v
    for first in range(0, CONFIG.KV_HEADS, CONFIG.BLOCK_H):
        h = first + tl.arange(0, CONFIG.BLOCK_H)[:, None]
        mask = (h < CONFIG.KV_HEADS) & (d < CONFIG.D)
        x = View(token_pointer(k_new, source[0], source[1]), k_new.strides)
        tile = apply_rotary(x, h, d, mask, angles, CONFIG)
        store_heads(cache.k, token_pointer(cache.k, target[0], target[1]), tile, h, d, mask)
        dv = tl.arange(0, CONFIG.BLOCK_DV)[None, :]
        mask = (h < CONFIG.KV_HEADS) & (dv < CONFIG.DV)
        p = token_pointer(v_new, source[0], source[1]) + h.to(tl.int64) * v_new.strides[2]
        tile = tl.load(p + columns(v_new, dv), mask=mask, other=0.0)
        store_heads(cache.v, token_pointer(cache.v, target[0], target[1]), tile, h, dv, mask)


@triton.jit
def rotate_query(queries, b, t, d, angles, CONFIG: tl.constexpr):
    """Write the rotated query at (batch row, index)."""
    q = queries.q
    for first in range(0, CONFIG.HEADS, CONFIG.BLOCK_H):
        h = first + tl.arange(0, CONFIG.BLOCK_H)[:, None]
        mask = (h < CONFIG.HEADS) & (d < CONFIG.D)
        x = View(token_pointer(q, b, t), q.strides)
        tile = apply_rotary(x, h, d, mask, angles, CONFIG)
        store_heads(queries.rotated, token_pointer(queries.rotated, b, t), tile, h, d, mask)


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def append_kernel(
    new,
    cache,
    queries,
    places,
    rotary,
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
    d = tl.arange(0, CONFIG.BLOCK_D)[None, :]
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
            append_token(new, cache, source, (page, offset), d, angles, CONFIG)
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
        if places.cu_q is None:
            rotate_query(queries, b, i, d, angles, CONFIG)
        else:
            rotate_query(queries, b * 0, t, d, angles, CONFIG)
