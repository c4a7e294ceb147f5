"""What both Hopper backward kernels share: the queries that a key tile visits, the producer, masks, the stores of dK
and dV, the sum of dQ.

Several programs may compute one tile of keys. Each of them visits some of the queries and stores its part of dK and dV.
`backward_schedule.choose_split` says when. `postprocess_kernel` adds the parts in the order of their numbers.

dQ is summed over the key tiles in global memory, in float32: by atomics or by TMA, in any order or a fixed one. A
semaphore for each tile of dQ counts the key tiles that have added to it, if DETERMINISTIC.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.score import scores_and_derivative
from ..common.device.softmax import exponent
from ..common.device.structs import PAD, Grid, Pairs, Sequences, Span, Work
from ..common.device.tile_range import band, block_at, locate, loop_range
from .gluon_compat import (
    bar_arrive,
    bar_arrive_dynamic,
    bar_sync,
    column_indices,
    fence_async_shared,
    gdc_wait,
    gl,
    gluon,
    keep_bits,
    keep_columns,
    mbarrier,
    opaque,
    semaphore_release,
    semaphore_wait,
    tma,
    tma_load,
    tma_reduce_add,
    warpgroup_mma,
)
from .parts import (
    acc_layout,
    allocate_boxes,
    allocate_parts,
    expect_boxes,
    flag_nonfinite,
    halves_of_rows,
    in_fours,
    in_register_order,
    load_parts,
    register_order_pointers,
    scaled,
    store_parts,
    tile_at,
    total,
    zero_part,
)
from .pipeline import (
    Tokens,
    apply_mask_mod,
    make_mbarriers,
    next_tile_id,
    phase,
    release_tile_info,
    tile_and_row,
    wait_tile_info,
    write_tile_info,
)


class Parts(NamedTuple):
    """How a tile of keys is split. A part visits `group` query heads, and of their blocks one in 2^shift: those that
    begin at multiples of `step` = 2^shift blocks after its first. It counts as a KV head of the tile scheduler: no two
    of them add to the same block of dQ. It stores `padded_keys` rows of dK and dV, in which packed sequences start at
    multiples of PAD."""

    group: tl.tensor
    shift: tl.tensor
    step: tl.tensor
    padded_keys: tl.tensor


@triton.jit
def query_heads(h, parts):
    """The first query head of head h of the tile scheduler."""
    return (h >> parts.shift) * parts.group


@gluon.jit
def own_blocks(lo, hi, h, parts, BLOCK_M: tl.constexpr):
    """The first and the end, in steps of parts.step, of the blocks between lo and hi that head h of the tile scheduler
    visits: the same ones for every tile of keys."""
    step = opaque(parts.step)
    lo += (h * BLOCK_M - lo) & (step - 1)
    return lo, lo + (tl.maximum(hi - lo + step - 1, 0) & -step)


@triton.jit
def part_tile(w, params):
    """The number of the first 64 keys of the tile w among those of all parts."""
    row = w.h
    if params.cu_k is None:
        row += w.b * params.scheduler.heads
    row = row * params.parts.padded_keys + w.first
    if params.cu_k is not None:
        row += (w.k0 // PAD + w.b) * PAD
    return row // 64


@gluon.jit
def store_key_part(ptr, acc, tile, SHARE: gl.constexpr, WIDTHS: gl.constexpr):
    """Stores `acc`, the share SHARE of the columns of each column part, in tile `tile`, [64, sum of WIDTHS]."""
    for i in gl.static_range(len(acc)):
        pointers, x = register_order_pointers(
            ptr, acc[i], tile, share_column(WIDTHS, i, SHARE, acc[i].shape[1]), total(WIDTHS)
        )
        gl.store(pointers, x)


@gluon.constexpr_function
def share_column(widths, part, share, columns):
    """The first column of a share of a column part, each of so many columns, among all."""
    return sum(widths[:part]) + share * columns


@gluon.jit
def store_dk(dk, w, staging, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Stores dK of this warpgroup's half of the key tile w, or its part of it."""
    outputs = params.outputs
    if outputs.flag is not None:
        flag_nonfinite(outputs.flag, dk)
    if CONFIG.SPLIT:
        D: gl.constexpr = CONFIG.D
        store_key_part(outputs.dk_parts, dk, part_tile(w, params) + WG, 0, D)
    else:
        tokens = Tokens(w.b, w.h, w.k0, w.n_k)
        store_parts(outputs.dk, scaled(dk, params.scale), staging.dk, tokens, w.first + 64 * WG, WG)


@gluon.jit
def store_dv(dv, w, staging, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """The same for dV."""
    outputs = params.outputs
    if outputs.flag is not None:
        flag_nonfinite(outputs.flag, dv)
    if params.terms.seed is not None:
        dv = scaled(dv, params.terms.rescale)
    if CONFIG.SPLIT:
        DV: gl.constexpr = CONFIG.DV
        store_key_part(outputs.dv_parts, dv, part_tile(w, params) + WG, 0, DV)
    else:
        store_parts(outputs.dv, dv, staging.dv, Tokens(w.b, w.h, w.k0, w.n_k), w.first + 64 * WG, WG)


BLOCK_M: gl.constexpr = gl.constexpr(64)


class BackwardConfig(NamedTuple):
    """The compile-time config of the backward. D, DV: columns of the tiles of Q and K, and of V and dO, as one or two
    powers of two. DQ_PIECES: for each warpgroup, its columns of dQ as (part of D, first column, columns). A block has
    BLOCK_M queries, a tile BLOCK_N keys; GROUP query heads share a KV head. DQ_BY_TMA: TMA adds dQ to global memory,
    not atomics. FOLD_SCALE: the softmax multiplies q.k by the scale. SCORES_FIRST: the product that would overlap with
    the score terms (dP, in the wide kernel dQ) is issued after them, which leaves them 32 registers. TWO_PASSES: a tile
    visits its queries twice, the second time for dV (`attend_values`). V_IN_REGISTERS: V is loaded once a tile; dP
    then reads half as much shared memory. WIDE: the kernel whose warpgroups share 64 keys. SPLIT: several programs
    compute a tile of keys, and store parts of its dK and dV (see `Parts`)."""

    D: tuple[int, ...]
    DV: tuple[int, ...]
    DQ_PIECES: tuple[tuple[tuple[int, int, int], ...], ...]
    BLOCK_M: int
    BLOCK_N: int
    GROUP: int
    DETERMINISTIC: bool
    DQ_BY_TMA: bool
    HAS_TERMS: bool = False
    FOLD_SCALE: bool = True
    SCORES_FIRST: bool = False
    TWO_PASSES: bool = False
    V_IN_REGISTERS: bool = False
    WIDE: bool = False
    SPLIT: bool = False


class Inputs(NamedTuple):
    """TMA descriptors; one or two column parts of q, k, v and do."""

    q: tl.tuple
    k: tl.tuple
    v: tl.tuple
    do: tl.tuple
    lse2: tl.tensor
    delta: tl.tensor


class Outputs(NamedTuple):
    """The float32 sums of dQ, by pointer and by a TMA descriptor of rows of 256; or, if `dq_lines` is not None, rows to
    which a query's dQ is added, and which of them, by padded token; dK and dV, by the descriptors of their
    column parts, or with SPLIT the float32 parts of each program; the flag of the NaN repair pass; a semaphore for each
    tile of dQ."""

    dq_acc: tl.tensor
    dq_acc_desc: tl.tensor
    dq_lines: tl.tensor
    dk: tl.tuple
    dv: tl.tuple
    dk_parts: tl.tensor
    dv_parts: tl.tensor
    flag: tl.tensor
    semaphores: tl.tensor


class Params(NamedTuple):
    """What all warps read: outputs, lengths, band, scale, score terms, tile scheduler. `scale_log2` is log2(e),
    times the scale with FOLD_SCALE. The row statistics and dQ have `padded_tokens` per head. DETERMINISTIC:
    the tiles of the first `ascending_rows` (batch, head) rows visit their queries in ascending order (see
    `is_ascending`), and with a block mask `query_lists` are its lists by queries; `terms` has those by keys."""

    outputs: tl.tuple
    cu_q: tl.tensor
    cu_k: tl.tensor
    n_q: tl.tensor
    n_k: tl.tensor
    before: tl.tensor
    after: tl.tensor
    scale_log2: tl.tensor
    scale: tl.tensor
    padded_tokens: tl.tensor
    ascending_rows: tl.tensor
    terms: tl.tuple
    query_lists: tl.tuple
    parts: tl.tuple
    scheduler: tl.tuple
    SCORE_MOD: tl.constexpr
    MASK_MOD: tl.constexpr


class KvTile(NamedTuple):
    """A tile of K and V in shared memory, for each part of the columns [64 keys each, ..., 64, columns]."""

    k: tuple[gl.shared_memory_descriptor, ...]
    v: tuple[gl.shared_memory_descriptor, ...]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class RowPipeline(NamedTuple):
    """A two-stage pipeline of blocks of Q (or dO), in column parts, each block with a statistic per row: lse2 (or
    delta)."""

    tiles: tuple[gl.shared_memory_descriptor, ...]
    statistics: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class QueryRange(NamedTuple):
    """The queries that a key tile visits: [lo, hi) in blocks, for `group` heads from `head` on, from `start` on in
    steps of `step` (with a block mask, as `loop_range` counts them). Those inside [full_lo, full_hi) need no mask.
    `dq_tile` is the number of the first head's first block among all blocks of the padded statistics and of dQ."""

    start: tl.tensor
    step: tl.tensor
    lo: tl.tensor
    hi: tl.tensor
    full_lo: tl.tensor
    full_hi: tl.tensor
    dq_tile: tl.tensor
    head: tl.tensor
    group: tl.tensor
    shift: tl.tensor


class KeyRows(NamedTuple):
    """The keys of a warpgroup: their tile; the query on whose diagonal the first one is; how many exist; the tile's
    number among those of this program; with V_IN_REGISTERS, V; and with dropout what the seed is mixed into."""

    work: tl.tuple
    diagonal: tl.tensor
    left: tl.tensor
    t: tl.tensor
    v: tl.tuple
    word: tl.tensor


class QueryBlock(NamedTuple):
    """The n-th block of a program: head, first query, whether the band's edge crosses it, whether the mask mod may hide
    some of its pairs, and whether another block of the same key tile follows. `dq_tile`: the block whose dQ is added
    meanwhile. `mask_words`, `shift`: as `mask_words.row_words` returns them."""

    n: tl.tensor
    h: tl.tensor
    first: tl.tensor
    is_edge: tl.tensor
    may_be_partial: tl.tensor
    has_next: tl.tensor
    dq_tile: tl.tensor
    mask_words: tl.tensor = None
    shift: tl.tensor = None


class Progress(NamedTuple):
    """How many blocks and how many tiles of its program a warp has done: the next uses of the pipelines."""

    n: tl.tensor
    t: tl.tensor


@gluon.jit
def make_kv_tile(k, v, PARTS: gl.constexpr):
    return KvTile(allocate_parts(k, PARTS), allocate_parts(v, PARTS), make_mbarriers(1, 1), make_mbarriers(1, 2))


@gluon.jit
def make_row_pipeline(x, statistics):
    return RowPipeline(allocate_parts(x, 2), allocate_boxes(statistics, 2), make_mbarriers(2, 1), make_mbarriers(2, 2))


@triton.jit
def is_ascending(row, params, CONFIG: tl.constexpr):
    """Whether the key tiles of this (batch, head) row are scheduled, and add to dQ, last tile first, each tile from its
    first query on. Under a causal mask a tile then starts some blocks behind the one that it waits for. But the longest
    tiles come last: so the last rows go the other way, as all do without DETERMINISTIC."""
    return row < params.ascending_rows if CONFIG.DETERMINISTIC else False


@triton.jit
def tile_work(tile_id, params, CONFIG: tl.constexpr):
    """The Work of a tile id: the longest tiles first, under a causal mask those of the first keys, or ascending."""
    scheduler = params.scheduler
    cu_q = params.cu_q
    cu_k = params.cu_k
    tile, row = tile_and_row(tile_id, scheduler)
    tile = tl.where(is_ascending(row, params, CONFIG), tile, scheduler.tiles_per_row - 1 - tile)
    pid = row * scheduler.tiles_per_row + tile
    grid = Grid(scheduler.tiles_per_row, scheduler.heads, scheduler.batch)
    return locate(pid, grid, Sequences(cu_q, cu_k, params.n_q, params.n_k), cu_k, CONFIG.BLOCK_N)


@gluon.jit
def query_range(w, params, CONFIG: tl.constexpr):
    """The queries that the key tile w visits. A tile starts with the first query that sees it; in the wide kernel with
    the queries at its own positions, so that the tiles of one head add to different parts of dQ at any time (not with
    a block mask); DETERMINISTIC with the last query, or ascending with the first."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    at = w.first + opaque(w.n_q) - opaque(w.n_k)
    # the forward's band with its sides swapped
    span = band(at, at + CONFIG.BLOCK_N - 1, opaque(w.n_q), params.after, params.before, BLOCK_M)
    row = w.h
    if params.cu_q is None:
        row += w.b * params.scheduler.heads
    if CONFIG.SPLIT:
        group = params.parts.group
        head = query_heads(w.h, params.parts)
        dq_row = query_heads(row, params.parts)
        shift = params.parts.shift
        step = params.parts.step
    else:
        group = CONFIG.GROUP
        head = w.h * CONFIG.GROUP
        dq_row = row * CONFIG.GROUP
        shift = 0
        step = BLOCK_M
    visited = span
    if CONFIG.DETERMINISTIC and params.terms.blocks.offsets is not None:
        visited = Span(0, 0, 0, w.n_q)  # all of each listed tile, so that `num_earlier_tiles` follows from the lists
    lo, hi = loop_range(visited, w, head, params.terms.blocks, BLOCK_M)
    hi = tl.maximum((hi + BLOCK_M - 1) // BLOCK_M * BLOCK_M, lo)
    if CONFIG.SPLIT:
        lo, hi = own_blocks(lo, hi, w.h, params.parts, BLOCK_M)
    start = lo
    if CONFIG.DETERMINISTIC:
        ascending = is_ascending(row, params, CONFIG)
        start = tl.where(ascending, start, hi - step)
        step = tl.where(ascending, step, -step)
    elif CONFIG.WIDE and params.terms.blocks.offsets is None:
        if CONFIG.SPLIT:
            start = tl.maximum(tl.minimum(lo + (at - lo) // step * step, hi - step), start)
        else:
            start = tl.maximum(tl.minimum(at // BLOCK_M * BLOCK_M, hi - BLOCK_M), start)
    full_hi = tl.where(w.first + CONFIG.BLOCK_N > w.n_k, 0, span.full_hi)
    blocks = opaque(params.padded_tokens) // BLOCK_M
    dq_tile = dq_row * blocks
    if params.cu_q is not None:
        dq_tile += (w.q0 // PAD + w.b) * (PAD // BLOCK_M)
    return QueryRange(start, step, lo, hi, span.full_lo, full_hi, dq_tile, head, group, shift)


@gluon.jit
def num_blocks(queries, CONFIG: gl.constexpr):
    if CONFIG.SPLIT:
        return queries.group * ((queries.hi - queries.lo) // CONFIG.BLOCK_M >> queries.shift)
    else:
        return CONFIG.GROUP * ((queries.hi - queries.lo) // CONFIG.BLOCK_M)


@gluon.jit
def next_block(queries, i0, g, CONFIG: gl.constexpr):
    """The block after that at i0 of head g of the group: the next one of this head; DETERMINISTIC, that of the next
    head, which keeps programs that wait for one another at the same queries."""
    if CONFIG.DETERMINISTIC:
        last = g == queries.group - 1
        return gl.where(last, i0 + queries.step, i0), gl.where(last, 0, g + 1)
    elif CONFIG.GROUP == 1 and not CONFIG.WIDE:
        return i0 + queries.step, g
    else:
        i0 += queries.step
        i0 = gl.where(i0 == queries.hi, queries.lo, i0)
        return i0, gl.where(i0 == queries.start, g + 1, g)


@gluon.jit
def num_visits(queries, CONFIG: gl.constexpr):
    """The blocks of all passes."""
    if CONFIG.TWO_PASSES:
        return 2 * num_blocks(queries, CONFIG)
    else:
        return num_blocks(queries, CONFIG)


@gluon.jit
def is_edge(queries, i0, CONFIG: gl.constexpr):
    """Whether the band's edge crosses the block at i0."""
    return (i0 < queries.full_lo) | (i0 + CONFIG.BLOCK_M > queries.full_hi)


@gluon.jit
def mask_band(s, diagonal, left, params):
    """S^T, -inf where the query does not see the key: the first key is on the diagonal of query `diagonal`, and `left`
    keys exist. Queries past the end need no mask: their lse2 is +inf."""
    j = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
    start = gl.where(j < left, 0, s.shape[1])
    if params.after is not None:
        start = gl.maximum(start, j + (opaque(diagonal) - params.after))
    s = keep_columns(s, "ge", start)
    if params.before is not None:
        s = keep_columns(s, "lt", j + (opaque(diagonal) + params.before + 1))
    return s


@gluon.jit
def log2_p(s, lse2, keys, block, params, CONFIG: gl.constexpr):
    """log2 P^T from S^T = K Q^T, and the derivative of the score mod."""
    derivative = s
    w = keys.work
    if CONFIG.HAS_TERMS:
        w = Work(w.b, w.h, w.first, w.q0, opaque(w.n_q), w.k0, opaque(w.n_k), w.r0)
        i = column_indices(block.first, s)[None, :]
        j = (w.n_k - keys.left + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout)))[:, None]
        s, derivative = scores_and_derivative(
            s, Pairs(w, block.h, i, j), params.scale, params.terms, params.SCORE_MOD, CONFIG.FOLD_SCALE
        )
    s = exponent(s, lse2, params.scale_log2, params.terms.large_scores)
    edge = block.is_edge
    if params.terms.mask_words is not None:
        edge = edge & (block.may_be_partial == 0)  # the band is part of the words
        if block.may_be_partial:
            s = keep_bits(s, block.mask_words, block.shift)
    elif params.MASK_MOD is not None:
        s = apply_mask_mod(s, block.may_be_partial, i, j, w, block.h, params)
    if edge:
        s = mask_band(s, keys.diagonal - block.first, keys.left, params)
    return s, derivative


@gluon.jit
def load_rows(rows, n, x, tokens, first, statistics):
    """Producer, use n of a row pipeline: waits until the consumers have released use n - 2, announces the tile and its
    `statistics`, and loads the tile."""
    full = rows.full.index(n % 2)
    mbarrier.wait(rows.empty.index(n % 2), phase(n, 2) ^ 1)
    expect_boxes(full, x, (statistics,), 1)
    load_parts(x, tokens, first, full, rows.tiles, n % 2)


@gluon.jit
def load_statistics(rows, n, statistics, row, column):
    """The rest of use n."""
    tma_load(statistics, [row, column], rows.full.index(n % 2), rows.statistics.index(n % 2))


@gluon.jit
def load_kv(kv, inputs, w, queries, t, CONFIG: gl.constexpr):
    """Producer: loads K and V of the t-th tile."""
    PARTS: gl.constexpr = kv.k[0].shape[0]
    full = kv.full.index(0)
    tokens = Tokens(w.b, queries.head // CONFIG.GROUP if CONFIG.SPLIT else w.h, w.k0, w.n_k)
    mbarrier.wait(kv.empty.index(0), phase(t, 1) ^ 1)
    expect_boxes(full, inputs.k, inputs.v, PARTS)
    for part in gl.static_range(PARTS):
        load_parts(inputs.k, tokens, w.first + 64 * part, full, kv.k, part)
        load_parts(inputs.v, tokens, w.first + 64 * part, full, kv.v, part)


@gluon.jit
def load_first(shared, inputs, w, params, CONFIG: gl.constexpr):
    """Producer: loads K, V and the first Q and dO of the program's first tile w, if it is one, and returns whether it
    is. This is before `gdc_wait`: no launch of this call writes them, and the preprocess lets this kernel start only
    after its own `gdc_wait`, when all launches before this call have ended."""
    is_tile = w.first < w.n_k
    if is_tile:
        queries = query_range(w, params, CONFIG)
        load_kv(shared.kv, inputs, w, queries, 0, CONFIG)
        if queries.hi > queries.lo:
            i0, _may_be_partial = block_at(queries.start, params.terms.blocks, CONFIG.BLOCK_M)
            tokens = Tokens(w.b, queries.head, w.q0, w.n_q)
            load_rows(shared.q, 0, inputs.q, tokens, i0, inputs.lse2)
            load_rows(shared.do, 0, inputs.do, tokens, i0, inputs.delta)
    return is_tile


@gluon.jit
def load_blocks(shared, inputs, w, queries, progress, params, CONFIG: gl.constexpr):
    """Producer: loads the keys of the t-th tile and the queries that see them, from use n on, but not what `load_first`
    has loaded. The first queries are loaded while the keys of the tile before are still in use. `progress`: n, t and
    whether the tile is new to the producer."""
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    n, t, is_new = progress
    blocks = opaque(params.padded_tokens) // BLOCK_M
    row = queries.dq_tile // blocks
    column = queries.dq_tile % blocks * BLOCK_M
    place = queries.start
    g = gl.to_tensor(0)
    half = n + num_blocks(queries, CONFIG)
    for m in range(n, n + num_visits(queries, CONFIG)):
        if CONFIG.TWO_PASSES:
            place = gl.where(m == half, queries.start, place)
            g = gl.where(m == half, 0, g)
        i0, _may_be_partial = block_at(place, params.terms.blocks, BLOCK_M)
        tokens = Tokens(w.b, queries.head + g, w.q0, w.n_q)
        is_next = is_new | (m > n)
        if is_next:
            load_rows(shared.q, m, inputs.q, tokens, i0, inputs.lse2)
        load_statistics(shared.q, m, inputs.lse2, row + g, column + i0)
        if is_new & (m == n):
            load_kv(shared.kv, inputs, w, queries, t, CONFIG)
        if is_next:
            load_rows(shared.do, m, inputs.do, tokens, i0, inputs.delta)
        load_statistics(shared.do, m, inputs.delta, row + g, column + i0)
        place, g = next_block(queries, place, g, CONFIG)


@gluon.jit
def produce(shared, inputs, tile_info, params, CONFIG: gl.constexpr):
    """Producer warp: draws key tiles and loads K and V, and Q, dO and their statistics block by block."""
    PACKED: gl.constexpr = params.cu_q is not None
    scheduler = params.scheduler
    tile_id = gl.program_id(0)
    w = tile_work(tile_id, params, CONFIG)
    is_loaded = load_first(shared, inputs, w, params, CONFIG)
    gdc_wait()  # the consumers wait for what is loaded here
    n = gl.to_tensor(0)
    t = gl.to_tensor(0)
    while tile_id < scheduler.num_tiles:
        if w.first < w.n_k:
            write_tile_info(tile_info, t, w, PACKED)
            queries = query_range(w, params, CONFIG)
            is_new = (t > 0) | (not is_loaded)
            if queries.hi > queries.lo:
                load_blocks(shared, inputs, w, queries, (n, t, is_new), params, CONFIG)
            elif is_new:
                load_kv(shared.kv, inputs, w, queries, t, CONFIG)
            n += num_visits(queries, CONFIG)
            t += 1
        tile_id = next_tile_id(scheduler)
        w = tile_work(gl.minimum(tile_id, scheduler.num_tiles - 1), params, CONFIG)
    write_tile_info(tile_info, t, Work(w.b, w.h, -1, w.q0, w.n_q, w.k0, w.n_k, 0), PACKED)


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
