"""The cost profiles of the portable kernels. Imports no Triton."""

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

    profile = Profile("forward", tile, max(d, dv), d + dv, is_forward=True, registers=_registers(tile), heads=heads)
    shared = call.itemsize * (tile.block_m * d + tile.stages * tile.block_n * (d + dv))
    few = call.lengths is None and call.n_q <= tiles.FEW_QUERIES
    return [profile._replace(shared=shared, parts=parts if few else None)]


def backward(call: Shapes, gpu: Gpu) -> list[Profile]:
    """dK and dV, then dQ; the row statistics before them read O and dO."""
    d, dv = padded(call.d), padded(call.dv)
    key, query = (tiles.tile(name, gpu.arch, call.itemsize, max(d, dv)) for name in ("key", "query"))
    both = call.itemsize * (d + dv)
    key_shared = both * (key.block_n + key.stages * key.block_m)
    query_shared = both * (query.block_m + query.stages * query.block_n)
    dkdv = Profile("key", key, max(d, dv), 2 * d + 2 * dv, by_key=True, shared=key_shared, registers=_registers(key))
    dq = Profile("query", query, max(d, dv), 2 * d + dv, shared=query_shared, registers=_registers(query))
    return [dkdv, dq._replace(beside=2 * call.rows("o"))]


def _registers(tile: Tile) -> int:
    """An estimate of the registers of a thread."""
    return 65536 // (32 * tile.warps * 2) if tile.warps <= 4 else 168
