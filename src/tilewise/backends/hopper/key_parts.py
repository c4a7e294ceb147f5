"""Where dK and dV of a tile of keys are stored. Of a tile that several programs compute: which queries each visits, and
where it stores its part.

`backward_schedule.choose_split` says when. `postprocess_kernel` adds the parts in the order of their numbers.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.structs import PAD
from .column_parts import flag_nonfinite, scaled, store_parts, total
from .gluon_compat import gl, gluon, opaque
from .register_order import register_order_pointers
from .token_rows import Tokens


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
