"""What both forms of the Hopper backward share: which queries a key tile visits, how tiles come in and sums go out."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.score import scores_and_derivative
from ..common.device.softmax import exponent
from ..common.device.structs import PAD, Grid, Pairs, Sequences, Work
from ..common.device.tile_range import band, block_at, locate, loop_range
from .gluon_compat import (  # fmt: skip
    add_out,
    await_previous,
    columns,
    copy_in,
    copy_out,
    fence_async_shared,
    gl,
    gluon,
    here,
    hide_from,
    hide_until,
    mbarrier,
    semaphore_release,
    semaphore_wait,
    tma,
    wait_turn,
    warpgroup_mma,
)
from .pipeline import at, barriers, hand_back, next_ticket, order, phase, post, take, unless_hidden

BLOCK_M: gl.constexpr = gl.constexpr(64)
# hardware barrier of a warp that adds dQ, at + the warp, and of whom it adds for
DQ_STORED: gl.constexpr = gl.constexpr(6)


class Plan(NamedTuple):
    """What is known at compile time: columns of the tiles of K and Q, and of V and dO; queries of a block and keys of a
    tile; query heads per KV head; whether dQ is summed in a fixed order; whether by the copy engine; whether there are
    score terms, whether they take q.k itself, not times the scale, and whether the product that would run beside them
    (dP, in the wide form dQ) comes after them, and leaves them its 32 registers."""

    D: int
    DV: int
    BLOCK_M: int
    BLOCK_N: int
    GROUP: int
    ORDERED: bool
    COPIED: bool
    TERMS: bool = False
    FOLD: bool = True
    LATE: bool = False


class Call(NamedTuple):
    """The scalars of a launch, and its score terms. `unit` is log2(e), times the scale where nothing stands between
    q.k and the softmax; `padded` tokens per head in the row statistics and in dQ; where sums are ORDERED, the first
    `rising` lines of heads are visited the other way round."""

    cu_q: tl.tensor
    cu_k: tl.tensor
    n_q: tl.tensor
    n_k: tl.tensor
    before: tl.tensor
    after: tl.tensor
    unit: tl.tensor
    scale: tl.tensor
    padded: tl.tensor
    rising: tl.tensor
    terms: tl.tuple


class Inputs(NamedTuple):
    """Where TMA finds them."""

    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    do: tl.tensor
    lse2: tl.tensor
    delta: tl.tensor


class Outputs(NamedTuple):
    """dQ in float32, as a pointer and, for the copy engine, as rows of 256; dK and dV, and where they go in float32, if
    they do; a flag for what is not finite."""

    sums: tl.tensor
    sum_rows: tl.tensor
    dk: tl.tensor
    dv: tl.tensor
    dk_full: tl.tuple
    dv_full: tl.tuple
    flag: tl.tensor


class Keys(NamedTuple):
    """A key tile in shared memory: K and V, [part of 64 keys, ..., 64, dim]."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class RowRing(NamedTuple):
    """A ring of two tiles of queries (or of their dO), each with a statistic per row: lse2 (or delta)."""

    tiles: gl.shared_memory_descriptor
    statistics: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Visit(NamedTuple):
    """The queries that see a key tile: [lo, hi) in blocks, for every head of the group, from `start` on, `step` at a
    time (of a block mask, as `loop_range` counts them); those inside [full_lo, full_hi) need no mask. `tile` is the
    place of the first head's query 0 among all blocks, in the padded statistics and in dQ."""

    start: tl.tensor
    step: tl.tensor
    lo: tl.tensor
    hi: tl.tensor
    full_lo: tl.tensor
    full_hi: tl.tensor
    tile: tl.tensor


@gluon.jit
def boxes(desc, N: gl.constexpr):
    """Shared memory for N of a descriptor's boxes."""
    return gl.allocate_shared_memory(desc.dtype, [N] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def keys_ring(k, v, PARTS: gl.constexpr):
    return Keys(boxes(k, PARTS), boxes(v, PARTS), barriers(1, 1), barriers(1, 2))


@gluon.jit
def rows_ring(x, statistics):
    return RowRing(boxes(x, 2), boxes(statistics, 2), barriers(2, 1), barriers(2, 2))


@triton.jit
def is_rising(line, call, PLAN: tl.constexpr):
    """Whether the key tiles of this line of heads are drawn, and their ORDERED sums made, last tile first, each tile
    from its first query on. Under a causal band a tile then starts some blocks behind the one that it waits for. But
    the longest come last: so the last cohort goes the other way, as the tiles of sums in any order do."""
    return line < call.rising if PLAN.ORDERED else False


@triton.jit
def find(ticket, queue, call, PLAN: tl.constexpr):
    """The key tile of a ticket: the longest first, which under a causal band are those of the first keys, or rising."""
    tile, head = order(ticket, queue)
    tile = tl.where(is_rising(head, call, PLAN), tile, queue.tiles - 1 - tile)
    pid = head * queue.tiles + tile
    grid = Grid(queue.tiles, queue.heads, queue.batch)
    return locate(pid, grid, Sequences(call.cu_q, call.cu_k, call.n_q, call.n_k), call.cu_k, PLAN.BLOCK_N)


@gluon.jit
def visit_of(w, queue, call, PLAN: tl.constexpr):
    """Tiles start with the first query that sees them, wide ones where their keys are, so that the tiles of one head
    add to different parts of dQ at any time; ORDERED, with the last query, or rising with the first."""
    BLOCK_M: tl.constexpr = PLAN.BLOCK_M
    at = w.first + here(w.n_q) - here(w.n_k)
    # the forward's band, sideways
    span = band(at, at + PLAN.BLOCK_N - 1, here(w.n_q), call.after, call.before, BLOCK_M)
    lo, hi = loop_range(span, w, w.h * PLAN.GROUP, call.terms.blocks, BLOCK_M)
    hi = tl.maximum((hi + BLOCK_M - 1) // BLOCK_M * BLOCK_M, lo)
    line = w.h
    if call.cu_q is None:
        line += w.b * queue.heads
    start = lo
    step = BLOCK_M
    if PLAN.ORDERED:
        rising = is_rising(line, call, PLAN)
        start = tl.where(rising, start, hi - BLOCK_M)
        step = tl.where(rising, BLOCK_M, -BLOCK_M)
    elif PLAN.D > 128:
        start = tl.maximum(tl.minimum(at // BLOCK_M * BLOCK_M, hi - BLOCK_M), start)
    full_hi = tl.where(w.first + PLAN.BLOCK_N > w.n_k, 0, span.full_hi)
    blocks = here(call.padded) // BLOCK_M
    if call.cu_q is None:
        tile = line * PLAN.GROUP * blocks
    else:
        tile = line * PLAN.GROUP * blocks + (w.q0 // PAD + w.b) * (PAD // BLOCK_M)
    return Visit(start, step, lo, hi, span.full_lo, full_hi, tile)


@gluon.jit
def blocks_of(visit, PLAN: gl.constexpr):
    return PLAN.GROUP * ((visit.hi - visit.lo) // PLAN.BLOCK_M)


@gluon.jit
def after_block(visit, i0, g, PLAN: gl.constexpr):
    """The block after that at i0 of head g of the group: the next one of this head; ORDERED, that of the next
    head, which keeps programs that wait for one another at the same queries."""
    if PLAN.ORDERED:
        last = g == PLAN.GROUP - 1
        return gl.where(last, i0 + visit.step, i0), gl.where(last, 0, g + 1)
    elif PLAN.GROUP == 1 and PLAN.D <= 128:
        return i0 + PLAN.BLOCK_M, g
    else:
        i0 += PLAN.BLOCK_M
        i0 = gl.where(i0 == visit.hi, visit.lo, i0)
        return i0, gl.where(i0 == visit.start, g + 1, g)


@gluon.jit
def is_edge(visit, i0, PLAN: gl.constexpr):
    return (i0 < visit.full_lo) | (i0 + PLAN.BLOCK_M > visit.full_hi)


@gluon.jit
def masked(s, at, left, call):
    """s^T, -inf where the query does not see the key: its first key is the diagonal of query `at`, and `left` of its
    keys exist. Queries past the end need no mask: their lse2 is +inf."""
    j = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
    start = gl.where(j < left, 0, s.shape[1])
    if call.after is not None:
        start = gl.maximum(start, j + (here(at) - call.after))
    s = hide_until(s, start)
    if call.before is not None:
        s = hide_from(s, j + (here(at) + call.before + 1))
    return s


@gluon.jit
def exponents(
    s, lse2, w, h, i0, edge, picky, at, left, call,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """log2 P^T from S^T = K Q^T, the queries being those of head h from i0 on, `at` and `left` as in `masked` for query
    0; and the slope of the score mod. The mask mod is asked of blocks that are `picky`."""
    slope = s
    if PLAN.TERMS:
        w = Work(w.b, w.h, w.first, w.q0, here(w.n_q), w.k0, here(w.n_k), w.r0)
        i = columns(i0, s)[None, :]
        j = (w.n_k - left + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout)))[:, None]
        s, slope = scores_and_derivative(s, Pairs(w, h, i, j), call.scale, call.terms, SCORE_MOD, PLAN.FOLD)
    s = exponent(s, lse2, call.unit, call.terms.large_scores)
    if MASK_MOD is not None:
        s = unless_hidden(s, picky, i, j, w, h, call.terms, MASK_MOD)
    if edge:
        s = masked(s, at - i0, left, call)
    return s, slope


@gluon.jit
def product_t(a, b):
    """a b^T of a [64, dim] and a [N, dim] tile in shared memory, on its way."""
    N: gl.constexpr = b.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    return warpgroup_mma(a, b.permute((1, 0)), gl.zeros([64, N], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def in_register_order(dq):
    """[64, N] as [N / 4, 256] with each thread's values in fours. `finish_kernel` puts them in place."""
    N: gl.constexpr = dq.shape[1]
    x = dq.reshape([4, 2, 8, N // 8, 4, 2])  # warp, half of its rows, row, group of columns, pair, column
    return x.permute((3, 0, 2, 4, 1, 5)).reshape([N // 4, 256])


@gluon.jit
def add_to(sums, dq, tile):
    """sums[tile] += dq, [64, N], in global memory, straight from the registers: four values to an instruction."""
    GROUPS: gl.constexpr = dq.shape[1] // 8
    x = in_register_order(dq).reshape([GROUPS, 512])  # the row is known at compile time, the column from the thread
    r = gl.arange(0, GROUPS, gl.SliceLayout(1, x.type.layout))[:, None]
    zero = gl.where(tile < 0, 512, 0)  # were it known to be 0, the sum of pointer and column would be kept in registers
    c = gl.arange(0, 512, gl.SliceLayout(0, x.type.layout))[None, :] + zero
    first = sums + tl.cast(tile, tl.int64) * (GROUPS * 512)
    gl.atomic_add(first + c.to(gl.int64) + r.to(gl.int64) * 512, x, sem="relaxed")


@gluon.jit
def report(flag, x):
    """Sets *flag if x has a value that is not finite."""
    bad = gl.sum(x * 0.0, 1)
    gl.store(flag + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout)) * 0, 1, mask=bad != bad)


@gluon.jit
def send(x, tile, desc, where):
    tile.reshape(x.shape).store(x.to(desc.dtype))
    fence_async_shared()
    copy_out(desc, where, tile)


@gluon.jit
def fill_rows(rows, n, x, where, statistics, row, column):
    """Use n of a ring of rows: wait until the consumers are done with use n - 2, then send for tile and statistics."""
    full = rows.full.index(n % 2)
    mbarrier.wait(rows.empty.index(n % 2), phase(n, 2) ^ 1)
    mbarrier.expect(full, x.block_type.nbytes + statistics.block_type.nbytes)
    copy_in(x, where, full, rows.tiles.index(n % 2))
    copy_in(statistics, [row, column], full, rows.statistics.index(n % 2))


@gluon.jit
def fill_keys(keys, inputs, w, turn):
    """Send for the keys of this turn."""
    PARTS: gl.constexpr = keys.k.shape[0]
    full = keys.full.index(0)
    mbarrier.wait(keys.empty.index(0), phase(turn, 1) ^ 1)
    mbarrier.expect(full, PARTS * (inputs.k.block_type.nbytes + inputs.v.block_type.nbytes))
    for part in gl.static_range(PARTS):
        first = w.first + 64 * part
        copy_in(inputs.k, at(inputs.k, w.b, w.h, w.k0, w.n_k, first), full, keys.k.index(part))
        copy_in(inputs.v, at(inputs.v, w.b, w.h, w.k0, w.n_k, first), full, keys.v.index(part))


@gluon.jit
def fill_tile(hold, inputs, w, visit, n, turn, call, PLAN: gl.constexpr):
    """Send for the keys of this turn and the queries that see them; n blocks came before. The first queries find room
    while the keys of the tile before are still in use."""
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    blocks = here(call.padded) // BLOCK_M
    row = visit.tile // blocks
    column = visit.tile % blocks * BLOCK_M
    place = visit.start
    g = gl.to_tensor(0)
    for m in range(n, n + blocks_of(visit, PLAN)):
        i0, _picky = block_at(place, call.terms.blocks, BLOCK_M)
        h = w.h * PLAN.GROUP + g
        q_at = at(inputs.q, w.b, h, w.q0, w.n_q, i0)
        fill_rows(hold.queries, m, inputs.q, q_at, inputs.lse2, row + g, column + i0)
        if m == n:
            fill_keys(hold.keys, inputs, w, turn)
        do_at = at(inputs.do, w.b, h, w.q0, w.n_q, i0)
        fill_rows(hold.grads, m, inputs.do, do_at, inputs.delta, row + g, column + i0)
        place, g = after_block(visit, place, g, PLAN)


@gluon.jit
def produce(hold, inputs, work, call, queue, PLAN: gl.constexpr):
    PACKED: gl.constexpr = call.cu_q is not None
    await_previous()  # the others wait for what comes from here
    ticket = gl.program_id(0)
    w = find(ticket, queue, call, PLAN)
    n = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    while ticket < queue.total:
        if w.first < w.n_k:
            post(work, turn, w, PACKED)
            visit = visit_of(w, queue, call, PLAN)
            if visit.hi > visit.lo:
                fill_tile(hold, inputs, w, visit, n, turn, call, PLAN)
            else:
                fill_keys(hold.keys, inputs, w, turn)
            n += blocks_of(visit, PLAN)
            turn += 1
        ticket = next_ticket(queue)
        w = find(gl.minimum(ticket, queue.total - 1), queue, call, PLAN)
    post(work, turn, Work(w.b, w.h, -1, w.q0, w.n_q, w.k0, w.n_k, 0), PACKED)


@gluon.jit
def adders(w, i0, visit, call, PLAN: gl.constexpr):
    """How many key tiles add to the dQ of the queries from i0 on before this one."""
    diagonal = i0 + w.n_k - w.n_q
    last = w.n_k - 1  # the first and the last key that one of these queries sees
    if call.after is not None:
        last = gl.minimum(last, diagonal + PLAN.BLOCK_M - 1 + call.after)
    first = 0
    if call.before is not None:
        first = gl.maximum(diagonal - call.before, 0)
    tile = w.first // PLAN.BLOCK_N
    return gl.where(visit.step > 0, last // PLAN.BLOCK_N - tile, tile - first // PLAN.BLOCK_N)


@gluon.jit
def add_tiles(out, outputs, semaphores, work, call, queue, WARP: gl.constexpr, PLAN: gl.constexpr):
    """One of two warps that add dQ, each the halves of one warpgroup. ORDERED, each adds every other tile, after the
    sums of the key tiles before this one: it takes longer than a block until others may be told. It waits only for
    tiles that were drawn earlier, and so never for one that nobody works on."""
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    LINES: gl.constexpr = out.dq.shape[1]
    PACKED: gl.constexpr = call.cu_q is not None
    n = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    w = take(work, turn, call.n_q, call.n_k, PACKED)
    while w.first >= 0:
        visit = visit_of(w, queue, call, PLAN)
        place = visit.start
        g = gl.to_tensor(0)
        for _ in range(blocks_of(visit, PLAN)):
            i0, _picky = block_at(place, call.terms.blocks, BLOCK_M)
            tile = visit.tile + g * (here(call.padded) // BLOCK_M) + i0 // BLOCK_M
            if not PLAN.ORDERED:
                wait_turn(DQ_STORED + WARP, 160)
                add_out(outputs.sum_rows, [(tile * 2 + WARP) * LINES, 0], out.dq.index(WARP))
                tma.store_wait(0)
                mbarrier.arrive(out.empty.index(WARP), count=1)
            elif (n & 1) == WARP:
                semaphore_wait(semaphores + tile, adders(w, i0, visit, call, PLAN) * 32)
                wait_turn(DQ_STORED + WARP, 288)
                for half in gl.static_range(2):
                    add_out(outputs.sum_rows, [(tile * 2 + half) * LINES, 0], out.dq.index(half))
                tma.store_wait(0)
                mbarrier.arrive(out.empty.index(0), count=1)
                semaphore_release(semaphores + tile)
            place, g = after_block(visit, place, g, PLAN)
            n += 1
        hand_back(work, turn)
        turn += 1
        w = take(work, turn, call.n_q, call.n_k, PACKED)
