"""The backward pass on Hopper for head dims up to 128: dQ, dK and dV from five products, none of them computed twice.

A program owns 128 keys of one KV head, 64 for each of its two warpgroups, and streams past them the queries that see
them, 64 at a time, of every query head in the group. Tiles are transposed (keys by queries), so that P^T and dS^T leave
the matrix units in the very registers from which dV and dK take them:

    S^T = K Q^T      P^T = exp2(unit S^T - lse2)      dP^T = V dO^T      dS^T = P^T * (dP^T - delta)
    dV += P^T dO     dK += dS^T Q                     dQ = dS K, over the keys of both: through shared memory

dQ of a block is computed one block late, from two buffers of dS, so that the warpgroups may drift apart by most of a
block: one exponentiates while the other multiplies. The sum of dQ over the key tiles is made in global memory, in
float32: by atomics, straight from the registers; or (COPIED) by the copy engine, for which two more warps take turns,
in any order or (ORDERED) in that of the key tiles.

dS is fenced where it is read, not where it is stored: a fence waits for all that its threads have under way, atomics
too, and here it does so while dV is being multiplied.
"""

from typing import NamedTuple

from ..tile import steepened
from .backward_tiles import (
    BLOCK_M,
    Call,
    Inputs,
    Keys,
    Outputs,
    Rows,
    add_by_turns,
    add_to,
    blocks_of,
    exponents,
    find,
    in_register_order,
    is_edge,
    keys_ring,
    produce,
    product_t,
    report,
    rows_ring,
    send,
    visit_of,
)  # fmt: skip
from .compat import (
    arrive,
    fence_async_shared,
    gl,
    gluon,
    here,
    mbarrier,
    meet,
    narrow,
    recast,
    signal,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)  # fmt: skip
from .pipeline import Queue, at, barriers, board, hand_back, phase, take

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
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Hold(NamedTuple):
    """All of shared memory."""

    keys: Keys
    queries: Rows
    grads: Rows
    out: Out


@gluon.jit
def product_dq(hold, buffer, zero, WG: gl.constexpr, D: gl.constexpr):
    """This warpgroup's half of the columns of dQ = dS K, over the keys of both."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    k0 = hold.keys.k.index(zero).reshape([64, D]).slice(D // 2 * WG, D // 2, dim=1)
    k1 = hold.keys.k.index(zero + 1).reshape([64, D]).slice(D // 2 * WG, D // 2, dim=1)
    none = gl.zeros([BLOCK_M, D // 2], gl.float32, layout)
    dq = warpgroup_mma(hold.out.ds.index(buffer).permute((1, 0)), k0, none, use_acc=False, is_async=True)
    return warpgroup_mma(hold.out.ds.index(2 + buffer).permute((1, 0)), k1, dq, is_async=True)


@gluon.jit
def add_dq(dq, out, sums, tile, n, WG: gl.constexpr, PLAN: gl.constexpr):
    """Adds half a dQ tile, the n-th of this program, to global memory, or hands it to the warps that send it there."""
    if PLAN.COPIED:
        mbarrier.wait(out.empty.index(0), phase(n, 1) ^ 1)
        out.dq.index(WG).store(in_register_order(dq))
        fence_async_shared()
        mbarrier.arrive(out.full.index(n & 1), count=1)
    else:
        add_to(sums, dq, tile * 2 + WG)


@gluon.jit
def attend(
    hold, sums, s, dk, dv, n, tile, r, w, h, at_keys, left, i0, edge, more, call,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, WG: gl.constexpr, FIRST: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """The n-th block of queries of this program, those from i0 on, and dQ of the block before it (of FIRST there is
    none), whose place is `tile`; `s` is on its way, and on return that of the next block is."""
    D: gl.constexpr = dk.shape[1]
    DV: gl.constexpr = dv.shape[1]
    DTYPE: gl.constexpr = hold.keys.k.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dk_operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    dv_operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    keys, queries, grads, out = hold
    cur = n & 1
    old = cur ^ 1
    # The compiler must not know that this is 0: it would keep the descriptors of K, V and dS in 64 registers.
    zero = gl.where(tile < 0, 2, 0)
    q = queries.tiles.index(cur).reshape([BLOCK_M, D])

    s = warpgroup_mma_wait(0, deps=(s,))  # ptxas follows a wgmma across a loop's back edge only to a wait for all
    lse2 = queries.statistics.index(cur).load(layout)
    mbarrier.wait(grads.full.index(cur), (n >> 1) & 1)
    do = grads.tiles.index(cur).reshape([BLOCK_M, DV])
    dp = product_t(keys.v.index(WG + zero).reshape([64, DV]), do)
    s, slope = exponents(s, lse2, w, h, i0, edge, at_keys, left, call, SCORE_MOD, MASK_MOD, PLAN)
    p = gl.exp2(s)
    p16 = gl.convert_layout(narrow(p, DTYPE), dv_operand, assert_trivial=True)
    p = steepened(p, slope, call.terms)
    mbarrier.wait(keys.full.index(0), phase(r, 1))  # true since long: the branch keeps the next wait after the exp2
    delta = grads.statistics.index(cur).load(layout)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = narrow(p * (dp - delta), DTYPE)
    ds16 = gl.convert_layout(ds, dk_operand, assert_trivial=True)
    if not FIRST:
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
        dq = product_dq(hold, old, zero, WG, D)
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
    hold, outputs, dk, dv, w, visit, n, r, call,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, WG: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """dK and dV of this warpgroup's half of the r-th key tile, and its part of dQ; n blocks came before."""
    D: gl.constexpr = PLAN.D
    keys, queries, _, out = hold
    end = n + blocks_of(visit, PLAN)
    at_keys = w.first + 64 * WG + here(w.n_q) - w.n_k
    left = w.n_k - w.first - 64 * WG
    i0 = visit.lo
    h = w.h * PLAN.GROUP
    tile = visit.tile + i0 // BLOCK_M
    mbarrier.wait(keys.full.index(0), phase(r, 1))
    mbarrier.wait(queries.full.index(n & 1), (n >> 1) & 1)
    zero = gl.where(tile < 0, 2, 0)
    q = queries.tiles.index((n & 1) + zero).reshape([BLOCK_M, D])
    s = product_t(keys.k.index(WG + zero).reshape([64, D]), q)
    s, dk, dv = attend(
        hold, outputs.sums, s, dk, dv, n, tile, r, w, h, at_keys, left, i0, is_edge(visit, i0), n + 1 < end, call,
        SCORE_MOD, MASK_MOD, WG, True, PLAN,
    )  # fmt: skip
    for m in range(n + 1, end):
        i0 += BLOCK_M
        if PLAN.GROUP > 1:
            i0 = gl.where(i0 == visit.hi, visit.lo, i0)
            if PLAN.TERMS:
                h = gl.where(i0 == visit.lo, h + 1, h)
        s, dk, dv = attend(
            hold, outputs.sums, s, dk, dv, m, tile, r, w, h, at_keys, left, i0, is_edge(visit, i0), m + 1 < end, call,
            SCORE_MOD, MASK_MOD, WG, False, PLAN,
        )  # fmt: skip
        tile += 1
        if PLAN.GROUP > 1:
            tile = gl.where(i0 == visit.lo, tile + (call.padded - visit.hi + visit.lo) // BLOCK_M, tile)

    zero = gl.where(tile < 0, 2, 0)
    cur = end & 1
    old = cur ^ 1
    s = warpgroup_mma_wait(0, deps=(s,))
    arrive(queries.empty.index(old))
    meet(READ + (1 - WG) * 2 + old, 256)
    meet(STORED + (1 - WG) * 2 + old, 256)
    fence_async_shared()
    dq = warpgroup_mma_wait(0, deps=(product_dq(hold, old, zero, WG, D),))
    arrive(keys.empty.index(0))
    signal(READ + WG * 2 + cur, 256)
    add_dq(dq, out, outputs.sums, tile, end - 1, WG, PLAN)
    meet(READ + (1 - WG) * 2 + cur, 256)
    if PLAN.COPIED:
        mbarrier.wait(out.empty.index(0), phase(end - 1, 1))
    return dk, dv


@gluon.jit
def sum_tile(
    hold, outputs, w, visit, n, r, call, queue,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, WG: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """dK and dV, which are 0 for keys that no query sees."""
    D: gl.constexpr = PLAN.D
    DV: gl.constexpr = PLAN.DV
    out = hold.out
    dk = gl.zeros([64, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
    dv = gl.zeros([64, DV], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16]))
    if visit.hi > visit.lo:
        dk, dv = sum_blocks(hold, outputs, dk, dv, w, visit, n, r, call, SCORE_MOD, MASK_MOD, WG, PLAN)
    if outputs.flag is not None:
        report(outputs.flag, dk)
        report(outputs.flag, dv)
    if not PLAN.PERSISTENT:  # kept all along, it would cost registers
        w = find(gl.program_id(0) + gl.where(visit.tile < 0, 1, 0), queue, call, PLAN)
    where = at(outputs.dk, w.b, w.h, w.k0, w.n_k, w.first + 64 * WG)
    send(dk * call.scale, out.dk.index(WG * out.dk.shape[0] // 2), outputs.dk, where)
    send(dv, out.dv.index(WG * out.dv.shape[0] // 2), outputs.dv, where)


@gluon.jit
def consume(
    hold, outputs, work, call, queue,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, WG: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    PACKED: gl.constexpr = call.cu_q is not None
    if PLAN.PERSISTENT:
        n = gl.to_tensor(0)
        r = gl.to_tensor(0)
        turn = gl.to_tensor(0)
        w = take(work, turn, call.n_q, call.n_k, PACKED)
        while w.first >= 0:
            visit = visit_of(w, queue, call, PLAN)
            tma.store_wait(0)  # dK and dV of the tile before have left
            sum_tile(hold, outputs, w, visit, n, r, call, queue, SCORE_MOD, MASK_MOD, WG, PLAN)
            n += blocks_of(visit, PLAN)
            r += gl.where(visit.hi > visit.lo, 1, 0)
            hand_back(work, turn)
            turn += 1
            w = take(work, turn, call.n_q, call.n_k, PACKED)
    else:
        w = find(gl.program_id(0), queue, call, PLAN)
        visit = visit_of(w, queue, call, PLAN)
        if w.first < w.n_k:
            sum_tile(hold, outputs, w, visit, 0, 0, call, queue, SCORE_MOD, MASK_MOD, WG, PLAN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_q", "n_k", "before", "after", "padded", "total", "rows", "tiles", "batch", "cohort"])
def backward_kernel(
    q, k, v, do, lse2, delta, sums, sum_rows, dk, dv, flag, semaphores, cu_q, cu_k, n_q, n_k, before, after, unit,
    scale, padded, counter, total, rows, tiles, heads, batch, cohort, terms,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = PLAN.D
    DV: gl.constexpr = PLAN.DV
    call = Call(cu_q, cu_k, n_q, n_k, before, after, unit, scale, padded, terms)
    queue = Queue(counter, total, rows, tiles, heads, batch, cohort)
    inputs = Inputs(q, k, v, do, lse2, delta)
    outputs = Outputs(sums, sum_rows, dk, dv, flag)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [4, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, D // 8, 256], sum_rows.layout)
    dk_tiles = recast(ds_tiles, q.dtype, [256 // D] + dk.block_type.shape, dk.layout)  # noqa: RUF005
    dv_tiles = recast(dq_tiles, q.dtype, [2 * D // DV] + dv.block_type.shape, dv.layout)  # noqa: RUF005
    # No barrier that is not used: the compiler would give its memory to a tile (emulator.machine, _check_barriers).
    full = barriers(2, 2) if PLAN.COPIED else ds_tiles
    empty = barriers(1, 1) if PLAN.COPIED else ds_tiles
    out = Out(ds_tiles, dq_tiles, dk_tiles, dv_tiles, full, empty)
    hold = Hold(keys_ring(k, v, 2), rows_ring(q, lse2), rows_ring(do, delta), out)
    work = board(2) if PLAN.PERSISTENT else ds_tiles
    fence_async_shared()
    if PLAN.COPIED:
        gl.warp_specialize([
            (consume, (hold, outputs, work, call, queue, SCORE_MOD, MASK_MOD, 0, PLAN)),
            (consume, (hold, outputs, work, call, queue, SCORE_MOD, MASK_MOD, 1, PLAN)),
            (produce, (hold, inputs, work, call, queue, PLAN)),
            (add_by_turns, (out, outputs, semaphores, call, queue, 0, PLAN)),
            (add_by_turns, (out, outputs, semaphores, call, queue, 1, PLAN)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (hold, outputs, work, call, queue, SCORE_MOD, MASK_MOD, 0, PLAN)),
            (consume, (hold, outputs, work, call, queue, SCORE_MOD, MASK_MOD, 1, PLAN)),
            (produce, (hold, inputs, work, call, queue, PLAN)),
        ], [4, 1], [240, 24])  # fmt: skip
