"""The backward pass on Hopper for head dims above 128: five products that read shared memory as rarely as possible.

A program owns 64 keys of one KV head at a time and streams past them the queries that see them, 64 by 64. dK and dV of
more keys would not fit into the registers; so the two warpgroups share them, and each has its own part of the scores:

    warpgroup 0    S^T = K Q^T       P^T = exp2(scale_log2 S^T - lse2)      to the other, in float32
    warpgroup 1    dP^T = V dO^T     dS^T = P^T * (dP^T - delta)      to the other, in 16 bits
    each, for its half of the columns:    dV += P^T dO    dK += dS^T Q    dQ = dS K

P^T and dS^T are computed alternately: while one warpgroup computes, the products of the other run. P^T of the next
block is stored after dS^T of this one has been read, and dS^T after P^T: so the two barriers that say "stored" also say
that what was stored before has been read, P^T in its one buffer and dS^T in its two.

dQ is added to global memory from registers: by atomics, in any order; or (DETERMINISTIC) in the order of the key tiles,
which two more warps keep.
"""

from typing import NamedTuple

import triton.language as tl

from ..common.device.score import times_derivative
from .backward_tiles import (
    BLOCK_M,
    KeyRows,
    KvTile,
    Progress,
    QueryBlock,
    RowPipeline,
    flag_nonfinite,
    is_edge,
    issue_abt,
    log2_p,
    make_kv_tile,
    make_row_pipeline,
    next_block,
    num_blocks,
    produce,
    query_range,
)
from .dq_accumulation import atomic_add_dq, make_order, order_dq
from .gluon_compat import (
    arrive,
    bar_arrive,
    bar_sync,
    downcast,
    fence_async_shared,
    gdc_launch_dependents,
    gl,
    gluon,
    mbarrier,
    opaque,
    reinterpret,
    tma,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .key_parts import part_tile, store_part
from .pipeline import (
    Tokens,
    make_tile_info,
    phase,
    read_tile_info,
    release_tile_info,
    tma_coordinates,
    wait_tile_info,
)
from .register_order import from_register_order, in_register_order

# named barriers of both warpgroups
P_STORED: gl.constexpr = gl.constexpr(8)
WIDE_DS_STORED: gl.constexpr = gl.constexpr(9)  # a name of its own: docs/gotchas.md, constants in cache keys
ALL_READ: gl.constexpr = gl.constexpr(10)
DQ_COLUMNS: gl.constexpr = gl.constexpr(64)  # of dQ at a time


class Shared(NamedTuple):
    """All of shared memory but the tile info: the inputs, P^T in register order, two buffers of dS^T [keys, queries].
    dK and dV are stored through the memory of K and V. `order` is None if not DETERMINISTIC."""

    kv: KvTile
    q: RowPipeline
    do: RowPipeline
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dk: gl.shared_memory_descriptor
    dv: gl.shared_memory_descriptor
    order: tl.tuple


@gluon.jit
def own_columns(tile, WG: gl.constexpr):
    """This warpgroup's half of the columns of a [64, dim] tile."""
    N: gl.constexpr = tile.shape[1] // 2
    return tile.slice(N * WG, N, dim=1)


@gluon.jit
def issue_dq(shared, stage, zero, PART: gl.constexpr, WG: gl.constexpr, D: gl.constexpr):
    """Issues DQ_COLUMNS columns of dQ = dS K: part PART of this warpgroup's."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    k = shared.kv.k.index(zero).reshape([64, D]).slice(D // 2 * WG + DQ_COLUMNS * PART, DQ_COLUMNS, dim=1)
    acc = gl.zeros([BLOCK_M, DQ_COLUMNS], gl.float32, layout)
    return warpgroup_mma(shared.ds.index(stage).permute((1, 0)), k, acc, use_acc=False, is_async=True)


@gluon.jit
def store_p(s, shared, stage, keys, block, params, CONFIG: gl.constexpr):
    """P^T of a block from S^T, in 16 bits. Also stores it for the other warpgroup: in float32, times the derivative of
    the score mod; if there is one, P^T in 16 bits as well, in the buffer of dS^T."""
    lse2 = shared.q.statistics.index(stage).load(s.type.layout)
    s, derivative = log2_p(s, lse2, keys, block, params, CONFIG)
    p = gl.exp2(s)
    p16 = downcast(p, shared.ds.dtype)
    if params.terms.has_derivative is not None:
        shared.ds.index(stage).store(p16)
    shared.p.store(in_register_order(times_derivative(p, derivative, params.terms)))
    bar_arrive(P_STORED, 256)
    return p16


@gluon.jit
def attend_block_0(shared, acc, keys, block, upcoming, params, LAST: gl.constexpr, CONFIG: gl.constexpr):
    """Warpgroup 0: its columns of dK, dV and dQ of a block, whose P^T is stored; then P^T of the `upcoming` block (none
    for LAST). `acc`: P^T, dK, dV."""
    D: gl.constexpr = CONFIG.D
    DV: gl.constexpr = CONFIG.DV
    p, dk, dv = acc
    operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    kv = shared.kv
    queries = shared.q
    grads = shared.do
    dq_acc = params.outputs.dq_acc
    n = block.n
    tile = block.dq_tile
    cur = n & 1
    new = cur ^ 1
    zero = opaque(gl.to_tensor(0))  # a known 0 would keep the descriptors of K in registers
    q = queries.tiles.index(cur).reshape([BLOCK_M, D])
    mbarrier.wait(grads.full.index(cur), (n >> 1) & 1)
    do = grads.tiles.index(cur).reshape([BLOCK_M, DV])
    p = gl.convert_layout(p, operand, assert_trivial=True)
    dv = warpgroup_mma(p, own_columns(do, 0), dv, is_async=True)
    if not LAST:
        mbarrier.wait(queries.full.index(new), ((n + 1) >> 1) & 1)
        s = issue_abt(kv.k.index(zero).reshape([64, D]), queries.tiles.index(new).reshape([BLOCK_M, D]))
    bar_sync(WIDE_DS_STORED, 256)
    dk = warpgroup_mma(shared.ds.index(cur), own_columns(q, 0), dk, is_async=True)
    DQ_LATE: gl.constexpr = CONFIG.SCORES_FIRST and not LAST
    if not DQ_LATE:
        dq = issue_dq(shared, cur, zero, 0, 0, D)
    if LAST:
        dv, p = warpgroup_mma_wait(2, deps=(dv, p))
    else:
        dv, p, s = warpgroup_mma_wait(1 if DQ_LATE else 2, deps=(dv, p, s))
    arrive(grads.empty.index(cur))
    if not LAST:
        p = store_p(s, shared, new, keys, upcoming, params, CONFIG)
        mbarrier.wait(kv.full.index(0), phase(keys.t, 1))  # already satisfied; keeps the next wait after exp2
    if DQ_LATE:
        dq = issue_dq(shared, cur, zero, 0, 0, D)
    dk, dq = warpgroup_mma_wait(0, deps=(dk, dq))
    arrive(queries.empty.index(cur))
    rest = issue_dq(shared, cur, zero, 1, 0, D)
    if CONFIG.DETERMINISTIC:
        mbarrier.wait(shared.order.ready.index(cur), (n >> 1) & 1)
    atomic_add_dq(dq_acc, dq, tile * 4)
    rest = warpgroup_mma_wait(0, deps=(rest,))
    atomic_add_dq(dq_acc, rest, tile * 4 + 1)
    if CONFIG.DETERMINISTIC:
        mbarrier.arrive(shared.order.added.index(cur), count=1)
    return p, dk, dv


@gluon.jit
def attend_block_1(shared, acc, block, params, CONFIG: gl.constexpr):
    """Warpgroup 1: its columns of dK, dV and dQ of a block, whose dP^T is in flight; on return that of the next block
    is, after the last block that of this one again, unused, instead of a branch around a wgmma. `acc`: dP^T, dK, dV."""
    D: gl.constexpr = CONFIG.D
    DV: gl.constexpr = CONFIG.DV
    DTYPE: gl.constexpr = shared.ds.dtype
    dp, dk, dv = acc
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    flat: gl.constexpr = in_register_order(gl.zeros([64, BLOCK_M], gl.float32, layout)).type.layout
    dk_operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    dv_operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    queries = shared.q
    grads = shared.do
    dq_acc = params.outputs.dq_acc
    n = block.n
    tile = block.dq_tile
    cur = n & 1
    new = cur ^ 1
    zero = opaque(gl.to_tensor(0))
    do = grads.tiles.index(cur).reshape([BLOCK_M, DV])
    delta = grads.statistics.index(cur).load(layout)
    bar_sync(P_STORED, 256)
    p = from_register_order(shared.p.load(flat), layout)
    dp = warpgroup_mma_wait(0, deps=(dp,))  # ptxas follows a wgmma across a loop's back edge only to a wait for all
    p16 = shared.ds.index(cur).load(layout) if params.terms.has_derivative is not None else downcast(p, DTYPE)
    p16 = gl.convert_layout(p16, dv_operand, assert_trivial=True)
    dv = warpgroup_mma(p16, own_columns(do, 1), dv, is_async=True)
    ds = downcast(p * (dp - delta), DTYPE)
    shared.ds.index(cur).store(ds)
    fence_async_shared()
    bar_arrive(WIDE_DS_STORED, 256)
    ds16 = gl.convert_layout(ds, dk_operand, assert_trivial=True)
    mbarrier.wait(queries.full.index(cur), (n >> 1) & 1)
    dk = warpgroup_mma(ds16, own_columns(queries.tiles.index(cur).reshape([BLOCK_M, D]), 1), dk, is_async=True)
    dq = issue_dq(shared, cur, zero, 0, 1, D)
    dk, dv, p16, ds16 = warpgroup_mma_wait(1, deps=(dk, dv, p16, ds16))
    mbarrier.expect(grads.empty.index(cur), 0, pred=block.has_next)  # `arrive`
    arrive(queries.empty.index(cur))
    dq = warpgroup_mma_wait(0, deps=(dq,))
    rest = issue_dq(shared, cur, zero, 1, 1, D)
    if CONFIG.DETERMINISTIC:
        mbarrier.wait(shared.order.ready.index(cur), (n >> 1) & 1)
    atomic_add_dq(dq_acc, dq, tile * 4 + 2)
    rest = warpgroup_mma_wait(0, deps=(rest,))
    mbarrier.wait(grads.full.index(new), ((n + 1) >> 1) & 1, pred=block.has_next)
    do = grads.tiles.index(gl.where(block.has_next, new, cur)).reshape([BLOCK_M, DV])
    dp = issue_abt(shared.kv.v.index(zero).reshape([64, DV]), do)
    atomic_add_dq(dq_acc, rest, tile * 4 + 3)
    if CONFIG.DETERMINISTIC:
        mbarrier.arrive(shared.order.added.index(cur), count=1)
    return dp, dk, dv


@gluon.jit
def attend_tile(shared, grads, w, queries, progress, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """This warpgroup's columns of dK and dV (`grads`, 0 before) of the key tile w, and its part of dQ."""
    D: gl.constexpr = CONFIG.D
    DV: gl.constexpr = CONFIG.DV
    dk, dv = grads
    n, t = progress
    end = n + num_blocks(queries, CONFIG)
    diagonal = w.first + opaque(w.n_q) - opaque(w.n_k)
    left = w.n_k - w.first
    keys = KeyRows(w, diagonal, left, t)
    i0 = queries.start
    h = queries.head
    g = gl.to_tensor(0)
    zero = opaque(gl.to_tensor(0))
    if WG == 0:
        mbarrier.wait(shared.q.full.index(n & 1), (n >> 1) & 1)
        q = shared.q.tiles.index(n & 1).reshape([BLOCK_M, D])
        s = warpgroup_mma_wait(0, deps=(issue_abt(shared.kv.k.index(zero).reshape([64, D]), q),))
        block = QueryBlock(n, h, i0, is_edge(queries, i0, CONFIG), True, True, 0)
        x = store_p(s, shared, n & 1, keys, block, params, CONFIG)
    else:
        mbarrier.wait(shared.do.full.index(n & 1), (n >> 1) & 1)
        do = shared.do.tiles.index(n & 1).reshape([BLOCK_M, DV])
        x = issue_abt(shared.kv.v.index(zero).reshape([64, DV]), do)
    for m in range(n, end - 1 + WG):
        tile = queries.dq_tile + g * (params.padded_tokens // BLOCK_M) + i0 // BLOCK_M
        i0, g = next_block(queries, i0, g, CONFIG)
        if WG == 0:
            block = QueryBlock(m, h, i0, False, True, True, tile)
            upcoming = QueryBlock(m + 1, h + g, i0, is_edge(queries, i0, CONFIG), True, True, tile)
            x, dk, dv = attend_block_0(shared, (x, dk, dv), keys, block, upcoming, params, False, CONFIG)
        else:
            block = QueryBlock(m, h, i0, False, True, m + 1 < end, tile)
            x, dk, dv = attend_block_1(shared, (x, dk, dv), block, params, CONFIG)
    tile = queries.dq_tile + g * (params.padded_tokens // BLOCK_M) + i0 // BLOCK_M
    if WG == 0:
        block = QueryBlock(end - 1, h, i0, False, True, False, tile)
        x, dk, dv = attend_block_0(shared, (x, dk, dv), keys, block, block, params, True, CONFIG)
    else:
        x = warpgroup_mma_wait(0, deps=(x,))
        arrive(shared.do.empty.index((end - 1) & 1))
    return dk, dv


@gluon.jit
def consume(shared, tile_info, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Consumer warpgroup WG: its columns of dK and dV, 0 for keys that no query sees, and its part of dQ."""
    D: gl.constexpr = CONFIG.D // 2
    DV: gl.constexpr = CONFIG.DV // 2
    PACKED: gl.constexpr = params.cu_q is not None
    outputs = params.outputs
    n = gl.to_tensor(0)
    t = gl.to_tensor(0)
    w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)
    while w.first >= 0:
        queries = query_range(w, params, CONFIG)
        dk = gl.zeros([64, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
        dv = gl.zeros([64, DV], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16]))
        mbarrier.wait(shared.kv.full.index(0), phase(t, 1))
        if queries.hi > queries.lo:
            dk, dv = attend_tile(shared, (dk, dv), w, queries, Progress(n, t), params, WG, CONFIG)
        if outputs.flag is not None:
            flag_nonfinite(outputs.flag, dk)
            flag_nonfinite(outputs.flag, dv)
        n = opaque(n + num_blocks(queries, CONFIG))
        w = read_tile_info(tile_info, opaque(t), params.n_q, params.n_k, PACKED)  # not kept in registers meanwhile
        tokens = Tokens(w.b, w.h, w.k0, w.n_k)
        bar_sync(ALL_READ, 256)
        if CONFIG.SPLIT:
            store_part(outputs.dk_parts, dk, part_tile(w, params) * 2 + WG)
            store_part(outputs.dv_parts, dv, part_tile(w, params) * 2 + WG)
        else:
            dk_at = tma_coordinates(outputs.dk, tokens, w.first, D * WG)
            dv_at = tma_coordinates(outputs.dv, tokens, w.first, DV * WG)
            shared.dk.index(WG).reshape([64, D]).store((dk * params.scale).to(outputs.dk.dtype))
            shared.dv.index(WG).reshape([64, DV]).store(dv.to(outputs.dv.dtype))
            fence_async_shared()
            tma_store(outputs.dk, dk_at, shared.dk.index(WG))
            tma_store(outputs.dv, dv_at, shared.dv.index(WG))
            tma.store_wait(0)
        mbarrier.arrive(shared.kv.empty.index(0), count=1)
        release_tile_info(tile_info, t)
        t += 1
        w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)


@gluon.jit
def specialize_warps_wide(inputs, params, CONFIG: gl.constexpr):
    """Allocates shared memory and starts the warps of a program, with their registers."""
    DTYPE: gl.constexpr = inputs.q.dtype
    dk = params.outputs.dk
    dv = params.outputs.dv
    kv = make_kv_tile(inputs.k, inputs.v, 1)
    p_tile = gl.allocate_shared_memory(gl.float32, [BLOCK_M // 4, 256], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ds_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    dk_tiles = reinterpret(kv.k, DTYPE, [2] + dk.block_type.shape, dk.layout)  # noqa: RUF005
    dv_tiles = reinterpret(kv.v, DTYPE, [2] + dv.block_type.shape, dv.layout)  # noqa: RUF005
    q = make_row_pipeline(inputs.q, inputs.lse2)
    do = make_row_pipeline(inputs.do, inputs.delta)
    tile_info = make_tile_info(4 if CONFIG.DETERMINISTIC else 2)
    gdc_launch_dependents()
    shared = Shared(kv, q, do, p_tile, ds_tiles, dk_tiles, dv_tiles, make_order() if CONFIG.DETERMINISTIC else None)
    fence_async_shared()
    if CONFIG.DETERMINISTIC:
        gl.warp_specialize(
            [
                (consume, (shared, tile_info, params, 0, CONFIG)),
                (consume, (shared, tile_info, params, 1, CONFIG)),
                (produce, (shared, inputs, tile_info, params, CONFIG)),
                (order_dq, (shared.order, tile_info, params, True, CONFIG)),
                (order_dq, (shared.order, tile_info, params, False, CONFIG)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (shared, tile_info, params, 0, CONFIG)),
                (consume, (shared, tile_info, params, 1, CONFIG)),
                (produce, (shared, inputs, tile_info, params, CONFIG)),
            ],
            [4, 1],
            [240, 24],
        )
