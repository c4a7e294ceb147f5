"""The Hopper backward in two passes over the queries of a key tile, for head dims from 129 to 192.

With 192 columns dK and dV of 64 keys would take 192 of a thread's 240 registers. So a tile visits its queries twice:

    first     S^T, dP^T, dS^T     dK += dS^T Q, dQ = dS K
    second    S^T, P^T            dV += P^T dO

That is six products where one pass has five. But it leaves registers for tiles of 128 keys, 64 for each warpgroup, and
so dQ is added to global memory half as often as with tiles of 64 keys (`backward_wide`).
"""

from ..common.device.tile_range import block_at
from .backward_common import QueryBlock, is_edge, log2_p, next_block, num_blocks
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
from .pipeline import phase


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
