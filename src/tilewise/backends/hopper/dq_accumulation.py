"""The sum of dQ over the key tiles in global memory, in float32: by atomics or by TMA, in any order or a fixed one.

A semaphore for each tile of dQ counts the key tiles that have added to it, if DETERMINISTIC.
"""

from typing import NamedTuple

from ..common.device.tile_range import block_at
from .backward_tiles import BLOCK_M, next_block, num_blocks, query_range
from .gluon_compat import (
    bar_sync,
    gl,
    gluon,
    mbarrier,
    opaque,
    semaphore_release,
    semaphore_wait,
    tma,
    tma_reduce_add,
)
from .pipeline import make_mbarriers, phase, release_tile_info, wait_tile_info
from .register_order import register_order_pointers

# named barrier of a warp that adds dQ, plus the warp's number: dQ is in shared memory
DQ_STORED: gl.constexpr = gl.constexpr(6)


class DqOrder(NamedTuple):
    """mbarriers of a tile of dQ, if DETERMINISTIC: the key tiles before this one have added to it (`ready`); both
    warpgroups have added (`added`); the warp that releases the semaphore has waited for that (`seen`)."""

    ready: gl.shared_memory_descriptor
    added: gl.shared_memory_descriptor
    seen: gl.shared_memory_descriptor


@gluon.jit
def make_order():
    return DqOrder(make_mbarriers(2, 1), make_mbarriers(2, 2), make_mbarriers(2, 1))


@gluon.jit
def atomic_add_dq(dq_acc, dq, tile):
    """dq_acc[tile] += dq, [64, N], in global memory from registers: four values an instruction."""
    pointers, x = register_order_pointers(dq_acc, dq, tile)
    gl.atomic_add(pointers, x, sem="relaxed")


@gluon.jit
def num_earlier_tiles(w, i0, queries, params, CONFIG: gl.constexpr):
    """How many key tiles add to the dQ of the queries from i0 on before this one."""
    diagonal = i0 + w.n_k - w.n_q
    last = w.n_k - 1  # the first and the last key that one of these queries sees
    if params.after is not None:
        last = gl.minimum(last, diagonal + CONFIG.BLOCK_M - 1 + params.after)
    first = 0
    if params.before is not None:
        first = gl.maximum(diagonal - params.before, 0)
    tile = w.first // CONFIG.BLOCK_N
    return gl.where(queries.step > 0, last // CONFIG.BLOCK_N - tile, tile - first // CONFIG.BLOCK_N)


@gluon.jit
def reduce_dq(staging, tile_info, params, WARP: gl.constexpr, CONFIG: gl.constexpr):
    """One of two warps that add dQ to global memory by TMA, each that of one warpgroup. DETERMINISTIC, each adds every
    other block, after the key tiles before this one: a release takes longer than a block. It waits only for tiles that
    were scheduled earlier, so some program computes them."""
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    ROWS: gl.constexpr = staging.dq.shape[1]
    PACKED: gl.constexpr = params.cu_q is not None
    dq_acc_desc = params.outputs.dq_acc_desc
    semaphores = params.outputs.semaphores
    n = gl.to_tensor(0)
    t = gl.to_tensor(0)
    w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)
    while w.first >= 0:
        queries = query_range(w, params, CONFIG)
        place = queries.start
        g = gl.to_tensor(0)
        for _ in range(num_blocks(queries, CONFIG)):
            i0, _has_mask_mod = block_at(place, params.terms.blocks, BLOCK_M)
            tile = queries.dq_tile + g * (opaque(params.padded_tokens) // BLOCK_M) + i0 // BLOCK_M
            if not CONFIG.DETERMINISTIC:
                bar_sync(DQ_STORED + WARP, 160)
                tma_reduce_add(dq_acc_desc, [(tile * 2 + WARP) * ROWS, 0], staging.dq.index(WARP))
                tma.store_wait(0)
                mbarrier.arrive(staging.dq_empty.index(WARP), count=1)
            elif (n & 1) == WARP:
                semaphore_wait(semaphores + tile, num_earlier_tiles(w, i0, queries, params, CONFIG) * 32)
                bar_sync(DQ_STORED + WARP, 288)
                for half in gl.static_range(2):
                    tma_reduce_add(dq_acc_desc, [(tile * 2 + half) * ROWS, 0], staging.dq.index(half))
                tma.store_wait(0)
                mbarrier.arrive(staging.dq_empty.index(0), count=1)
                semaphore_release(semaphores + tile)
            place, g = next_block(queries, place, g, CONFIG)
            n += 1
        release_tile_info(tile_info, t)
        t += 1
        w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)


@gluon.jit
def order_dq(order, tile_info, params, WAIT: gl.constexpr, CONFIG: gl.constexpr):
    """One of two warps that order the sums of dQ: one waits, ahead of the consumers, for the semaphore of a tile of dQ,
    which counts the key tiles that have added to it; the other releases it once this program has added. They wait only
    for tiles that were scheduled earlier."""
    PACKED: gl.constexpr = params.cu_q is not None
    n = gl.to_tensor(0)
    t = gl.to_tensor(0)
    w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)
    while w.first >= 0:
        queries = query_range(w, params, CONFIG)
        i0 = queries.start
        g = gl.to_tensor(0)
        for _ in range(num_blocks(queries, CONFIG)):
            tile = queries.dq_tile
            semaphore = params.outputs.semaphores + tile + g * (opaque(params.padded_tokens) // BLOCK_M) + i0 // BLOCK_M
            if WAIT:
                mbarrier.wait(order.seen.index(n & 1), phase(n, 2) ^ 1)
                semaphore_wait(semaphore, num_earlier_tiles(w, i0, queries, params, CONFIG) * 32)
                mbarrier.arrive(order.ready.index(n & 1), count=1)
            else:
                mbarrier.wait(order.added.index(n & 1), phase(n, 2))
                mbarrier.arrive(order.seen.index(n & 1), count=1)
                semaphore_release(semaphore)
            i0, g = next_block(queries, i0, g, CONFIG)
            n += 1
        release_tile_info(tile_info, t)
        t += 1
        w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)
