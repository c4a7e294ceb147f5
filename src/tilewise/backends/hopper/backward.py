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

For head dims from 129 to 192 a key tile visits its queries in two passes.

With 192 columns dK and dV of 64 keys would take 192 of a thread's 240 registers. So there are two loops:

    first     S^T, dP^T, dS^T     dK += dS^T Q, dQ = dS K
    second    S^T, P^T            dV += P^T dO

That is six products where one pass has five. But it leaves registers for tiles of 128 keys, 64 for each warpgroup, and
so dQ is added to global memory half as often as with tiles of 64 keys (`backward_wide`).
"""

from typing import NamedTuple

from ..common.device.score import times_derivative
from ..common.device.tile_range import block_at
from .backward_common import (
    DS_READ,
    DS_STORED,
    Inputs,
    KeyRows,
    KvTile,
    Outputs,
    Params,
    Parts,
    Progress,
    QueryBlock,
    RowPipeline,
    add_dq,
    is_edge,
    issue_dq,
    load_lines,
    log2_p,
    make_kv_tile,
    make_row_pipeline,
    next_block,
    num_blocks,
    num_visits,
    produce,
    query_range,
    reduce_dq,
    store_dk,
    store_dv,
)
from .backward_wide import specialize_warps_wide
from .dropout import downcast_weights, score_gradients, sequence_word, with_signs
from .gluon_compat import (
    arrive,
    bar_arrive_dynamic,
    bar_sync_dynamic,
    downcast,
    fence_async_shared,
    gdc_launch_dependents,
    gl,
    gluon,
    mbarrier,
    opaque,
    tma,
    warpgroup_mma_wait,
)
from .mask_words import row_words
from .parts import (
    acc_layout,
    issue_abt,
    issue_parts,
    loaded_operands,
    operands,
    parts_at,
    reinterpret_parts,
    wait_parts,
    zero_acc,
    zero_part,
)
from .pipeline import (
    ANY_VALUE,
    TileScheduler,
    as_parts,
    make_mbarriers,
    make_tile_info,
    phase,
    read_tile_info,
    release_tile_info,
    wait_tile_info,
)


@gluon.jit
def attend_keys(shared, acc, keys, block, params, WG: gl.constexpr, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """`backward.attend_block` of the first pass: dK of a block, and dQ of the block before it. `acc`: S^T, dK, ()."""
    s, dk, dv = acc
    kv, queries, grads, staging = shared
    n = block.n
    DTYPE: gl.constexpr = staging.ds.dtype
    layout: gl.constexpr = acc_layout(CONFIG.BLOCK_M)
    PARTS: gl.constexpr = len(CONFIG.D)
    PIECES: gl.constexpr = len(CONFIG.DQ_PIECES[WG])
    cur = n & 1
    old = cur ^ 1
    zero = opaque(gl.to_tensor(0))  # a known 0 would keep the descriptors of K, V and dS in 64 registers
    s = warpgroup_mma_wait(0, deps=(s,))  # ptxas follows a wgmma across a loop's back edge only to a wait for all
    lse2 = queries.statistics.index(cur).load(layout)
    mbarrier.wait(grads.full.index(cur), (n >> 1) & 1)
    dp = issue_abt(parts_at(kv.v, WG + zero), parts_at(grads.tiles, cur))
    s, _derivative = log2_p(s, lse2, keys, block, params, CONFIG)
    p = gl.exp2(s)
    mbarrier.wait(kv.full.index(0), phase(keys.t, 1))  # already satisfied; its branch keeps the next wait after exp2
    delta = grads.statistics.index(cur).load(layout)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = downcast(p * (dp - delta), DTYPE)
    ds16 = operands((ds,), dk)
    if FIRST:
        tma.store_wait(0)  # dV of the tile before has left
    else:
        bar_sync_dynamic(DS_READ + (1 - WG) * 2 + old, 256)
    staging.ds.index(WG * 2 + cur).store(ds)
    bar_arrive_dynamic(DS_STORED + WG * 2 + cur, 256)
    dk = issue_parts(ds16, parts_at(queries.tiles, cur), dk)
    dq = ()
    if not FIRST:
        bar_sync_dynamic(DS_STORED + (1 - WG) * 2 + old, 256)
        fence_async_shared()
        for piece in gl.static_range(PIECES):
            dq = dq + (issue_dq(shared, old, zero, piece, WG, CONFIG),)  # noqa: RUF005
    # S of the next block, after the last one that of the first block of the second pass
    mbarrier.wait(queries.full.index(old), ((n + 1) >> 1) & 1)
    s = issue_abt(parts_at(kv.k, WG + zero), parts_at(queries.tiles, old))
    dk = wait_parts(PARTS if FIRST else PARTS + 2 * PIECES, dk, ds16)
    arrive(grads.empty.index(cur))
    arrive(queries.empty.index(cur))
    if not FIRST:
        dq = wait_parts(PARTS, dq, ())
    bar_arrive_dynamic(DS_READ + WG * 2 + cur, 256)
    for piece in gl.static_range(len(dq)):
        add_dq(dq[piece], staging, params.outputs, (block.dq_tile, 0), n - 1, piece, WG, CONFIG)
    return s, dk, dv


@gluon.jit
def exponentiate(s, lse2, keys, block, params, CONFIG: gl.constexpr):
    """P^T of a block from S^T, in 16 bits."""
    s, _derivative = log2_p(s, lse2, keys, block, params, CONFIG)
    return downcast(gl.exp2(s), params.outputs.dv[0].dtype)


@gluon.jit
def attend_values(shared, acc, keys, queries, n, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """The second pass, from block n on: dV of this warpgroup's half of the key tile. S^T of the next block is computed
    before dV of this one, which overlaps with its exponentials. `acc`: S^T of the first block, and dV, 0 before."""
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    PARTS: gl.constexpr = len(CONFIG.DV)
    layout: gl.constexpr = acc_layout(BLOCK_M)
    kv, rows, grads, _staging = shared
    end = n + num_blocks(queries, CONFIG)
    place = queries.start
    i0, may_be_partial = block_at(place, params.terms.blocks, BLOCK_M)
    h = queries.head
    g = gl.to_tensor(0)
    s, dv = acc
    lse2 = rows.statistics.index(n & 1).load(layout)
    mbarrier.arrive(rows.empty.index(n & 1), count=1)
    block = QueryBlock(n, h, i0, is_edge(queries, i0, CONFIG), may_be_partial, True, 0)
    p = exponentiate(s, lse2, keys, block, params, CONFIG)
    for m in range(n, end - 1):
        place, g = next_block(queries, place, g, CONFIG)
        i0, may_be_partial = block_at(place, params.terms.blocks, BLOCK_M)
        block = QueryBlock(m + 1, h + g, i0, is_edge(queries, i0, CONFIG), may_be_partial, True, 0)
        cur = m & 1
        new = cur ^ 1
        zero = opaque(gl.to_tensor(0))
        mbarrier.wait(rows.full.index(new), ((m + 1) >> 1) & 1)
        lse2 = rows.statistics.index(new).load(layout)  # ahead of a product: when it ends, all warps have read them
        s = issue_abt(parts_at(kv.k, WG + zero), parts_at(rows.tiles, new))
        mbarrier.wait(grads.full.index(cur), (m >> 1) & 1)
        p16 = operands((p,), dv)
        dv = issue_parts(p16, parts_at(grads.tiles, cur), dv)
        s = warpgroup_mma_wait(PARTS, deps=(s,))
        arrive(rows.empty.index(new))
        p = exponentiate(s, lse2, keys, block, params, CONFIG)
        mbarrier.wait(grads.full.index(cur), (m >> 1) & 1)  # already satisfied; keeps the next wait after exp2
        dv = wait_parts(0, dv, p16)
        arrive(grads.empty.index(cur))
    last = end - 1
    arrive(kv.empty.index(0))
    mbarrier.wait(grads.full.index(last & 1), (last >> 1) & 1)
    p16 = operands((p,), dv)
    dv = wait_parts(0, issue_parts(p16, parts_at(grads.tiles, last & 1), dv), p16)
    arrive(grads.empty.index(last & 1))
    return dv


class Staging(NamedTuple):
    """Tiles on their way out: dS^T [2 warpgroup + buffer, keys, queries] and dQ [warpgroup, register order]. dK is
    stored through the memory of dS, dV through that of dQ, in column parts: K, V, Q and dO are being loaded again by
    then. `dq_empty`: dQ has left."""

    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    dk: tuple[gl.shared_memory_descriptor, ...]
    dv: tuple[gl.shared_memory_descriptor, ...]
    dq_empty: gl.shared_memory_descriptor


class Shared(NamedTuple):
    """All of shared memory but the tile info."""

    kv: KvTile
    q: RowPipeline
    do: RowPipeline
    staging: Staging


@gluon.jit
def attend_block(shared, acc, keys, block, params, WG: gl.constexpr, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """dK and dV of a block of queries, and dQ of the block before it (none for FIRST), which is block.dq_tile.
    `acc`: S^T, dK, dV. S^T of the block is in flight; on return that of the next one is."""
    s, dk, dv = acc
    kv, queries, grads, staging = shared
    n = block.n
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    DTYPE: gl.constexpr = staging.ds.dtype
    layout: gl.constexpr = acc_layout(BLOCK_M)
    PARTS: gl.constexpr = len(CONFIG.D)
    LOAD_LATE: gl.constexpr = BLOCK_M == 128  # with 128 queries registers are short: operands are loaded last
    HAS_SIGNS: gl.constexpr = params.terms.seed is not None
    gl.static_assert(not (LOAD_LATE and (CONFIG.HAS_TERMS or HAS_SIGNS)), "P for dV is taken after the derivative")
    cur = n & 1
    old = cur ^ 1
    zero = opaque(gl.to_tensor(0))  # a known 0 would keep the descriptors of K, V and dS in 64 registers
    q = parts_at(queries.tiles, cur)
    lines = 0 if FIRST else load_lines(params.outputs, block.dq_tile, WG, CONFIG)

    s = warpgroup_mma_wait(0, deps=(s,))  # ptxas follows a wgmma across a loop's back edge only to a wait for all
    if not LOAD_LATE:
        lse2 = queries.statistics.index(cur).load(layout)
    mbarrier.wait(grads.full.index(cur), (n >> 1) & 1)
    do = parts_at(grads.tiles, cur)
    v = keys.v if CONFIG.V_IN_REGISTERS else parts_at(kv.v, WG + zero)
    if not CONFIG.SCORES_FIRST:
        dp = issue_abt(v, do)
    if LOAD_LATE:
        lse2 = queries.statistics.index(cur).load(layout)
    s, derivative = log2_p(s, lse2, keys, block, params, CONFIG)
    p = with_signs(gl.exp2(s), keys, block, params.terms)
    if not LOAD_LATE:
        p16 = operands((downcast_weights(p, DTYPE, params.terms),), dv)
    p = times_derivative(p, derivative, params.terms)
    if CONFIG.SCORES_FIRST:
        dp = issue_abt(v, do)
    mbarrier.wait(kv.full.index(0), phase(keys.t, 1))  # already satisfied; its branch keeps the next wait after exp2
    if not LOAD_LATE:
        delta = grads.statistics.index(cur).load(layout)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    if LOAD_LATE:
        delta = grads.statistics.index(cur).load(layout)
    ds = downcast(score_gradients(p, dp, delta, params.terms), DTYPE)
    ds16 = operands((ds,), dk)
    if LOAD_LATE:
        p16 = operands((downcast(p, DTYPE),), dv)
    if FIRST:
        tma.store_wait(0)  # dK and dV of the tile before have left
    else:
        bar_sync_dynamic(DS_READ + (1 - WG) * 2 + old, 256)
    staging.ds.index(WG * 2 + cur).store(ds)
    bar_arrive_dynamic(DS_STORED + WG * 2 + cur, 256)

    dv = issue_parts(p16, do, dv)
    if FIRST:
        dv = wait_parts(0, dv, p16)
        arrive(grads.empty.index(cur))
        dk = issue_parts(ds16, q, dk)
        bar_arrive_dynamic(DS_READ + WG * 2 + cur, 256)
    else:
        bar_sync_dynamic(DS_STORED + (1 - WG) * 2 + old, 256)
        fence_async_shared()
        dq = issue_dq(shared, old, zero, 0, WG, CONFIG)
        dv = wait_parts(2, dv, p16)
        arrive(grads.empty.index(cur))
        dk = issue_parts(ds16, q, dk)
        dq = warpgroup_mma_wait(PARTS, deps=(dq,))
        bar_arrive_dynamic(DS_READ + WG * 2 + cur, 256)
        add_dq(dq, staging, params.outputs, (block.dq_tile, lines), n - 1, 0, WG, CONFIG)
    # S of the next block; after the last block that of this one again, unused, instead of a branch around a wgmma
    mbarrier.wait(queries.full.index(old), ((n + 1) >> 1) & 1, pred=block.has_next)
    s = issue_abt(parts_at(kv.k, WG + zero), parts_at(queries.tiles, gl.where(block.has_next, old, cur)))
    dk = wait_parts(PARTS, dk, ds16)
    mbarrier.expect(queries.empty.index(cur), 0, pred=block.has_next)  # `arrive`
    return s, dk, dv


@gluon.jit
def attend_next(shared, acc, keys, block, params, WG: gl.constexpr, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    if CONFIG.TWO_PASSES:
        return attend_keys(shared, acc, keys, block, params, WG, FIRST, CONFIG)
    else:
        return attend_block(shared, acc, keys, block, params, WG, FIRST, CONFIG)


@gluon.jit
def key_rows(w, t, v, params, WG: gl.constexpr):
    """This warpgroup's half of the key tile w."""
    diagonal = w.first + 64 * WG + opaque(w.n_q) - opaque(w.n_k)
    return KeyRows(w, diagonal, w.n_k - w.first - 64 * WG, t, v, sequence_word(w, params.terms))


@gluon.jit
def attend_tile(shared, grads, w, queries, progress, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """dK and dV (`grads`, 0 before) of this warpgroup's half of the key tile w, and its part of dQ. In two passes, the
    first one: dK, and S^T of the first block of the second."""
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    dk, dv = grads
    n, t = progress
    end = n + num_blocks(queries, CONFIG)
    first = w.first + 64 * WG
    v = loaded_operands(shared.kv.v, WG, BLOCK_M) if CONFIG.V_IN_REGISTERS else ()
    keys = key_rows(w, t, v, params, WG)
    place = queries.start
    i0, may_be_partial = block_at(place, params.terms.blocks, BLOCK_M)
    mask_words, shift = row_words(place, first, may_be_partial, params.terms, BLOCK_M, acc_layout(BLOCK_M))
    g = gl.to_tensor(0)
    h = queries.head
    mbarrier.wait(shared.q.full.index(n & 1), (n >> 1) & 1)
    zero = opaque(gl.to_tensor(0))
    q = parts_at(shared.q.tiles, (n & 1) + zero)
    s = issue_abt(parts_at(shared.kv.k, WG + zero), q)
    has_next = CONFIG.TWO_PASSES or n + 1 < end
    block = QueryBlock(n, h, i0, is_edge(queries, i0, CONFIG), may_be_partial, has_next, 0, mask_words, shift)
    s, dk, dv = attend_next(shared, (s, dk, dv), keys, block, params, WG, True, CONFIG)
    for m in range(n + 1, end):
        tile = queries.dq_tile + g * (params.padded_tokens // BLOCK_M) + i0 // BLOCK_M
        place, g = next_block(queries, place, g, CONFIG)
        i0, may_be_partial = block_at(place, params.terms.blocks, BLOCK_M)
        mask_words, shift = row_words(place, first, may_be_partial, params.terms, BLOCK_M, acc_layout(BLOCK_M))
        edge, has_next = is_edge(queries, i0, CONFIG), CONFIG.TWO_PASSES or m + 1 < end
        block = QueryBlock(m, h + g, i0, edge, may_be_partial, has_next, tile, mask_words, shift)
        s, dk, dv = attend_next(shared, (s, dk, dv), keys, block, params, WG, False, CONFIG)
    tile = queries.dq_tile + g * (params.padded_tokens // BLOCK_M) + i0 // BLOCK_M
    lines = load_lines(params.outputs, tile, WG, CONFIG)

    zero = opaque(gl.to_tensor(0))
    cur = end & 1
    old = cur ^ 1
    s = warpgroup_mma_wait(0, deps=(s,))
    if not CONFIG.TWO_PASSES:
        arrive(shared.q.empty.index(old))
    bar_sync_dynamic(DS_READ + (1 - WG) * 2 + old, 256)
    bar_sync_dynamic(DS_STORED + (1 - WG) * 2 + old, 256)
    fence_async_shared()
    dq = warpgroup_mma_wait(0, deps=(issue_dq(shared, old, zero, 0, WG, CONFIG),))
    bar_arrive_dynamic(DS_READ + WG * 2 + cur, 256)
    bar_sync_dynamic(DS_READ + (1 - WG) * 2 + cur, 256)
    if not CONFIG.TWO_PASSES:
        arrive(shared.kv.empty.index(0))  # before this the other warpgroup cannot start the next tile and arrive again
    add_dq(dq, shared.staging, params.outputs, (tile, lines), end - 1, 0, WG, CONFIG)
    return dk, ((s,) if CONFIG.TWO_PASSES else dv)


@gluon.jit
def consume(shared, tile_info, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Consumer warpgroup WG: dK and dV of its keys, 0 for keys that no query sees, and its part of dQ."""
    D: gl.constexpr = CONFIG.D
    DV: gl.constexpr = CONFIG.DV
    PACKED: gl.constexpr = params.cu_q is not None
    staging = shared.staging
    n = gl.to_tensor(0)
    t = gl.to_tensor(0)
    w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)
    while w.first >= 0:
        queries = query_range(w, params, CONFIG)
        dk = zero_acc(D)
        dv = (zero_part(CONFIG.BLOCK_M),) if CONFIG.TWO_PASSES else zero_acc(DV)  # S of the second pass, or dV
        mbarrier.wait(shared.kv.full.index(0), phase(t, 1))
        if queries.hi > queries.lo:
            dk, dv = attend_tile(shared, (dk, dv), w, queries, Progress(n, t), params, WG, CONFIG)
        else:
            arrive(shared.kv.empty.index(0))
            tma.store_wait(0)
        if CONFIG.TWO_PASSES:
            w = read_tile_info(tile_info, opaque(t), params.n_q, params.n_k, PACKED)  # not kept in registers meanwhile
            store_dk(dk, w, staging, params, WG, CONFIG)
            queries = query_range(w, params, CONFIG)
            s = dv[0]
            dv = zero_acc(DV)
            if queries.hi > queries.lo:
                keys = key_rows(w, t, (), params, WG)
                dv = attend_values(shared, (s, dv), keys, queries, n + num_blocks(queries, CONFIG), params, WG, CONFIG)
            tma.store_wait(0)  # dK has left
        n = opaque(n + num_visits(queries, CONFIG))  # the compiler may not derive its parity
        w = read_tile_info(tile_info, opaque(t), params.n_q, params.n_k, PACKED)
        if not CONFIG.TWO_PASSES:
            store_dk(dk, w, staging, params, WG, CONFIG)
        if CONFIG.DQ_BY_TMA and not CONFIG.SPLIT:
            mbarrier.wait(staging.dq_empty.index(0 if CONFIG.DETERMINISTIC else WG), phase(n - 1, 1))
        store_dv(dv, w, staging, params, WG, CONFIG)
        release_tile_info(tile_info, t)
        t += 1
        w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)
    tma.store_wait(0)


@gluon.jit
def specialize_warps(inputs, params, CONFIG: gl.constexpr):
    """Allocates shared memory and starts the warps of a program, with their registers."""
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    DTYPE: gl.constexpr = inputs.q[0].dtype
    ds_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    dq_layout: gl.constexpr = params.outputs.dq_acc_desc.layout
    dk_tiles = reinterpret_parts(ds_tiles, params.outputs.dk, 4 * 64 * BLOCK_M)
    if CONFIG.TWO_PASSES:
        dq_tiles = ds_tiles
        dv_tiles = reinterpret_parts(ds_tiles, params.outputs.dv, 4 * 64 * BLOCK_M)
    else:
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq_layout)
        dv_tiles = reinterpret_parts(dq_tiles, params.outputs.dv, 4 * 64 * 64)
    # The compiler would give the memory of an unused mbarrier to a tile (emulator.machine, _check_barriers).
    dq_empty = make_mbarriers(1 if CONFIG.DETERMINISTIC else 2, 1) if CONFIG.DQ_BY_TMA else ds_tiles
    staging = Staging(ds_tiles, dq_tiles, dk_tiles, dv_tiles, dq_empty)
    kv = make_kv_tile(inputs.k, inputs.v, 2)
    shared = Shared(kv, make_row_pipeline(inputs.q, inputs.lse2), make_row_pipeline(inputs.do, inputs.delta), staging)
    tile_info = make_tile_info(4 if CONFIG.DQ_BY_TMA else 2)
    fence_async_shared()
    gdc_launch_dependents()  # before the wait in `produce`: the postprocess waits for the end of this launch anyway
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
    if CONFIG.WIDE:
        specialize_warps_wide(inputs, params, CONFIG)
    else:
        specialize_warps(inputs, params, CONFIG)


@gluon.jit(**ANY_VALUE)
def backward_kernel(
    q,
    q_rest,
    k,
    k_rest,
    v,
    v_rest,
    do,
    do_rest,
    lse2,
    delta,
    dq_acc,
    dq_acc_desc,
    dq_lines,
    dk,
    dk_rest,
    dv,
    dv_rest,
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
    grouped_rows,
    terms,
    query_lists,
    SCORE_MOD: gl.constexpr,
    MASK_MOD: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """The arguments in the form in which Triton takes them (see ANY_VALUE): TMA descriptors and integers one by one."""
    start_warps(
        Inputs(
            *(as_parts(q, q_rest), as_parts(k, k_rest), as_parts(v, v_rest), as_parts(do, do_rest)),
            *(lse2, delta),
        ),
        Params(
            Outputs(
                *(dq_acc, dq_acc_desc, dq_lines, as_parts(dk, dk_rest), as_parts(dv, dv_rest)),
                *(dk_parts, dv_parts, flag, semaphores),
            ),
            *(
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
                terms,
                query_lists,
            ),
            Parts(group, query_shift, query_step, padded_keys),
            TileScheduler(counter, num_tiles, rows, tiles_per_row, heads, batch, rows_in_l2, grouped_rows),
            SCORE_MOD,
            MASK_MOD,
        ),
        CONFIG,
    )
