"""Tiles of keys that several programs compute: which queries each visits, and where it stores its part of dK and dV.

`split.choose_split` says when. `postprocess_kernel` adds the parts in the order of their numbers.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.structs import PAD
from .gluon_compat import gl, gluon
from .register_order import register_order_pointers


class Parts(NamedTuple):
    """heads * queries programs compute a tile of keys. Each visits 1 / `heads` of the group's query heads, and of their
    blocks every `queries`-th one. It counts as a KV head of the tile scheduler: no two of them add to the same block of
    dQ. A part has `padded_keys` rows, in which packed sequences start at multiples of PAD."""

    heads: tl.tensor
    queries: tl.tensor
    padded_keys: tl.tensor


@triton.jit
def kv_head(w, params, CONFIG: tl.constexpr):
    """The KV head of a tile."""
    return w.h // (params.parts.heads * params.parts.queries) if CONFIG.SPLIT else w.h


@triton.jit
def own_blocks(lo, hi, w, parts, BLOCK_M: tl.constexpr):
    """The first and the end, in steps of parts.queries blocks, of the blocks between lo and hi that the tile w visits:
    those whose numbers are w.h modulo parts.queries, so that all key tiles visit a block for the same part."""
    step = parts.queries * BLOCK_M
    skipped = w.h % parts.queries + parts.queries - lo // BLOCK_M % parts.queries
    lo += skipped % parts.queries * BLOCK_M
    return lo, lo + tl.maximum(hi - lo + step - 1, 0) // step * step


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
def store_part(parts, x, tile):
    """parts[tile] = x, [64, N]."""
    pointers, x = register_order_pointers(parts, x, tile)
    gl.store(pointers, x)
