"""Decode of multi-head latent attention on Hopper, for tiles of 64 rows (queries times heads): two consumer warpgroups
and a producer (`mla_producers`).

O, 64 x 512 in float32, is half of an SM's registers: each warpgroup accumulates 256 of its columns. Scores of the tiles
of 64 keys are computed in turn, even tiles by warpgroup 0, odd ones by warpgroup 1, and P goes through shared memory:

    warpgroup 0, even j:  O += P_{j-1} V_{j-1} (P of the other warpgroup), release V_{j-1};  S_j = Q K_j^T;
                          P_j = softmax(S_j);  hand over P_j and its maximum;  O += P_j V_j, release V_j
    warpgroup 1, odd j:   issue S_j;  issue O += P_{j-1} V_{j-1};  wait S_j;  P_j = softmax(S_j);  hand over P_j;
                          wait O, release V_{j-1};  O += P_j V_j, release V_j

So S_j of an odd tile is computed during the softmax of the tile before, and its own softmax during the products of that
tile. V_j is the first 512 columns of K_j: columns 0 to 255, which warpgroup 0 releases, and 256 to 575, which
warpgroup 1 releases, since scores need them no longer than P V. There is shared memory for two tiles of keys only, so
what matters is to release one early: warpgroup 0 does not wait for tile j before it has released tile j - 1.

The schedule of keys and the workspace are those of the portable kernels, which also combine and repair.
"""

from typing import NamedTuple

from ..common.device.softmax import log2_scale, row_logsumexp
from ..common.kv.combine import (
    Partial,
    SplitSizes,
    columns,
    partials_of,
    row_pointers,
    rows_of_partial,
    slot_of,
    store_partial,
    store_rows,
    tile_rows,
)
from ..common.kv.schedule import RUNTIME_SIZES
from .forward_softmax import finite_max, rescale_part, row_max
from .gluon_compat import (
    arrive,
    barrier,
    downcast,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    keep_column_range,
    mbarrier,
    opaque,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .mla_producers import (
    HALF_LATENT,
    LATENT_KEYS,
    LATENT_ROWS,
    REST_COLUMNS,
    LatentParams,
    LatentShared,
    LatentTokens,
    produce_latent,
    produce_packed,
    split_of_program,
)
from .pipeline import allocate_tiles, make_mbarriers, phase, stage_tile


class HopperLatentConfig(NamedTuple):
    """What the kernel is compiled for. BOX: rows of a TMA box, which lies within one page. FLAG_NAN, PACKED: as in
    `LatentConfig`. LARGE_SCORES, FIXED_SPLIT, MERGE_PREFIX: as in `DecodeConfig`. NAMED: as in `HopperTopkConfig`."""

    GROUP: int
    D: int
    DV: int
    BLOCK_M: int
    BOX: int
    PAGE_SIZE: int | None
    KV_HEADS: int
    FLAG_NAN: bool
    PACKED: bool
    LARGE_SCORES: bool = False
    FIXED_SPLIT: bool = False
    MERGE_PREFIX: bool = False
    NAMED: bool = False


@gluon.constexpr_function
def score_layout():
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])


@gluon.constexpr_function
def output_layout():
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])


@gluon.jit
def unknown_zero(part):
    """0, which the compiler does not know: addresses are computed where they are used, not kept in registers during
    the loop over keys."""
    return gl.multiple_of(part.tiles - part.tiles * gl.num_programs(1), 128)


@gluon.jit
def load_latent_rows(shared, q, part, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Columns 256 WG to 256 WG + 255 of Q to shared memory; returns columns 512 to 575 as an operand in registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    zero = unknown_zero(part)
    r = gl.arange(0, LATENT_ROWS, gl.SliceLayout(1, LAYOUT)) + zero
    at = tile_rows(part.item, part.head, r, None, CONFIG.GROUP)
    p = row_pointers(q, part.item, at)
    c = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT)) + zero
    for n in gl.static_range(HALF_LATENT // 64):
        d = columns(q, WG * HALF_LATENT + n * 64 + c)
        x = gl.load(p[:, None] + d[None, :], mask=at.exists[:, None] & (c < 64)[None, :], other=0.0)
        shared.q.index(WG).slice(n * 64, 64, dim=1).store(x)
    S: gl.constexpr = score_layout()
    r = gl.arange(0, LATENT_ROWS, gl.SliceLayout(1, S)) + zero
    at = tile_rows(part.item, part.head, r, None, CONFIG.GROUP)
    p = row_pointers(q, part.item, at)
    c = gl.arange(0, REST_COLUMNS, gl.SliceLayout(0, S)) + zero
    mask = at.exists[:, None] & (c < CONFIG.D - 2 * HALF_LATENT)[None, :]
    rest = gl.load(p[:, None] + columns(q, 2 * HALF_LATENT + c)[None, :], mask=mask, other=0.0)
    return gl.convert_layout(rest, gl.DotOperandLayout(0, S, 2), assert_trivial=True)


@gluon.jit
def issue_scores(shared, q_rest, use):
    """Issues S = Q K^T of a tile, part by part as its columns arrive."""
    zero = gl.zeros([LATENT_ROWS, LATENT_KEYS], gl.float32, score_layout())
    first = opaque(gl.to_tensor(0))  # with a known 0 the compiler keeps the descriptors of Q in registers
    mbarrier.wait(shared.full[0].index(use % 2), phase(use, 2))
    s = warpgroup_mma(
        shared.q.index(first), stage_tile(shared.k[0], use, 2).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    mbarrier.wait(shared.full[1].index(use % 2), phase(use, 2))
    s = warpgroup_mma(shared.q.index(first + 1), stage_tile(shared.k[1], use, 2).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(q_rest, stage_tile(shared.k[2], use, 2).permute((1, 0)), s, is_async=True)


@gluon.jit
def mask_latent(s, part, first, params, CONFIG: gl.constexpr):
    """s, with -inf for keys past the end, or past a row's last visible one."""
    item = part.item
    full = part.hi
    if params.after is not None:
        full = gl.minimum(full, item.first // CONFIG.GROUP + item.n_k - item.n_q + params.after + 1)
    if first + LATENT_KEYS > full:
        r = gl.arange(0, LATENT_ROWS, gl.SliceLayout(1, s.type.layout))
        end = r * 0 + (part.hi - first)
        if params.after is not None:
            i = (item.first + r) // CONFIG.GROUP
            end = gl.minimum(end, i + (item.n_k - item.n_q + params.after + 1 - first))
        s = keep_column_range(s, None, end)
    return s


@gluon.jit
def issue_other_values(shared, state, use, WG: gl.constexpr):
    """Issues O += P V of a tile of the other warpgroup, whose maximum becomes the running one."""
    acc, m, l = state
    mbarrier.wait(shared.p_full.index(1 - WG), phase(use, 2))
    m_new = shared.m.index(1 - WG).load(gl.SliceLayout(1, score_layout()))
    alpha = gl.exp2(m - finite_max(m_new))
    acc = rescale_part(acc, alpha, True)
    acc = warpgroup_mma(shared.p.index(1 - WG), stage_tile(shared.k[WG], use, 2), acc, is_async=True)
    return acc, m_new, l * alpha


@gluon.jit
def other_values_done(shared, acc, use, WG: gl.constexpr):
    """Waits for the product of `issue_other_values`, and all before it, and releases the tile."""
    acc = warpgroup_mma_wait(0, deps=(acc,))
    arrive(shared.empty[WG].index(use % 2))
    return acc


@gluon.jit
def own_softmax(shared, s, state, part, use, params, CONFIG: gl.constexpr):
    """(p, alpha, m, l) after a tile of scores."""
    m, l = state
    scale_log2 = log2_scale(params.scale, True)
    if CONFIG.NAMED:
        s += shared.seen.index(use % 2).load(gl.SliceLayout(0, score_layout()))[None, :]
    else:
        s = mask_latent(s, part, part.lo + use * LATENT_KEYS, params, CONFIG)
    m_new = gl.maximum(m, row_max(s) * scale_log2)
    pivot = finite_max(m_new)
    p = gl.exp2(s * scale_log2 - pivot[:, None])
    alpha = gl.exp2(m - pivot)
    return p, alpha, m_new, l * alpha + gl.sum(p, 1)


@gluon.jit
def hand_over(shared, p, m, WG: gl.constexpr):
    """P and its maximum to the other warpgroup. Its products with the P before are done: this warpgroup has waited for
    a tile of keys in the stage that they released."""
    shared.p.index(WG).store(p)
    shared.m.index(WG).store(m)
    fence_async_shared()
    barrier()
    arrive(shared.p_full.index(WG))


@gluon.jit
def own_values(shared, acc, p, alpha, use, WG: gl.constexpr):
    """O += P V of an own tile, complete."""
    acc = rescale_part(acc, alpha, True)
    p = gl.convert_layout(p, gl.DotOperandLayout(0, output_layout(), 2), assert_trivial=True)
    acc = warpgroup_mma(p, stage_tile(shared.k[WG], use, 2), acc, is_async=True)
    acc, _p = warpgroup_mma_wait(0, deps=(acc, p))
    arrive(shared.empty[WG].index(use % 2))
    return acc


@gluon.jit
def consume_latent(shared, q, buffers, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Consumer warpgroup WG: columns 256 WG to 256 WG + 255 of O."""
    part = split_of_program(buffers.schedule, params, CONFIG)
    if part.tiles > 0:
        S: gl.constexpr = score_layout()
        q_rest = load_latent_rows(shared, q, part, WG, CONFIG)
        fence_async_shared()
        barrier()
        arrive(shared.q_ready.index(0))
        mbarrier.wait(shared.q_ready.index(0), 0)
        acc, m, l = attend_latent_keys(shared, q_rest, part, params, WG, CONFIG)
        shared.l.index(WG).store(l)
        barrier()
        arrive(shared.done.index(0))
        mbarrier.wait(shared.done.index(0), 0)
        l += shared.l.index(1 - WG).load(gl.SliceLayout(1, S))
        store_latent(acc, m, l, part, buffers, params, WG, CONFIG)


@gluon.jit
def attend_latent_keys(shared, q_rest, part, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """(acc, m, l) over the tiles of keys of a split; l of the tiles of this warpgroup."""
    DTYPE: gl.constexpr = shared.p.dtype
    S: gl.constexpr = score_layout()
    acc = gl.zeros([LATENT_ROWS, HALF_LATENT], gl.float32, output_layout())
    m = gl.full([LATENT_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l = gl.full([LATENT_ROWS], 0.0, gl.float32, gl.SliceLayout(1, S))
    if WG == 0:
        s = warpgroup_mma_wait(0, deps=(issue_scores(shared, q_rest, gl.to_tensor(0)),))
        p, alpha, m, l = own_softmax(shared, s, (m, l), part, gl.to_tensor(0), params, CONFIG)
        p = downcast(p, DTYPE)
        hand_over(shared, p, m, WG)
        acc = own_values(shared, acc, p, alpha, gl.to_tensor(0), WG)
    for j in range(2 - WG, part.tiles, 2):
        if WG == 1:
            s = issue_scores(shared, q_rest, j)
            acc, m, l = issue_other_values(shared, (acc, m, l), j - 1, WG)
            s = warpgroup_mma_wait(1, deps=(s,))
        else:
            acc, m, l = issue_other_values(shared, (acc, m, l), j - 1, WG)
            acc = other_values_done(shared, acc, j - 1, WG)
            s = warpgroup_mma_wait(0, deps=(issue_scores(shared, q_rest, j),))
        p, alpha, m, l = own_softmax(shared, s, (m, l), part, j, params, CONFIG)
        p = downcast(p, DTYPE)
        hand_over(shared, p, m, WG)
        if WG == 1:
            acc = other_values_done(shared, acc, j - 1, WG)
        acc = own_values(shared, acc, p, alpha, j, WG)
    if part.tiles % 2 == WG:
        acc, m, l = issue_other_values(shared, (acc, m, l), part.tiles - 1, WG)
        acc = other_values_done(shared, acc, part.tiles - 1, WG)
    return acc, m, l


@gluon.jit
def store_latent(acc, m, l, part, buffers, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Writes the results of a work item, or a partial result to the split's slot of the workspace."""
    ROWS_LAYOUT: gl.constexpr = gl.SliceLayout(1, output_layout())
    m = gl.convert_layout(m, ROWS_LAYOUT, assert_trivial=True)
    l = gl.convert_layout(l, ROWS_LAYOUT, assert_trivial=True)
    out = acc / gl.where(l == 0.0, 1.0, l)[:, None]
    partial = Partial(out, row_logsumexp(m, l, None), l)
    zero = unknown_zero(part)
    r = gl.arange(0, LATENT_ROWS, ROWS_LAYOUT) + zero
    d = (WG * HALF_LATENT + gl.arange(0, HALF_LATENT, gl.SliceLayout(0, output_layout())) + zero)[None, :]
    at = tile_rows(part.item, part.head, r, None, CONFIG.GROUP)
    if CONFIG.NAMED:
        store_rows(buffers, partial, part.item, at, d, params.sinks, params.sizes.batch, CONFIG)
    else:
        partials = partials_of(buffers.workspace, params.sizes, CONFIG.DV)
        if CONFIG.FLAG_NAN:
            sums = gl.sum(out, 1)
            bad = sums != sums
            gl.store(partials.flags + gl.program_id(0) + bad.to(gl.int32) * 0, bad.to(gl.float32), mask=bad)
        if part.is_whole:
            store_rows(buffers, partial, part.item, at, d, params.sinks, params.sizes.batch, CONFIG)
        else:
            slot = slot_of(partials, part.number, part.item_number, 0, part.head, CONFIG)
            store_partial(rows_of_partial(partials, slot, r, d, CONFIG.DV), partial, CONFIG.LARGE_SCORES)


@gluon.jit
def latent_shared(keys, COPIES: gl.constexpr):
    """Shared memory of a program with the tiles `keys`. COPIES: threads whose copies fill them; 0: TMA or stores do."""
    DTYPE: gl.constexpr = keys[0].dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    m = gl.allocate_shared_memory(gl.float32, [2, LATENT_ROWS], ROW)
    seen = m
    if COPIES > 0:
        seen = gl.allocate_shared_memory(gl.float32, [2, LATENT_KEYS], ROW)
    return LatentShared(
        gl.allocate_shared_memory(DTYPE, [2, LATENT_ROWS, HALF_LATENT], TILE),
        keys,
        (make_mbarriers(2, COPIES if COPIES > 0 else 1), make_mbarriers(2, COPIES + 1)),
        (make_mbarriers(2, 1), make_mbarriers(2, 1)),
        gl.allocate_shared_memory(DTYPE, [2, LATENT_ROWS, LATENT_KEYS], TILE),
        m,
        make_mbarriers(2, 1),
        gl.allocate_shared_memory(gl.float32, [2, LATENT_ROWS], ROW),
        make_mbarriers(1, 2),
        make_mbarriers(1, 2),
        seen,
    )


@gluon.jit
def latent_tiles(DTYPE: gl.constexpr):
    """Two tiles of keys for producers that do not use TMA."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    left = gl.allocate_shared_memory(DTYPE, [2, LATENT_KEYS, HALF_LATENT], TILE)
    right = gl.allocate_shared_memory(DTYPE, [2, LATENT_KEYS, HALF_LATENT], TILE)
    return left, right, gl.allocate_shared_memory(DTYPE, [2, LATENT_KEYS, REST_COLUMNS], TILE)


@gluon.jit(do_not_specialize=[*RUNTIME_SIZES, "page_stride"])
def hopper_mla_kernel(
    q,
    k_wide,
    k_rest,
    packed,
    places,
    buffers,
    after,
    scale,
    items,
    num_splits,
    chunk_size,
    slots,
    whole_slots,
    num_slots,
    rows,
    target,
    table_stride,
    num_pages,
    page_stride,
    batch,
    sinks,
    CONFIG: gl.constexpr,
):
    BOXES: gl.constexpr = LATENT_KEYS // CONFIG.BOX
    DTYPE: gl.constexpr = q.ptr.dtype.element_ty
    if not CONFIG.PACKED:
        keys = (allocate_tiles(k_wide, 2, BOXES), allocate_tiles(k_wide, 2, BOXES), allocate_tiles(k_rest, 2, BOXES))
    else:
        keys = latent_tiles(DTYPE)
    shared = latent_shared(keys, 0)
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()
    sizes = SplitSizes(items, num_splits, slots, whole_slots, num_slots, rows, batch, target)
    if CONFIG.FLAG_NAN:
        gl.store(partials_of(buffers.workspace, sizes, CONFIG.DV).flags + gl.program_id(0), 0.0)
    tokens = LatentTokens(places[0], places[1], places[2], table_stride, num_pages, page_stride)
    params = LatentParams(tokens, after, scale, chunk_size, sizes, sinks)
    if not CONFIG.PACKED:
        gl.warp_specialize(
            [
                (consume_latent, (shared, q, buffers, params, 1, CONFIG)),
                (consume_latent, (shared, q, buffers, params, 0, CONFIG)),
                (produce_latent, (shared, k_wide, k_rest, buffers.schedule, params, CONFIG)),
            ],
            [4, 1],
            [240, 24] if BOXES == 1 else [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (consume_latent, (shared, q, buffers, params, 1, CONFIG)),
                (consume_latent, (shared, q, buffers, params, 0, CONFIG)),
                (produce_packed, (shared, packed, buffers.schedule, params, CONFIG)),
            ],
            [4, 4],
            [216, 64],
        )
