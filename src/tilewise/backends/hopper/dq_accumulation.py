"""The sum of dQ over the key tiles in global memory, in float32: by atomics or by TMA, in any order or a fixed one.

A semaphore for each tile of dQ counts the key tiles that have added to it, if DETERMINISTIC.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.tile_range import block_at
from .backward_common import BLOCK_M, next_block, num_blocks, query_range
from .column_parts import acc_layout, tile_at, total, zero_part
from .gluon_compat import (
    bar_arrive,
    bar_arrive_dynamic,
    bar_sync,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    opaque,
    semaphore_release,
    semaphore_wait,
    tma,
    tma_reduce_add,
    warpgroup_mma,
)
from .pipeline import make_mbarriers, phase, release_tile_info, wait_tile_info
from .register_order import halves_of_rows, in_fours, in_register_order, register_order_pointers

# named barrier of a warp that adds dQ, plus the warp's number: dQ is in shared memory
DQ_STORED: gl.constexpr = gl.constexpr(6)
# named barriers; that of warpgroup w and buffer b of dS is + 2 w + b
DS_STORED: gl.constexpr = gl.constexpr(8)  # w has stored its dS in b
DS_READ: gl.constexpr = gl.constexpr(12)  # w has read the buffer other than b


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
def atomic_add_dq(dq_acc, dq, tile, PIECE: gl.constexpr, WG: gl.constexpr, CONFIG: gl.constexpr):
    """dq_acc[tile] += dq, a piece of warpgroup WG's columns, in global memory from registers: four values an
    instruction."""
    PLACE: gl.constexpr = CONFIG.DQ_PIECES[WG][PIECE]
    D: gl.constexpr = CONFIG.D
    pointers, x = register_order_pointers(dq_acc, dq, tile, first_column(PLACE, D), total(D))
    gl.atomic_add(pointers, x, sem="relaxed")


@gluon.jit
def load_lines(outputs, tile, WG: gl.constexpr, CONFIG: gl.constexpr):
    """The rows to which warpgroup WG's rows of a tile of dQ are added; 0 if they are not scattered."""
    if outputs.dq_lines is None:
        return 0
    else:
        layout: gl.constexpr = gl.SliceLayout(1, acc_layout(CONFIG.DQ_PIECES[WG][0][2]))
        rows = (tile * 2 + WG if CONFIG.BLOCK_M == 128 else tile) * 64
        return gl.load(outputs.dq_lines + rows + gl.arange(0, 64, layout))


@gluon.jit
def scatter_dq(outputs, dq, lines, PIECE: gl.constexpr, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Adds the rows of a piece of dQ to the rows `lines` of float32 sums, whose columns are `in_fours`."""
    PLACE: gl.constexpr = CONFIG.DQ_PIECES[WG][PIECE]
    D: gl.constexpr = CONFIG.D
    parts = in_fours(dq)
    rows = halves_of_rows(lines)
    for half in gl.static_range(2):
        x = parts[half]
        row = gl.convert_layout(rows[half], gl.SliceLayout(1, x.type.layout), assert_trivial=True)
        c = first_column(PLACE, D) + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        gl.atomic_add(outputs.dq_acc + row.to(gl.int64)[:, None] * total(D) + c[None, :], x, sem="relaxed")


@gluon.jit
def issue_dq(shared, buffer, zero, PIECE: gl.constexpr, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Issues a piece of this warpgroup's share of dQ = dS K, over the keys of both: some of the columns or, with 128
    queries, half of the rows."""
    PLACE: gl.constexpr = CONFIG.DQ_PIECES[WG][PIECE]
    COLUMNS: gl.constexpr = PLACE[2]
    dq = zero_part(COLUMNS)
    for part in gl.static_range(2):
        ds = shared.staging.ds.index(2 * part + buffer)
        k = tile_at(shared.kv.k[PLACE[0]], zero + part).slice(PLACE[1], COLUMNS, dim=1)
        if CONFIG.BLOCK_M == 128:
            ds = ds.slice(64 * WG, 64, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=part > 0, is_async=True)
    return dq


@gluon.jit
def add_dq(dq, staging, outputs, at, n, PIECE: gl.constexpr, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Adds a piece of a tile of dQ, the n-th of this program, to global memory, or hands it to the warps that do. `at`:
    the tile, and its `load_lines`."""
    tile, lines = at
    if CONFIG.DQ_BY_TMA:
        mbarrier.wait(staging.dq_empty.index(0 if CONFIG.DETERMINISTIC else WG), phase(n, 1) ^ 1)
        staging.dq.index(WG).slice(0, dq.shape[1] // 4, dim=0).store(in_register_order(dq))
        fence_async_shared()
        if CONFIG.DETERMINISTIC:
            bar_arrive_dynamic(DQ_STORED + (n & 1), 288)
        else:
            bar_arrive(DQ_STORED + WG, 160)
    elif outputs.dq_lines is not None:
        scatter_dq(outputs, dq, lines, PIECE, WG, CONFIG)
    else:
        rows = tile * 2 + WG if CONFIG.BLOCK_M == 128 else tile
        atomic_add_dq(outputs.dq_acc, dq, rows, PIECE, WG, CONFIG)


@gluon.constexpr_function
def first_column(place, parts):
    """The first column of a piece of dQ (part, column in it, columns), among all."""
    return sum(parts[: place[0]]) + place[1]


@gluon.jit
def add_by_tma(staging, tile, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Adds warpgroup WG's columns (of 128 queries: rows) of dQ, which lie in shared memory, box by box."""
    desc = params.outputs.dq_acc_desc
    PLACE: gl.constexpr = CONFIG.DQ_PIECES[WG][0]
    D: gl.constexpr = CONFIG.D
    BOX: gl.constexpr = desc.block_type.shape[0]
    TILES: gl.constexpr = CONFIG.BLOCK_M // 64  # tiles of dq_acc have 64 rows
    tile = tile * TILES + (WG if TILES == 2 else 0)
    row = (tile * total(D) + first_column(PLACE, D)) // 4
    for i in gl.static_range(PLACE[2] // 4 // BOX):
        tma_reduce_add(desc, [row + i * BOX, 0], staging.dq.index(WG).slice(i * BOX, BOX, dim=0))


@gluon.jit
def num_earlier_tiles(w, i0, g, queries, params, CONFIG: gl.constexpr):
    """How many key tiles add to the dQ of the queries from i0 on of the group's head g before this one."""
    if params.query_lists.offsets is None:
        return num_earlier_in_band(w, i0, queries, params, CONFIG)
    else:
        return num_earlier_listed(w, i0, queries.head + g, queries.step > 0, params.query_lists, CONFIG)


@triton.jit
def num_earlier_listed(w, i0, h, ascending, lists, CONFIG: tl.constexpr):
    """`num_earlier_tiles` with a block mask: a binary search for the key tile in the list of the queries."""
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    row = lists.offsets + ((i0 >> lists.own) + (w.b * lists.batch_rows + h * lists.head_rows) // 16)
    start = tl.load(row)
    end = tl.load(row + 1)
    at = start
    above = end
    while above - at > 1:
        mid = (at + above) // 2
        past = (tl.load(lists.entries + mid) >> 2) > (w.first >> lists.other)
        above = tl.where(past, mid, above)
        at = tl.where(past, at, mid)
    earlier = (((at - start) << lists.other) + (w.first & ((1 << lists.other) - 1))) // BLOCK_N
    last = tl.load(lists.entries + (end - 1)) >> 2 << lists.other
    keys = tl.minimum(w.n_k - last, 1 << lists.other)  # of the last tile
    total = ((end - 1 - start) << lists.other) // BLOCK_N + (keys + BLOCK_N - 1) // BLOCK_N
    return tl.where(ascending, total - 1 - earlier, earlier)


@gluon.jit
def num_earlier_in_band(w, i0, queries, params, CONFIG: gl.constexpr):
    """`num_earlier_tiles` without a block mask."""
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
    PACKED: gl.constexpr = params.cu_q is not None
    semaphores = params.outputs.semaphores
    n = gl.to_tensor(0)
    t = gl.to_tensor(0)
    w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)
    while w.first >= 0:
        queries = query_range(w, params, CONFIG)
        place = queries.start
        g = gl.to_tensor(0)
        for _ in range(num_blocks(queries, CONFIG)):
            i0, _may_be_partial = block_at(place, params.terms.blocks, BLOCK_M)
            tile = queries.dq_tile + g * (opaque(params.padded_tokens) // BLOCK_M) + i0 // BLOCK_M
            if not CONFIG.DETERMINISTIC:
                bar_sync(DQ_STORED + WARP, 160)
                add_by_tma(staging, tile, params, WARP, CONFIG)
                tma.store_wait(0)
                mbarrier.arrive(staging.dq_empty.index(WARP), count=1)
            elif (n & 1) == WARP:
                semaphore_wait(semaphores + tile, num_earlier_tiles(w, i0, g, queries, params, CONFIG) * 32)
                bar_sync(DQ_STORED + WARP, 288)
                for half in gl.static_range(2):
                    add_by_tma(staging, tile, params, half, CONFIG)
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
        place = queries.start
        g = gl.to_tensor(0)
        for _ in range(num_blocks(queries, CONFIG)):
            i0, _may_be_partial = block_at(place, params.terms.blocks, BLOCK_M)
            tile = queries.dq_tile
            semaphore = params.outputs.semaphores + tile + g * (opaque(params.padded_tokens) // BLOCK_M) + i0 // BLOCK_M
            if WAIT:
                mbarrier.wait(order.seen.index(n & 1), phase(n, 2) ^ 1)
                semaphore_wait(semaphore, num_earlier_tiles(w, i0, g, queries, params, CONFIG) * 32)
                mbarrier.arrive(order.ready.index(n & 1), count=1)
            else:
                mbarrier.wait(order.added.index(n & 1), phase(n, 2))
                mbarrier.arrive(order.seen.index(n & 1), count=1)
                semaphore_release(semaphore)
            place, g = next_block(queries, place, g, CONFIG)
            n += 1
        release_tile_info(tile_info, t)
        t += 1
        w = wait_tile_info(tile_info, t, params.n_q, params.n_k, PACKED)
