"""Two passes of the Hopper backward over the queries of a key tile, for head dims of which dK and dV do not both fit.

With 192 columns dK and dV of 64 keys would take 192 of a thread's 240 registers. So a tile visits its queries twice:

    first     S^T, dP^T, dS^T     dK += dS^T Q, dQ = dS K
    second    S^T, P^T            dV += P^T dO

That is six products where one pass has five, but it leaves registers for tiles of 128 keys, each of whose warpgroups has
its own 64, and so for half of the sums of dQ in global memory that tiles of 64 keys have (`backward_wide`).
"""

from ..common.device.tile_range import block_at
from .backward_tiles import QueryBlock, is_edge, log2_p, next_block, num_blocks, query_range
from .column_parts import acc_layout, issue_abt, issue_parts, operands, parts_at, wait_parts
from .dq_accumulation import DS_READ, DS_STORED, add_dq, issue_dq
from .gluon_compat import (
    arrive,
    bar_arrive_dynamic,
    bar_sync_dynamic,
    downcast,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    opaque,
    tma,
    warpgroup_mma_wait,
)
from .pipeline import phase, release_tile_info, wait_tile_info


@gluon.jit
def wait_ds(shared, n, keys, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Waits until dS of block n of both warpgroups may be read by the matrix units."""
    if CONFIG.FENCE_WARP:
        f = n - keys.word
        mbarrier.wait(shared.staging.dq_empty.index(f & 1), (f >> 1) & 1)
    else:
        bar_sync_dynamic(DS_STORED + (1 - WG) * 2 + (n & 1), 256)
        if not CONFIG.NO_FENCE:
            fence_async_shared()


@gluon.jit
def fence_ds(staging, tile_info, params, CONFIG: gl.constexpr):
    """A warp that fences dS: a fence waits for everything that its threads have in flight, and the consumers' atomics
    take long."""
    PACKED: gl.constexpr = params.cu_q is not None
    f = gl.to_tensor(0)
    t = gl.to_tensor(0)
    w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)
    while w.first >= 0:
        queries = query_range(w, params, CONFIG)
        for m in range(num_blocks(queries, CONFIG)):
            bar_sync_dynamic(DS_STORED + (m & 1), 160)
            bar_sync_dynamic(DS_STORED + 2 + (m & 1), 160)
            fence_async_shared()
            mbarrier.arrive(staging.dq_empty.index(f & 1), count=1)
            f += 1
        release_tile_info(tile_info, t)
        t += 1
        w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)


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
    STAGES: gl.constexpr = CONFIG.STAGES
    cur = n & 1
    old = cur ^ 1
    at = stage(n, CONFIG)
    after = stage(n + 1, CONFIG)
    zero = opaque(gl.to_tensor(0))  # a known 0 would keep the descriptors of K, V and dS in 64 registers
    s = warpgroup_mma_wait(0, deps=(s,))  # ptxas follows a wgmma across a loop's back edge only to a wait for all
    lse2 = queries.statistics.index(at).load(layout)
    mbarrier.wait(grads.full.index(at), phase(n, STAGES))
    dp = issue_abt(parts_at(kv.v, WG + zero), parts_at(grads.tiles, at))
    s, _derivative = log2_p(s, lse2, keys, block, params, CONFIG)
    p = gl.exp2(s)
    mbarrier.wait(kv.full.index(0), phase(keys.t, 1))  # already satisfied; its branch keeps the next wait after exp2
    delta = grads.statistics.index(at).load(layout)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = downcast(p * (dp - delta), DTYPE)
    ds16 = operands((ds,), dk)
    if FIRST:
        tma.store_wait(0)  # dV of the tile before has left
    else:
        bar_sync_dynamic(DS_READ + (1 - WG) * 2 + old, 256)
    staging.ds.index(WG * 2 + cur).store(ds)
    bar_arrive_dynamic(DS_STORED + WG * 2 + cur, 160 if CONFIG.FENCE_WARP else 256)
    dk = issue_parts(ds16, parts_at(queries.tiles, at), dk)
    if STAGES == 1:
        s, dk = late_scores(shared, dk, ds16, keys, block, params, WG, FIRST, CONFIG)
    else:
        dq = ()
        if not FIRST:
            wait_ds(shared, n - 1, keys, WG, CONFIG)
            for piece in gl.static_range(PIECES):
                dq = dq + (issue_dq(shared, old, zero, piece, WG, CONFIG),)  # noqa: RUF005
        # S of the next block, after the last one that of the first block of the second pass
        mbarrier.wait(queries.full.index(after), phase(n + 1, STAGES))
        s = issue_abt(parts_at(kv.k, WG + zero), parts_at(queries.tiles, after))
        dk = wait_parts(PARTS if FIRST else PARTS + 2 * PIECES, dk, ds16)
        arrive(grads.empty.index(at))
        arrive(queries.empty.index(at))
        if not FIRST:
            dq = wait_parts(PARTS, dq, ())
        bar_arrive_dynamic(DS_READ + WG * 2 + cur, 256)
        for piece in gl.static_range(len(dq)):
            if not CONFIG.NO_ADD:
                add_dq(dq[piece], staging, params.outputs.dq_acc, block.dq_tile, n - 1, piece, WG, CONFIG)
    return s, dk, dv


@gluon.jit
def stage(n, CONFIG: gl.constexpr):
    """Of the pipelines of Q and dO, in block n."""
    if CONFIG.STAGES == 1:
        return opaque(gl.to_tensor(0))
    else:
        return n & 1


@gluon.jit
def late_scores(shared, dk, ds16, keys, block, params, WG: gl.constexpr, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """The rest of `attend_keys` with one stage: the next queries are loaded while dQ is computed, piece by piece."""
    kv, queries, grads, staging = shared
    n = block.n
    zero = opaque(gl.to_tensor(0))
    if FIRST:
        dk = wait_parts(0, dk, ds16)
        arrive(queries.empty.index(zero))
        arrive(grads.empty.index(zero))
        bar_arrive_dynamic(DS_READ + WG * 2 + (n & 1), 256)
    else:
        wait_ds(shared, n - 1, keys, WG, CONFIG)
        dq = issue_dq(shared, (n & 1) ^ 1, zero, 0, WG, CONFIG)
        dk = wait_parts(2, dk, ds16)
        arrive(queries.empty.index(zero))
        arrive(grads.empty.index(zero))
        dq = warpgroup_mma_wait(0, deps=(dq,))
        rest = issue_dq(shared, (n & 1) ^ 1, zero, 1, WG, CONFIG)
        add_dq(dq, staging, params.outputs.dq_acc, block.dq_tile, n - 1, 0, WG, CONFIG)
        rest = warpgroup_mma_wait(0, deps=(rest,))
        bar_arrive_dynamic(DS_READ + WG * 2 + (n & 1), 256)
    mbarrier.wait(queries.full.index(zero), phase(n + 1, 1))
    s = issue_abt(parts_at(kv.k, WG + zero), parts_at(queries.tiles, zero))
    if not FIRST:
        add_dq(rest, staging, params.outputs.dq_acc, block.dq_tile, n - 1, 1, WG, CONFIG)
    return s, dk


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
    i0, has_mask_mod = block_at(place, params.terms.blocks, BLOCK_M)
    h = queries.head
    g = gl.to_tensor(0)
    s, dv = acc
    STAGES: gl.constexpr = CONFIG.STAGES
    lse2 = rows.statistics.index(stage(n, CONFIG)).load(layout)
    if STAGES == 1:
        zero = opaque(gl.to_tensor(0))
        s = warpgroup_mma_wait(0, deps=(issue_abt(parts_at(kv.k, WG + zero), parts_at(rows.tiles, zero)),))
    mbarrier.arrive(rows.empty.index(stage(n, CONFIG)), count=1)
    block = QueryBlock(n, h, i0, is_edge(queries, i0, CONFIG), has_mask_mod, True, 0)
    p = exponentiate(s, lse2, keys, block, params, CONFIG)
    for m in range(n, end - 1):
        place, g = next_block(queries, place, g, CONFIG)
        i0, has_mask_mod = block_at(place, params.terms.blocks, BLOCK_M)
        block = QueryBlock(m + 1, h + g, i0, is_edge(queries, i0, CONFIG), has_mask_mod, True, 0)
        cur = stage(m, CONFIG)
        new = stage(m + 1, CONFIG)
        zero = opaque(gl.to_tensor(0))
        mbarrier.wait(rows.full.index(new), phase(m + 1, STAGES))
        lse2 = rows.statistics.index(new).load(layout)  # ahead of a product: when it ends, all warps have read them
        s = issue_abt(parts_at(kv.k, WG + zero), parts_at(rows.tiles, new))
        mbarrier.wait(grads.full.index(cur), phase(m, STAGES))
        p16 = operands((p,), dv)
        dv = issue_parts(p16, parts_at(grads.tiles, cur), dv)
        s = warpgroup_mma_wait(PARTS, deps=(s,))
        arrive(rows.empty.index(new))
        p = exponentiate(s, lse2, keys, block, params, CONFIG)
        mbarrier.wait(kv.full.index(0), phase(keys.t, 1))  # already satisfied; keeps the next wait after exp2
        dv = wait_parts(0, dv, p16)
        arrive(grads.empty.index(cur))
    if not CONFIG.STORE_IN_KV:
        arrive(kv.empty.index(0))
    at = stage(end - 1, CONFIG)
    mbarrier.wait(grads.full.index(at), phase(end - 1, STAGES))
    p16 = operands((p,), dv)
    dv = wait_parts(0, issue_parts(p16, parts_at(grads.tiles, at), dv), p16)
    arrive(grads.empty.index(at))
    return dv
