"""The backward pass on Hopper for head dims above 128: five products, read from shared memory as rarely as possible.

A program owns 64 keys of one KV head at a time and streams past them the queries that see them, 64 by 64. dK and dV of
more keys would not fit into the registers; so the two warpgroups share them, and each has its own work on the scores:

    warpgroup 0    S^T = K Q^T       P^T = exp2(unit S^T - lse2)      to the other, in float32
    warpgroup 1    dP^T = V dO^T     dS^T = P^T * (dP^T - delta)      to the other, in 16 bits
    each, for its half of the columns:    dV += P^T dO    dK += dS^T Q    dQ = dS K

P^T and dS^T are computed by turns: while one warpgroup computes, the products of the other run. P^T of the next block
comes after dS^T of this one has been seen, and dS^T after P^T: so the two barriers that say "stored" also say that what
was stored before has been read, P^T in its one buffer and dS^T in its two.

dQ is added to global memory straight from the registers: by atomics, in any order; or (ORDERED) in that of the key
tiles, for which two more warps ask and tell.
"""

from typing import NamedTuple

from ..common.device.score import times_derivative
from ..common.device.structs import ANY_SIZE
from .backward_tiles import (  # fmt: skip
    BLOCK_M,
    Call,
    Inputs,
    Keys,
    Outputs,
    RowRing,
    add_to,
    adders,
    after_block,
    blocks_of,
    exponents,
    in_register_order,
    is_edge,
    keys_ring,
    produce,
    product_t,
    report,
    rows_ring,
    visit_of,
)
from .gluon_compat import (  # fmt: skip
    arrive,
    copy_out,
    fence_async_shared,
    gl,
    gluon,
    here,
    let_next_start,
    mbarrier,
    narrow,
    pass_turn,
    recast,
    semaphore_release,
    semaphore_wait,
    tma,
    wait_turn,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .pipeline import Queue, at, barriers, board, hand_back, phase, recall, store_full, take

# hardware barriers of both warpgroups
P_STORED: gl.constexpr = gl.constexpr(8)
DS_STORED: gl.constexpr = gl.constexpr(9)
ALL_READ: gl.constexpr = gl.constexpr(10)
COLUMNS: gl.constexpr = gl.constexpr(64)  # of dQ at a time


class Hold(NamedTuple):
    """All of shared memory: the inputs, P^T in register order, two buffers of dS^T [keys, queries]; in the end dK and
    dV leave through the memory of K and V."""

    keys: Keys
    queries: RowRing
    grads: RowRing
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dk: gl.shared_memory_descriptor
    dv: gl.shared_memory_descriptor


class Order(NamedTuple):
    """Of a dQ tile, where the sums are ORDERED: it is this program's turn to add to it; both warpgroups have added; the
    warp that tells so has seen it."""

    turn: gl.shared_memory_descriptor
    added: gl.shared_memory_descriptor
    seen: gl.shared_memory_descriptor


@gluon.jit
def from_register_order(x, LAYOUT: gl.constexpr):
    """The inverse of `in_register_order`."""
    N: gl.constexpr = x.shape[0] * 4
    x = x.reshape([N // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, N])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def half(tile, WG: gl.constexpr):
    """The columns of a [64, dim] tile that are this warpgroup's."""
    N: gl.constexpr = tile.shape[1] // 2
    return tile.slice(N * WG, N, dim=1)


@gluon.jit
def product_dq(hold, stage, zero, PART: gl.constexpr, WG: gl.constexpr, D: gl.constexpr):
    """A part of the columns of dQ = dS K."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    k = hold.keys.k.index(zero).reshape([64, D]).slice(D // 2 * WG + COLUMNS * PART, COLUMNS, dim=1)
    none = gl.zeros([BLOCK_M, COLUMNS], gl.float32, layout)
    return warpgroup_mma(hold.ds.index(stage).permute((1, 0)), k, none, use_acc=False, is_async=True)


@gluon.jit
def probabilities(
    s, hold, stage, w, h, i0, edge, at_keys, left, call,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """P^T of the queries of head h from i0 on, also stored for the other warpgroup: where scores have a slope, P^T
    times that, and P^T in 16 bits where dS^T will be."""
    lse2 = hold.queries.statistics.index(stage).load(s.type.layout)
    s, slope = exponents(s, lse2, w, h, i0, edge, True, at_keys, left, call, SCORE_MOD, MASK_MOD, PLAN)
    p = gl.exp2(s)
    p16 = narrow(p, hold.ds.dtype)
    if call.terms.has_derivative is not None:
        hold.ds.index(stage).store(p16)
    hold.p.store(in_register_order(times_derivative(p, slope, call.terms)))
    pass_turn(P_STORED, 256)
    return p16


@gluon.jit
def attend_0(
    hold, sums, order, p, dk, dv, n, turn, tile, w, h, ahead, edge, at_keys, left, call,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, LAST: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """What warpgroup 0 does for the n-th block of queries, whose P^T is stored and whose place in dQ is `tile`, up to
    P^T of the block after it, that of query `ahead` of head h."""
    D: gl.constexpr = PLAN.D
    DV: gl.constexpr = PLAN.DV
    operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    keys = hold.keys
    queries = hold.queries
    grads = hold.grads
    cur = n & 1
    new = cur ^ 1
    zero = here(gl.to_tensor(0))  # so that the compiler does not keep the descriptors of K in registers
    q = queries.tiles.index(cur).reshape([BLOCK_M, D])
    mbarrier.wait(grads.full.index(cur), (n >> 1) & 1)
    do = grads.tiles.index(cur).reshape([BLOCK_M, DV])
    p = gl.convert_layout(p, operand, assert_trivial=True)
    dv = warpgroup_mma(p, half(do, 0), dv, is_async=True)
    if not LAST:
        mbarrier.wait(queries.full.index(new), ((n + 1) >> 1) & 1)
        s = product_t(keys.k.index(zero).reshape([64, D]), queries.tiles.index(new).reshape([BLOCK_M, D]))
    wait_turn(DS_STORED, 256)
    dk = warpgroup_mma(hold.ds.index(cur), half(q, 0), dk, is_async=True)
    LATE: gl.constexpr = PLAN.LATE and not LAST
    if not LATE:
        dq = product_dq(hold, cur, zero, 0, 0, D)
    if LAST:
        dv, p = warpgroup_mma_wait(2, deps=(dv, p))
    else:
        dv, p, s = warpgroup_mma_wait(1 if LATE else 2, deps=(dv, p, s))
    arrive(grads.empty.index(cur))
    if not LAST:
        p = probabilities(s, hold, new, w, h, ahead, edge, at_keys, left, call, SCORE_MOD, MASK_MOD, PLAN)
        mbarrier.wait(keys.full.index(0), phase(turn, 1))  # true since long: the branch keeps the next wait behind exp2
    if LATE:
        dq = product_dq(hold, cur, zero, 0, 0, D)
    dk, dq = warpgroup_mma_wait(0, deps=(dk, dq))
    arrive(queries.empty.index(cur))
    rest = product_dq(hold, cur, zero, 1, 0, D)
    if PLAN.ORDERED:
        mbarrier.wait(order.turn.index(cur), (n >> 1) & 1)
    add_to(sums, dq, tile * 4)
    rest = warpgroup_mma_wait(0, deps=(rest,))
    add_to(sums, rest, tile * 4 + 1)
    if PLAN.ORDERED:
        mbarrier.arrive(order.added.index(cur), count=1)
    return p, dk, dv


@gluon.jit
def attend_1(hold, sums, order, dp, dk, dv, n, tile, more, call, PLAN: gl.constexpr):
    """What warpgroup 1 does for the n-th block of queries, whose dP^T is on its way, as on return that of the next is;
    of the last one, rather than branch around a wgmma, once more its own."""
    D: gl.constexpr = PLAN.D
    DV: gl.constexpr = PLAN.DV
    DTYPE: gl.constexpr = hold.ds.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    flat: gl.constexpr = in_register_order(gl.zeros([64, BLOCK_M], gl.float32, layout)).type.layout
    dk_operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    dv_operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    queries = hold.queries
    grads = hold.grads
    cur = n & 1
    new = cur ^ 1
    zero = here(gl.to_tensor(0))
    do = grads.tiles.index(cur).reshape([BLOCK_M, DV])
    delta = grads.statistics.index(cur).load(layout)
    wait_turn(P_STORED, 256)
    p = from_register_order(hold.p.load(flat), layout)
    dp = warpgroup_mma_wait(0, deps=(dp,))  # ptxas follows a wgmma across a loop's back edge only to a wait for all
    p16 = hold.ds.index(cur).load(layout) if call.terms.has_derivative is not None else narrow(p, DTYPE)
    p16 = gl.convert_layout(p16, dv_operand, assert_trivial=True)
    dv = warpgroup_mma(p16, half(do, 1), dv, is_async=True)
    ds = narrow(p * (dp - delta), DTYPE)
    hold.ds.index(cur).store(ds)
    fence_async_shared()
    pass_turn(DS_STORED, 256)
    ds16 = gl.convert_layout(ds, dk_operand, assert_trivial=True)
    mbarrier.wait(queries.full.index(cur), (n >> 1) & 1)
    dk = warpgroup_mma(ds16, half(queries.tiles.index(cur).reshape([BLOCK_M, D]), 1), dk, is_async=True)
    dq = product_dq(hold, cur, zero, 0, 1, D)
    dk, dv, p16, ds16 = warpgroup_mma_wait(1, deps=(dk, dv, p16, ds16))
    mbarrier.expect(grads.empty.index(cur), 0, pred=more)  # `arrive`
    arrive(queries.empty.index(cur))
    dq = warpgroup_mma_wait(0, deps=(dq,))
    rest = product_dq(hold, cur, zero, 1, 1, D)
    if PLAN.ORDERED:
        mbarrier.wait(order.turn.index(cur), (n >> 1) & 1)
    add_to(sums, dq, tile * 4 + 2)
    rest = warpgroup_mma_wait(0, deps=(rest,))
    mbarrier.wait(grads.full.index(new), ((n + 1) >> 1) & 1, pred=more)
    do = grads.tiles.index(gl.where(more, new, cur)).reshape([BLOCK_M, DV])
    dp = product_t(hold.keys.v.index(zero).reshape([64, DV]), do)
    add_to(sums, rest, tile * 4 + 3)
    if PLAN.ORDERED:
        mbarrier.arrive(order.added.index(cur), count=1)
    return dp, dk, dv


@gluon.jit
def sum_blocks(
    hold, sums, order, dk, dv, w, visit, n, turn, call,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, WG: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """This warpgroup's columns of dK and dV of the key tile, and its part of dQ; n blocks came before."""
    D: gl.constexpr = PLAN.D
    DV: gl.constexpr = PLAN.DV
    end = n + blocks_of(visit, PLAN)
    at_keys = w.first + here(w.n_q) - here(w.n_k)  # the query whose diagonal is the first key
    left = w.n_k - w.first
    i0 = visit.start
    h = w.h * PLAN.GROUP
    g = gl.to_tensor(0)
    zero = here(gl.to_tensor(0))
    if WG == 0:
        mbarrier.wait(hold.queries.full.index(n & 1), (n >> 1) & 1)
        q = hold.queries.tiles.index(n & 1).reshape([BLOCK_M, D])
        s = warpgroup_mma_wait(0, deps=(product_t(hold.keys.k.index(zero).reshape([64, D]), q),))
        edge = is_edge(visit, i0, PLAN)
        x = probabilities(s, hold, n & 1, w, h, i0, edge, at_keys, left, call, SCORE_MOD, MASK_MOD, PLAN)
    else:
        mbarrier.wait(hold.grads.full.index(n & 1), (n >> 1) & 1)
        do = hold.grads.tiles.index(n & 1).reshape([BLOCK_M, DV])
        x = product_t(hold.keys.v.index(zero).reshape([64, DV]), do)
    for m in range(n, end - 1 + WG):
        tile = visit.tile + g * (call.padded // BLOCK_M) + i0 // BLOCK_M
        i0, g = after_block(visit, i0, g, PLAN)
        if WG == 0:
            x, dk, dv = attend_0(
                hold, sums, order, x, dk, dv, m, turn, tile, w, h + g, i0, is_edge(visit, i0, PLAN), at_keys, left,
                call, SCORE_MOD, MASK_MOD, False, PLAN,
            )  # fmt: skip
        else:
            x, dk, dv = attend_1(hold, sums, order, x, dk, dv, m, tile, m + 1 < end, call, PLAN)
    tile = visit.tile + g * (call.padded // BLOCK_M) + i0 // BLOCK_M
    if WG == 0:
        x, dk, dv = attend_0(
            hold, sums, order, x, dk, dv, end - 1, turn, tile, w, h, i0, False, at_keys, left, call,
            SCORE_MOD, MASK_MOD, True, PLAN,
        )  # fmt: skip
    else:
        x = warpgroup_mma_wait(0, deps=(x,))
        arrive(hold.grads.empty.index((end - 1) & 1))
    return dk, dv


@gluon.jit
def consume(
    hold, outputs, order, work, call, queue,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, WG: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """dK and dV, which are 0 for keys that no query sees."""
    D: gl.constexpr = PLAN.D // 2
    DV: gl.constexpr = PLAN.DV // 2
    PACKED: gl.constexpr = call.cu_q is not None
    n = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    w = take(work, turn, call.n_q, call.n_k, PACKED)
    while w.first >= 0:
        visit = visit_of(w, queue, call, PLAN)
        dk = gl.zeros([64, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
        dv = gl.zeros([64, DV], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16]))
        mbarrier.wait(hold.keys.full.index(0), phase(turn, 1))
        if visit.hi > visit.lo:
            dk, dv = sum_blocks(
                hold, outputs.sums, order, dk, dv, w, visit, n, turn, call, SCORE_MOD, MASK_MOD, WG, PLAN
            )
        if outputs.flag is not None:
            report(outputs.flag, dk)
            report(outputs.flag, dv)
        n = here(n + blocks_of(visit, PLAN))
        w = recall(work, here(turn), call.n_q, call.n_k, PACKED)  # kept all along, it would cost registers
        wait_turn(ALL_READ, 256)
        if outputs.dk_full.ptr is not None:
            store_full(outputs.dk_full, dk * call.scale, w.b, w.h, w.k0, w.n_k, w.first, D * WG)
            store_full(outputs.dv_full, dv, w.b, w.h, w.k0, w.n_k, w.first, DV * WG)
        else:
            dk_at = at(outputs.dk, w.b, w.h, w.k0, w.n_k, w.first, D * WG)
            dv_at = at(outputs.dv, w.b, w.h, w.k0, w.n_k, w.first, DV * WG)
            hold.dk.index(WG).reshape([64, D]).store((dk * call.scale).to(outputs.dk.dtype))
            hold.dv.index(WG).reshape([64, DV]).store(dv.to(outputs.dv.dtype))
            fence_async_shared()
            copy_out(outputs.dk, dk_at, hold.dk.index(WG))
            copy_out(outputs.dv, dv_at, hold.dv.index(WG))
            tma.store_wait(0)
        mbarrier.arrive(hold.keys.empty.index(0), count=1)
        hand_back(work, turn)
        turn += 1
        w = take(work, turn, call.n_q, call.n_k, PACKED)


@gluon.jit
def keep_order(order, semaphores, work, call, queue, ASK: gl.constexpr, PLAN: gl.constexpr):
    """One of two warps: the first asks, ahead of time, whether the key tiles after this one have added to a dQ tile;
    the other one tells that this one has. They wait only for tiles that were drawn earlier."""
    PACKED: gl.constexpr = call.cu_q is not None
    n = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    w = take(work, turn, call.n_q, call.n_k, PACKED)
    while w.first >= 0:
        visit = visit_of(w, queue, call, PLAN)
        i0 = visit.start
        g = gl.to_tensor(0)
        for _ in range(blocks_of(visit, PLAN)):
            semaphore = semaphores + visit.tile + g * (here(call.padded) // BLOCK_M) + i0 // BLOCK_M
            if ASK:
                mbarrier.wait(order.seen.index(n & 1), phase(n, 2) ^ 1)
                semaphore_wait(semaphore, adders(w, i0, visit, call, PLAN) * 32)
                mbarrier.arrive(order.turn.index(n & 1), count=1)
            else:
                mbarrier.wait(order.added.index(n & 1), phase(n, 2))
                mbarrier.arrive(order.seen.index(n & 1), count=1)
                semaphore_release(semaphore)
            i0, g = after_block(visit, i0, g, PLAN)
            n += 1
        hand_back(work, turn)
        turn += 1
        w = take(work, turn, call.n_q, call.n_k, PACKED)


@gluon.jit(**ANY_SIZE)
def backward_wide_kernel(
    q, k, v, do, lse2, delta, sums, sum_rows, dk, dv, dk_full, dv_full, flag, semaphores, cu_q, cu_k, n_q, n_k,
    before, after, unit, scale, padded, rising, counter, total, rows, tiles, heads, batch, cohort, terms,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    call = Call(cu_q, cu_k, n_q, n_k, before, after, unit, scale, padded, rising, terms)
    queue = Queue(counter, total, rows, tiles, heads, batch, cohort)
    inputs = Inputs(q, k, v, do, lse2, delta)
    outputs = Outputs(sums, sum_rows, dk, dv, dk_full, dv_full, flag)
    keys = keys_ring(k, v, 1)
    p_tile = gl.allocate_shared_memory(gl.float32, [BLOCK_M // 4, 256], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ds_tiles = gl.allocate_shared_memory(q.dtype, [2, 64, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    dk_tiles = recast(keys.k, q.dtype, [2] + dk.block_type.shape, dk.layout)  # noqa: RUF005
    dv_tiles = recast(keys.v, q.dtype, [2] + dv.block_type.shape, dv.layout)  # noqa: RUF005
    hold = Hold(keys, rows_ring(q, lse2), rows_ring(do, delta), p_tile, ds_tiles, dk_tiles, dv_tiles)
    work = board(4 if PLAN.ORDERED else 2)
    let_next_start()
    if PLAN.ORDERED:
        order = Order(barriers(2, 1), barriers(2, 2), barriers(2, 1))
        fence_async_shared()
        gl.warp_specialize([
            (consume, (hold, outputs, order, work, call, queue, SCORE_MOD, MASK_MOD, 0, PLAN)),
            (consume, (hold, outputs, order, work, call, queue, SCORE_MOD, MASK_MOD, 1, PLAN)),
            (produce, (hold, inputs, work, call, queue, PLAN)),
            (keep_order, (order, semaphores, work, call, queue, True, PLAN)),
            (keep_order, (order, semaphores, work, call, queue, False, PLAN)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
    else:
        fence_async_shared()
        gl.warp_specialize([
            (consume, (hold, outputs, None, work, call, queue, SCORE_MOD, MASK_MOD, 0, PLAN)),
            (consume, (hold, outputs, None, work, call, queue, SCORE_MOD, MASK_MOD, 1, PLAN)),
            (produce, (hold, inputs, work, call, queue, PLAN)),
        ], [4, 1], [240, 24])  # fmt: skip
