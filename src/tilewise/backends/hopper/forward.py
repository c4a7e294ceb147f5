"""The forward pass on Hopper: a persistent program per SM, one producer warp and two or three consumer warpgroups.

The producer fetches pieces of work, 64 queries for each warpgroup, and copies their Q and then K and V, block by
block, into shared memory. A warpgroup turns K_j into scores, scores into weights, and weights with V_j into output. The
scores of one block and the output of the block before are asked of the tensor cores together, so that the softmax of
one block runs beside the products of another:

    issue S_j = Q K_j^T;  issue O += P_{j-1} V_{j-1};  await S_j;  half of P_j = softmax(S_j);  await O;  the other half

docs/hopper-forward.md has the timeline and says why each barrier is there.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.softmax import log2_scale, rescale_exponent, row_maximum
from ..common.device.structs import ANY_SIZE, LN2, LOG2E, Grid, Sequences, Work
from ..common.device.tile_io import row_pointers
from ..common.device.tile_range import locate
from .forward_tiles import (
    ROWS,
    by_row,
    halves,
    lane_sums,
    nothing,
    operands,
    origin,
    product,
    rescale,
    row_max,
    score,
    settled,
    weigh,
    weights,
    with_sink,
)
from .gluon_compat import (  # fmt: skip
    arrive,
    barrier,
    copy_out,
    fence_async_shared,
    gl,
    gluon,
    let_next_start,
    mbarrier,
    pass_turn,
    tma,
    wait_turn,
    warpgroup_mma_wait,
)
from .pipeline import (  # fmt: skip
    Board,
    Cached,
    Queue,
    Ring,
    at,
    await_full,
    blocks,
    board,
    fill,
    gather,
    hand_back,
    keys_of,
    length_of,
    next_ticket,
    order,
    parts,
    phase,
    post,
    recall,
    release,
    ring,
    room,
    row_of,
    send,
    store_full,
    take,
)

TURN: gl.constexpr = gl.constexpr(8)  # the first hardware barrier that the compiler does not use


class Target(NamedTuple):
    """Where O goes: by TMA, rounded; or, if there is a `full`, as it is."""

    desc: tl.tensor
    full: tl.tuple


class Pipes(NamedTuple):
    q: Ring
    k: Ring
    v: Ring
    o: gl.shared_memory_descriptor
    work: Board


@gluon.jit
def wait_for_turn(WG: gl.constexpr, PLAN: gl.constexpr):
    if PLAN.TURNS:
        wait_turn(TURN + WG, 256)


@gluon.jit
def next_turn(WG: gl.constexpr, PLAN: gl.constexpr):
    if PLAN.TURNS:
        pass_turn(TURN + (WG + 1) % PLAN.WARPGROUPS, 256)


@gluon.jit
def skip(pipes, n, end, WG: gl.constexpr, PLAN: gl.constexpr):
    """Blocks that other warpgroups need and this one does not."""
    for use in range(n, end):
        await_full(pipes.k, use, PLAN.STAGES)
        await_full(pipes.v, use, PLAN.STAGES)
        barrier()  # no warp may still be waiting for a phase that the release lets pass
        release(pipes.k, use, PLAN.STAGES)
        release(pipes.v, use, PLAN.STAGES)
        wait_for_turn(WG, PLAN)
        next_turn(WG, PLAN)


@gluon.jit
def consume(
    pipes, o, lse, flag, n_q, n_k, heads, before, after, scale, terms,
    WG: gl.constexpr, PACKED: gl.constexpr, RAGGED: gl.constexpr, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    unit = log2_scale(scale, PLAN.FOLD)
    if PLAN.TURNS and WG == 0:
        pass_turn(TURN, 256)
    n = gl.to_tensor(0)  # blocks so far: use n of both rings is the next one
    r = gl.to_tensor(0)  # tiles so far
    w = take(pipes.work, r, n_q, n_k, RAGGED)
    while w.first >= 0:
        n = attend(
            pipes, n, r, w, o, lse, flag, n_q, n_k, heads, before, after, scale, unit, terms, WG, PACKED, RAGGED,
            SCORE_MOD, MASK_MOD, PLAN,
        )  # fmt: skip
        hand_back(pipes.work, r)
        r += 1
        w = take(pipes.work, r, n_q, n_k, RAGGED)
    tma.store_wait(0)


@gluon.jit
def attend(
    pipes, n, r, w, o, lse, flag, n_q, n_k, heads, before, after, scale, unit, terms,
    WG: gl.constexpr, PACKED: gl.constexpr, RAGGED: gl.constexpr, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """The warpgroup's queries of the r-th piece of work, n blocks into the rings; how many blocks it is then."""
    DTYPE: gl.constexpr = o.desc.dtype
    STAGES: gl.constexpr = PLAN.STAGES
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    lo, hi, _whole = blocks(w.first, w, before, after, terms.blocks, ROWS * PLAN.WARPGROUPS, BLOCK_N)
    first = w.first + WG * ROWS
    mine, end, span = blocks(first, w, before, after, terms.blocks, ROWS, BLOCK_N)
    mine = gl.minimum(mine if terms.blocks.offsets is None else gl.maximum(mine, lo), hi - 1)
    start = n + mine - lo
    stop = n + gl.minimum(gl.maximum(end, mine + 1), hi) - lo
    skip(pipes, n, start, WG, PLAN)

    key, picky = keys_of(start - n + lo, w, terms.blocks, BLOCK_N)
    mbarrier.wait(pipes.q.full.index(WG), phase(r, 1))
    await_full(pipes.k, start, STAGES)
    s = warpgroup_mma_wait(0, deps=(product(pipes.q, WG, pipes.k, start, PLAN),))
    release(pipes.k, start, STAGES)
    s = score(s, w, span, first, key, picky, before, after, scale, terms, SCORE_MOD, MASK_MOD, PLAN)
    m = row_maximum(row_max(s), unit, terms.large_scores)
    left, right = halves(s)
    p_left = weights(left, origin(m), unit, terms)
    p_right = weights(right, origin(m), unit, terms)
    l = lane_sums(p_left) + lane_sums(p_right)
    p_tile = operands(p_left, p_right, DTYPE, PLAN)
    acc = nothing(PLAN)
    await_full(pipes.k, start + 1, STAGES, start + 1 < stop)
    for use in range(start + 1, stop):
        key, picky = keys_of(use - n + lo, w, terms.blocks, BLOCK_N)
        wait_for_turn(WG, PLAN)
        s_coming = product(pipes.q, WG, pipes.k, use, PLAN)
        await_full(pipes.v, use - 1, STAGES)
        acc_coming = weigh(p_tile, pipes.v, use - 1, acc, PLAN)
        next_turn(WG, PLAN)
        s = warpgroup_mma_wait(2 * len(PLAN.WIDTHS), deps=(s_coming,))
        release(pipes.k, use, STAGES)
        s = score(s, w, span, first, key, picky, before, after, scale, terms, SCORE_MOD, MASK_MOD, PLAN)
        m_before = m
        m = gl.maximum(m, row_maximum(row_max(s), unit, terms.large_scores))
        pivot = origin(m)
        factor = gl.exp2(rescale_exponent(m_before, pivot, unit, terms.large_scores))
        left, right = halves(s)
        p_left = weights(left, pivot, unit, terms)
        l = l * by_row(factor, l) + lane_sums(p_left)
        await_full(pipes.k, use + 1, STAGES, use + 1 < stop)
        acc = settled(acc_coming, p_tile)
        release(pipes.v, use - 1, STAGES)
        p_right = weights(right, pivot, unit, terms)  # what else is left to do is done beside these exponentials
        l += lane_sums(p_right)
        acc = rescale(acc, factor, PLAN.LAZY)
        p_tile = operands(p_left, p_right, DTYPE, PLAN)
    arrive(pipes.q.empty.index(WG))
    await_full(pipes.v, stop - 1, STAGES)
    acc = settled(weigh(p_tile, pipes.v, stop - 1, acc, PLAN), p_tile)
    release(pipes.v, stop - 1, STAGES)
    n += hi - lo
    skip(pipes, stop, n, WG, PLAN)

    w = recall(pipes.work, r, n_q, n_k, RAGGED)
    finish(acc, m, l, w, first, pipes.o.index(WG), o, lse, n_q, heads, flag, terms, PACKED, PLAN)
    return n


@gluon.jit
def finish(
    acc, m, l, w, first, o_tile, o, lse, n_q, heads, flag, terms, PACKED: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """out = acc / l and lse = m (`measured`) + log l, to memory; the flag, where a nan in acc does not come from l."""
    total = gl.sum(l, 1)
    kept = 1.0
    if terms.sinks.ptr is not None:  # a key without a value, seen after all others
        sink = gl.load(terms.sinks.ptr + w.h * terms.sinks.stride).to(gl.float32)
        kept, m, total = with_sink(m, total, row_maximum(sink, LOG2E, terms.large_scores), terms)
    some = gl.where(total == 0.0, 1.0, total)
    WIDTH: gl.constexpr = PLAN.BLOCK_DV // PLAN.PARTS
    if o.full.ptr is not None:
        sums = store_whole(acc[0], kept / some, o.full, w, first, 0)
        if len(acc) == 2:
            more = store_whole(acc[1], kept / some, o.full, w, first, PLAN.WIDTHS[0])
            sums += gl.convert_layout(more, sums.type.layout, assert_trivial=True)
    else:
        if PLAN.PARTS == 2 and len(acc) == 1:
            acc = halves(acc[0])
        tma.store_wait(0)  # the last tile has left this memory
        sums = store_part(acc[0], kept / some, o_tile.reshape([ROWS, WIDTH]), 0)
        if PLAN.PARTS == 2:
            fence_async_shared()
            copy_out(o.desc, at(o.desc, w.b, w.h, w.q0, w.n_q, first), o_tile)
            tma.store_wait(0)
        if len(acc) == 2:
            COLUMN: gl.constexpr = 0 if PLAN.PARTS == 2 else PLAN.WIDTHS[0]
            more = store_part(acc[1], kept / some, o_tile.reshape([ROWS, WIDTH]), COLUMN)
            sums += gl.convert_layout(more, sums.type.layout, assert_trivial=True)
        fence_async_shared()
        copy_out(o.desc, at(o.desc, w.b, w.h, w.q0, w.n_q, first, WIDTH * (PLAN.PARTS - 1)), o_tile)
    if flag is not None:
        sound = gl.convert_layout(total, gl.SliceLayout(1, sums.type.layout))[:, None]
        odd = (sums != sums) & (sound == sound)
        gl.store(flag + odd.to(gl.int32) * 0, odd.to(gl.int32), mask=odd)
    i = first + gl.arange(0, ROWS, m.type.layout)
    some = gl.convert_layout(some, m.type.layout)
    log = gl.log2(some)
    log += (some * gl.exp2(-log) - 1.0) * LOG2E  # a Newton step: the hardware's log2 is off by 2^-22
    seen = gl.convert_layout(total, m.type.layout) != 0.0
    log = (m + log) * LN2 if terms.large_scores is None else m + log * LN2
    rows = row_pointers(lse, n_q, heads, w.b, w.h, w.q0, i, PACKED)
    gl.store(rows, gl.where(seen, log, float("-inf")), mask=i < w.n_q)


@gluon.jit
def store_part(acc, share, o_tile, COLUMN: gl.constexpr):
    """out = share * acc to its columns of the tile in shared memory; the lanes' sums of it."""
    out = acc * gl.convert_layout(share, gl.SliceLayout(1, acc.type.layout))[:, None]
    o_tile.slice(COLUMN, acc.shape[1], dim=1).store(out.to(o_tile.dtype))
    return lane_sums(out)


@gluon.jit
def store_whole(acc, share, full, w, first, COLUMN: gl.constexpr):
    """The same to memory, in float32."""
    out = acc * gl.convert_layout(share, gl.SliceLayout(1, acc.type.layout))[:, None]
    store_full(full, out, w.b, w.h, w.q0, w.n_q, first, COLUMN)
    return lane_sums(out)


@gluon.jit
def produce(pipes, q, k, v, cu_q, cu_k, n_q, n_k, before, after, lists, queue, cache, PLAN: gl.constexpr):
    """Fetch work; post it; copy K_0, Q, K_1, V_0, K_2, V_1 ..: the order in which the consumers need them."""
    STAGES: gl.constexpr = PLAN.STAGES
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    WARPGROUPS: gl.constexpr = PLAN.WARPGROUPS
    RAGGED: gl.constexpr = (cu_q is not None) or (cache.lengths is not None)
    ticket = gl.program_id(0)
    n = gl.to_tensor(0)
    r = gl.to_tensor(0)
    while ticket < queue.total:
        w = find(ticket, queue, cu_q, cu_k, n_q, n_k, cache, ROWS * WARPGROUPS, PLAN.FEW)
        if w.first < w.n_q:
            post(pipes.work, r, w, RAGGED)
            h = w.h // PLAN.GROUP
            lo, hi, _span = blocks(w.first, w, before, after, lists, ROWS * WARPGROUPS, BLOCK_N)
            row, _picky = keys_of(lo, w, lists, BLOCK_N)
            fetch(pipes.k, n, k, 0, cache, w, h, row, PLAN)
            for wg in gl.static_range(WARPGROUPS):
                mbarrier.wait(pipes.q.empty.index(wg), phase(r, 1) ^ 1)
                send(pipes.q, wg, q, w.b, w.h, w.q0, w.n_q, w.first + wg * ROWS)
            short = hi - lo <= 2 * STAGES  # the next piece of work is wanted before this one's copies are all sent
            if short:
                ticket = next_ticket(queue)
            for j in range(lo + 1, hi):
                row_before = row
                row, _picky = keys_of(j, w, lists, BLOCK_N)
                fetch(pipes.k, n + 1, k, 0, cache, w, h, row, PLAN)
                fetch(pipes.v, n, v, 1, cache, w, h, row_before, PLAN)
                n += 1
            if not short:
                ticket = next_ticket(queue)
            fetch(pipes.v, n, v, 1, cache, w, h, row, PLAN)
            n += 1
            r += 1
        else:
            ticket = next_ticket(queue)
    post(pipes.work, r, Work(0, 0, -1, 0, 0, 0, 0, 0), RAGGED)


@gluon.jit
def fetch(pipe, n, x, IS_V: gl.constexpr, cache, w, h, row, PLAN: gl.constexpr):
    """Keys, or their values, from `row` on, for use n of a ring."""
    STAGES: gl.constexpr = PLAN.STAGES
    if cache.lengths is None:
        fill(pipe, n, x, w.b, h, w.k0, w.n_k, row, STAGES)
    else:
        step = cache.step_v if IS_V else cache.step_k
        if PLAN.PAGE is None:
            fill(pipe, n, x, w.b, h, w.k0 * step, w.n_k, row, STAGES)
        else:
            gather(pipe, n, x, cache, step, w.b, h, w.n_k, row, STAGES, PLAN.PAGE, PLAN.BOXES, PLAN.AHEAD)


@triton.jit
def find(ticket, queue, cu_q, cu_k, n_q, n_k, cache, BLOCK_M: tl.constexpr, FEW: tl.constexpr):
    """The ticket-th piece of work. Of a cache, k0 is the row of a dense one that holds the keys. A sequence of at
    most FEW queries has none."""
    tile, line = order(ticket, queue)
    pid = line * queue.tiles + tile
    grid = Grid(queue.tiles, queue.heads, queue.batch)
    w = locate(pid, grid, Sequences(cu_q, cu_k, n_q, n_k), cu_q, BLOCK_M)
    if cache.lengths is None:
        return w
    else:
        n_q = w.n_q if FEW == 0 else tl.where(w.n_q > FEW, w.n_q, 0)
        return Work(w.b, w.h, w.first, w.q0, n_q, row_of(cache, w.b), length_of(cache, w.b), w.r0)


@gluon.jit(**ANY_SIZE)
def forward_kernel(
    q, q_rest, k, k_rest, v, v_rest, o, o_full, lse, counter, flag, cu_q, cu_k, n_q, n_k, before, after, scale,
    total, lines, tiles, heads, batch, cohort, terms, held, new, most, line, count, step_k, step_v,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    PACKED: gl.constexpr = cu_q is not None
    cache = Cached(held.lengths, held.cu_new, held.table, held.rows, new, most, line, count, step_k, step_v)
    RAGGED: gl.constexpr = PACKED or (cache.lengths is not None)
    WARPGROUPS: gl.constexpr = PLAN.WARPGROUPS
    queue = Queue(counter, total, lines, tiles, heads, batch, cohort)
    let_next_start()
    q = parts(q, q_rest)
    k = parts(k, k_rest)
    v = parts(v, v_rest)
    q_ring = ring(q, WARPGROUPS, 1)
    k_ring = ring(k, PLAN.STAGES, WARPGROUPS, PLAN.BOXES)
    v_ring = ring(v, PLAN.STAGES, WARPGROUPS, PLAN.BOXES)
    pipes = Pipes(q_ring, k_ring, v_ring, room(o, WARPGROUPS), board(WARPGROUPS))
    o = Target(o, o_full)
    fence_async_shared()
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (consume, (
                pipes, o, lse, flag, n_q, n_k, heads, before, after, scale, terms, 0, PACKED, RAGGED,
                SCORE_MOD, MASK_MOD, PLAN,
            )),
            (consume, (
                pipes, o, lse, flag, n_q, n_k, heads, before, after, scale, terms, 1, PACKED, RAGGED,
                SCORE_MOD, MASK_MOD, PLAN,
            )),
            (produce, (pipes, q, k, v, cu_q, cu_k, n_q, n_k, before, after, terms.blocks, queue, cache, PLAN)),
        ], [4, 1], [240, 24] if PLAN.BOXES == 1 else [232, 40] if PLAN.AHEAD < 8 else [224, 56])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (
                pipes, o, lse, flag, n_q, n_k, heads, before, after, scale, terms, 0, PACKED, RAGGED,
                SCORE_MOD, MASK_MOD, PLAN,
            )),
            (consume, (
                pipes, o, lse, flag, n_q, n_k, heads, before, after, scale, terms, 1, PACKED, RAGGED,
                SCORE_MOD, MASK_MOD, PLAN,
            )),
            (consume, (
                pipes, o, lse, flag, n_q, n_k, heads, before, after, scale, terms, 2, PACKED, RAGGED,
                SCORE_MOD, MASK_MOD, PLAN,
            )),
            (produce, (pipes, q, k, v, cu_q, cu_k, n_q, n_k, before, after, terms.blocks, queue, cache, PLAN)),
        ], [4, 4, 1], [160, 160, 32] if PLAN.BOXES > 1 else [160, 160, 24])  # fmt: skip
