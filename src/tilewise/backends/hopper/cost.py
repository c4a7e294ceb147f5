"""The Hopper kernels, as the model of times sees them. Imports no Triton."""

from __future__ import annotations

from ..common.cost_profile import Profile, Shapes, padded
from ..common.gpu import Gpu
from ..common.tiles import Tile
from .support import takes
from .tiles import forward_tile, widths


def forward(call: Shapes, gpu: Gpu) -> list[Profile]:
    """The tile is that of a program, whose warps have different jobs."""
    row = forward_tile(call.d, call.dv, banded=call.after is not None or call.has_lists, keys=call.n_k)
    tile = Tile(64 * row.warpgroups, row.block_n, 4 * row.warpgroups + 4, row.stages)
    columns = sum(widths(call.d)) + sum(widths(call.dv))
    heads = call.heads // call.kv_heads if call.heads_are_queries else 1
    return [Profile("hopper forward", tile, _width(call), columns, is_forward=True, heads=heads)]


def backward(call: Shapes, gpu: Gpu) -> list[Profile]:
    """Around it O and dO are read, and dQ in float32 is cleared, read and stored."""
    if not takes(call.d, call.dv, listed=call.has_lists, deterministic=call.deterministic):
        return []  # another backend computes it
    width = _width(call)
    q, wide = call.rows("q"), 4 * call.rows("q") // call.itemsize
    return [
        Profile(
            "hopper backward", Tile(64, 128 if width <= 128 else 64, 12, 2), width,
            3 * width + 2 * max(64, padded(call.dv)), by_key=True, is_ordered=call.deterministic,
            beside=2 * call.rows("o") + 2 * wide + q,
        )
    ]  # fmt: skip


def _width(call: Shapes) -> int:
    return max(64, padded(call.d), padded(call.dv))
