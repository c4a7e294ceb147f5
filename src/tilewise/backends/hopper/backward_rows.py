"""The backward pass on Hopper for head dims above 256: one kernel, launched for dQ, for dK and for dV.

dK and dV of 64 keys by 512 columns would take all registers of an SM. So a program computes one gradient of 64 rows of
its own, queries for dQ and keys for dK and dV, and streams past them the rows of the other side, 32 at a time:

    dQ    own Q, dO     other K, V     S = Q K^T    dP = dO V^T    dS = P * (dP - delta)    dQ += dS K
    dK    own K, V      other Q, dO    S = K Q^T    dP = V dO^T    dS = P * (dP - delta)    dK += dS Q
    dV    own K         other Q, dO    S = K Q^T                                            dV += P dO

Eight products for five, but nothing is summed in global memory, so that results do not depend on timing. Warpgroup 0
computes S and P, warpgroup 1 dP and dS; each has 256 columns of the gradient.
"""

from typing import NamedTuple

import triton.language as tl

from ..common.device.structs import PAD, Grid, Sequences
from ..common.device.tile_range import band, locate
from .gluon_compat import (
    arrive,
    bar_arrive,
    bar_sync,
    downcast,
    fence_async_shared,
    gl,
    gluon,
    keep_column_range,
    mbarrier,
    opaque,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .parts import (
    acc_layout,
    allocate_boxes,
    flag_nonfinite,
    from_register_order,
    in_register_order,
    issue_abt,
    tile_at,
    zero_part,
)
from .pipeline import Tokens, make_mbarriers, phase, store_global, tma_coordinates

OWN: gl.constexpr = gl.constexpr(64)  # rows of a program
OTHER: gl.constexpr = gl.constexpr(32)  # rows of the other side at a time
COLUMNS: gl.constexpr = gl.constexpr(512)
HALF_COLUMNS: gl.constexpr = gl.constexpr(256)  # of a warpgroup
# named barriers of both warpgroups
ROWS_P_STORED: gl.constexpr = gl.constexpr(8)
ROWS_DS_STORED: gl.constexpr = gl.constexpr(9)
ROWS_DS_READ: gl.constexpr = gl.constexpr(10)
ANY_ROWS = {
    "do_not_specialize": ["n_own", "n_other", "before", "after", "padded_tokens", "tiles_per_row", "heads", "batch"],
    "do_not_specialize_on_alignment": ["cu_own", "cu_other"],
}


class RowsConfig(NamedTuple):
    """BY_KEY: the own rows are keys. HAS_DP: the gradient is that of Q or K. GROUP query heads share a KV head."""

    BY_KEY: bool
    HAS_DP: bool
    GROUP: int
    STAGES: int


class RowsInputs(NamedTuple):
    """TMA descriptors of the own rows and of the other side's: those multiplied for S, and those multiplied for dP. Of
    dV, `own_dp` is not used."""

    own_s: tl.tensor
    own_dp: tl.tensor
    other_s: tl.tensor
    other_dp: tl.tensor


class RowsParams(NamedTuple):
    """The gradient (a `Float32Output` of any dtype); the row statistics, `padded_tokens` for each head; the flag of the
    NaN repair pass; lengths; the band of the own rows; factors of the scores and of the gradient."""

    out: tl.tuple
    lse2: tl.tensor
    delta: tl.tensor
    flag: tl.tensor
    cu_own: tl.tensor
    cu_other: tl.tensor
    n_own: tl.tensor
    n_other: tl.tensor
    before: tl.tensor
    after: tl.tensor
    scale_log2: tl.tensor
    scale: tl.tensor
    padded_tokens: tl.tensor
    grid: tl.tuple


class OtherRows(NamedTuple):
    """Tiles of the other side, with their mbarriers."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class RowsShared(NamedTuple):
    """All of shared memory: the own rows and an mbarrier; the other side's; P in register order; dS, or P of dV."""

    own_s: gl.shared_memory_descriptor
    own_dp: gl.shared_memory_descriptor
    own_full: gl.shared_memory_descriptor
    other_s: OtherRows
    other_dp: OtherRows
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor


class Visit(NamedTuple):
    """The tile of a program and the blocks of other rows that it visits: `blocks` for each of GROUP heads."""

    work: tl.tuple
    span: tl.tuple
    blocks: tl.tensor


@gluon.jit
def visit(params):
    """The own tile of this program, those with the most other rows under a causal mask first."""
    grid = params.grid
    pid = gl.program_id(0)
    tile = pid % grid.tiles
    if params.after is not None:
        pid = pid - tile + (grid.tiles - 1 - tile)
    seqs = Sequences(params.cu_own, params.cu_other, params.n_own, params.n_other)
    w = locate(pid, grid, seqs, params.cu_own, OWN)
    at = w.first + w.n_k - w.n_q
    span = band(at, at + OWN - 1, w.n_k, params.before, params.after, OTHER)
    blocks = gl.where(w.first < w.n_q, gl.maximum(span.hi - span.lo + OTHER - 1, 0) // OTHER, 0)
    return Visit(w, span, blocks)


@gluon.jit
def statistics_row(w, h, heads, params, BY_KEY: gl.constexpr):
    """The first of a head's queries in the padded row statistics; there are `heads` query heads."""
    row = h if params.cu_own is not None else w.b * heads + h
    row = row * params.padded_tokens
    if params.cu_own is not None:
        row += ((w.k0 if BY_KEY else w.q0) // PAD + w.b) * PAD
    return row


@gluon.jit
def load_statistic(ptr, v, n, params, layout: gl.constexpr, CONFIG: gl.constexpr):
    """lse2 or delta of the queries of block n, as a row or a column of [OWN, OTHER]."""
    w = v.work
    heads = params.grid.heads
    if CONFIG.BY_KEY:
        h = w.h * CONFIG.GROUP + n // v.blocks
        first = statistics_row(w, h, heads * CONFIG.GROUP, params, True) + v.span.lo + n % v.blocks * OTHER
        c = gl.arange(0, OTHER, gl.SliceLayout(0, layout))
        return gl.load(ptr + (first.to(gl.int64) + c))[None, :]
    else:
        first = statistics_row(w, w.h, heads, params, False) + w.first
        r = gl.arange(0, OWN, gl.SliceLayout(1, layout))
        return gl.load(ptr + (first.to(gl.int64) + r))[:, None]


@gluon.jit
def block_p(s, lse2, v, n, params):
    """P of block n."""
    w = v.work
    first = v.span.lo + n % v.blocks * OTHER
    s = s * params.scale_log2 - lse2
    if (first < v.span.full_lo) | (first + OTHER > v.span.full_hi):
        at = gl.arange(0, OWN, gl.SliceLayout(1, s.type.layout)) + (w.first + w.n_k - w.n_q - first)
        end = opaque(at * 0 + (w.n_k - first))
        if params.after is not None:
            end = gl.minimum(at + params.after + 1, end)
        s = keep_column_range(s, None if params.before is None else at - params.before, end)
    return gl.exp2(s)


@gluon.jit
def add_block(shared, rows, acc, n, WG: gl.constexpr, CONFIG: gl.constexpr):
    """acc + dS (or P) times this warpgroup's columns of the other rows of block n, which are then released."""
    stage = n % CONFIG.STAGES
    zero = opaque(gl.to_tensor(0))  # a known 0 would keep descriptors in registers
    b = tile_at(rows.tiles, stage + zero).slice(WG * HALF_COLUMNS, HALF_COLUMNS, dim=1)
    acc = warpgroup_mma(shared.ds.index(zero), b, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    arrive(rows.empty.index(stage))
    return acc


@gluon.jit
def attend_s(shared, acc, v, n, params, CONFIG: gl.constexpr):
    """Warpgroup 0: S and P of block n, then its columns of the gradient."""
    layout: gl.constexpr = acc_layout(OTHER)
    stage = n % CONFIG.STAGES
    zero = opaque(gl.to_tensor(0))
    rows = shared.other_s
    mbarrier.wait(rows.full.index(stage), phase(n, CONFIG.STAGES))
    s = issue_abt((tile_at(shared.own_s, zero),), (tile_at(rows.tiles, stage + zero),))
    lse2 = load_statistic(params.lse2, v, n, params, layout, CONFIG)
    s = warpgroup_mma_wait(0, deps=(s,))
    if not CONFIG.HAS_DP:
        arrive(rows.empty.index(stage))
    p = block_p(s, lse2, v, n, params)
    if CONFIG.HAS_DP:
        shared.p.store(in_register_order(p))
        bar_arrive(ROWS_P_STORED, 256)
    else:
        rows = shared.other_dp
        if n > 0:
            bar_sync(ROWS_DS_READ, 256)
        shared.ds.index(0).store(downcast(p, shared.ds.dtype))
        fence_async_shared()
        mbarrier.wait(rows.full.index(stage), phase(n, CONFIG.STAGES))
    bar_sync(ROWS_DS_STORED, 256)
    return add_block(shared, rows, acc, n, 0, CONFIG)


@gluon.jit
def attend_dp(shared, acc, v, n, last, params, CONFIG: gl.constexpr):
    """Warpgroup 1: dP and dS of block n (none for dV), then its columns of the gradient."""
    layout: gl.constexpr = acc_layout(OTHER)
    flat: gl.constexpr = in_register_order(gl.zeros([OWN, OTHER], gl.float32, layout)).type.layout
    stage = n % CONFIG.STAGES
    zero = opaque(gl.to_tensor(0))
    rows = shared.other_dp
    mbarrier.wait(rows.full.index(stage), phase(n, CONFIG.STAGES))
    if CONFIG.HAS_DP:
        dp = issue_abt((tile_at(shared.own_dp, zero),), (tile_at(rows.tiles, stage + zero),))
        delta = load_statistic(params.delta, v, n, params, layout, CONFIG)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        arrive(rows.empty.index(stage))
        bar_sync(ROWS_P_STORED, 256)
        p = from_register_order(shared.p.load(flat), layout)
        shared.ds.index(0).store(downcast(p * (dp - delta), shared.ds.dtype))
        fence_async_shared()
        rows = shared.other_s
        mbarrier.wait(rows.full.index(stage), phase(n, CONFIG.STAGES))
    bar_sync(ROWS_DS_STORED, 256)
    acc = add_block(shared, rows, acc, n, 1, CONFIG)
    if not CONFIG.HAS_DP and n + 1 < last:
        bar_arrive(ROWS_DS_READ, 256)
    return acc


@gluon.jit
def consume(shared, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Consumer warpgroup WG: its columns of the gradient of the own rows, 0 if no other rows belong to them."""
    v = visit(params)
    w = v.work
    if w.first < w.n_q:
        acc = zero_part(HALF_COLUMNS)
        mbarrier.wait(shared.own_full.index(0), 0)
        last = v.blocks * CONFIG.GROUP if CONFIG.BY_KEY else v.blocks
        for n in range(last):
            if WG == 0:
                acc = attend_s(shared, acc, v, n, params, CONFIG)
            else:
                acc = attend_dp(shared, acc, v, n, last, params, CONFIG)
        if params.flag is not None:
            flag_nonfinite(params.flag, (acc,))
        x = (acc * params.scale).to(params.out.ptr.dtype.element_ty)
        store_global(params.out, x, Tokens(w.b, w.h, w.q0, w.n_q), w.first, WG * HALF_COLUMNS)


@gluon.jit
def load_rows(rows, n, desc, v, CONFIG: gl.constexpr):
    """Producer: block n of the other side."""
    w = v.work
    stage = n % CONFIG.STAGES
    h = w.h * CONFIG.GROUP + n // v.blocks if CONFIG.BY_KEY else w.h // CONFIG.GROUP
    full = rows.full.index(stage)
    mbarrier.wait(rows.empty.index(stage), phase(n, CONFIG.STAGES) ^ 1)
    mbarrier.expect(full, desc.block_type.nbytes)
    at = tma_coordinates(desc, Tokens(w.b, h, w.k0, w.n_k), v.span.lo + n % v.blocks * OTHER)
    tma_load(desc, at, full, rows.tiles.index(stage))


@gluon.jit
def produce(shared, inputs, params, CONFIG: gl.constexpr):
    """Producer warp. The rows for dP are released before those for S: their next block is loaded first."""
    v = visit(params)
    w = v.work
    if w.first < w.n_q:
        tokens = Tokens(w.b, w.h, w.q0, w.n_q)
        full = shared.own_full.index(0)
        BYTES: gl.constexpr = inputs.own_s.block_type.nbytes
        mbarrier.expect(full, 2 * BYTES if CONFIG.HAS_DP else BYTES)
        tma_load(inputs.own_s, tma_coordinates(inputs.own_s, tokens, w.first), full, shared.own_s.index(0))
        if CONFIG.HAS_DP:
            tma_load(inputs.own_dp, tma_coordinates(inputs.own_dp, tokens, w.first), full, shared.own_dp.index(0))
        for n in range(v.blocks * CONFIG.GROUP if CONFIG.BY_KEY else v.blocks):
            load_rows(shared.other_dp, n, inputs.other_dp, v, CONFIG)
            load_rows(shared.other_s, n, inputs.other_s, v, CONFIG)


@gluon.jit
def specialize_warps_by_rows(inputs, params, CONFIG: gl.constexpr):
    """Allocates shared memory and starts the warps of a program, with their registers."""
    DTYPE: gl.constexpr = inputs.own_s.dtype
    STAGES: gl.constexpr = CONFIG.STAGES
    own_s = allocate_boxes(inputs.own_s, 1)
    own_dp = allocate_boxes(inputs.own_dp, 1) if CONFIG.HAS_DP else own_s
    other_s = OtherRows(
        allocate_boxes(inputs.other_s, STAGES),
        make_mbarriers(STAGES, 1),
        make_mbarriers(STAGES, 2 if CONFIG.HAS_DP else 1),
    )
    other_dp = OtherRows(
        allocate_boxes(inputs.other_dp, STAGES),
        make_mbarriers(STAGES, 1),
        make_mbarriers(STAGES, 1 if CONFIG.HAS_DP else 2),
    )
    ds = gl.allocate_shared_memory(DTYPE, [1, OWN, OTHER], gl.NVMMASharedLayout(64, 16, 2))
    p = gl.allocate_shared_memory(gl.float32, [OTHER // 4, 256], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    shared = RowsShared(own_s, own_dp, make_mbarriers(1, 1), other_s, other_dp, p, ds)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (shared, params, 0, CONFIG)),
            (consume, (shared, params, 1, CONFIG)),
            (produce, (shared, inputs, params, CONFIG)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit(**ANY_ROWS)
def backward_rows_kernel(
    own_s,
    own_dp,
    other_s,
    other_dp,
    out,
    lse2,
    delta,
    flag,
    cu_own,
    cu_other,
    n_own,
    n_other,
    before,
    after,
    scale_log2,
    scale,
    padded_tokens,
    tiles_per_row,
    heads,
    batch,
    CONFIG: gl.constexpr,
):
    """One gradient of `heads` heads. Row r sees the other rows p - before .. p + after, p = r + n_other - n_own."""
    specialize_warps_by_rows(
        RowsInputs(own_s, own_dp, other_s, other_dp),
        RowsParams(
            *(out, lse2, delta, flag, cu_own, cu_other, n_own, n_other, before, after, scale_log2, scale),
            *(padded_tokens, Grid(tiles_per_row, heads, batch)),
        ),
        CONFIG,
    )
