"""After the Hopper backward: dQ from its float32 sums, dK and dV from parts; and the NaN repair: gradients again,
without what their rows do not see, where a product let a NaN through (see `common/repair.py`). The repair is slow, and
nearly never needed."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.structs import ANY_SIZE, PAD, Grid, Rows, ScoreParams, Sequences
from ..common.device.tile_io import store_columns
from ..common.device.tile_range import locate
from ..common.pdl import gdc_launch_dependents, gdc_wait
from ..common.repair import repair_key_rows, repair_query_rows

ROWS: tl.constexpr = tl.constexpr(64)


class PostprocessTensors(NamedTuple):
    """The sums of dQ, the parts of dK and dV (or None); what is written: dq, dk, dv; and the flag that dK or dV are not
    finite."""

    dq_acc: tl.tensor
    dk_parts: tl.tensor
    dv_parts: tl.tensor
    dq: tl.tuple
    dk: tl.tuple
    dv: tl.tuple
    flag: tl.tensor


class PostprocessConfig(NamedTuple):
    """D_PARTS, DV_PARTS: the columns of dq_acc and dk_parts, and of dv_parts, as powers of two; D_COLUMNS, DV_COLUMNS:
    their sums."""

    D: int
    DV: int
    D_PARTS: tuple[int, ...]
    DV_PARTS: tuple[int, ...]
    D_COLUMNS: int
    DV_COLUMNS: int
    OVERLAP: bool


@triton.jit
def load_register_order(ptr, row, column, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS rows and WIDTH columns, from `row` and `column` on, of a float32 buffer of COLUMNS columns, in the order of
    rows and columns. In memory they are [group of 8 columns, warp, row, pair, upper or lower 8 rows, column], as
    `in_register_order` wrote them."""
    x = tl.load(ptr + tl.cast(row, tl.int64) * COLUMNS + column * ROWS + tl.arange(0, ROWS * WIDTH))
    x = tl.reshape(x, [WIDTH // 8, 4, 8, 4, 2, 2])
    return tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), [ROWS, WIDTH])


@triton.jit
def add_parts(ptr, row, padded, parts, column, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of ROWS rows of `parts` buffers of `padded` rows, in the order of their numbers."""
    x = load_register_order(ptr, row, column, WIDTH, COLUMNS)
    for part in range(1, parts):
        x += load_register_order(ptr, row + part * padded, column, WIDTH, COLUMNS)
    return x


@triton.jit
def round_keys(tensors, w, first, grid, parts, scale, PACKED: tl.constexpr, CONFIG: tl.constexpr):
    """dk = scale * the sum of its parts, dv = that of its parts, ROWS rows from `first` on."""
    padded = grid.tiles * PAD
    row = (w.h if PACKED else w.b * grid.heads + w.h) * parts * padded + first
    if PACKED:
        row += (w.k0 // PAD + w.b) * PAD
    dk_rows = Rows(tensors.dk, w.b, w.h, w.k0, first, w.n_k)
    for i in tl.static_range(len(CONFIG.D_PARTS)):
        column = i * CONFIG.D_PARTS[0]
        dk = add_parts(tensors.dk_parts, row, padded, parts, column, CONFIG.D_PARTS[i], CONFIG.D_COLUMNS) * scale
        store_columns(dk_rows, dk, column, CONFIG.D)
    dv_rows = Rows(tensors.dv, w.b, w.h, w.k0, first, w.n_k)
    for i in tl.static_range(len(CONFIG.DV_PARTS)):
        column = i * CONFIG.DV_PARTS[0]
        dv = add_parts(tensors.dv_parts, row, padded, parts, column, CONFIG.DV_PARTS[i], CONFIG.DV_COLUMNS)
        store_columns(dv_rows, dv, column, CONFIG.DV)


@triton.jit
def round_queries(tensors, w, first, grid, scale, PACKED: tl.constexpr, CONFIG: tl.constexpr):
    """dq = scale * dq_acc, ROWS rows from `first` on. Returns whether they are all finite."""
    row = (w.h if PACKED else w.b * grid.heads + w.h) * grid.tiles * PAD + w.r0 + first
    rows = Rows(tensors.dq, w.b, w.h, w.q0, first, w.n_q)
    bad = w.n_q * 0.0
    for i in tl.static_range(len(CONFIG.D_PARTS)):
        column = i * CONFIG.D_PARTS[0]
        x = load_register_order(tensors.dq_acc, row, column, CONFIG.D_PARTS[i], CONFIG.D_COLUMNS) * scale
        store_columns(rows, x, column, CONFIG.D)
        bad += tl.sum(x * 0.0)  # x - x would be fma(acc, scale, -x): the rounding of x, and not 0
    return bad == 0.0


@triton.jit(**ANY_SIZE)
def postprocess_kernel(
    tensors,  # PostprocessTensors
    repair,  # BackwardTensors
    cu_q,
    cu_k,
    n_q,
    n_k,
    before,
    after,
    score_scale,
    scale,
    q_tiles,
    k_tiles,
    heads,
    kv_heads,
    batch,
    q_total,
    k_total,
    splits,
    q_terms,
    k_terms,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    REPAIR: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """dQ, and of keys that several programs computed dK and dV; and their repair, with the KernelConfig REPAIR, or None
    where every row sees every key. There are `q_total` programs of ROWS
    queries, two for each of the tiles of PAD rows; and, if dK and dV have `splits` parts, `k_total` of ROWS keys."""
    if CONFIG.OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    PACKED: tl.constexpr = cu_q is not None
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    pid = tl.program_id(0)
    flag = 0
    if REPAIR is not None:
        flag = tl.load(tensors.flag)  # now, while the sums are loaded
    if pid < q_total:
        grid = Grid(q_tiles, heads, batch)
        w = locate(pid // 2, grid, seqs, cu_q, PAD)
        first = w.first + pid % 2 * ROWS
        if first < w.n_q:
            if tensors.dq_acc is None:
                is_finite = flag == 0
            else:
                is_finite = round_queries(tensors, w, first, grid, scale, PACKED, CONFIG)
            if REPAIR is not None:  # noqa: SIM102 - is_finite is no constant
                if not is_finite:
                    tl.debug_barrier()  # dq has been stored
                    repair_query_rows(
                        *(repair, w, first, score_scale),
                        ScoreParams(before, after, score_scale, q_terms, SCORE_MOD, MASK_MOD),
                        *(ROWS, REPAIR),
                    )
    elif tensors.dk_parts is not None:
        grid = Grid(k_tiles, kv_heads, batch)
        w = locate((pid - q_total) // 2, grid, seqs, cu_k, PAD)
        first = w.first + (pid - q_total) % 2 * ROWS
        if first < w.n_k:
            round_keys(tensors, w, first, grid, splits, scale, PACKED, CONFIG)
    if REPAIR is not None:  # noqa: SIM102 - as above
        if flag > 0:
            tl.debug_barrier()  # dk and dv have been stored
            # all programs share all keys; with parts, each program repairs the keys that it has rounded
            first_tile = pid if tensors.dk_parts is None else pid - q_total
            end = k_total if tensors.dk_parts is None else tl.where(first_tile < 0, first_tile, first_tile + 1)
            for n in range(first_tile, end, tl.num_programs(0)):
                w = locate(n // 2, Grid(k_tiles, kv_heads, batch), seqs, cu_k, PAD)
                repair_key_rows(
                    *(repair, w, w.first + n % 2 * ROWS, kv_heads, score_scale),
                    ScoreParams(before, after, score_scale, k_terms, SCORE_MOD, MASK_MOD),
                    *(ROWS, REPAIR),
                )
