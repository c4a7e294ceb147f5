"""Tiles of a KV cache, dense or paged, in the decode kernels: where their rows are, and how they are loaded."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.tile_io import index
from ..device.tile_range import clamp


class KvCacheView(NamedTuple):
    """Keys and values as views, of words where they are quantised, and their scales; the page table, with `indptr` that
    of all sequences one after another; or, of a dense cache, the batch row of each sequence."""

    k: tl.tuple
    v: tl.tuple
    page_table: tl.tensor
    indptr: tl.tensor
    rows: tl.tensor
    k_scale: tl.tuple
    v_scale: tl.tuple


class KeyRange(NamedTuple):
    """The keys [lo, hi) of a sequence, from `first` on visible to some row, from `start` on valid. `pages`: its page
    numbers, below `num_pages`, or the row of a dense cache."""

    cache: tl.tuple
    pages: tl.tensor
    num_pages: tl.tensor
    start: tl.tensor
    first: tl.tensor
    lo: tl.tensor
    hi: tl.tensor


@triton.jit
def pages_of(cache, b, table_stride, num_pages):
    """A pointer to the sequence's page numbers; or, of a dense cache, its row."""
    if cache.page_table is None:
        if cache.rows is None:
            return b
        else:
            return clamp(tl.load(cache.rows + b), 0, num_pages - 1)
    elif cache.indptr is None:
        return cache.page_table + b.to(tl.int64) * table_stride
    else:
        return cache.page_table + tl.maximum(tl.load(cache.indptr + b), 0)


@triton.jit
def load_pages(keys, at, PAGE_SIZE: tl.constexpr, N: tl.constexpr):
    """The pages of the N keys from `at` on, a multiple of N: one number where a tile lies within a page, else one for
    each key."""
    if PAGE_SIZE is None:
        return keys.pages
    elif PAGE_SIZE % N == 0:
        return clamp(tl.load(keys.pages + at // PAGE_SIZE, mask=at < keys.hi, other=0), 0, keys.num_pages - 1)
    else:
        r = tl.arange(0, N)
        j = at + r
        index = at // PAGE_SIZE + r // PAGE_SIZE if N % PAGE_SIZE == 0 else j // PAGE_SIZE
        inside = (j >= keys.first) & (j < keys.hi)
        return clamp(tl.load(keys.pages + index, mask=inside, other=0), 0, keys.num_pages - 1)


@triton.jit
def key_offsets(x, page, h, at, PAGE_SIZE: tl.constexpr, N: tl.constexpr):
    """Offsets of the rows of the N keys from `at` on: (one for all, one for each)."""
    r = tl.arange(0, N)
    base = h.to(tl.int64) * x.strides[2]
    if PAGE_SIZE is None or PAGE_SIZE % N == 0:
        place = at if PAGE_SIZE is None else at % PAGE_SIZE
        return base + page.to(tl.int64) * x.strides[0] + place.to(tl.int64) * x.strides[1], index(x, r) * x.strides[1]
    else:
        place = r % PAGE_SIZE if N % PAGE_SIZE == 0 else (at + r) % PAGE_SIZE
        return base, page.to(tl.int64) * x.strides[0] + place.to(tl.int64) * x.strides[1]


@triton.jit
def key_places(x, rows, BLOCK_D: tl.constexpr):
    """Offsets of the elements of rows of a cache."""
    d = tl.arange(0, BLOCK_D)[None, :]
    return rows[:, None] + index(x, d) * x.strides[3]


@triton.jit
def load_keys(x, base, rows, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a cache. Those that are not inside are not read: 0, as are columns past D."""
    return load_places(x, base, key_places(x, rows, BLOCK_D), inside, D, False)


@triton.jit
def load_places(x, base, places, inside, D: tl.constexpr, TURNED: tl.constexpr):
    """The same by `key_places`, transposed if TURNED. `inside` is None where any row of the cache may be read instead
    of one that is not inside."""
    BLOCK_D: tl.constexpr = places.shape[1]
    mask = None
    if inside is not None:
        mask = tl.broadcast_to(inside[:, None], places.shape)
    if D != BLOCK_D:
        columns = tl.broadcast_to((tl.arange(0, BLOCK_D) < D)[None, :], places.shape)
        mask = columns if mask is None else mask & columns
    if TURNED:
        places = tl.trans(places)
        if mask is not None:
            mask = tl.trans(mask)
    if mask is None:
        return tl.load(x.ptr + base + places)
    else:
        return tl.load(x.ptr + base + places, mask=mask, other=0.0)


@triton.jit
def load_blocks(x, base, places, inside, D: tl.constexpr, TURNED: tl.constexpr, STORED: tl.constexpr):
    """The same, a tile for each of the BLOCKS of words in D dims, from the `key_places` of the first. If there are
    several, words are contiguous."""
    BLOCKS: tl.constexpr = STORED.BLOCKS
    WORDS: tl.constexpr = D // (STORED.PARTS * BLOCKS)
    found = ()
    for n in tl.static_range(BLOCKS):
        found += (load_places(x, base + n * WORDS, places, inside, WORDS, TURNED),)
    return found
