"""What the warps of the Hopper kernels of MLA share, and their producers: TMA loads by one warp; of DeepSeek's fp8
format, four warps that write tokens of 656 bytes to shared memory as bfloat16; of named keys, warps that copy them with
cp.async.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.tile_range import clamp
from ..common.kv.cache_tiles import pages_of
from ..common.kv.decode import visible_keys
from ..common.kv.schedule import WorkItem, load_item, load_split, split_record
from .gluon_compat import (
    arrive,
    arrive_copied,
    barrier,
    copy_async,
    downcast,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    prefetch_l2,
    tma_load,
)
from .pipeline import phase
from .token_rows import Tokens, tma_coordinates

LATENT_ROWS: gl.constexpr = gl.constexpr(64)
LATENT_KEYS: gl.constexpr = gl.constexpr(64)
HALF_LATENT: gl.constexpr = gl.constexpr(256)
REST_COLUMNS: gl.constexpr = gl.constexpr(64)


class LatentTokens(NamedTuple):
    """Where the tokens of sequences are, as in `KvCacheView`; page_stride: tokens from a page to the next."""

    page_table: tl.tensor
    indptr: tl.tensor
    rows: tl.tensor
    table_stride: tl.tensor
    num_pages: tl.tensor
    page_stride: tl.tensor


class LatentParams(NamedTuple):
    """What all warps read."""

    tokens: tl.tuple
    after: tl.tensor
    scale: tl.tensor
    chunk_size: tl.tensor
    sizes: tl.tuple
    sinks: tl.tuple


class NamedKeys(NamedTuple):
    """The keys that queries name: indices (batch, queries, KV heads, count), contiguous; and the numbers of queries and
    of keys. What is not 0 to n_k - 1 names none."""

    indices: tl.tensor
    n_q: tl.tensor
    n_k: tl.tensor
    count: tl.tensor


class LatentShared(NamedTuple):
    """All of shared memory. `k`: columns 0 to 255, 256 to 511 and 512 to 575 of two tiles of keys; `full` and `empty`
    of the first, and of the other two. `m`: the maximum that was subtracted in P of each warpgroup; `l`: row sums of
    each warpgroup. `q_ready` and `done`: of both warpgroups. `seen`: of two tiles of named keys, 0 for a key and -inf
    for none; else not used."""

    q: gl.shared_memory_descriptor
    k: tuple[gl.shared_memory_descriptor, ...]
    full: tuple[gl.shared_memory_descriptor, ...]
    empty: tuple[gl.shared_memory_descriptor, ...]
    p: gl.shared_memory_descriptor
    m: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    l: gl.shared_memory_descriptor
    q_ready: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor
    seen: gl.shared_memory_descriptor


class LatentSplit(NamedTuple):
    """The split of a program: its number, the work item and its number, the KV head; the keys [lo, hi) in so many
    tiles, none if there is no such split; whether they are all keys of the work item."""

    number: tl.tensor
    item: tl.tuple
    item_number: tl.tensor
    head: tl.tensor
    lo: tl.tensor
    hi: tl.tensor
    tiles: tl.tensor
    is_whole: tl.tensor


@triton.jit
def split_of_program(schedule, params, CONFIG: tl.constexpr):
    program = tl.program_id(0)
    if CONFIG.NAMED:
        return query_of_program(program, params.tokens, CONFIG)
    else:
        number = program // CONFIG.KV_HEADS
        record = split_record(schedule, number)
        item = load_item(record)
        split = load_split(record)
        _first_key, hi = visible_keys(item, None, params.after, CONFIG)
        lo = (item.first_chunk + split.chunk) * params.chunk_size
        hi = tl.minimum(hi, (item.first_chunk + split.stop) * params.chunk_size)
        tiles = tl.maximum((hi - lo + LATENT_KEYS - 1) // LATENT_KEYS, 1)
        tiles = tl.where(split.chunk < split.stop, tiles, 0)
        is_whole = (split.chunk == 0) & (split.stop == item.num_chunks)
        return LatentSplit(number, item, split.item, program % CONFIG.KV_HEADS, lo, hi, tiles, is_whole)


@triton.jit
def query_of_program(program, keys, CONFIG: tl.constexpr):
    """One query with the keys that it names: a work item of up to LATENT_ROWS of its heads."""
    TILES: tl.constexpr = (CONFIG.GROUP + LATENT_ROWS - 1) // LATENT_ROWS
    line = program // TILES
    head = line % CONFIG.KV_HEADS
    query = line // CONFIG.KV_HEADS
    b, i = query // keys.n_q, query % keys.n_q
    zero = program * 0
    item = WorkItem(b, program % TILES * LATENT_ROWS, i, zero + 1, keys.n_k, zero, zero, zero)
    tiles = (keys.count + LATENT_KEYS - 1) // LATENT_KEYS
    return LatentSplit(line, item, line, head, zero, keys.count, tiles, tiles > 0)


@gluon.jit
def produce_latent(shared, k_wide, k_rest, schedule, params, CONFIG: gl.constexpr):
    """Producer warp: loads the tiles of keys, columns 0 to 255 first."""
    part = split_of_program(schedule, params, CONFIG)
    tokens = params.tokens
    b = gl.minimum(part.item.b, params.sizes.batch - 1)
    pages = pages_of(tokens, b, tokens.table_stride, tokens.num_pages)
    for j in range(part.tiles):
        load_latent_tile(shared, (k_wide, k_rest), pages, part, j, tokens, CONFIG)


@gluon.jit
def box_of(pages, part, first, tokens, CONFIG: gl.constexpr):
    """The tokens of a TMA box from key `first` on; those past the end of the sequence are read as 0."""
    left = clamp(part.item.n_k - first, 0, CONFIG.BOX)
    if CONFIG.PAGE_SIZE is None:
        start = pages * tokens.page_stride + first
    else:
        page = gl.load(pages + first // CONFIG.PAGE_SIZE, mask=left > 0, other=0)
        start = clamp(page, 0, tokens.num_pages - 1) * tokens.page_stride + first % CONFIG.PAGE_SIZE
    return Tokens(0, part.head, start, left)


@gluon.jit
def load_latent_tile(shared, k, pages, part, use, tokens, CONFIG: gl.constexpr):
    """Producer: loads a tile of keys, as its stage becomes empty. `k`: descriptors of 256 and of 64 columns."""
    k_wide = k[0]
    k_rest = k[1]
    first = part.lo + use * LATENT_KEYS
    BOX: gl.constexpr = CONFIG.BOX
    BOXES: gl.constexpr = LATENT_KEYS // BOX
    stage = use % 2
    full = shared.full[0].index(stage)
    starts = ()
    left = ()
    for i in gl.static_range(BOXES):  # page numbers are loaded before the stage is empty, to hide their latency
        box = box_of(pages, part, first + i * BOX, tokens, CONFIG)
        starts = starts + (box.start,)  # noqa: RUF005
        left = left + (box.n,)  # noqa: RUF005
    mbarrier.wait(shared.empty[0].index(stage), phase(use, 2) ^ 1)
    mbarrier.expect(full, k_wide.block_type.nbytes * BOXES)
    for i in gl.static_range(BOXES):
        at = tma_coordinates(k_wide, Tokens(0, part.head, starts[i], left[i]), 0)
        tma_load(k_wide, at, full, shared.k[0].index(stage).slice(i * BOX, BOX, dim=3))
    full = shared.full[1].index(stage)
    mbarrier.wait(shared.empty[1].index(stage), phase(use, 2) ^ 1)
    mbarrier.expect(full, (k_wide.block_type.nbytes + k_rest.block_type.nbytes) * BOXES)
    for i in gl.static_range(BOXES):
        at = tma_coordinates(k_wide, Tokens(0, part.head, starts[i], left[i]), 0, HALF_LATENT)
        tma_load(k_wide, at, full, shared.k[1].index(stage).slice(i * BOX, BOX, dim=3))
        at = tma_coordinates(k_rest, Tokens(0, part.head, starts[i], left[i]), 0, 2 * HALF_LATENT)
        tma_load(k_rest, at, full, shared.k[2].index(stage).slice(i * BOX, BOX, dim=3))


class PackedViews(NamedTuple):
    """A cache in DeepSeek's fp8 format: its e4m3 numbers, bfloat16 numbers and scales."""

    latent: tl.tuple
    rest: tl.tuple
    scales: tl.tuple


@gluon.jit
def page_of_tokens(pages, token, part, tokens, CONFIG: gl.constexpr):
    """The pages of tokens, or the row of a dense cache."""
    if CONFIG.PAGE_SIZE is None:
        return pages + token * 0
    else:
        page = gl.load(pages + token // CONFIG.PAGE_SIZE, mask=token < part.item.n_k, other=0)
        return clamp(page, 0, tokens.num_pages - 1)


@gluon.jit
def token_bytes(page, token, part, cache, CONFIG: gl.constexpr):
    """(whether tokens exist, their offsets in bytes)."""
    exists = token < part.item.n_k
    at = gl.where(exists, token, 0)
    if CONFIG.PAGE_SIZE is not None:
        at = at % CONFIG.PAGE_SIZE
    strides = cache.latent.strides
    offset = page.to(gl.int64) * strides[0] + at.to(gl.int64) * strides[1] + part.head.to(gl.int64) * strides[2]
    return exists, offset


@gluon.jit
def prefetch_tokens(cache, offset):
    """Brings tokens of 656 bytes into L2: eight addresses of each, less than a line of 128 bytes apart."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    offset = gl.convert_layout(offset, gl.SliceLayout(1, LINES), assert_trivial=True)
    c = gl.arange(0, 8, gl.SliceLayout(0, LINES))
    prefetch_l2(cache.latent.ptr + (offset[:, None] + (c * 93)[None, :]))


@gluon.jit
def load_numbers(cache, offset, exists, N: gl.constexpr, LAYOUT: gl.constexpr):
    """64 numbers of each token from number 64 N on, in e4m3."""
    c = N * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    return gl.load(cache.latent.ptr + (offset[:, None] + c[None, :]), mask=exists[:, None], other=0.0)


@gluon.jit
def load_scale(cache, offset, exists, N: gl.constexpr):
    return gl.load(cache.scales.ptr + (offset // 4 + N), mask=exists, other=0.0)


@gluon.jit
def write_half(shared, cache, offset, exists, use, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Writes columns 256 HALF to 256 HALF + 255 of a tile of tokens as bfloat16, 64 at a time, once the stage is empty;
    the next are on their way meanwhile."""
    stage = use % 2
    N: gl.constexpr = 4 * HALF
    x = load_numbers(cache, offset, exists, N, LAYOUT)
    y = load_numbers(cache, offset, exists, N + 1, LAYOUT)
    scale = load_scale(cache, offset, exists, 2 * HALF)
    mbarrier.wait(shared.empty[HALF].index(stage), phase(use, 2) ^ 1)
    for n in gl.static_range(4):
        tile = shared.k[HALF].index(stage).slice(n * 64, 64, dim=1)
        tile.store(downcast(x.to(gl.float32) * scale[:, None], shared.p.dtype))
        x = y
        if n < 2:
            y = load_numbers(cache, offset, exists, N + n + 2, LAYOUT)
        if n == 1:
            scale = load_scale(cache, offset, exists, 2 * HALF + 1)


@gluon.jit
def produce_packed(shared, cache, schedule, params, CONFIG: gl.constexpr):
    """Producer warpgroup for DeepSeek's fp8 format: loads pages two tiles ahead, and prefetches tokens into L2."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    part = split_of_program(schedule, params, CONFIG)
    tokens = params.tokens
    b = gl.minimum(part.item.b, params.sizes.batch - 1)
    pages = pages_of(tokens, b, tokens.table_stride, tokens.num_pages)
    token = part.lo + gl.arange(0, LATENT_KEYS, gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, REST_COLUMNS, gl.SliceLayout(0, LAYOUT))
    page = page_of_tokens(pages, token, part, tokens, CONFIG)
    next_page = page_of_tokens(pages, token + LATENT_KEYS, part, tokens, CONFIG)
    for j in range(part.tiles):
        last_page = page_of_tokens(pages, token + 2 * LATENT_KEYS, part, tokens, CONFIG)
        exists, offset = token_bytes(page, token, part, cache, CONFIG)
        write_half(shared, cache, offset, exists, j, 0, LAYOUT)
        publish(shared.full[0].index(j % 2))
        _, later = token_bytes(last_page, token + 2 * LATENT_KEYS, part, cache, CONFIG)
        prefetch_tokens(cache, later)
        write_half(shared, cache, offset, exists, j, 1, LAYOUT)
        rest = gl.load(cache.rest.ptr + ((offset // 2)[:, None] + c[None, :]), mask=exists[:, None], other=0.0)
        shared.k[2].index(j % 2).store(rest)
        publish(shared.full[1].index(j % 2))
        page = next_page
        next_page = last_page
        token += LATENT_KEYS


@gluon.jit
def publish(bar):
    """What the warpgroup has written to shared memory is there for products."""
    fence_async_shared()
    barrier()
    arrive(bar)


@gluon.jit
def named_tile(keys, part, first, LAYOUT: gl.constexpr):
    """The indices of a tile of named keys from number `first` on."""
    n = first + gl.arange(0, LATENT_KEYS, gl.SliceLayout(1, LAYOUT))
    line = part.number.to(gl.int64) * keys.count
    return gl.load(keys.indices + line + n, mask=n < keys.count, other=-1)


@gluon.jit
def copy_columns(tile, k, rows, seen, FIRST: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Issues the copies of COUNT columns from FIRST on, 64 at a time; keys that are none become 0."""
    c = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    for n in gl.static_range(COUNT // 64):
        at = k + (rows[:, None] + (FIRST + n * 64 + c)[None, :])
        copy_async(tile.slice(n * 64, 64, dim=1), at, mask=seen[:, None])


@gluon.jit
def produce_named(shared, k, params, CONFIG: gl.constexpr):
    """Producer warps: gather the keys that a query names. Indices are loaded a tile ahead."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    part = split_of_program(None, params, CONFIG)
    keys = params.tokens
    base = k.ptr + part.item.b.to(gl.int64) * k.strides[0] + part.head.to(gl.int64) * k.strides[2]
    later = named_tile(keys, part, 0, LAYOUT)
    for j in range(part.tiles):
        index = later
        later = named_tile(keys, part, (j + 1) * LATENT_KEYS, LAYOUT)
        seen = (index >= 0) & (index < keys.n_k)
        rows = gl.where(seen, index, 0).to(gl.int64) * k.strides[1]
        stage = j % 2
        mbarrier.wait(shared.empty[0].index(stage), phase(j, 2) ^ 1)
        copy_columns(shared.k[0].index(stage), base, rows, seen, 0, HALF_LATENT, LAYOUT)
        arrive_copied(shared.full[0].index(stage))
        mbarrier.wait(shared.empty[1].index(stage), phase(j, 2) ^ 1)
        copy_columns(shared.k[1].index(stage), base, rows, seen, HALF_LATENT, HALF_LATENT, LAYOUT)
        copy_columns(shared.k[2].index(stage), base, rows, seen, 2 * HALF_LATENT, REST_COLUMNS, LAYOUT)
        shared.seen.index(stage).store(gl.where(seen, 0.0, float("-inf")))
        barrier()
        arrive(shared.full[1].index(stage))
        arrive_copied(shared.full[1].index(stage))
