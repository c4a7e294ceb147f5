"""The portable kernels, as the model of times sees them. Imports no Triton."""

from __future__ import annotations

from ..common import tiles
from ..common.cost_profile import Profile, Shapes, padded
from ..common.gpu import Gpu
from ..common.tiles import Tile


def forward(call: Shapes, gpu: Gpu) -> list[Profile]:
    d, dv = padded(call.d), padded(call.dv)
    tile = tiles.tile("forward", gpu.arch, call.itemsize, max(d, dv))
    group = call.heads // call.kv_heads
    heads = 1
    if not call.has_lists:
        queries = call.n_q if call.lengths is None else -(-call.n_q // max(call.batch, 1))
        heads = tiles.heads_of_a_tile(queries, group, tile.block_m)
        if heads > 1:
            tile = tiles.tile("forward", gpu.arch, call.itemsize, max(d, dv), "groups")

    def parts(programs: int, processors: int) -> int:
        return tiles.parts_of_keys(programs, call.n_k, tile.block_n, processors)

    shared = call.itemsize * (tile.block_m * d + tile.stages * tile.block_n * (d + dv))
    few = call.lengths is None and call.n_q <= tiles.FEW_QUERIES
    return [
        Profile(
            "forward", tile, max(d, dv), d + dv, is_forward=True, shared=shared, registers=_registers(tile),
            heads=heads, parts=parts if few else None,
        )
    ]  # fmt: skip


def backward(call: Shapes, gpu: Gpu) -> list[Profile]:
    """dK and dV, then dQ; before them O and dO are read."""
    d, dv = padded(call.d), padded(call.dv)
    key, query = (tiles.tile(name, gpu.arch, call.itemsize, max(d, dv)) for name in ("key", "query"))
    both = call.itemsize * (d + dv)
    return [
        Profile(
            "key", key, max(d, dv), 2 * d + 2 * dv, by_key=True, registers=_registers(key),
            shared=both * (key.block_n + key.stages * key.block_m),
        ),
        Profile(
            "query", query, max(d, dv), 2 * d + dv, registers=_registers(query),
            shared=both * (query.block_m + query.stages * query.block_n), beside=2 * call.rows("o"),
        ),
    ]  # fmt: skip


def _registers(tile: Tile) -> int:
    """Of a thread; the compiler has the last word, on these as on shared memory."""
    return 65536 // (32 * tile.warps * 2) if tile.warps <= 4 else 168
