"""Decode of multi-head latent attention on Hopper, for tiles of 64 rows (queries times heads): two consumer warpgroups
and a producer.

O, 64 x 512 in float32, is half of an SM's registers: each warpgroup accumulates 256 of its columns. Scores of the tiles
of 64 keys are computed in turn, even tiles by warpgroup 0, odd ones by warpgroup 1, and P goes through shared memory:

    warpgroup 0, even j:  O += P_{j-1} V_{j-1} (P of the other warpgroup), release V_{j-1};  S_j = Q K_j^T;
                          P_j = softmax(S_j);  hand over P_j and its maximum;  O += P_j V_j, release V_j
    warpgroup 1, odd j:   issue S_j;  issue O += P_{j-1} V_{j-1};  wait S_j;  P_j = softmax(S_j);  hand over P_j;
                          wait O, release V_{j-1};  O += P_j V_j, release V_j

So S_j of an odd tile is computed during the softmax of the tile before, and its own softmax during the products of that
tile. V_j is the first 512 columns of K_j: columns 0 to 255, which warpgroup 0 releases, and 256 to 575, which warpgroup
1 releases, since scores need them no longer than P V. There is shared memory for two tiles of keys only, so what
matters is to release one early: warpgroup 0 does not wait for tile j before it has released tile j - 1.

The schedule of keys and the workspace are those of the portable kernels, which also combine and repair.

There are three producers: TMA loads by one warp; for DeepSeek's fp8 format, four warps that write tokens of 656 bytes
to shared memory as bfloat16; for named keys, warps that copy them with cp.async.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.softmax import log2_scale, row_logsumexp
from ..common.device.tile_range import clamp
from ..common.kv.cache_tiles import pages_of
from ..common.kv.combine import (
    Partial,
    SplitSizes,
    columns,
    partials_of,
    row_pointers,
    rows_of_partial,
    slot_of,
    store_partial,
    store_rows,
    tile_rows,
)
from ..common.kv.decode import visible_keys
from ..common.kv.schedule import RUNTIME_SIZES, WorkItem, load_item, load_split, split_record
from .forward import finite_max, rescale_part, row_max
from .gluon_compat import (
    arrive,
    arrive_copied,
    barrier,
    copy_async,
    downcast,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    keep_column_range,
    mbarrier,
    opaque,
    prefetch_l2,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .pipeline import Tokens, allocate_tiles, make_mbarriers, phase, stage_tile, tma_coordinates

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


class HopperLatentConfig(NamedTuple):
    """What the kernel is compiled for. BOX: rows of a TMA box, which lies within one page. FLAG_NAN, PACKED: as in
    `LatentConfig`. LARGE_SCORES, FIXED_SPLIT, MERGE_PREFIX: as in `DecodeConfig`. NAMED: as in `HopperTopkConfig`."""

    GROUP: int
    D: int
    DV: int
    BLOCK_M: int
    BOX: int
    PAGE_SIZE: int | None
    KV_HEADS: int
    FLAG_NAN: bool
    PACKED: bool
    LARGE_SCORES: bool = False
    FIXED_SPLIT: bool = False
    MERGE_PREFIX: bool = False
    NAMED: bool = False


@gluon.constexpr_function
def score_layout():
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])


@gluon.constexpr_function
def output_layout():
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])


@gluon.jit
def unknown_zero(part):
    """0, which the compiler does not know: addresses are computed where they are used, not kept in registers during
    the loop over keys."""
    return gl.multiple_of(part.tiles - part.tiles * gl.num_programs(1), 128)


@gluon.jit
def load_latent_rows(shared, q, part, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Columns 256 WG to 256 WG + 255 of Q to shared memory; returns columns 512 to 575 as an operand in registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    zero = unknown_zero(part)
    r = gl.arange(0, LATENT_ROWS, gl.SliceLayout(1, LAYOUT)) + zero
    at = tile_rows(part.item, part.head, r, None, CONFIG.GROUP)
    p = row_pointers(q, part.item, at)
    c = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT)) + zero
    for n in gl.static_range(HALF_LATENT // 64):
        d = columns(q, WG * HALF_LATENT + n * 64 + c)
        x = gl.load(p[:, None] + d[None, :], mask=at.exists[:, None] & (c < 64)[None, :], other=0.0)
        shared.q.index(WG).slice(n * 64, 64, dim=1).store(x)
    S: gl.constexpr = score_layout()
    r = gl.arange(0, LATENT_ROWS, gl.SliceLayout(1, S)) + zero
    at = tile_rows(part.item, part.head, r, None, CONFIG.GROUP)
    p = row_pointers(q, part.item, at)
    c = gl.arange(0, REST_COLUMNS, gl.SliceLayout(0, S)) + zero
    mask = at.exists[:, None] & (c < CONFIG.D - 2 * HALF_LATENT)[None, :]
    rest = gl.load(p[:, None] + columns(q, 2 * HALF_LATENT + c)[None, :], mask=mask, other=0.0)
    return gl.convert_layout(rest, gl.DotOperandLayout(0, S, 2), assert_trivial=True)


@gluon.jit
def issue_scores(shared, q_rest, use):
    """Issues S = Q K^T of a tile, part by part as its columns arrive."""
    zero = gl.zeros([LATENT_ROWS, LATENT_KEYS], gl.float32, score_layout())
    first = opaque(gl.to_tensor(0))  # with a known 0 the compiler keeps the descriptors of Q in registers
    mbarrier.wait(shared.full[0].index(use % 2), phase(use, 2))
    s = warpgroup_mma(
        shared.q.index(first), stage_tile(shared.k[0], use, 2).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    mbarrier.wait(shared.full[1].index(use % 2), phase(use, 2))
    s = warpgroup_mma(shared.q.index(first + 1), stage_tile(shared.k[1], use, 2).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(q_rest, stage_tile(shared.k[2], use, 2).permute((1, 0)), s, is_async=True)


@gluon.jit
def mask_latent(s, part, first, params, CONFIG: gl.constexpr):
    """s, with -inf for keys past the end, or past a row's last visible one."""
    item = part.item
    full = part.hi
    if params.after is not None:
        full = gl.minimum(full, item.first // CONFIG.GROUP + item.n_k - item.n_q + params.after + 1)
    if first + LATENT_KEYS > full:
        r = gl.arange(0, LATENT_ROWS, gl.SliceLayout(1, s.type.layout))
        end = r * 0 + (part.hi - first)
        if params.after is not None:
            i = (item.first + r) // CONFIG.GROUP
            end = gl.minimum(end, i + (item.n_k - item.n_q + params.after + 1 - first))
        s = keep_column_range(s, None, end)
    return s


@gluon.jit
def issue_other_values(shared, state, use, WG: gl.constexpr):
    """Issues O += P V of a tile of the other warpgroup, whose maximum becomes the running one."""
    acc, m, l = state
    mbarrier.wait(shared.p_full.index(1 - WG), phase(use, 2))
    m_new = shared.m.index(1 - WG).load(gl.SliceLayout(1, score_layout()))
    alpha = gl.exp2(m - finite_max(m_new))
    acc = rescale_part(acc, alpha, True)
    acc = warpgroup_mma(shared.p.index(1 - WG), stage_tile(shared.k[WG], use, 2), acc, is_async=True)
    return acc, m_new, l * alpha


@gluon.jit
def other_values_done(shared, acc, use, WG: gl.constexpr):
    """Waits for the product of `issue_other_values`, and all before it, and releases the tile."""
    acc = warpgroup_mma_wait(0, deps=(acc,))
    arrive(shared.empty[WG].index(use % 2))
    return acc


@gluon.jit
def own_softmax(shared, s, state, part, use, params, CONFIG: gl.constexpr):
    """(p, alpha, m, l) after a tile of scores."""
    m, l = state
    scale_log2 = log2_scale(params.scale, True)
    if CONFIG.NAMED:
        s += shared.seen.index(use % 2).load(gl.SliceLayout(0, score_layout()))[None, :]
    else:
        s = mask_latent(s, part, part.lo + use * LATENT_KEYS, params, CONFIG)
    m_new = gl.maximum(m, row_max(s) * scale_log2)
    pivot = finite_max(m_new)
    p = gl.exp2(s * scale_log2 - pivot[:, None])
    alpha = gl.exp2(m - pivot)
    return p, alpha, m_new, l * alpha + gl.sum(p, 1)


@gluon.jit
def hand_over(shared, p, m, WG: gl.constexpr):
    """P and its maximum to the other warpgroup. Its products with the P before are done: this warpgroup has waited for
    a tile of keys in the stage that they released."""
    shared.p.index(WG).store(p)
    shared.m.index(WG).store(m)
    fence_async_shared()
    barrier()
    arrive(shared.p_full.index(WG))


@gluon.jit
def own_values(shared, acc, p, alpha, use, WG: gl.constexpr):
    """O += P V of an own tile, complete."""
    acc = rescale_part(acc, alpha, True)
    p = gl.convert_layout(p, gl.DotOperandLayout(0, output_layout(), 2), assert_trivial=True)
    acc = warpgroup_mma(p, stage_tile(shared.k[WG], use, 2), acc, is_async=True)
    acc, _p = warpgroup_mma_wait(0, deps=(acc, p))
    arrive(shared.empty[WG].index(use % 2))
    return acc


@gluon.jit
def consume_latent(shared, q, buffers, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Consumer warpgroup WG: columns 256 WG to 256 WG + 255 of O."""
    part = split_of_program(buffers.schedule, params, CONFIG)
    if part.tiles > 0:
        S: gl.constexpr = score_layout()
        q_rest = load_latent_rows(shared, q, part, WG, CONFIG)
        fence_async_shared()
        barrier()
        arrive(shared.q_ready.index(0))
        mbarrier.wait(shared.q_ready.index(0), 0)
        acc, m, l = attend_latent_keys(shared, q_rest, part, params, WG, CONFIG)
        shared.l.index(WG).store(l)
        barrier()
        arrive(shared.done.index(0))
        mbarrier.wait(shared.done.index(0), 0)
        l += shared.l.index(1 - WG).load(gl.SliceLayout(1, S))
        store_latent(acc, m, l, part, buffers, params, WG, CONFIG)


@gluon.jit
def attend_latent_keys(shared, q_rest, part, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """(acc, m, l) over the tiles of keys of a split; l of the tiles of this warpgroup."""
    DTYPE: gl.constexpr = shared.p.dtype
    S: gl.constexpr = score_layout()
    acc = gl.zeros([LATENT_ROWS, HALF_LATENT], gl.float32, output_layout())
    m = gl.full([LATENT_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l = gl.full([LATENT_ROWS], 0.0, gl.float32, gl.SliceLayout(1, S))
    if WG == 0:
        s = warpgroup_mma_wait(0, deps=(issue_scores(shared, q_rest, gl.to_tensor(0)),))
        p, alpha, m, l = own_softmax(shared, s, (m, l), part, gl.to_tensor(0), params, CONFIG)
        p = downcast(p, DTYPE)
        hand_over(shared, p, m, WG)
        acc = own_values(shared, acc, p, alpha, gl.to_tensor(0), WG)
    for j in range(2 - WG, part.tiles, 2):
        if WG == 1:
            s = issue_scores(shared, q_rest, j)
            acc, m, l = issue_other_values(shared, (acc, m, l), j - 1, WG)
            s = warpgroup_mma_wait(1, deps=(s,))
        else:
            acc, m, l = issue_other_values(shared, (acc, m, l), j - 1, WG)
            acc = other_values_done(shared, acc, j - 1, WG)
            s = warpgroup_mma_wait(0, deps=(issue_scores(shared, q_rest, j),))
        p, alpha, m, l = own_softmax(shared, s, (m, l), part, j, params, CONFIG)
        p = downcast(p, DTYPE)
        hand_over(shared, p, m, WG)
        if WG == 1:
            acc = other_values_done(shared, acc, j - 1, WG)
        acc = own_values(shared, acc, p, alpha, j, WG)
    if part.tiles % 2 == WG:
        acc, m, l = issue_other_values(shared, (acc, m, l), part.tiles - 1, WG)
        acc = other_values_done(shared, acc, part.tiles - 1, WG)
    return acc, m, l


@gluon.jit
def store_latent(acc, m, l, part, buffers, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Writes the results of a work item, or a partial result to the split's slot of the workspace."""
    ROWS_LAYOUT: gl.constexpr = gl.SliceLayout(1, output_layout())
    m = gl.convert_layout(m, ROWS_LAYOUT, assert_trivial=True)
    l = gl.convert_layout(l, ROWS_LAYOUT, assert_trivial=True)
    out = acc / gl.where(l == 0.0, 1.0, l)[:, None]
    partial = Partial(out, row_logsumexp(m, l, None), l)
    zero = unknown_zero(part)
    r = gl.arange(0, LATENT_ROWS, ROWS_LAYOUT) + zero
    d = (WG * HALF_LATENT + gl.arange(0, HALF_LATENT, gl.SliceLayout(0, output_layout())) + zero)[None, :]
    at = tile_rows(part.item, part.head, r, None, CONFIG.GROUP)
    if CONFIG.NAMED:
        store_rows(buffers, partial, part.item, at, d, params.sinks, params.sizes.batch, CONFIG)
    else:
        partials = partials_of(buffers.workspace, params.sizes, CONFIG.DV)
        if CONFIG.FLAG_NAN:
            sums = gl.sum(out, 1)
            bad = sums != sums
            gl.store(partials.flags + gl.program_id(0) + bad.to(gl.int32) * 0, bad.to(gl.float32), mask=bad)
        if part.is_whole:
            store_rows(buffers, partial, part.item, at, d, params.sinks, params.sizes.batch, CONFIG)
        else:
            slot = slot_of(partials, part.number, part.item_number, 0, part.head, CONFIG)
            store_partial(rows_of_partial(partials, slot, r, d, CONFIG.DV), partial, CONFIG.LARGE_SCORES)


@gluon.jit
def latent_shared(keys, COPIES: gl.constexpr):
    """Shared memory of a program with the tiles `keys`. COPIES: threads whose copies fill them; 0: TMA or stores do."""
    DTYPE: gl.constexpr = keys[0].dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    m = gl.allocate_shared_memory(gl.float32, [2, LATENT_ROWS], ROW)
    seen = m
    if COPIES > 0:
        seen = gl.allocate_shared_memory(gl.float32, [2, LATENT_KEYS], ROW)
    return LatentShared(
        gl.allocate_shared_memory(DTYPE, [2, LATENT_ROWS, HALF_LATENT], TILE),
        keys,
        (make_mbarriers(2, COPIES if COPIES > 0 else 1), make_mbarriers(2, COPIES + 1)),
        (make_mbarriers(2, 1), make_mbarriers(2, 1)),
        gl.allocate_shared_memory(DTYPE, [2, LATENT_ROWS, LATENT_KEYS], TILE),
        m,
        make_mbarriers(2, 1),
        gl.allocate_shared_memory(gl.float32, [2, LATENT_ROWS], ROW),
        make_mbarriers(1, 2),
        make_mbarriers(1, 2),
        seen,
    )


@gluon.jit
def latent_tiles(DTYPE: gl.constexpr):
    """Two tiles of keys for producers that do not use TMA."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    left = gl.allocate_shared_memory(DTYPE, [2, LATENT_KEYS, HALF_LATENT], TILE)
    right = gl.allocate_shared_memory(DTYPE, [2, LATENT_KEYS, HALF_LATENT], TILE)
    return left, right, gl.allocate_shared_memory(DTYPE, [2, LATENT_KEYS, REST_COLUMNS], TILE)


@gluon.jit(do_not_specialize=[*RUNTIME_SIZES, "page_stride"])
def hopper_mla_kernel(
    q,
    k_wide,
    k_rest,
    packed,
    places,
    buffers,
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
    page_stride,
    batch,
    sinks,
    CONFIG: gl.constexpr,
):
    BOXES: gl.constexpr = LATENT_KEYS // CONFIG.BOX
    DTYPE: gl.constexpr = q.ptr.dtype.element_ty
    if not CONFIG.PACKED:
        keys = (allocate_tiles(k_wide, 2, BOXES), allocate_tiles(k_wide, 2, BOXES), allocate_tiles(k_rest, 2, BOXES))
    else:
        keys = latent_tiles(DTYPE)
    shared = latent_shared(keys, 0)
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()
    sizes = SplitSizes(items, num_splits, slots, whole_slots, num_slots, rows, batch, target)
    if CONFIG.FLAG_NAN:
        gl.store(partials_of(buffers.workspace, sizes, CONFIG.DV).flags + gl.program_id(0), 0.0)
    tokens = LatentTokens(places[0], places[1], places[2], table_stride, num_pages, page_stride)
    params = LatentParams(tokens, after, scale, chunk_size, sizes, sinks)
    if not CONFIG.PACKED:
        gl.warp_specialize(
            [
                (consume_latent, (shared, q, buffers, params, 1, CONFIG)),
                (consume_latent, (shared, q, buffers, params, 0, CONFIG)),
                (produce_latent, (shared, k_wide, k_rest, buffers.schedule, params, CONFIG)),
            ],
            [4, 1],
            [240, 24] if BOXES == 1 else [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (consume_latent, (shared, q, buffers, params, 1, CONFIG)),
                (consume_latent, (shared, q, buffers, params, 0, CONFIG)),
                (produce_packed, (shared, packed, buffers.schedule, params, CONFIG)),
            ],
            [4, 4],
            [216, 64],
        )
