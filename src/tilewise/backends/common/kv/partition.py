"""How the keys of a KV cache are divided among programs: what the host decides from shapes alone. Imports no Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..gpu import Gpu
from ..tiles import padded
from . import kv_tiles
from .kv_tiles import KvTile

SHORTEST = 512  # keys that are worth a program


class Deal(NamedTuple):
    """What the host knows of a plan: tiles of rows, teams of programs, keys of a unit, and the workspace's slots of
    rows."""

    tile: KvTile
    items: int
    tiles: int
    teams: int
    kv_heads: int  # programs of a team
    unit: int
    slots: int
    rows: int
    cost: int  # of beginning an item, in units
    least: int = 1  # units of a stretch

    @property
    def programs(self) -> int:
        return self.teams * self.kv_heads

    @property
    def numbers(self) -> int:
        return 2 + 12 * (2 * self.teams + 1) + self.items + 1 + 8 * self.items

    def floats(self, dim_v: int) -> int:
        """Parts of row sets with their lse, or m and l, and a flag for each program."""
        return self.programs * (self.slots * self.rows * (dim_v + 2) + 1)


def deal(request: Any, gpu: Gpu, processors: int, tile: KvTile | None = None) -> Deal:
    """Of a `KvRequest`, from shapes alone, on a GPU with so many processors."""
    q, k, v = request.q, request.k, request.v
    group = q.shape[-2] // k.shape[-2]
    known = request.most * group
    if tile is None:
        tile = kv_tiles.tile(gpu.arch, q.element_size(), padded(max(q.shape[-1], v.shape[-1])), known)
    if request.call.cu_q is None:
        tiles = -(-q.shape[1] * group // tile.block_m)
        items = q.shape[0] * tiles
    else:
        tiles = 0
        items = q.shape[0] * group // tile.block_m + request.places.batch + 1
    rows = min(known or tile.block_m, tile.block_m)  # in this order torch.compile guards "no more than block_m"
    unit = request.split or tile.block_n
    slots = 2 if request.split is None else 1 + -(-request.places.capacity(k) // unit)
    cost, least = (0, 1) if request.split else (1, max(1, SHORTEST // unit))
    teams = max(1, processors * tile.per // k.shape[-2])
    return Deal(tile, items, tiles, teams, k.shape[-2], unit, slots, rows, cost, least)
