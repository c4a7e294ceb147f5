"""How the keys of a KV cache are dealt to programs, in plain numbers: what the host decides (`Deal`), and what the plan
kernel makes of lengths (`ranges`), for those who explain it. Imports no Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..cost_profile import padded
from ..gpu import Gpu
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


class Item(NamedTuple):
    """A tile of a sequence's rows, and the units of keys that they see; `keys` of them in all."""

    b: int
    first: int
    units: int
    keys: int


class Ranges(NamedTuple):
    """The plan of a step: all items that have keys, one after another, cut into equal stretches of `each` units (with
    what it costs to begin), or each a stretch of its own; `divided` row sets belong to several programs, `parts` are
    theirs all together."""

    items: list[Item]
    each: int
    busy: int  # programs that have something to do
    divided: int
    parts: int


def ranges(
    dealt: Deal, sequences: Sequence[tuple[int, int, int]], group: int,
    before: int | None = None, after: int | None = None,
) -> Ranges:  # fmt: skip
    """Of sequences with so many (queries, keys, first valid key), as the plan kernel computes it.

    >>> dealt = Deal(KvTile(16, 64, 4, 2, 1), 2, 1, 4, 1, 64, 2, 16, 1)
    >>> ranges(dealt, [(1, 640, 0), (1, 64, 0)], 4, after=0)[1:]
    (4, 4, 1, 3)
    """
    items = [item for b, seq in enumerate(sequences) for item in _items(dealt, b, *seq, group, before, after)]
    items = [item for item in items if item.units]  # the rows of others are written without a look at keys
    costs = [item.units + dealt.cost for item in items]
    total, heads = sum(costs), dealt.kv_heads
    each = max(-(-total // dealt.teams), dealt.least)
    longest = max((item.units for item in items), default=0)
    if len(items) <= dealt.teams and longest <= dealt.least:
        return Ranges(items, longest + dealt.cost, len(items) * heads, 0, 0)
    shared: dict[int, int] = {}
    n, begins = 0, 0  # the item at x, and where it begins
    for x in range(each, total, each):
        while begins + costs[n] <= x:
            begins += costs[n]
            n += 1
        if x - begins > dealt.cost:
            shared[n] = shared.get(n, 1) + 1
    return Ranges(items, each, -(-total // each) * heads, len(shared) * heads, sum(shared.values()) * heads)


def _items(
    dealt: Deal, b: int, n_q: int, n_k: int, start: int, group: int, before: int | None, after: int | None
) -> Iterator[Item]:
    for row in range(0, n_q * group, dealt.tile.block_m):
        at = row // group + n_k - n_q
        last = min((row + dealt.tile.block_m - 1) // group, n_q - 1) + n_k - n_q
        lo = start if before is None else max(start, at - before)
        hi = n_k if after is None else min(n_k, last + after + 1)
        keys = max(hi - lo, 0)
        yield Item(b, row, -(-hi // dealt.unit) - lo // dealt.unit if keys else 0, keys)
