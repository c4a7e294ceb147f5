"""The backward pass on Hopper for head dims up to 128: dQ, dK and dV from five products, none of them computed twice.

A program owns 128 keys of one KV head at a time, 64 for each of its two warpgroups, and streams past them the queries
that see them, 64 or 128 at a time, of every query head in the group. Tiles are transposed (keys by queries), so that
P^T and dS^T leave the matrix units in the very registers from which dV and dK take them:

    S^T = K Q^T      P^T = exp2(unit S^T - lse2)      dP^T = V dO^T      dS^T = P^T * (dP^T - delta)
    dV += P^T dO     dK += dS^T Q                     dQ = dS K, over the keys of both: through shared memory

dQ of a block is computed one block late, from two buffers of dS, so that the warpgroups may drift apart by most of a
block: one exponentiates while the other multiplies. The sum of dQ over the key tiles is made in global memory, in
float32: by atomics, straight from the registers; or (COPIED) by the copy engine, through two more warps: in
any order, each for one warpgroup; or (ORDERED) in that of the key tiles, by turns for both.

dS is fenced where it is read, not where it is stored: a fence waits for all that its threads have under way, atomics
too, and here it does so while dV is being multiplied.
"""

from typing import NamedTuple

from ..common.device.score import times_derivative
from ..common.device.structs import ANY_SIZE
from ..common.device.tile_range import block_at
from .backward_tiles import (  # fmt: skip
    DQ_STORED,
    Call,
    Inputs,
    Keys,
    Outputs,
    RowRing,
    add_tiles,
    add_to,
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
    send,
    visit_of,
)
from .gluon_compat import (  # fmt: skip
    arrive,
    fence_async_shared,
    gl,
    gluon,
    here,
    let_next_start,
    mbarrier,
    meet,
    narrow,
    pass_turn,
    recast,
    signal,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .pipeline import Queue, at, barriers, board, hand_back, phase, recall, store_full, take

# hardware barriers, each for warpgroup w and buffer b of dS, at + 2 w + b
STORED: gl.constexpr = gl.constexpr(8)  # w has stored its dS in b
READ: gl.constexpr = gl.constexpr(12)  # w is done with the buffer other than b


class Out(NamedTuple):
    """On its way out: dS^T [2 warpgroup + buffer, keys, queries] and dQ [warpgroup, register order]; in the end dK
    leaves through the memory of dS and dV through that of dQ, since K, V and the rings are being filled again."""

    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    dk: gl.shared_memory_descriptor
    dv: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Hold(NamedTuple):
    """All of shared memory."""

    keys: Keys
    queries: RowRing
    grads: RowRing
    out: Out


@gluon.jit
def product_dq(hold, buffer, zero, WG: gl.constexpr, PLAN: gl.constexpr):
    """This warpgroup's half of dQ = dS K, over the keys of both: half of the rows or, of 64 queries, of the columns."""
    D: gl.constexpr = PLAN.D
    COLUMNS: gl.constexpr = D if PLAN.BLOCK_M == 128 else D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros([64, COLUMNS], gl.float32, layout)
    for part in gl.static_range(2):
        ds = hold.out.ds.index(2 * part + buffer)
        k = hold.keys.k.index(zero + part).reshape([64, D])
        if PLAN.BLOCK_M == 128:
            ds = ds.slice(64 * WG, 64, dim=1)
        else:
            k = k.slice(COLUMNS * WG, COLUMNS, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=part > 0, is_async=True)
    return dq


@gluon.jit
def add_dq(dq, out, sums, tile, n, WG: gl.constexpr, PLAN: gl.constexpr):
    """Adds half a dQ tile, the n-th of this program, to global memory, or hands it to the warps that send it there."""
    if PLAN.COPIED:
        mbarrier.wait(out.empty.index(0 if PLAN.ORDERED else WG), phase(n, 1) ^ 1)
        out.dq.index(WG).store(in_register_order(dq))
        fence_async_shared()
        if PLAN.ORDERED:
            signal(DQ_STORED + (n & 1), 288)
        else:
            pass_turn(DQ_STORED + WG, 160)
    else:
        add_to(sums, dq, tile * 2 + WG)


@gluon.jit
def sum_block(
    hold, sums, s, dk, dv, n, turn, tile, w, h, at_keys, left, i0, edge, picky, more, call,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, WG: gl.constexpr, FIRST: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """The n-th block of queries of this program, those from i0 on, and dQ of the block before it (of FIRST there is
    none), whose place is `tile`; `s` is on its way, and on return that of the next block is."""
    D: gl.constexpr = dk.shape[1]
    DV: gl.constexpr = dv.shape[1]
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    DTYPE: gl.constexpr = hold.keys.k.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    dk_operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    dv_operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    TALL: gl.constexpr = BLOCK_M == 128  # then what can come late comes late: registers are short
    keys, queries, grads, out = hold
    cur = n & 1
    old = cur ^ 1
    # The compiler must not know that this is 0: it would keep the descriptors of K, V and dS in 64 registers.
    zero = here(gl.to_tensor(0))
    q = queries.tiles.index(cur).reshape([BLOCK_M, D])

    s = warpgroup_mma_wait(0, deps=(s,))  # ptxas follows a wgmma across a loop's back edge only to a wait for all
    if not TALL:
        lse2 = queries.statistics.index(cur).load(layout)
    mbarrier.wait(grads.full.index(cur), (n >> 1) & 1)
    do = grads.tiles.index(cur).reshape([BLOCK_M, DV])
    v = keys.v.index(WG + zero).reshape([64, DV])
    if not PLAN.LATE:
        dp = product_t(v, do)
    if TALL:
        lse2 = queries.statistics.index(cur).load(layout)
    s, slope = exponents(s, lse2, w, h, i0, edge, picky, at_keys, left, call, SCORE_MOD, MASK_MOD, PLAN)
    p = gl.exp2(s)
    if not TALL:
        p16 = gl.convert_layout(narrow(p, DTYPE), dv_operand, assert_trivial=True)
    p = times_derivative(p, slope, call.terms)
    if PLAN.LATE:
        dp = product_t(v, do)
    mbarrier.wait(keys.full.index(0), phase(turn, 1))  # true since long: the branch keeps the next wait after the exp2
    if not TALL:
        delta = grads.statistics.index(cur).load(layout)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    if TALL:
        delta = grads.statistics.index(cur).load(layout)
    ds = narrow(p * (dp - delta), DTYPE)
    ds16 = gl.convert_layout(ds, dk_operand, assert_trivial=True)
    if TALL:
        p16 = gl.convert_layout(narrow(p, DTYPE), dv_operand, assert_trivial=True)
    if FIRST:
        tma.store_wait(0)  # dK and dV of the tile before have left
    else:
        meet(READ + (1 - WG) * 2 + old, 256)
    out.ds.index(WG * 2 + cur).store(ds)
    signal(STORED + WG * 2 + cur, 256)

    dv = warpgroup_mma(p16, do, dv, is_async=True)
    if FIRST:
        dv, p16 = warpgroup_mma_wait(0, deps=(dv, p16))
        arrive(grads.empty.index(cur))
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
        signal(READ + WG * 2 + cur, 256)
    else:
        meet(STORED + (1 - WG) * 2 + old, 256)
        fence_async_shared()
        dq = product_dq(hold, old, zero, WG, PLAN)
        dv, p16 = warpgroup_mma_wait(2, deps=(dv, p16))
        arrive(grads.empty.index(cur))
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        signal(READ + WG * 2 + cur, 256)
        add_dq(dq, out, sums, tile, n - 1, WG, PLAN)
    # S of the next block; after the last one, rather than branch around a wgmma, once more that of this block, unused
    mbarrier.wait(queries.full.index(old), ((n + 1) >> 1) & 1, pred=more)
    q_next = queries.tiles.index(gl.where(more, old, cur)).reshape([BLOCK_M, D])
    s = product_t(keys.k.index(WG + zero).reshape([64, D]), q_next)
    dk, ds16 = warpgroup_mma_wait(1, deps=(dk, ds16))
    mbarrier.expect(queries.empty.index(cur), 0, pred=more)  # `arrive`
    return s, dk, dv


@gluon.jit
def sum_blocks(
    hold, outputs, dk, dv, w, visit, n, turn, call,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, WG: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """dK and dV of this warpgroup's half of the key tile, and its part of dQ; n blocks came before."""
    D: gl.constexpr = PLAN.D
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    keys, queries, _, out = hold
    end = n + blocks_of(visit, PLAN)
    at_keys = w.first + 64 * WG + here(w.n_q) - here(w.n_k)
    left = w.n_k - w.first - 64 * WG
    place = visit.start
    i0, picky = block_at(place, call.terms.blocks, BLOCK_M)
    g = gl.to_tensor(0)
    h = w.h * PLAN.GROUP
    mbarrier.wait(queries.full.index(n & 1), (n >> 1) & 1)
    zero = here(gl.to_tensor(0))
    q = queries.tiles.index((n & 1) + zero).reshape([BLOCK_M, D])
    s = product_t(keys.k.index(WG + zero).reshape([64, D]), q)
    s, dk, dv = sum_block(
        hold, outputs.sums, s, dk, dv, n, turn, 0, w, h, at_keys, left, i0, is_edge(visit, i0, PLAN), picky,
        n + 1 < end, call, SCORE_MOD, MASK_MOD, WG, True, PLAN,
    )  # fmt: skip
    for m in range(n + 1, end):
        tile = visit.tile + g * (call.padded // BLOCK_M) + i0 // BLOCK_M
        place, g = after_block(visit, place, g, PLAN)
        i0, picky = block_at(place, call.terms.blocks, BLOCK_M)
        s, dk, dv = sum_block(
            hold, outputs.sums, s, dk, dv, m, turn, tile, w, h + g, at_keys, left, i0, is_edge(visit, i0, PLAN),
            picky, m + 1 < end, call, SCORE_MOD, MASK_MOD, WG, False, PLAN,
        )  # fmt: skip
    tile = visit.tile + g * (call.padded // BLOCK_M) + i0 // BLOCK_M

    zero = here(gl.to_tensor(0))
    cur = end & 1
    old = cur ^ 1
    s = warpgroup_mma_wait(0, deps=(s,))
    arrive(queries.empty.index(old))
    meet(READ + (1 - WG) * 2 + old, 256)
    meet(STORED + (1 - WG) * 2 + old, 256)
    fence_async_shared()
    dq = warpgroup_mma_wait(0, deps=(product_dq(hold, old, zero, WG, PLAN),))
    signal(READ + WG * 2 + cur, 256)
    meet(READ + (1 - WG) * 2 + cur, 256)
    arrive(keys.empty.index(0))  # the other one starts with the next tile, and signals again, not before this
    add_dq(dq, out, outputs.sums, tile, end - 1, WG, PLAN)
    return dk, dv


@gluon.jit
def consume(
    hold, outputs, work, call, queue,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, WG: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """dK and dV, which are 0 for keys that no query sees."""
    D: gl.constexpr = PLAN.D
    DV: gl.constexpr = PLAN.DV
    PACKED: gl.constexpr = call.cu_q is not None
    keys, _, _, out = hold
    n = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    w = take(work, turn, call.n_q, call.n_k, PACKED)
    while w.first >= 0:
        visit = visit_of(w, queue, call, PLAN)
        dk = gl.zeros([64, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
        dv = gl.zeros([64, DV], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16]))
        mbarrier.wait(keys.full.index(0), phase(turn, 1))
        if visit.hi > visit.lo:
            dk, dv = sum_blocks(hold, outputs, dk, dv, w, visit, n, turn, call, SCORE_MOD, MASK_MOD, WG, PLAN)
        else:
            arrive(keys.empty.index(0))
            tma.store_wait(0)
        if outputs.flag is not None:
            report(outputs.flag, dk)
            report(outputs.flag, dv)
        n = here(n + blocks_of(visit, PLAN))  # of which the compiler may know that it is even, and what follows from it
        w = recall(work, here(turn), call.n_q, call.n_k, PACKED)  # kept all along, it would cost registers
        if outputs.dk_full.ptr is not None:
            store_full(outputs.dk_full, dk * call.scale, w.b, w.h, w.k0, w.n_k, w.first + 64 * WG, 0)
            store_full(outputs.dv_full, dv, w.b, w.h, w.k0, w.n_k, w.first + 64 * WG, 0)
        else:
            where = at(outputs.dk, w.b, w.h, w.k0, w.n_k, w.first + 64 * WG)
            send(dk * call.scale, out.dk.index(WG * out.dk.shape[0] // 2), outputs.dk, where)
            if PLAN.COPIED:
                mbarrier.wait(out.empty.index(0 if PLAN.ORDERED else WG), phase(n - 1, 1))
            send(dv, out.dv.index(WG * out.dv.shape[0] // 2), outputs.dv, where)
        hand_back(work, turn)
        turn += 1
        w = take(work, turn, call.n_q, call.n_k, PACKED)
    tma.store_wait(0)


@gluon.jit(**ANY_SIZE)
def backward_kernel(
    q, k, v, do, lse2, delta, sums, sum_rows, dk, dv, dk_full, dv_full, flag, semaphores, cu_q, cu_k, n_q, n_k,
    before, after, unit, scale, padded, rising, counter, total, rows, tiles, heads, batch, cohort, terms,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = PLAN.D
    DV: gl.constexpr = PLAN.DV
    call = Call(cu_q, cu_k, n_q, n_k, before, after, unit, scale, padded, rising, terms)
    queue = Queue(counter, total, rows, tiles, heads, batch, cohort)
    inputs = Inputs(q, k, v, do, lse2, delta)
    outputs = Outputs(sums, sum_rows, dk, dv, dk_full, dv_full, flag)
    BLOCK_M: gl.constexpr = PLAN.BLOCK_M
    ds_tiles = gl.allocate_shared_memory(q.dtype, [4, 64, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M * D // 512, 256], sum_rows.layout)
    dk_tiles = recast(ds_tiles, q.dtype, [4 * BLOCK_M // D] + dk.block_type.shape, dk.layout)  # noqa: RUF005
    dv_tiles = recast(dq_tiles, q.dtype, [BLOCK_M * D // (32 * DV)] + dv.block_type.shape, dv.layout)  # noqa: RUF005
    # No barrier that is not used: the compiler would give its memory to a tile (emulator.machine, _check_barriers).
    empty = barriers(1 if PLAN.ORDERED else 2, 1) if PLAN.COPIED else ds_tiles
    out = Out(ds_tiles, dq_tiles, dk_tiles, dv_tiles, empty)
    hold = Hold(keys_ring(k, v, 2), rows_ring(q, lse2), rows_ring(do, delta), out)
    work = board(4 if PLAN.COPIED else 2)
    fence_async_shared()
    let_next_start()
    if PLAN.COPIED:
        gl.warp_specialize([
            (consume, (hold, outputs, work, call, queue, SCORE_MOD, MASK_MOD, 0, PLAN)),
            (consume, (hold, outputs, work, call, queue, SCORE_MOD, MASK_MOD, 1, PLAN)),
            (produce, (hold, inputs, work, call, queue, PLAN)),
            (add_tiles, (out, outputs, semaphores, work, call, queue, 0, PLAN)),
            (add_tiles, (out, outputs, semaphores, work, call, queue, 1, PLAN)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (hold, outputs, work, call, queue, SCORE_MOD, MASK_MOD, 0, PLAN)),
            (consume, (hold, outputs, work, call, queue, SCORE_MOD, MASK_MOD, 1, PLAN)),
            (produce, (hold, inputs, work, call, queue, PLAN)),
        ], [4, 1], [240, 24])  # fmt: skip
