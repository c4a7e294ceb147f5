"""The backward pass on Hopper for head dims up to 128: dQ, dK and dV from five products, none of them computed twice.

A program owns 128 keys of one KV head at a time, 64 for each of its two warpgroups, and streams past them the queries
that see them, 64 or 128 at a time, of every query head in the group. Tiles are transposed (keys by queries), so that
P^T and dS^T leave the tensor cores in the registers from which dV and dK read them:

    S^T = K Q^T      P^T = exp2(scale_log2 S^T - lse2)      dP^T = V dO^T      dS^T = P^T * (dP^T - delta)
    dV += P^T dO     dK += dS^T Q                     dQ = dS K, over the keys of both: through shared memory

dQ of a block is computed one block late, from two buffers of dS, so that the warpgroups may drift apart by most of a
block: one exponentiates while the other multiplies. dQ is summed over the key tiles in global memory, in float32: by
atomics from registers; or (DQ_BY_TMA) by TMA, through two more warps: in any order, one for each warpgroup; or
(DETERMINISTIC) in the order of the key tiles, by turns for both.

dS is fenced where it is read, not where it is stored: a fence waits for everything that its threads have in flight,
atomics too, and here it overlaps with the product of dV.
"""

from typing import NamedTuple

from ..common.device.score import times_derivative
from ..common.device.tile_range import block_at
from .backward_tiles import (
    Inputs,
    KeyRows,
    KvTile,
    Outputs,
    Params,
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
    store_by_tma,
)
from .backward_wide import specialize_warps_wide
from .dq_accumulation import DQ_STORED, atomic_add_dq, reduce_dq
from .gluon_compat import (
    arrive,
    bar_arrive,
    bar_arrive_dynamic,
    bar_sync_dynamic,
    downcast,
    fence_async_shared,
    gdc_launch_dependents,
    gl,
    gluon,
    mbarrier,
    opaque,
    reinterpret,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .key_parts import Parts, part_tile, store_part
from .pipeline import (
    ANY_VALUE,
    TileScheduler,
    Tokens,
    make_mbarriers,
    make_tile_info,
    phase,
    read_tile_info,
    release_tile_info,
    tma_coordinates,
    wait_tile_info,
)
from .register_order import in_register_order

# named barriers; that of warpgroup w and buffer b of dS is + 2 w + b
DS_STORED: gl.constexpr = gl.constexpr(8)  # w has stored its dS in b
DS_READ: gl.constexpr = gl.constexpr(12)  # w has read the buffer other than b


class Staging(NamedTuple):
    """Tiles on their way out: dS^T [2 warpgroup + buffer, keys, queries] and dQ [warpgroup, register order]. dK is
    stored through the memory of dS, dV through that of dQ: K, V, Q and dO are being loaded again by then. `dq_empty`:
    dQ has left."""

    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    dk: gl.shared_memory_descriptor
    dv: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor


class Shared(NamedTuple):
    """All of shared memory but the tile info."""

    kv: KvTile
    q: RowPipeline
    do: RowPipeline
    staging: Staging


@gluon.jit
def issue_dq(shared, buffer, zero, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Issues this warpgroup's half of dQ = dS K, over the keys of both: half of the rows, or with 64 queries of the
    columns."""
    D: gl.constexpr = CONFIG.D
    COLUMNS: gl.constexpr = D if CONFIG.BLOCK_M == 128 else D // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros([64, COLUMNS], gl.float32, layout)
    for part in gl.static_range(2):
        ds = shared.staging.ds.index(2 * part + buffer)
        k = shared.kv.k.index(zero + part).reshape([64, D])
        if CONFIG.BLOCK_M == 128:
            ds = ds.slice(64 * WG, 64, dim=1)
        else:
            k = k.slice(COLUMNS * WG, COLUMNS, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=part > 0, is_async=True)
    return dq


@gluon.jit
def add_dq(dq, staging, dq_acc, tile, n, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Adds half a tile of dQ, the n-th of this program, to global memory, or hands it to the warps that do."""
    if CONFIG.DQ_BY_TMA:
        mbarrier.wait(staging.dq_empty.index(0 if CONFIG.DETERMINISTIC else WG), phase(n, 1) ^ 1)
        staging.dq.index(WG).store(in_register_order(dq))
        fence_async_shared()
        if CONFIG.DETERMINISTIC:
            bar_arrive_dynamic(DQ_STORED + (n & 1), 288)
        else:
            bar_arrive(DQ_STORED + WG, 160)
    else:
        atomic_add_dq(dq_acc, dq, tile * 2 + WG)


@gluon.jit
def attend_block(shared, acc, keys, block, params, WG: gl.constexpr, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """dK and dV of a block of queries, and dQ of the block before it (none for FIRST), which is block.dq_tile.
    `acc`: S^T, dK, dV. S^T of the block is in flight; on return that of the next one is."""
    s, dk, dv = acc
    kv, queries, grads, staging = shared
    n = block.n
    D: gl.constexpr = dk.shape[1]
    DV: gl.constexpr = dv.shape[1]
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    DTYPE: gl.constexpr = kv.k.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    dk_operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    dv_operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    LOAD_LATE: gl.constexpr = BLOCK_M == 128  # with 128 queries registers are short: operands are loaded last
    gl.static_assert(not (LOAD_LATE and CONFIG.HAS_TERMS), "P for dV is taken after the derivative of the scores")
    cur = n & 1
    old = cur ^ 1
    zero = opaque(gl.to_tensor(0))  # a known 0 would keep the descriptors of K, V and dS in 64 registers
    q = queries.tiles.index(cur).reshape([BLOCK_M, D])

    s = warpgroup_mma_wait(0, deps=(s,))  # ptxas follows a wgmma across a loop's back edge only to a wait for all
    if not LOAD_LATE:
        lse2 = queries.statistics.index(cur).load(layout)
    mbarrier.wait(grads.full.index(cur), (n >> 1) & 1)
    do = grads.tiles.index(cur).reshape([BLOCK_M, DV])
    v = kv.v.index(WG + zero).reshape([64, DV])
    if not CONFIG.SCORES_FIRST:
        dp = issue_abt(v, do)
    if LOAD_LATE:
        lse2 = queries.statistics.index(cur).load(layout)
    s, derivative = log2_p(s, lse2, keys, block, params, CONFIG)
    p = gl.exp2(s)
    if not LOAD_LATE:
        p16 = gl.convert_layout(downcast(p, DTYPE), dv_operand, assert_trivial=True)
    p = times_derivative(p, derivative, params.terms)
    if CONFIG.SCORES_FIRST:
        dp = issue_abt(v, do)
    mbarrier.wait(kv.full.index(0), phase(keys.t, 1))  # already satisfied; its branch keeps the next wait after exp2
    if not LOAD_LATE:
        delta = grads.statistics.index(cur).load(layout)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    if LOAD_LATE:
        delta = grads.statistics.index(cur).load(layout)
    ds = downcast(p * (dp - delta), DTYPE)
    ds16 = gl.convert_layout(ds, dk_operand, assert_trivial=True)
    if LOAD_LATE:
        p16 = gl.convert_layout(downcast(p, DTYPE), dv_operand, assert_trivial=True)
    if FIRST:
        tma.store_wait(0)  # dK and dV of the tile before have left
    else:
        bar_sync_dynamic(DS_READ + (1 - WG) * 2 + old, 256)
    staging.ds.index(WG * 2 + cur).store(ds)
    bar_arrive_dynamic(DS_STORED + WG * 2 + cur, 256)

    dv = warpgroup_mma(p16, do, dv, is_async=True)
    if FIRST:
        dv, p16 = warpgroup_mma_wait(0, deps=(dv, p16))
        arrive(grads.empty.index(cur))
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
        bar_arrive_dynamic(DS_READ + WG * 2 + cur, 256)
    else:
        bar_sync_dynamic(DS_STORED + (1 - WG) * 2 + old, 256)
        fence_async_shared()
        dq = issue_dq(shared, old, zero, WG, CONFIG)
        dv, p16 = warpgroup_mma_wait(2, deps=(dv, p16))
        arrive(grads.empty.index(cur))
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        bar_arrive_dynamic(DS_READ + WG * 2 + cur, 256)
        add_dq(dq, staging, params.outputs.dq_acc, block.dq_tile, n - 1, WG, CONFIG)
    # S of the next block; after the last block that of this one again, unused, instead of a branch around a wgmma
    mbarrier.wait(queries.full.index(old), ((n + 1) >> 1) & 1, pred=block.has_next)
    q_next = queries.tiles.index(gl.where(block.has_next, old, cur)).reshape([BLOCK_M, D])
    s = issue_abt(kv.k.index(WG + zero).reshape([64, D]), q_next)
    dk, ds16 = warpgroup_mma_wait(1, deps=(dk, ds16))
    mbarrier.expect(queries.empty.index(cur), 0, pred=block.has_next)  # `arrive`
    return s, dk, dv


@gluon.jit
def attend_tile(shared, grads, w, queries, progress, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """dK and dV (`grads`, 0 before) of this warpgroup's half of the key tile w, and its part of dQ."""
    D: gl.constexpr = CONFIG.D
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    dk, dv = grads
    n, t = progress
    end = n + num_blocks(queries, CONFIG)
    diagonal = w.first + 64 * WG + opaque(w.n_q) - opaque(w.n_k)
    left = w.n_k - w.first - 64 * WG
    keys = KeyRows(w, diagonal, left, t)
    place = queries.start
    i0, has_mask_mod = block_at(place, params.terms.blocks, BLOCK_M)
    g = gl.to_tensor(0)
    h = queries.head
    mbarrier.wait(shared.q.full.index(n & 1), (n >> 1) & 1)
    zero = opaque(gl.to_tensor(0))
    q = shared.q.tiles.index((n & 1) + zero).reshape([BLOCK_M, D])
    s = issue_abt(shared.kv.k.index(WG + zero).reshape([64, D]), q)
    block = QueryBlock(n, h, i0, is_edge(queries, i0, CONFIG), has_mask_mod, n + 1 < end, 0)
    s, dk, dv = attend_block(shared, (s, dk, dv), keys, block, params, WG, True, CONFIG)
    for m in range(n + 1, end):
        tile = queries.dq_tile + g * (params.padded_tokens // BLOCK_M) + i0 // BLOCK_M
        place, g = next_block(queries, place, g, CONFIG)
        i0, has_mask_mod = block_at(place, params.terms.blocks, BLOCK_M)
        block = QueryBlock(m, h + g, i0, is_edge(queries, i0, CONFIG), has_mask_mod, m + 1 < end, tile)
        s, dk, dv = attend_block(shared, (s, dk, dv), keys, block, params, WG, False, CONFIG)
    tile = queries.dq_tile + g * (params.padded_tokens // BLOCK_M) + i0 // BLOCK_M

    zero = opaque(gl.to_tensor(0))
    cur = end & 1
    old = cur ^ 1
    s = warpgroup_mma_wait(0, deps=(s,))
    arrive(shared.q.empty.index(old))
    bar_sync_dynamic(DS_READ + (1 - WG) * 2 + old, 256)
    bar_sync_dynamic(DS_STORED + (1 - WG) * 2 + old, 256)
    fence_async_shared()
    dq = warpgroup_mma_wait(0, deps=(issue_dq(shared, old, zero, WG, CONFIG),))
    bar_arrive_dynamic(DS_READ + WG * 2 + cur, 256)
    bar_sync_dynamic(DS_READ + (1 - WG) * 2 + cur, 256)
    arrive(shared.kv.empty.index(0))  # before this the other warpgroup cannot start the next tile and arrive again
    add_dq(dq, shared.staging, params.outputs.dq_acc, tile, end - 1, WG, CONFIG)
    return dk, dv


@gluon.jit
def consume(shared, tile_info, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Consumer warpgroup WG: dK and dV of its keys, 0 for keys that no query sees, and its part of dQ."""
    D: gl.constexpr = CONFIG.D
    DV: gl.constexpr = CONFIG.DV
    PACKED: gl.constexpr = params.cu_q is not None
    outputs = params.outputs
    staging = shared.staging
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
        else:
            arrive(shared.kv.empty.index(0))
            tma.store_wait(0)
        if outputs.flag is not None:
            flag_nonfinite(outputs.flag, dk)
            flag_nonfinite(outputs.flag, dv)
        n = opaque(n + num_blocks(queries, CONFIG))  # the compiler may not derive its parity
        w = read_tile_info(tile_info, opaque(t), params.n_q, params.n_k, PACKED)  # not kept in registers meanwhile
        tokens = Tokens(w.b, w.h, w.k0, w.n_k)
        if CONFIG.SPLIT:
            store_part(outputs.dk_parts, dk, part_tile(w, params) + WG)
            store_part(outputs.dv_parts, dv, part_tile(w, params) + WG)
        else:
            where = tma_coordinates(outputs.dk, tokens, w.first + 64 * WG)
            store_by_tma(dk * params.scale, staging.dk.index(WG * staging.dk.shape[0] // 2), outputs.dk, where)
            if CONFIG.DQ_BY_TMA:
                mbarrier.wait(staging.dq_empty.index(0 if CONFIG.DETERMINISTIC else WG), phase(n - 1, 1))
            store_by_tma(dv, staging.dv.index(WG * staging.dv.shape[0] // 2), outputs.dv, where)
        release_tile_info(tile_info, t)
        t += 1
        w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)
    tma.store_wait(0)


@gluon.jit
def specialize_warps(inputs, params, CONFIG: gl.constexpr):
    """Allocates shared memory and starts the warps of a program, with their registers."""
    D: gl.constexpr = CONFIG.D
    DV: gl.constexpr = CONFIG.DV
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    DTYPE: gl.constexpr = inputs.q.dtype
    dk = params.outputs.dk
    dv = params.outputs.dv
    ds_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    dq_layout: gl.constexpr = params.outputs.dq_acc_desc.layout
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M * D // 512, 256], dq_layout)
    dk_tiles = reinterpret(ds_tiles, DTYPE, [4 * BLOCK_M // D] + dk.block_type.shape, dk.layout)  # noqa: RUF005
    dv_tiles = reinterpret(dq_tiles, DTYPE, [BLOCK_M * D // (32 * DV)] + dv.block_type.shape, dv.layout)  # noqa: RUF005
    # The compiler would give the memory of an unused mbarrier to a tile (emulator.machine, _check_barriers).
    dq_empty = make_mbarriers(1 if CONFIG.DETERMINISTIC else 2, 1) if CONFIG.DQ_BY_TMA else ds_tiles
    staging = Staging(ds_tiles, dq_tiles, dk_tiles, dv_tiles, dq_empty)
    kv = make_kv_tile(inputs.k, inputs.v, 2)
    shared = Shared(kv, make_row_pipeline(inputs.q, inputs.lse2), make_row_pipeline(inputs.do, inputs.delta), staging)
    tile_info = make_tile_info(4 if CONFIG.DQ_BY_TMA else 2)
    fence_async_shared()
    gdc_launch_dependents()
    if CONFIG.DQ_BY_TMA:
        gl.warp_specialize(
            [
                (consume, (shared, tile_info, params, 0, CONFIG)),
                (consume, (shared, tile_info, params, 1, CONFIG)),
                (produce, (shared, inputs, tile_info, params, CONFIG)),
                (reduce_dq, (staging, tile_info, params, 0, CONFIG)),
                (reduce_dq, (staging, tile_info, params, 1, CONFIG)),
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


@gluon.jit
def start_warps(inputs, params, CONFIG: gl.constexpr):
    if CONFIG.D > 128:
        specialize_warps_wide(inputs, params, CONFIG)
    else:
        specialize_warps(inputs, params, CONFIG)


@gluon.jit(**ANY_VALUE)
def backward_kernel(
    q,
    k,
    v,
    do,
    lse2,
    delta,
    dq_acc,
    dq_acc_desc,
    dk,
    dv,
    dk_parts,
    dv_parts,
    flag,
    semaphores,
    cu_q,
    cu_k,
    n_q,
    n_k,
    before,
    after,
    scale_log2,
    scale,
    padded_tokens,
    ascending_rows,
    group,
    query_shift,
    query_step,
    padded_keys,
    counter,
    num_tiles,
    rows,
    tiles_per_row,
    heads,
    batch,
    rows_in_l2,
    terms,
    SCORE_MOD: gl.constexpr,
    MASK_MOD: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """The arguments in the form in which Triton takes them (see ANY_VALUE): TMA descriptors and integers one by one."""
    start_warps(
        Inputs(q, k, v, do, lse2, delta),
        Params(
            Outputs(dq_acc, dq_acc_desc, dk, dv, dk_parts, dv_parts, flag, semaphores),
            *(cu_q, cu_k, n_q, n_k, before, after, scale_log2, scale, padded_tokens, ascending_rows, terms),
            Parts(group, query_shift, query_step, padded_keys),
            TileScheduler(counter, num_tiles, rows, tiles_per_row, heads, batch, rows_in_l2),
            SCORE_MOD,
            MASK_MOD,
        ),
        CONFIG,
    )
