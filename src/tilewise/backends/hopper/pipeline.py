"""How the warps of a program talk: rings of shared-memory tiles, a board with the current work, a queue of all work.

Every barrier here is an mbarrier that counts arrivals and bytes and flips a phase when both are complete. The n-th use
of a ring lies in stage n % STAGES, in phase n // STAGES % 2; both sides only count uses.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.mask import mask_mod_visible
from ..common.device.structs import Pairs, Work
from ..common.device.tile_range import band, block_at, clamp, loop_range
from .gluon_compat import arrive, copy_in, gl, gluon, mbarrier

SLOTS: gl.constexpr = gl.constexpr(4)  # tiles that the producer may be ahead of the slowest consumer
FIELDS: gl.constexpr = gl.constexpr(8)
FAR: gl.constexpr = gl.constexpr(1 << 30)


class Ring(NamedTuple):
    """Tiles on their way from the producer to the consumers: full = has arrived, empty = all consumers are done.

    The columns of a tile come in one or two parts, each a power of two wide: 128 and 64 for a head dim of 192.
    """

    parts: tuple[gl.shared_memory_descriptor, ...]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Board(NamedTuple):
    """Work on its way from the producer to the consumers, a few ints at a time."""

    ints: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Queue(NamedTuple):
    """`total` tiles of work: `tiles` per head; the heads in cohorts whose K and V fit into L2 together."""

    counter: tl.tensor
    total: tl.tensor
    rows: tl.tensor
    tiles: tl.tensor
    heads: tl.tensor
    batch: tl.tensor
    cohort: tl.tensor


@gluon.jit
def barriers(N: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(N):
        mbarrier.init(bars.index(n), count=ARRIVALS)
    return bars


@gluon.jit
def parts(first, rest):
    if rest is None:
        return (first,)
    else:
        return first, rest


@gluon.jit
def ring(x, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, BOXES: gl.constexpr = 1):
    """Tiles of so many boxes of these descriptors, below each other."""
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, CONSUMERS)
    if len(x) == 1:
        return Ring((room(x[0], STAGES, BOXES),), full, empty)
    else:
        return Ring((room(x[0], STAGES, BOXES), room(x[1], STAGES, BOXES)), full, empty)


class Full(NamedTuple):
    """Where results go in float32, from the registers they are in, if there is a pointer: the strides of (batch, token,
    head), and how many columns there are."""

    ptr: tl.tensor = None
    strides: tl.tuple = (0, 0, 0)
    columns: tl.tensor = 0


@gluon.jit
def store_full(full, x, b, h, t, n, first, COLUMN: gl.constexpr):
    """x at the rows `first` and on of the sequence that starts at token t, which has n of them."""
    i = first + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    c = COLUMN + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    p = full.ptr + tl.cast(b, tl.int64) * full.strides[0] + tl.cast(h, tl.int64) * full.strides[2]
    p = p + (tl.cast(t, tl.int64) + i.to(tl.int64))[:, None] * full.strides[1] + c[None, :]
    gl.store(p, x, mask=(i < n)[:, None] & (c < full.columns)[None, :])


@gluon.jit
def room(desc, N: gl.constexpr, BOXES: gl.constexpr = 1):
    """Shared memory for N tiles."""
    return gl.allocate_shared_memory(desc.dtype, tall(desc.block_type.shape, N, BOXES), desc.layout)


@gluon.constexpr_function
def tall(shape, n, boxes):
    *outer, rows, columns = shape
    return [n, *outer, rows * boxes, columns]


@gluon.jit
def board(CONSUMERS: gl.constexpr):
    ints = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Board(ints, barriers(SLOTS, 1), barriers(SLOTS, CONSUMERS))


@gluon.jit
def phase(n, STAGES: gl.constexpr):
    return (n // STAGES) & 1


@gluon.jit
def at(desc, b, h, t, n, row, column=0):
    """Where TMA finds row `row`, from `column` on, of the n rows from token t of batch row b, head h: rows past n read
    as zero and are not written.

    A dense descriptor has the axes (batch, head, token, dim) and ends where the sequence ends. A packed one has (FAR,
    FAR, head, FAR, dim) with the strides (-token, token, head, token, 1), modulo 2^64 bytes: of the many coordinates of
    one row, these put the sequence's last row just before the end of the axis.
    """
    if len(desc.block_type.shape) == 4:
        return [b, h, row, column]
    else:
        return [FAR, t + n, h, FAR - n + row, column]


@gluon.jit
def fill(pipe, n, x, b, h, t, rows, row, STAGES: gl.constexpr):
    """Use n of a ring: wait until the consumers are done with use n - STAGES, then send for the tile from `row` on."""
    stage = n % STAGES
    mbarrier.wait(pipe.empty.index(stage), phase(n, STAGES) ^ 1)
    send(pipe, stage, x, b, h, t, rows, row)


@gluon.jit
def send(pipe, stage, x, b, h, t, rows, row):
    """Send for the tile from `row` on, all its parts."""
    full = pipe.full.index(stage)
    if len(x) == 1:
        mbarrier.expect(full, x[0].block_type.nbytes)
        copy_in(x[0], at(x[0], b, h, t, rows, row), full, pipe.parts[0].index(stage))
    else:
        WIDTH: gl.constexpr = x[0].block_type.shape[-1]
        mbarrier.expect(full, x[0].block_type.nbytes + x[1].block_type.nbytes)
        copy_in(x[0], at(x[0], b, h, t, rows, row), full, pipe.parts[0].index(stage))
        copy_in(x[1], at(x[1], b, h, t, rows, row, WIDTH), full, pipe.parts[1].index(stage))


class Held(NamedTuple):
    """Where keys lie that are a KV cache's, which has `lengths`: how many a sequence has, and as many as `cu_new` says;
    on which pages, by its row of a `table`, or in which of the `rows`."""

    lengths: tl.tensor = None
    cu_new: tl.tensor = None
    table: tl.tensor = None
    rows: tl.tensor = None


class Cached(NamedTuple):
    """The same, with its numbers: `new` keys were added to each length, and no sequence has more than `most`; the next
    row of the table is `line` further; there are `count` pages, or rows; `step_k` and `step_v` tokens lie from one to
    the next."""

    lengths: tl.tensor
    cu_new: tl.tensor
    table: tl.tensor
    rows: tl.tensor
    new: tl.tensor
    most: tl.tensor
    line: tl.tensor
    count: tl.tensor
    step_k: tl.tensor
    step_v: tl.tensor


@triton.jit
def length_of(cache, b):
    n = tl.load(cache.lengths + b)
    if cache.cu_new is None:
        n += cache.new
    else:
        n += tl.maximum(tl.load(cache.cu_new + b + 1) - tl.load(cache.cu_new + b), 0)
    return clamp(n, 0, cache.most)


@triton.jit
def row_of(cache, b):
    """The row of a dense cache."""
    if cache.rows is None:
        return b
    else:
        return clamp(tl.load(cache.rows + b), 0, cache.count - 1)


@gluon.jit
def gather(
    pipe, n, x, cache, step, b, h, rows, row, STAGES: gl.constexpr, PAGE: gl.constexpr, BOXES: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """`fill`, where the tile's rows lie on pages: box by box, none of which leaves its page. A box past the end of the
    sequence has no page, and is zero."""
    BOX: gl.constexpr = x[0].block_type.shape[3]
    WIDTH: gl.constexpr = x[0].block_type.shape[4]
    stage = n % STAGES
    full = pipe.full.index(stage)
    pages = cache.table + tl.cast(b, tl.int64) * cache.line
    found = ()
    if AHEAD > 1:  # several at once, the first before there is room: they take long, and what waits for them is short
        found = some_pages(pages, row, rows, 0, BOX, PAGE, AHEAD)
    mbarrier.wait(pipe.empty.index(stage), phase(n, STAGES) ^ 1)
    if len(x) == 1:
        mbarrier.expect(full, x[0].block_type.nbytes * BOXES)
    else:
        mbarrier.expect(full, (x[0].block_type.nbytes + x[1].block_type.nbytes) * BOXES)
    for i in gl.static_range(BOXES):
        first = row + i * BOX
        left = clamp(rows - first, 0, BOX)
        if AHEAD == 1:
            page = gl.load(pages + first // PAGE, mask=left > 0, other=0)
        else:
            if i > 0 and i % AHEAD == 0:
                found = some_pages(pages, row, rows, i, BOX, PAGE, AHEAD)
            page = found[i % AHEAD]
        t = clamp(page, 0, cache.count - 1) * step + first % PAGE
        copy_in(x[0], at(x[0], b, h, t, left, 0), full, pipe.parts[0].index(stage).slice(i * BOX, BOX, dim=3))
        if len(x) == 2:
            part = pipe.parts[1].index(stage).slice(i * BOX, BOX, dim=3)
            copy_in(x[1], at(x[1], b, h, t, left, 0, WIDTH), full, part)


@gluon.jit
def some_pages(pages, row, rows, first, BOX: gl.constexpr, PAGE: gl.constexpr, COUNT: gl.constexpr):
    """Of so many boxes, from number `first` on, the pages; of those past the end of the sequence, none."""
    found = ()
    for i in gl.static_range(COUNT):
        at = row + (first + i) * BOX
        found = found + (gl.load(pages + at // PAGE, mask=at < rows, other=0),)  # noqa: RUF005
    return found


@gluon.jit
def await_full(pipe, n, STAGES: gl.constexpr, pred=True):
    mbarrier.wait(pipe.full.index(n % STAGES), phase(n, STAGES), pred=pred)


@gluon.jit
def release(pipe, n, STAGES: gl.constexpr):
    arrive(pipe.empty.index(n % STAGES))


@gluon.jit
def matrix(tiles, n, STAGES: gl.constexpr):
    """Use n of a ring's tiles as (rows, columns)."""
    rank: gl.constexpr = len(tiles.shape)
    return tiles.index(n % STAGES).reshape([tiles.shape[rank - 2], tiles.shape[rank - 1]])


@gluon.jit
def post(board, r, w, PACKED: gl.constexpr):
    """Tell the consumers the r-th piece of work; first = -1 is the end."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = r % SLOTS
    mbarrier.wait(board.empty.index(slot), phase(r, SLOTS) ^ 1)
    ints = board.ints
    ints.index(slot * FIELDS).store(gl.full([1], w.first, gl.int32, one))
    ints.index(slot * FIELDS + 1).store(gl.full([1], w.b, gl.int32, one))
    ints.index(slot * FIELDS + 2).store(gl.full([1], w.h, gl.int32, one))
    if PACKED:
        ints.index(slot * FIELDS + 3).store(gl.full([1], w.q0, gl.int32, one))
        ints.index(slot * FIELDS + 4).store(gl.full([1], w.n_q, gl.int32, one))
        ints.index(slot * FIELDS + 5).store(gl.full([1], w.k0, gl.int32, one))
        ints.index(slot * FIELDS + 6).store(gl.full([1], w.n_k, gl.int32, one))
    mbarrier.arrive(board.full.index(slot), count=1)


@gluon.jit
def read(ints, i):
    """An int from shared memory, as a scalar."""
    return gl.max(ints.index(i).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def take(board, r, n_q, n_k, PACKED: gl.constexpr):
    """The r-th piece of work, as the producer posted it."""
    mbarrier.wait(board.full.index(r % SLOTS), phase(r, SLOTS))
    return recall(board, r, n_q, n_k, PACKED)


@gluon.jit
def recall(board, r, n_q, n_k, PACKED: gl.constexpr):
    slot = r % SLOTS
    first = read(board.ints, slot * FIELDS)
    b = read(board.ints, slot * FIELDS + 1)
    h = read(board.ints, slot * FIELDS + 2)
    if PACKED:
        q0 = read(board.ints, slot * FIELDS + 3)
        n_q = read(board.ints, slot * FIELDS + 4)
        k0 = read(board.ints, slot * FIELDS + 5)
        n_k = read(board.ints, slot * FIELDS + 6)
        return Work(b, h, first, q0, n_q, k0, n_k, 0)
    else:
        return Work(b, h, first, 0, n_q, 0, n_k, 0)


@gluon.jit
def hand_back(board, r):
    mbarrier.arrive(board.empty.index(r % SLOTS), count=1)


@triton.jit
def order(ticket, q):
    """(tile, head of the batch) of the ticket-th piece of work: cohort by cohort, and within one the last tiles, which
    see the most keys where the band ends with the query, first.
    """
    leader = ticket // (q.cohort * q.tiles) * q.cohort
    size = tl.minimum(q.cohort, q.rows - leader)
    rest = ticket - leader * q.tiles
    return q.tiles - 1 - rest // size, leader + rest % size


@gluon.jit
def next_ticket(queue):
    """The first ticket of a program is its number; the last one asked for sets the counter back for the next launch."""
    old = gl.atomic_add(queue.counter, 1, sem="relaxed")
    if old == queue.total - 1:
        gl.store(queue.counter, 0)
    return old + gl.num_programs(0)


@triton.jit
def blocks(first, w, before, after, lists, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks [lo, hi) of keys that the queries first .. first + ROWS - 1 visit, at least one, and their span. Of a
    block mask's lists, blocks are counted as `walk` does, through the listed tiles; where none is listed, -1 is."""
    at = first + w.n_k - w.n_q
    span = band(at, at + ROWS - 1, w.n_k, before, after, BLOCK)
    lo, hi = loop_range(span, w, w.h, lists, BLOCK)
    if lists.offsets is not None:
        hi = tl.where(lo < hi, hi, 0)
        lo = tl.where(lo < hi, lo, -BLOCK)
    lo = lo // BLOCK
    return lo, tl.maximum((hi + BLOCK - 1) // BLOCK, lo + 1), span


@triton.jit
def keys_of(n, w, lists, BLOCK: tl.constexpr):
    """The first key of block n, and whether the mask mod may hide some of its pairs."""
    first, picky = block_at(n * BLOCK, lists, BLOCK, False)
    if lists.offsets is not None:
        first = tl.where(n < 0, w.n_k, first)  # past the last key, where nobody sees one
    return first, picky


@gluon.jit
def unless_hidden(s, picky, i, j, w, h, terms, MASK_MOD: gl.constexpr):
    """s, but -inf where the mask mod hides key j from query i. It is asked of blocks that are `picky`."""
    if picky:
        seen = (i == i) & (j == j) & mask_mod_visible(Pairs(w, h, i, j), terms, MASK_MOD)
        s = gl.where(seen, s, float("-inf"))
    return s
