"""The NaN repair of the Hopper forward: tiles of O again, without the values that their rows do not see.

A matrix product cannot leave a value out: 0 * nan and 0 * inf are nan. The epilogue of a tile raises a flag of its
warpgroup in global memory where O may be nan and the softmax is not. A warpgroup whose flag is raised looks for nan in
O of all its tiles after the last one. Where it finds one, it computes O again with multiply-adds, from global memory
and the stored lse, and leaves out hidden pairs. That is slow, and rarely needed. In the loop over tiles, the code of
the repair took 2 to 8 % of causal calls.

The tiles of a program are a linked list in global memory, which its producer writes.
"""

from typing import NamedTuple

import triton.language as tl

from ..common.device.score import scores
from ..common.device.softmax import exponent, log2_scale, rescale_exponent, row_maximum
from ..common.device.structs import LOG2E, Pairs, Work
from ..common.device.tile_io import row_pointers
from .dropout import kept_weights, query_words
from .forward_softmax import ROWS, acc_layout, broadcast_rows, mask_scores
from .gluon_compat import barrier, column_indices, gl, gluon, opaque, program_id_here, tma, tma_stores_done
from .mask_words import load_key_block, part_of
from .pipeline import TileScheduler, block_range, find_block, tile_work
from .token_rows import Tokens, global_rows, load_global, store_global, tensor_of

# keys and columns of V at a time: few registers
REPAIR_KEYS: gl.constexpr = gl.constexpr(16)
REPAIR_COLUMNS: gl.constexpr = gl.constexpr(64)


class RepairPointers(NamedTuple):
    """q, k, v and out; a flag for each warpgroup of each program, which are 0 between launches; and for each tile, the
    tile that its program computed before. All are None where every row sees every key. In fp8, q, k and v are
    GlobalTensors, because there the TMA descriptors are those of the quantised operands."""

    q: tl.tensor = None
    k: tl.tensor = None
    v: tl.tensor = None
    o: tl.tensor = None
    flags: tl.tensor = None
    tiles: tl.tensor = None


class Repair(NamedTuple):
    """The pointers, and the TMA descriptors of q, k and v, from which their strides are taken."""

    pointers: RepairPointers
    q: tl.tensor
    k: tl.tensor
    v: tl.tensor


@gluon.jit
def flag_pointer(flags, WG: gl.constexpr, CONFIG: gl.constexpr):
    """The flag of this warpgroup."""
    return flags + program_id_here() * CONFIG.WARPGROUPS + WG


@gluon.jit
def record_tile(tiles, tile_id, last_id):
    """Producer: appends a tile to the list of its program, unless `tiles` is None. Returns its id, now the last one."""
    if tiles is not None:
        gl.store(tiles + tile_id, last_id)
    return tile_id


@gluon.jit
def repair_tiles(last_id, outputs, params, scheduler, WG: gl.constexpr, CONFIG: gl.constexpr):
    """This warpgroup, after its last tile (-1: it had none): if its flag is raised, repairs its tiles and clears it."""
    pointers = outputs.repair.pointers
    flag = flag_pointer(pointers.flags, WG, CONFIG)
    tma.store_wait(0)
    barrier()  # all warps have stored their flags
    if gl.load(flag, volatile=True) > 0:
        tma_stores_done()
        barrier()  # O is in memory, and all warps have read the flag
        gl.store(flag, 0)
        tile_id = last_id
        # opaque, because what follows from arguments alone is computed before the loop over tiles, and spilled there
        per_row, in_l2 = opaque(scheduler.tiles_per_row), opaque(scheduler.rows_in_l2)
        scheduler = TileScheduler(
            *(scheduler.counter, scheduler.num_tiles, scheduler.rows, per_row),
            *(scheduler.heads, scheduler.batch, in_l2, scheduler.grouped_rows),
        )
        while tile_id >= 0:
            repair_tile(tile_work(tile_id, scheduler, params, CONFIG), outputs, params, WG, CONFIG)
            tile_id = gl.load(pointers.tiles + tile_id, volatile=True)


@gluon.jit
def repair_tile(w, outputs, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Computes and stores the columns of this warpgroup's O again that have a nan in a row whose softmax has none."""
    pointers = outputs.repair.pointers
    if CONFIG.FP8:
        inputs = (pointers.q, pointers.k, pointers.v)
    else:
        inputs = (
            tensor_of(pointers.q, outputs.repair.q),
            tensor_of(pointers.k, outputs.repair.k),
            tensor_of(pointers.v, outputs.repair.v),
        )
    terms = params.terms
    SLOT: gl.constexpr = WG % (CONFIG.BLOCK_M // ROWS)
    FIRST_COLUMN: gl.constexpr = (WG - SLOT) * CONFIG.BLOCK_DV
    first = opaque(w.first + SLOT * ROWS)
    out = outputs.o_float32
    if out.ptr is None:
        out = tensor_of(pointers.o, outputs.o)
    tokens = Tokens(w.b, w.h, w.q0, w.n_q)

    layout: gl.constexpr = acc_layout(REPAIR_KEYS)
    lse2 = load_lse2(w, first, outputs.lse, params, gl.SliceLayout(1, layout))
    sink = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    if terms.sinks.ptr is not None:
        score = gl.load(terms.sinks.ptr + w.h * terms.sinks.stride).to(gl.float32)
        score = row_maximum(score, LOG2E, terms.large_scores)
        sink += gl.exp2(rescale_exponent(score, lse2, LOG2E, terms.large_scores))
    dropout_words = query_words(w, first, gl.SliceLayout(1, layout), ROWS, terms)
    # opaque: max(n_k, 0) would likewise be computed before the loop over tiles
    keys = Work(w.b, w.h, w.first, w.q0, w.n_q, w.k0, opaque(w.n_k), w.r0)
    lo, hi, span = block_range(first, keys, params, ROWS, CONFIG.BLOCK_N)
    for column in range(FIRST_COLUMN, gl.minimum(inputs[2].columns, FIRST_COLUMN + CONFIG.BLOCK_DV), REPAIR_COLUMNS):
        acc = gl.zeros([ROWS, REPAIR_COLUMNS], gl.float32, acc_layout(REPAIR_COLUMNS))
        total = sink
        end = gl.where(has_nan(out, tokens, first, column, lse2), hi, lo)
        for n in range(lo, end):
            found = find_block(n, w, terms.blocks, CONFIG.BLOCK_N)
            block = load_key_block(n, found, first, terms, CONFIG.BLOCK_N, REPAIR_KEYS, layout)
            for j in range(block.start, block.start + CONFIG.BLOCK_N, REPAIR_KEYS):
                p = visible_p((w, first, span), part_of(block, opaque(j)), lse2, inputs, params, CONFIG)
                total += gl.sum(gl.maximum(p, 0.0), 1)
                p = gl.where(p > 0.0, kept_weights(p, dropout_words, opaque(j), terms), p)
                for key in range(j, j + REPAIR_KEYS):
                    acc = add_value(acc, p, j, opaque(key), w, column, inputs[2], CONFIG)
        factor = 1.0 if terms.seed is None else terms.rescale
        acc *= broadcast_rows(factor / gl.where(total == 0.0, 1.0, total), acc)
        if end > lo:
            store_global(out, acc, tokens, first, column)


@gluon.jit
def has_nan(out, tokens, first, column, lse2):
    """Whether REPAIR_COLUMNS columns of the rows `first` and on of O have a nan, except in rows whose lse is one."""
    layout: gl.constexpr = acc_layout(REPAIR_COLUMNS)
    x = load_global(out, tokens, first, column, gl.zeros([ROWS, REPAIR_COLUMNS], gl.float32, layout))
    rows = broadcast_rows(lse2, x)
    bad = (x != x) & (rows == rows)
    return gl.max(gl.max(bad.to(gl.int32), 1), 0) > 0


@gluon.jit
def load_lse2(w, first, lse, params, layout: gl.constexpr):
    """lse of the queries from `first` on in the units of the exponent; +inf, which makes p 0, for rows without keys."""
    i = first + gl.arange(0, ROWS, layout)
    rows = row_pointers(lse, params.n_q, params.heads, w.b, w.h, w.q0, i, params.cu_q is not None)
    x = gl.load(rows, mask=i < w.n_q, other=float("inf"))
    x = row_maximum(x, LOG2E, params.terms.large_scores)
    return gl.where(x == float("-inf"), float("inf"), x)


@gluon.jit
def visible_p(tile, block, lse2, inputs, params, CONFIG: gl.constexpr):
    """p of the REPAIR_KEYS keys of `block`; -1 for hidden pairs. A p that is nan becomes inf, because a maximum drops
    nan and keeps inf; O, a quotient, is then nan."""
    w, first, _span = tile
    q, k, _v = inputs
    layout: gl.constexpr = acc_layout(REPAIR_KEYS)
    i = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    s = gl.zeros([ROWS, REPAIR_KEYS], gl.float32, layout)
    j = column_indices(block.start, s)
    q_rows = global_rows(q, w.b, w.h, w.q0, i)
    k_rows = global_rows(k, w.b, w.h // CONFIG.GROUP, w.k0, j)
    for d in range(k.columns):
        q_column = gl.load(q_rows + d, mask=i < w.n_q, other=0.0).to(gl.float32)
        k_column = gl.load(k_rows + d, mask=j < w.n_k, other=0.0).to(gl.float32)
        s += q_column[:, None] * k_column[None, :]
    pairs = Pairs(w, w.h, i[:, None], j[None, :])
    visible = mask_scores(gl.zeros([ROWS, REPAIR_KEYS], gl.float32, layout), tile, block, params) == 0.0
    s = scores(s, pairs, params.scale, params.terms, params.SCORE_MOD, CONFIG.FOLD_SCALE)
    p = gl.exp2(exponent(s, lse2[:, None], log2_scale(params.scale, CONFIG.FOLD_SCALE), params.terms.large_scores))
    p = gl.where(p == p, p, float("inf"))
    return gl.where(visible, p, -1.0)


@gluon.jit
def add_value(acc, p, start, j, w, column, v, CONFIG: gl.constexpr):
    """acc + p_j * v_j where p_j is not negative; the columns of v from `column` on. p: of the keys from `start` on."""
    is_j = column_indices(start, p) == j
    p_column = broadcast_rows(gl.max(gl.where(is_j[None, :], p, -1.0), 1), acc)
    columns = column_indices(opaque(column), acc)
    row = global_rows(v, w.b, w.h // CONFIG.GROUP, w.k0, j)
    value = gl.load(row + columns, mask=(columns < v.columns) & (j < w.n_k), other=0.0).to(gl.float32)
    return gl.where(p_column >= 0.0, acc + p_column * value[None, :], acc)
