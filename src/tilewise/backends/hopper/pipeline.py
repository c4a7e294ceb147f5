"""How the warps of a program communicate: TMA pipelines through shared memory, and the persistent tile scheduler.

Every mbarrier here counts arrivals and bytes and flips its phase when both are complete. Use n of a pipeline lies in
stage n % STAGES, in phase n // STAGES % 2; producer and consumers only count uses.

And where the rows of a tile lie in global memory: for TMA, and for loads and stores without it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.mask import mask_mod_visible
from ..common.device.structs import Grid, Pairs, Sequences, Work
from ..common.device.tile_range import band, block_at, clamp, locate, loop_range
from .gluon_compat import arrive, bar_arrive, bar_sync, column_indices, gl, gluon, mbarrier, opaque, opaque64, tma_load

TMA_EXTENT: gl.constexpr = gl.constexpr(1 << 30)  # size of a packed descriptor's token axes
GRID_BOX: gl.constexpr = gl.constexpr(128)  # tokens of a box of a grid


class Tokens(NamedTuple):
    """The tokens of one sequence and head: `n` from token `start` of batch row b."""

    b: tl.tensor
    h: tl.tensor
    start: tl.tensor
    n: tl.tensor


class GlobalTensor(NamedTuple):
    """A tensor in global memory, if `ptr` is not None: strides of (batch, token, head), number of columns. Of a grid of
    tokens the second stride is that of its slow axis, and more follow: stride and length of the fast axis, and the
    tokens of a box along both."""

    ptr: tl.tensor = None
    strides: tl.tuple = (0, 0, 0)
    columns: tl.tensor = 0


@gluon.jit
def tma_coordinates(desc, tokens, row, column=0):
    """Coordinates of row `row` and column `column` of `tokens`. Rows past the end read as zero and are not written.

    A dense descriptor has the axes (batch, head, token, dim) and ends where the sequence ends. A packed one has
    (TMA_EXTENT, TMA_EXTENT, head, TMA_EXTENT, dim) with the strides (-token, token, head, token, 1), modulo 2^64 bytes:
    of the many coordinates of one row, these put the sequence's last row just before the end of the axis. One of a grid
    has (batch, head, slow axis, fast axis, dim): `row` is then the first of a box, or of one of its equal parts along
    the slow axis.
    """
    if len(desc.block_type.shape) == 4:
        return [tokens.b, tokens.h, row, column]
    elif desc.block_type.shape[2] > 1:
        slow, fast = grid_place(row, desc.shape[3], box_height(desc.block_type.shape), desc.block_type.shape[3])
        return [tokens.b, tokens.h, slow, fast, column]
    else:
        return [TMA_EXTENT, tokens.start + tokens.n, tokens.h, TMA_EXTENT - tokens.n + row, column]


@gluon.constexpr_function
def box_height(shape):
    """Tokens of a box along the slow axis, from the shape of a part of it."""
    return GRID_BOX.value // shape[3]


@triton.jit
def grid_place(row, length, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Where row `row` of a grid of tokens lies along its slow and its fast axis, of `length`. Rows are counted box by
    box, and in a box, by the slow axis first."""
    box = row // (HEIGHT * WIDTH)
    inside = row % (HEIGHT * WIDTH)
    across = tl.cast(length, tl.int32) // WIDTH
    return box // across * HEIGHT + inside // WIDTH, box % across * WIDTH + inside % WIDTH


@gluon.jit
def tensor_of(ptr, desc):
    """The tensor at `ptr` that a TMA descriptor describes."""
    if len(desc.block_type.shape) == 4:
        return GlobalTensor(ptr, (desc.strides[0], desc.strides[2], desc.strides[1]), desc.shape[3])
    elif desc.block_type.shape[2] > 1:
        strides = (desc.strides[0], desc.strides[2], desc.strides[1])
        fast = (desc.strides[3], desc.shape[3], box_height(desc.block_type.shape), desc.block_type.shape[3])
        return GlobalTensor(ptr, strides + fast, desc.shape[4])
    else:
        return GlobalTensor(ptr, (0, desc.strides[3], desc.strides[2]), desc.shape[4])


@gluon.jit
def global_rows(x, b, h, start, i):
    """Pointers to the rows i of the sequence that starts at row `start`."""
    offset = tl.cast(b, tl.int64) * x.strides[0] + tl.cast(h, tl.int64) * x.strides[2]
    if len(x.strides) == 3:
        offset += (tl.cast(start, tl.int64) + tl.cast(i, tl.int64)) * x.strides[1]
    else:
        slow, fast = grid_place(i, x.strides[4], x.strides[5], x.strides[6])
        offset += tl.cast(slow, tl.int64) * x.strides[1] + tl.cast(fast, tl.int64) * x.strides[3]
    return x.ptr + opaque64(offset)


@gluon.jit
def load_global(x, tokens, first, column, like):
    """x at the rows `first` and on of `tokens` and the columns `column` and on, with the shape and layout of `like`;
    0 outside of x."""
    i = first + gl.arange(0, like.shape[0], gl.SliceLayout(1, like.type.layout))
    c = column_indices(opaque(gl.to_tensor(column)), like)
    p = global_rows(x, tokens.b, tokens.h, tokens.start, i)[:, None] + c[None, :]
    return gl.load(p, mask=(i < tokens.n)[:, None] & (c < x.columns)[None, :], other=0.0)


@gluon.jit
def store_global(out, x, tokens, first, column):
    """Stores x at the rows `first` and on of `tokens` and the columns `column` and on."""
    i = first + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    c = column_indices(opaque(gl.to_tensor(column)), x)
    p = global_rows(out, tokens.b, tokens.h, tokens.start, i)[:, None] + c[None, :]
    gl.store(p, x.to(out.ptr.dtype.element_ty), mask=(i < tokens.n)[:, None] & (c < out.columns)[None, :])


TILE_SLOTS: gl.constexpr = gl.constexpr(4)  # tiles that the producer may be ahead of the slowest consumer
TILE_FIELDS: gl.constexpr = gl.constexpr(8)
# Triton compiles a kernel once for all values of these arguments. By default it compiles another one for 1 and for
# multiples of 16. For integers in a tuple it always does, so these are single arguments (docs/gotchas.md).
ANY_VALUE = {
    "do_not_specialize": [
        *("n_q", "n_k", "before", "after", "padded_tokens", "ascending_rows"),
        *("group", "query_shift", "query_step", "padded_keys"),
        *("num_tiles", "rows", "tiles_per_row", "heads", "batch", "rows_in_l2", "grouped_rows"),
        *("new_tokens", "max_length", "table_stride", "num_pages", "k_page_stride", "v_page_stride"),
    ],
    "do_not_specialize_on_alignment": ["cu_q", "cu_k"],
}
# Named barriers: the compiler uses the first ones, up to 5 in these kernels. This is the first of the forward's
# ping-pong, which has one for each warpgroup. The backward's are in backward_common.py, backward_rows.py and
# backward_wide.py.
PING_PONG_BARRIER: gl.constexpr = gl.constexpr(8)


class Pipeline(NamedTuple):
    """Tiles on their way from the producer to the consumers. `full`: the tile has arrived; `empty`: all consumers have
    released it. The columns of a tile are one or two parts, each a power of two wide: 128 and 64 for head dim 192.
    """

    parts: tuple[gl.shared_memory_descriptor, ...]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class TileInfo(NamedTuple):
    """The coordinates of the current tiles, which the producer writes and the consumers read in shared memory."""

    ints: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class TileScheduler(NamedTuple):
    """`num_tiles` tiles: `tiles_per_row` for each of `rows` (batch, head) pairs. Programs draw them from `counter`.
    The tiles of `rows_in_l2` neighbouring rows are scheduled together, because what they share fits into L2. Only the
    first `grouped_rows` rows (None: all) form such groups. The others are one more group at the end."""

    counter: tl.tensor
    num_tiles: tl.tensor
    rows: tl.tensor
    tiles_per_row: tl.tensor
    heads: tl.tensor
    batch: tl.tensor
    rows_in_l2: tl.tensor
    grouped_rows: tl.tensor


class CachePointers(NamedTuple):
    """Tensors of a KV cache; `lengths` is None without one. `lengths`: keys of each sequence before new ones; `cu_new`:
    cumulative numbers of new keys, if they differ; `table`: pages of each sequence; `rows`: rows of a dense cache."""

    lengths: tl.tensor = None
    cu_new: tl.tensor = None
    table: tl.tensor = None
    rows: tl.tensor = None


class KvCache(NamedTuple):
    """A KV cache: its pointers, and integers. `new_tokens` were added to each length, which is at most `max_length`.
    There are `num_pages` pages (or rows), `k_page_stride` and `v_page_stride` tokens apart."""

    lengths: tl.tensor
    cu_new: tl.tensor
    table: tl.tensor
    rows: tl.tensor
    new_tokens: tl.tensor
    max_length: tl.tensor
    table_stride: tl.tensor
    num_pages: tl.tensor
    k_page_stride: tl.tensor
    v_page_stride: tl.tensor


@gluon.jit
def ping_pong_wait(WG: gl.constexpr, CONFIG: gl.constexpr):
    """Waits until the warpgroup before this one has issued its products."""
    if CONFIG.PING_PONG:
        bar_sync(PING_PONG_BARRIER + WG, 256)


@gluon.jit
def ping_pong_arrive(WG: gl.constexpr, CONFIG: gl.constexpr):
    """Lets the next warpgroup issue its products."""
    if CONFIG.PING_PONG:
        bar_arrive(PING_PONG_BARRIER + (WG + 1) % CONFIG.WARPGROUPS, 256)


@gluon.jit
def make_mbarriers(N: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(N):
        mbarrier.init(bars.index(n), count=ARRIVALS)
    return bars


@gluon.jit
def as_parts(first, rest):
    """The descriptors of the one or two column parts of a tensor, as a tuple. `rest`: the second one, or None."""
    if rest is None:
        return (first,)
    else:
        return first, rest


@gluon.jit
def make_pipeline(x, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, BOXES: gl.constexpr = 1):
    """A pipeline of tiles, each of BOXES boxes of the descriptors x below one another."""
    full = make_mbarriers(STAGES, 1)
    empty = make_mbarriers(STAGES, CONSUMERS)
    if len(x) == 1:
        return Pipeline((allocate_tiles(x[0], STAGES, BOXES),), full, empty)
    else:
        return Pipeline((allocate_tiles(x[0], STAGES, BOXES), allocate_tiles(x[1], STAGES, BOXES)), full, empty)


@gluon.jit
def allocate_tiles(desc, N: gl.constexpr, BOXES: gl.constexpr = 1):
    """Shared memory for N tiles of BOXES boxes of a descriptor each."""
    return gl.allocate_shared_memory(desc.dtype, stacked_shape(desc.block_type.shape, N, BOXES), desc.layout)


@gluon.constexpr_function
def stacked_shape(shape, n, boxes):
    *outer, rows, columns = shape
    return [n, *outer, rows * boxes, columns]


@gluon.jit
def make_tile_info(CONSUMERS: gl.constexpr):
    ints = gl.allocate_shared_memory(gl.int32, [TILE_SLOTS * TILE_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return TileInfo(ints, make_mbarriers(TILE_SLOTS, 1), make_mbarriers(TILE_SLOTS, CONSUMERS))


@gluon.jit
def phase(n, STAGES: gl.constexpr):
    return (n // STAGES) & 1


@gluon.jit
def load_stage(pipe, n, x, tokens, row, STAGES: gl.constexpr):
    """Producer, use n: waits until the consumers have released use n - STAGES, then loads the tile from `row` on."""
    stage = n % STAGES
    mbarrier.wait(pipe.empty.index(stage), phase(n, STAGES) ^ 1)
    load_tile(pipe, stage, x, tokens, row)


@gluon.jit
def load_tile(pipe, stage, x, tokens, row):
    """Issues the TMA loads of all parts of the tile from `row` on."""
    full = pipe.full.index(stage)
    if len(x) == 1:
        mbarrier.expect(full, x[0].block_type.nbytes)
        tma_load(x[0], tma_coordinates(x[0], tokens, row), full, pipe.parts[0].index(stage))
    else:
        WIDTH: gl.constexpr = x[0].block_type.shape[-1]
        mbarrier.expect(full, x[0].block_type.nbytes + x[1].block_type.nbytes)
        tma_load(x[0], tma_coordinates(x[0], tokens, row), full, pipe.parts[0].index(stage))
        tma_load(x[1], tma_coordinates(x[1], tokens, row, WIDTH), full, pipe.parts[1].index(stage))


@triton.jit
def cache_length(cache, b):
    """The number of keys of sequence b."""
    n = tl.load(cache.lengths + b)
    if cache.cu_new is None:
        n += cache.new_tokens
    else:
        n += tl.maximum(tl.load(cache.cu_new + b + 1) - tl.load(cache.cu_new + b), 0)
    return clamp(n, 0, cache.max_length)


@triton.jit
def cache_row(cache, b):
    """The row of a dense cache that holds sequence b."""
    if cache.rows is None:
        return b
    else:
        return clamp(tl.load(cache.rows + b), 0, cache.num_pages - 1)


@gluon.jit
def load_stage_from_pages(pipe, n, x, page_stride, tokens, first_key, cache, CONFIG: gl.constexpr):
    """`load_stage` from a paged cache: box by box, each within one page. A box past the end of the sequence has no page
    and is zero."""
    BOX: gl.constexpr = x[0].block_type.shape[3]
    WIDTH: gl.constexpr = x[0].block_type.shape[4]
    BOXES: gl.constexpr = CONFIG.PAGE_BOXES
    PREFETCH: gl.constexpr = CONFIG.PAGE_PREFETCH
    stage = n % CONFIG.STAGES
    full = pipe.full.index(stage)
    pages = cache.table + tl.cast(tokens.b, tl.int64) * cache.table_stride
    found = ()
    if PREFETCH > 1:  # the first page numbers are loaded before the stage is empty, to hide their latency
        found = load_page_numbers(pages, first_key, tokens.n, 0, BOX, CONFIG)
    mbarrier.wait(pipe.empty.index(stage), phase(n, CONFIG.STAGES) ^ 1)
    if len(x) == 1:
        mbarrier.expect(full, x[0].block_type.nbytes * BOXES)
    else:
        mbarrier.expect(full, (x[0].block_type.nbytes + x[1].block_type.nbytes) * BOXES)
    for i in gl.static_range(BOXES):
        key = first_key + i * BOX
        left = clamp(tokens.n - key, 0, BOX)
        if PREFETCH == 1:
            page = gl.load(pages + key // CONFIG.PAGE_SIZE, mask=left > 0, other=0)
        else:
            if i > 0 and i % PREFETCH == 0:
                found = load_page_numbers(pages, first_key, tokens.n, i, BOX, CONFIG)
            page = found[i % PREFETCH]
        start = clamp(page, 0, cache.num_pages - 1) * page_stride + key % CONFIG.PAGE_SIZE
        box = Tokens(tokens.b, tokens.h, start, left)
        tma_load(x[0], tma_coordinates(x[0], box, 0), full, pipe.parts[0].index(stage).slice(i * BOX, BOX, dim=3))
        if len(x) == 2:
            part = pipe.parts[1].index(stage).slice(i * BOX, BOX, dim=3)
            tma_load(x[1], tma_coordinates(x[1], box, 0, WIDTH), full, part)


@gluon.jit
def load_page_numbers(pages, first_key, length, first_box, BOX: gl.constexpr, CONFIG: gl.constexpr):
    """The pages of PAGE_PREFETCH boxes, from box `first_box` of the block at `first_key` on; 0 past the end of the
    sequence."""
    PREFETCH: gl.constexpr = CONFIG.PAGE_PREFETCH
    found = ()
    for i in gl.static_range(PREFETCH):
        key = first_key + (first_box + i) * BOX
        found = found + (gl.load(pages + key // CONFIG.PAGE_SIZE, mask=key < length, other=0),)  # noqa: RUF005
    return found


@gluon.jit
def wait_full(pipe, n, STAGES: gl.constexpr, pred=True):
    mbarrier.wait(pipe.full.index(n % STAGES), phase(n, STAGES), pred=pred)


@gluon.jit
def release(pipe, n, STAGES: gl.constexpr):
    """Consumer: use n may be overwritten."""
    arrive(pipe.empty.index(n % STAGES))


@gluon.jit
def stage_tile(tiles, n, STAGES: gl.constexpr):
    """The tile of use n as (rows, columns)."""
    COLUMNS: gl.constexpr = tiles.shape[-1]
    # a known 0 would keep all of a wgmma's descriptors in registers
    stage = opaque(gl.to_tensor(0)) if STAGES == 1 else n % STAGES
    return tiles.index(stage).reshape([num_rows(tiles.shape), COLUMNS])


@gluon.constexpr_function
def num_rows(shape):
    """Rows of each of the tiles that lie along the first axis."""
    count = 1
    for n in shape[1:-1]:
        count *= n
    return count


@gluon.constexpr_function
def is_varlen(cu_q, cache_lengths):
    """Whether sequences differ in length: then the tile info has their lengths."""
    return cu_q is not None or cache_lengths is not None


@gluon.jit
def write_tile_info(info, n, w, VARLEN: gl.constexpr):
    """Producer: hands the n-th tile to the consumers. A tile with first = -1 ends their loops."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = n % TILE_SLOTS
    mbarrier.wait(info.empty.index(slot), phase(n, TILE_SLOTS) ^ 1)
    fields = (w.first, w.b, w.h, w.q0, w.n_q, w.k0, w.n_k)
    for i in gl.static_range(7 if VARLEN else 3):
        info.ints.index(slot * TILE_FIELDS + i).store(gl.full([1], fields[i], gl.int32, one))
    mbarrier.arrive(info.full.index(slot), count=1)


@gluon.jit
def load_int(ints, i):
    """An int from shared memory, as a scalar."""
    return gl.max(ints.index(i).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def wait_tile_info(info, n, n_q, n_k, VARLEN: gl.constexpr):
    """Consumer: waits for the n-th tile and returns its Work."""
    mbarrier.wait(info.full.index(n % TILE_SLOTS), phase(n, TILE_SLOTS))
    return read_tile_info(info, n, n_q, n_k, VARLEN)


@gluon.jit
def read_tile_info(info, n, n_q, n_k, VARLEN: gl.constexpr):
    """The Work of the n-th tile, which has been waited for and not released."""
    slot = n % TILE_SLOTS
    first = load_int(info.ints, slot * TILE_FIELDS)
    b = load_int(info.ints, slot * TILE_FIELDS + 1)
    h = load_int(info.ints, slot * TILE_FIELDS + 2)
    if VARLEN:
        q0 = load_int(info.ints, slot * TILE_FIELDS + 3)
        n_q = load_int(info.ints, slot * TILE_FIELDS + 4)
        k0 = load_int(info.ints, slot * TILE_FIELDS + 5)
        n_k = load_int(info.ints, slot * TILE_FIELDS + 6)
        return Work(b, h, first, q0, n_q, k0, n_k, 0)
    else:
        return Work(b, h, first, 0, n_q, 0, n_k, 0)


@gluon.jit
def release_tile_info(info, n):
    mbarrier.arrive(info.empty.index(n % TILE_SLOTS), count=1)


@triton.jit
def tile_and_row(tile_id, scheduler):
    """(tile, (batch, head) row) of a tile id. Rows come in groups that share L2; within a group the last tiles come
    first, which see the most keys under a causal mask.
    """
    grouped = scheduler.grouped_rows
    first = tile_id // (scheduler.rows_in_l2 * scheduler.tiles_per_row) * scheduler.rows_in_l2
    if grouped is None:
        size = tl.minimum(scheduler.rows_in_l2, scheduler.rows - first)
    else:
        grouped = opaque(grouped)
        size = tl.where(first < grouped, scheduler.rows_in_l2, scheduler.rows - grouped)
        first = tl.minimum(first, grouped)
    rest = tile_id - first * scheduler.tiles_per_row
    return scheduler.tiles_per_row - 1 - rest // size, first + rest % size


@triton.jit
def tile_work(tile_id, scheduler, params, CONFIG: tl.constexpr):
    """The Work of a tile id of the forward. With a KV cache, k0 is the row of a dense cache that holds the keys; and a
    sequence with at most MAX_DECODE_QUERIES queries has n_q = 0, because the decode kernels compute it."""
    n_q = params.n_q
    n_k = params.n_k
    cu_q = params.cu_q
    cache = params.cache
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    MAX_DECODE_QUERIES: tl.constexpr = CONFIG.MAX_DECODE_QUERIES
    tile, row = tile_and_row(tile_id, scheduler)
    tile_number = row * scheduler.tiles_per_row + tile
    grid = Grid(scheduler.tiles_per_row, scheduler.heads, scheduler.batch)
    w = locate(tile_number, grid, Sequences(cu_q, params.cu_k, n_q, n_k), cu_q, BLOCK_M)
    if cache.lengths is None:
        return w
    else:
        n_q = w.n_q if MAX_DECODE_QUERIES == 0 else tl.where(w.n_q > MAX_DECODE_QUERIES, w.n_q, 0)
        return Work(w.b, w.h, w.first, w.q0, n_q, cache_row(cache, w.b), cache_length(cache, w.b), w.r0)


@gluon.jit
def next_tile_id(scheduler):
    """Draws the next tile id. A program's first one is its program id. The last draw of a launch resets the counter."""
    old = gl.atomic_add(scheduler.counter, 1, sem="relaxed")
    if old == scheduler.num_tiles - 1:
        gl.store(scheduler.counter, 0)
    return old + gl.num_programs(0)


@triton.jit
def block_range(first, w, params, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks [lo, hi) of keys that the queries first .. first + ROWS - 1 visit, at least one, and their span. With
    a block mask, blocks are numbered along the listed tiles, concatenated as in `loop_range`; block -1 stands for an
    empty list."""
    lists = params.terms.blocks
    at = first + w.n_k - w.n_q
    span = band(at, at + ROWS - 1, w.n_k, params.before, params.after, BLOCK)
    lo, hi = loop_range(span, w, w.h, lists, BLOCK)
    if lists.offsets is not None:
        hi = tl.where(lo < hi, hi, 0)
        lo = tl.where(lo < hi, lo, -BLOCK)
    lo = lo // BLOCK
    return lo, tl.maximum((hi + BLOCK - 1) // BLOCK, lo + 1), span


@triton.jit
def find_block(n, w, lists, BLOCK: tl.constexpr):
    """The first key of block n, and whether it may be partial (see `block_at`)."""
    first, may_be_partial = block_at(n * BLOCK, lists, BLOCK, False)
    if lists.offsets is not None:
        first = tl.where(n < 0, w.n_k, first)  # past the last key: every pair is masked
    return first, may_be_partial


@gluon.jit
def apply_mask_mod(s, may_be_partial, i, j, w, h, params):
    """s, with -inf where the mask mod hides key j from query i. The mask mod is evaluated if `may_be_partial`."""
    if may_be_partial:
        visible = (i == i) & (j == j) & mask_mod_visible(Pairs(w, h, i, j), params.terms, params.MASK_MOD)
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def load_keys(pipe, n, x, page_stride, keys, first_key, cache, CONFIG: gl.constexpr):
    """Loads keys, or their values, from `first_key` on as use n of a pipeline."""
    if CONFIG.FP8:  # stored block by block, one after the other: the block takes the place of the batch row
        load_stage(pipe, n, x, Tokens(keys.b + first_key // CONFIG.BLOCK_N, keys.h, 0, 0), 0, CONFIG.STAGES)
    elif cache.lengths is None:
        load_stage(pipe, n, x, keys, first_key, CONFIG.STAGES)
    elif CONFIG.PAGE_SIZE is None:
        load_stage(pipe, n, x, Tokens(keys.b, keys.h, keys.start * page_stride, keys.n), first_key, CONFIG.STAGES)
    else:
        load_stage_from_pages(pipe, n, x, page_stride, keys, first_key, cache, CONFIG)
