"""A block of the Hopper backward where registers are short: dK of 192 columns and dV of 128 take 160 of a thread's 240.

P and dS of 64 keys by 64 queries come in two halves of 32 queries, one after the other, so that S, dP and the operands
of dV and dK take 32 registers at any time, not 64. dQ of the block before, in two pieces, comes last, when they are
free. The other warpgroup's products fill the gaps.
"""

from .backward_tiles import QueryBlock, log2_p
from .column_parts import half_rows, issue_abt, issue_parts, operands, parts_at, wait_parts
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

HALF: gl.constexpr = gl.constexpr(32)  # queries


@gluon.jit
def attend_in_halves(shared, acc, keys, block, params, WG: gl.constexpr, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """`backward.attend_block` in halves. `acc`: S^T of the first half, in flight, dK, dV; on return S^T of the first
    half of the next block is in flight."""
    s, dk, dv = acc
    kv, queries, grads, staging = shared
    n = block.n
    DTYPE: gl.constexpr = staging.ds.dtype
    cur = n & 1
    old = cur ^ 1
    zero = opaque(gl.to_tensor(0))  # a known 0 would keep the descriptors of K, V and dS in 64 registers
    q = parts_at(queries.tiles, cur)
    do = parts_at(grads.tiles, cur)
    mbarrier.wait(grads.full.index(cur), (n >> 1) & 1)
    for half in gl.static_range(2):
        s = warpgroup_mma_wait(0, deps=(s,))
        dp = issue_abt(parts_at(kv.v, WG + zero), half_rows(do, half))
        lse2 = queries.statistics.index(cur).slice(half * HALF, HALF, dim=1).load(s.type.layout)
        upper = QueryBlock(n, block.h, block.first + half * HALF, block.is_edge, True, True, 0)
        s, _derivative = log2_p(s, lse2, keys, upper, params, CONFIG)
        p = gl.exp2(s)
        mbarrier.wait(kv.full.index(0), phase(keys.t, 1))  # already satisfied; keeps the next wait after exp2
        dp = warpgroup_mma_wait(0, deps=(dp,))
        delta = grads.statistics.index(cur).slice(half * HALF, HALF, dim=1).load(p.type.layout)
        ds = downcast(p * (dp - delta), DTYPE)
        p16 = operands((downcast(p, DTYPE),), dv)
        ds16 = operands((ds,), dk)
        if half == 0:
            if FIRST:
                tma.store_wait(0)  # dK and dV of the tile before have left
            else:
                bar_sync_dynamic(DS_READ + (1 - WG) * 2 + old, 256)
        staging.ds.index(WG * 2 + cur).slice(half * HALF, HALF, dim=1).store(ds)
        if half == 0:
            s = issue_abt(parts_at(kv.k, WG + zero), half_rows(q, 1))
        dv = issue_parts(p16, half_rows(do, half), dv)
        dk = issue_parts(ds16, half_rows(q, half), dk)
        if half == 0:
            dk = wait_parts(0, dk, ds16)
            dv = wait_parts(0, dv, p16)
    bar_arrive_dynamic(DS_STORED + WG * 2 + cur, 256)
    if not FIRST:
        bar_sync_dynamic(DS_STORED + (1 - WG) * 2 + old, 256)
        fence_async_shared()
    dk = wait_parts(0, dk, ds16)
    dv = wait_parts(0, dv, p16)
    arrive(grads.empty.index(cur))
    if not FIRST:
        for piece in gl.static_range(2):
            dq = warpgroup_mma_wait(0, deps=(issue_dq(shared, old, zero, piece, WG, CONFIG),))
            if piece == 1:
                bar_arrive_dynamic(DS_READ + WG * 2 + cur, 256)
            add_dq(dq, staging, params.outputs.dq_acc, block.dq_tile, n - 1, piece, WG, CONFIG)
    else:
        bar_arrive_dynamic(DS_READ + WG * 2 + cur, 256)
    # S of the next block; after the last block that of this one again, unused, instead of a branch around a wgmma
    mbarrier.wait(queries.full.index(old), ((n + 1) >> 1) & 1, pred=block.has_next)
    q = parts_at(queries.tiles, gl.where(block.has_next, old, cur))
    s = issue_abt(parts_at(kv.k, WG + zero), half_rows(q, 0))
    mbarrier.expect(queries.empty.index(cur), 0, pred=block.has_next)  # `arrive`
    return s, dk, dv
