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
from ..common.device.tile_range import block_at, clamp
from .backward_common import (
    BLOCK_M,
    KeyRows,
    KvTile,
    Progress,
    QueryBlock,
    RowPipeline,
    atomic_add_dq,
    is_edge,
    log2_p,
    make_kv_tile,
    make_order,
    make_row_pipeline,
    next_block,
    num_blocks,
    order_dq,
    part_tile,
    produce,
    query_range,
    store_key_part,
)
from .dropout import downcast_weights, score_gradients, sequence_word, with_signs
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
from .parts import (
    acc_layout,
    flag_nonfinite,
    from_register_order,
    in_register_order,
    issue_abt,
    issue_parts,
    operands,
    parts_at,
    scaled,
    tile_at,
    wait_parts,
    zero_acc,
    zero_part,
)
from .pipeline import (
    Tokens,
    make_tile_info,
    phase,
    read_tile_info,
    release_tile_info,
    tma_coordinates,
    wait_tile_info,
)

# named barriers of both warpgroups
P_STORED: gl.constexpr = gl.constexpr(8)
WIDE_DS_STORED: gl.constexpr = gl.constexpr(9)  # a name of its own: docs/gotchas.md, constants in cache keys
ALL_READ: gl.constexpr = gl.constexpr(10)


class Shared(NamedTuple):
    """All of shared memory but the tile info: the inputs, P^T in register order, two buffers of dS^T [keys, queries].
    dK and dV are stored through the memory of K and V. `order` is None if not DETERMINISTIC."""

    kv: KvTile
    q: RowPipeline
    do: RowPipeline
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dk: tuple[gl.shared_memory_descriptor, ...]
    dv: tuple[gl.shared_memory_descriptor, ...]
    order: tl.tuple


@gluon.jit
def own_columns(tiles, n, WG: gl.constexpr):
    """This warpgroup's half of each column part of tile n."""
    if len(tiles) == 1:
        return (half_columns(tile_at(tiles[0], n), WG),)
    else:
        return half_columns(tile_at(tiles[0], n), WG), half_columns(tile_at(tiles[1], n), WG)


@gluon.jit
def half_columns(tile, WG: gl.constexpr):
    N: gl.constexpr = tile.shape[1] // 2
    return tile.slice(N * WG, N, dim=1)


@gluon.constexpr_function
def half_widths(parts):
    return tuple(x // 2 for x in parts)


@gluon.jit
def issue_dq(shared, stage, zero, PIECE: gl.constexpr, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Issues a piece of this warpgroup's columns of dQ = dS K."""
    PLACE: gl.constexpr = CONFIG.DQ_PIECES[WG][PIECE]
    k = tile_at(shared.kv.k[PLACE[0]], zero).slice(PLACE[1], PLACE[2], dim=1)
    ds = shared.ds.index(stage).permute((1, 0))
    return warpgroup_mma(ds, k, zero_part(PLACE[2]), use_acc=False, is_async=True)


@gluon.jit
def store_p(s, shared, stage, keys, block, params, CONFIG: gl.constexpr):
    """P^T of a block from S^T, in 16 bits. Also stores it for the other warpgroup: in float32, times the derivative of
    the score mod; if there is one, P^T in 16 bits as well, in the buffer of dS^T."""
    lse2 = shared.q.statistics.index(stage).load(s.type.layout)
    s, derivative = log2_p(s, lse2, keys, block, params, CONFIG)
    p = with_signs(gl.exp2(s), keys, block, params.terms)
    p16 = downcast_weights(p, shared.ds.dtype, params.terms)
    if params.terms.has_derivative is not None:
        shared.ds.index(stage).store(p16)
    shared.p.store(in_register_order(times_derivative(p, derivative, params.terms)))
    bar_arrive(P_STORED, 256)
    return p16


@gluon.jit
def attend_block_0(shared, acc, keys, block, upcoming, params, LAST: gl.constexpr, CONFIG: gl.constexpr):
    """Warpgroup 0: its columns of dK, dV and dQ of a block, whose P^T is stored; then P^T of the `upcoming` block (none
    for LAST). `acc`: P^T, dK, dV."""
    PARTS: gl.constexpr = len(CONFIG.D)
    p, dk, dv = acc
    kv = shared.kv
    queries = shared.q
    grads = shared.do
    dq_acc = params.outputs.dq_acc
    n = block.n
    tile = block.dq_tile
    cur = n & 1
    new = cur ^ 1
    zero = opaque(gl.to_tensor(0))  # a known 0 would keep the descriptors of K in registers
    mbarrier.wait(grads.full.index(cur), (n >> 1) & 1)
    p16 = operands((p,), dv)
    dv = issue_parts(p16, own_columns(grads.tiles, cur, 0), dv)
    if not LAST:
        mbarrier.wait(queries.full.index(new), ((n + 1) >> 1) & 1)
        s = issue_abt(parts_at(kv.k, zero), parts_at(queries.tiles, new))
    bar_sync(WIDE_DS_STORED, 256)
    ds = shared.ds.index(cur)
    dk = issue_parts((ds,) if PARTS == 1 else (ds, ds), own_columns(queries.tiles, cur, 0), dk)
    DQ_LATE: gl.constexpr = CONFIG.SCORES_FIRST and not LAST
    if not DQ_LATE:
        dq = issue_dq(shared, cur, zero, 0, 0, CONFIG)
    dv = wait_parts(PARTS if DQ_LATE else PARTS + 1, dv, p16)
    if not LAST:
        s = warpgroup_mma_wait(PARTS if DQ_LATE else PARTS + 1, deps=(s,))
    arrive(grads.empty.index(cur))
    if not LAST:
        p = store_p(s, shared, new, keys, upcoming, params, CONFIG)
        mbarrier.wait(kv.full.index(0), phase(keys.t, 1))  # already satisfied; keeps the next wait after exp2
    if DQ_LATE:
        dq = issue_dq(shared, cur, zero, 0, 0, CONFIG)
    dk = wait_parts(0, dk, ())
    dq = warpgroup_mma_wait(0, deps=(dq,))
    arrive(queries.empty.index(cur))
    rest = issue_dq(shared, cur, zero, 1, 0, CONFIG)
    if CONFIG.DETERMINISTIC:
        mbarrier.wait(shared.order.ready.index(cur), (n >> 1) & 1)
    atomic_add_dq(dq_acc, dq, tile, 0, 0, CONFIG)
    rest = warpgroup_mma_wait(0, deps=(rest,))
    atomic_add_dq(dq_acc, rest, tile, 1, 0, CONFIG)
    if CONFIG.DETERMINISTIC:
        mbarrier.arrive(shared.order.added.index(cur), count=1)
    return p, dk, dv


@gluon.jit
def attend_block_1(shared, acc, block, params, CONFIG: gl.constexpr):
    """Warpgroup 1: its columns of dK, dV and dQ of a block, whose dP^T is in flight; on return that of the next block
    is, after the last block that of this one again, unused, instead of a branch around a wgmma. `acc`: dP^T, dK, dV."""
    DTYPE: gl.constexpr = shared.ds.dtype
    dp, dk, dv = acc
    layout: gl.constexpr = acc_layout(BLOCK_M)
    flat: gl.constexpr = in_register_order(gl.zeros([64, BLOCK_M], gl.float32, layout)).type.layout
    queries = shared.q
    grads = shared.do
    dq_acc = params.outputs.dq_acc
    n = block.n
    tile = block.dq_tile
    cur = n & 1
    new = cur ^ 1
    zero = opaque(gl.to_tensor(0))
    delta = grads.statistics.index(cur).load(layout)
    bar_sync(P_STORED, 256)
    p = from_register_order(shared.p.load(flat), layout)
    dp = warpgroup_mma_wait(0, deps=(dp,))  # ptxas follows a wgmma across a loop's back edge only to a wait for all
    if params.terms.has_derivative is not None:
        p16 = shared.ds.index(cur).load(layout)
    else:
        p16 = downcast_weights(p, DTYPE, params.terms)
    p16 = operands((p16,), dv)
    dv = issue_parts(p16, own_columns(grads.tiles, cur, 1), dv)
    ds = downcast(score_gradients(p, dp, delta, params.terms), DTYPE)
    shared.ds.index(cur).store(ds)
    fence_async_shared()
    bar_arrive(WIDE_DS_STORED, 256)
    ds16 = operands((ds,), dk)
    mbarrier.wait(queries.full.index(cur), (n >> 1) & 1)
    dk = issue_parts(ds16, own_columns(queries.tiles, cur, 1), dk)
    dq = issue_dq(shared, cur, zero, 0, 1, CONFIG)
    dv = wait_parts(1, dv, p16)
    dk = wait_parts(1, dk, ds16)
    mbarrier.expect(grads.empty.index(cur), 0, pred=block.has_next)  # `arrive`
    arrive(queries.empty.index(cur))
    dq = warpgroup_mma_wait(0, deps=(dq,))
    rest = issue_dq(shared, cur, zero, 1, 1, CONFIG)
    if CONFIG.DETERMINISTIC:
        mbarrier.wait(shared.order.ready.index(cur), (n >> 1) & 1)
    atomic_add_dq(dq_acc, dq, tile, 0, 1, CONFIG)
    rest = warpgroup_mma_wait(0, deps=(rest,))
    mbarrier.wait(grads.full.index(new), ((n + 1) >> 1) & 1, pred=block.has_next)
    dp = issue_abt(parts_at(shared.kv.v, zero), parts_at(grads.tiles, gl.where(block.has_next, new, cur)))
    atomic_add_dq(dq_acc, rest, tile, 1, 1, CONFIG)
    if CONFIG.DETERMINISTIC:
        mbarrier.arrive(shared.order.added.index(cur), count=1)
    return dp, dk, dv


@gluon.jit
def clamp_listed(place, queries, params):
    """`place`, with a block mask the nearest one inside the range."""
    if params.terms.blocks.offsets is None:
        return place
    else:
        return clamp(place, queries.lo, queries.hi - BLOCK_M)


@gluon.jit
def attend_tile(shared, grads, w, queries, progress, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """This warpgroup's columns of dK and dV (`grads`, 0 before) of the key tile w, and its part of dQ."""
    dk, dv = grads
    n, t = progress
    end = n + num_blocks(queries, CONFIG)
    diagonal = w.first + opaque(w.n_q) - opaque(w.n_k)
    left = w.n_k - w.first
    keys = KeyRows(w, diagonal, left, t, (), sequence_word(w, params.terms))
    place = queries.start
    i0, may_be_partial = block_at(place, params.terms.blocks, BLOCK_M)
    h = queries.head
    g = gl.to_tensor(0)
    zero = opaque(gl.to_tensor(0))
    if WG == 0:
        mbarrier.wait(shared.q.full.index(n & 1), (n >> 1) & 1)
        s = issue_abt(parts_at(shared.kv.k, zero), parts_at(shared.q.tiles, n & 1))
        s = warpgroup_mma_wait(0, deps=(s,))
        block = QueryBlock(n, h, i0, is_edge(queries, i0, CONFIG), may_be_partial, True, 0)
        x = store_p(s, shared, n & 1, keys, block, params, CONFIG)
    else:
        mbarrier.wait(shared.do.full.index(n & 1), (n >> 1) & 1)
        x = issue_abt(parts_at(shared.kv.v, zero), parts_at(shared.do.tiles, n & 1))
    for m in range(n, end - 1 + WG):
        tile = queries.dq_tile + g * (params.padded_tokens // BLOCK_M) + i0 // BLOCK_M
        place, g = next_block(queries, place, g, CONFIG)
        # warpgroup 1 is one block ahead: after the last one, stay inside the lists
        i0, may_be_partial = block_at(clamp_listed(place, queries, params), params.terms.blocks, BLOCK_M)
        if WG == 0:
            block = QueryBlock(m, h, i0, False, True, True, tile)
            upcoming = QueryBlock(m + 1, h + g, i0, is_edge(queries, i0, CONFIG), may_be_partial, True, tile)
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
def halves(tiles, x):
    """The memory of each part as two boxes of the descriptors x."""
    if len(x) == 1:
        return (reinterpret(tiles[0], x[0].dtype, [2] + x[0].block_type.shape, x[0].layout),)  # noqa: RUF005
    else:
        return (
            reinterpret(tiles[0], x[0].dtype, [2] + x[0].block_type.shape, x[0].layout),  # noqa: RUF005
            reinterpret(tiles[1], x[1].dtype, [2] + x[1].block_type.shape, x[1].layout),  # noqa: RUF005
        )


@gluon.jit
def stage_parts(tiles, acc, WG: gl.constexpr):
    """Stores this warpgroup's columns of each part to shared memory."""
    tiles[0].index(WG).reshape(acc[0].shape).store(acc[0].to(tiles[0].dtype))
    if len(acc) == 2:
        tiles[1].index(WG).reshape(acc[1].shape).store(acc[1].to(tiles[1].dtype))


@gluon.jit
def send_parts(x, tiles, tokens, first, WG: gl.constexpr):
    """Stores them from there by TMA."""
    rank: gl.constexpr = len(tiles[0].shape)
    WIDTH: gl.constexpr = tiles[0].shape[rank - 1]
    tma_store(x[0], tma_coordinates(x[0], tokens, first, WG * WIDTH), tiles[0].index(WG))
    if len(x) == 2:
        column = 2 * WIDTH + WG * tiles[1].shape[rank - 1]
        tma_store(x[1], tma_coordinates(x[1], tokens, first, column), tiles[1].index(WG))


@gluon.jit
def consume(shared, tile_info, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Consumer warpgroup WG: its columns of dK and dV, 0 for keys that no query sees, and its part of dQ."""
    D: gl.constexpr = CONFIG.D
    DV: gl.constexpr = CONFIG.DV
    OWN_D: gl.constexpr = half_widths(D)
    OWN_DV: gl.constexpr = half_widths(DV)
    PACKED: gl.constexpr = params.cu_q is not None
    outputs = params.outputs
    n = gl.to_tensor(0)
    t = gl.to_tensor(0)
    w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)
    while w.first >= 0:
        queries = query_range(w, params, CONFIG)
        dk = zero_acc(OWN_D)
        dv = zero_acc(OWN_DV)
        mbarrier.wait(shared.kv.full.index(0), phase(t, 1))
        if queries.hi > queries.lo:
            dk, dv = attend_tile(shared, (dk, dv), w, queries, Progress(n, t), params, WG, CONFIG)
        if outputs.flag is not None:
            flag_nonfinite(outputs.flag, dk)
            flag_nonfinite(outputs.flag, dv)
        n = opaque(n + num_blocks(queries, CONFIG))
        w = read_tile_info(tile_info, opaque(t), params.n_q, params.n_k, PACKED)  # not kept in registers meanwhile
        tokens = Tokens(w.b, w.h, w.k0, w.n_k)
        if params.terms.seed is not None:
            dv = scaled(dv, params.terms.rescale)
        bar_sync(ALL_READ, 256)
        if CONFIG.SPLIT:
            store_key_part(outputs.dk_parts, dk, part_tile(w, params), WG, D)
            store_key_part(outputs.dv_parts, dv, part_tile(w, params), WG, DV)
        else:
            stage_parts(shared.dk, scaled(dk, params.scale), WG)
            stage_parts(shared.dv, dv, WG)
            fence_async_shared()
            send_parts(outputs.dk, shared.dk, tokens, w.first, WG)
            send_parts(outputs.dv, shared.dv, tokens, w.first, WG)
            tma.store_wait(0)
        mbarrier.arrive(shared.kv.empty.index(0), count=1)
        release_tile_info(tile_info, t)
        t += 1
        w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)


@gluon.jit
def specialize_warps_wide(inputs, params, CONFIG: gl.constexpr):
    """Allocates shared memory and starts the warps of a program, with their registers."""
    DTYPE: gl.constexpr = inputs.q[0].dtype
    kv = make_kv_tile(inputs.k, inputs.v, 1)
    p_tile = gl.allocate_shared_memory(gl.float32, [BLOCK_M // 4, 256], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ds_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    dk_tiles = halves(kv.k, params.outputs.dk)
    dv_tiles = halves(kv.v, params.outputs.dv)
    q = make_row_pipeline(inputs.q, inputs.lse2)
    do = make_row_pipeline(inputs.do, inputs.delta)
    tile_info = make_tile_info(4 if CONFIG.DETERMINISTIC else 2)
    gdc_launch_dependents()  # before the wait in `produce`: the postprocess waits for the end of this launch anyway
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
