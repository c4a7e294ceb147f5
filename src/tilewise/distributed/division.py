"""A division: who holds which tokens, which tiles are computed where, what travels. Pure, and free of any GPU.

The same object is executed, simulated, verified (its tiles can be counted) and drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from . import layout as layouts
from .layout import LAYOUTS, Run, Shard
from .tiles import Band, Call, Piece, Tile, by_document, calls, count, fused, pieces, tiles

STRATEGIES = ("ring", "allgather", "ulysses", "two-level", "halo", "tree")
GATHERING = ("allgather", "halo")  # the strategies that send keys to whoever sees them, all at once
TOGETHER = 1 << 22  # pairs of runs are counted at a time


@dataclass(frozen=True, eq=False)
class Division:
    """Of a sequence among ranks. These are grouped into `stations` of `width` neighbours, which exchange heads for
    tokens (Ulysses); keys and values travel from station to station. Without that exchange a station is a rank."""

    ranks: int
    lengths: tuple[int, ...]
    packed: bool
    band: Band
    strategy: str
    layout: str
    width: int = 1
    queries: int = 0  # of a tree: so many, the last ones, which all ranks hold

    def __repr__(self) -> str:
        before, after = self.band
        named: dict[Band, str] = {(None, None): "all", (None, 0): "causal"}
        sees = named.get((before, after), f"window ({before}, {after})")
        what = f"{len(self.lengths)} documents, {self.tokens} tokens" if self.packed else f"{self.tokens} tokens"
        wide = f" of {self.width} x {self.stations}" if self.strategy == "two-level" else ""
        return f"<plan: {what} on {self.ranks} ranks, {sees}, {self.strategy}{wide}, {self.layout}>"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def stations(self) -> int:
        return self.ranks // self.width

    @cached_property
    def shards(self) -> list[Shard]:
        """The runs that each rank holds."""
        return _dealt(self.layout, self.lengths, self.ranks)

    @cached_property
    def held(self) -> list[Shard]:
        """The runs of each station: those of its members, for some of the heads."""
        if self.width == 1:
            return self.shards
        if self.stations == 1:
            return [tuple(Run(d, 0, 1, n) for d, n in enumerate(self.lengths) if n)]
        return [
            layouts.joined(itertools.chain(*self.shards[s * self.width : (s + 1) * self.width]))
            for s in range(self.stations)
        ]

    def rows(self, station: int) -> int:
        return sum(run.size for run in self.held[station])

    def counts(self) -> list[int]:
        """How many tokens each rank holds."""
        return [sum(run.size for run in shard) for shard in self.shards]

    # --- what is computed ---

    def asking(self, station: int) -> list[Piece]:
        """The queries of a station."""
        if self.strategy == "tree":
            # runs that meet have one step: beside striped keys each query is a run of its own
            step, first = self.ranks if self.layout == "striped" else 1, self.tokens - self.queries
            size = self.queries if step == 1 else 1
            return [Piece(n, Run(0, first + n, step, size)) for n in range(0, self.queries, size)]
        return pieces(self.held[station])

    def work(self, station: int, source: int) -> list[Tile]:
        """The tiles of a station's queries and the keys of another, in rows of both."""
        queries, keys = self._asked[station], self._kept[source]
        return [x for d in sorted(queries.keys() & keys.keys()) for x in tiles(queries[d], keys[d], self.band)]

    @cached_property
    def _kept(self) -> list[dict[int, list[Piece]]]:
        """The keys of each station, by document."""
        return [by_document(pieces(held)) for held in self.held]

    @cached_property
    def _asked(self) -> list[dict[int, list[Piece]]]:
        if self.strategy != "tree":
            return self._kept
        return [by_document(self.asking(s)) for s in range(self.stations)]

    def meets(self, station: int) -> set[int]:
        """Those whose keys a station sees, and those that see its keys."""
        return set((self.pairs[station] + self.pairs[:, station]).nonzero().flatten().tolist())

    @lru_cache(1 << 16)  # noqa: B019 - plans are few, and forgotten together
    def wants(self, station: int, source: int) -> tuple[tuple[int, int], ...]:
        """The rows of `source` that are sent to a station which gathers keys: of a halo, those it sees."""
        if self.strategy != "halo":
            n = self.rows(source)
            return ((0, n),) if n else ()
        found: list[tuple[int, int]] = []
        for a, b in sorted((x.k0, x.k1) for x in self.work(station, source)):
            if found and a <= found[-1][1]:
                found[-1] = found[-1][0], max(b, found[-1][1])
            else:
                found.append((a, b))
        return tuple(found)

    def buffer(self, station: int, sources: Sequence[int]) -> list[tuple[int, int, Run]]:
        """(source, row among those it has sent, run) of the keys that a station keeps from some sources, in order."""
        found = []
        gathers = self.strategy in GATHERING and sources != (station,)
        for source in sources:
            sent = 0
            ranges = self.wants(station, source) if gathers else ((0, self.rows(source)),)
            own = pieces(self.held[source])
            for a, b in ranges:
                for row, run in own:
                    low, high = max(a, row), min(b, row + run.size)
                    if low < high:
                        found.append((source, sent + low - a, run.part(low - row, high - row)))
                sent += b - a
        return sorted(found, key=lambda x: x[2]) if gathers else found

    @lru_cache(4096)  # noqa: B019
    def calls(self, station: int, sources: tuple[int, ...], placed: bool, alone: bool) -> list[Call]:
        """What a station computes with the keys of these sources, kept as `buffer` says. `placed`: mods or dropout ask
        for positions, so that tiles must not be put together; `alone`: one tile to a call, as a bias wants it."""
        keys = pieces(layouts.joined(run for _, _, run in self.buffer(station, sources)))
        found = tiles(self.asking(station), keys, self.band)
        return calls(found if placed else fused(found), self.packed and not alone)

    @cached_property
    @layouts.lasting
    def pairs(self) -> Tensor:
        """(stations, stations): how many pairs of a station's queries and another's keys see each other."""
        total = torch.zeros(self.stations**2, dtype=torch.int64)
        asked: dict[int, list[tuple[int, Run]]] = {}
        kept: dict[int, list[tuple[int, Run]]] = {}
        for station in range(self.stations):
            for _, run in self.asking(station):
                asked.setdefault(run.document, []).append((station, run))
            for run in self.held[station]:
                kept.setdefault(run.document, []).append((station, run))
        alike: dict[tuple[int, int], list[int]] = {}  # documents by their numbers of runs: counted together
        for document in asked.keys() & kept.keys():
            alike.setdefault((len(asked[document]), len(kept[document])), []).append(document)
        before, after = self.band
        for (n_q, n_k), documents in alike.items():
            few = max(1, TOGETHER // (n_q * n_k))
            for some in (documents[n : n + few] for n in range(0, len(documents), few)):
                at, i, n, step = _columns([asked[d] for d in some], 2)
                to, j, m, _ = _columns([kept[d] for d in some], 1)
                away = i - j
                hi = None if after is None else (away + after).div(step, rounding_mode="floor")
                lo = None if before is None else -(before - away).div(step, rounding_mode="floor")
                found = count(n.expand_as(away), m.expand_as(away), lo, hi)
                total.index_add_(0, (at * self.stations + to).flatten(), found.flatten())
        return total.view(self.stations, self.stations)

    @cached_property
    @layouts.lasting
    def reach(self) -> list[int]:
        """How many hops the keys of each station travel around the ring: to the last one that wants them."""
        n = self.stations
        source = torch.arange(n)
        hops = (source[:, None] - source) % n  # of the keys of column s to row g
        return [int(x) for x in torch.where(self.pairs > 0, hops, 0).amax(0)] if n else []

    def imbalance(self) -> float:
        """The work of the busiest rank over the mean, minus 1."""
        each = self.pairs.sum(1).double()
        return float(each.max() / each.mean() - 1) if each.sum() else 0.0

    def explain(self) -> str:
        """The plan in words."""
        counts = self.counts()
        hops = max(self.reach, default=0)
        travel: str = {
            "ring": f"keys travel {hops} hops", "allgather": "all keys go to all",
            "halo": "each is sent the keys it sees", "ulysses": "heads are exchanged for tokens",
            "tree": "partial results are merged",
            "two-level": f"heads are exchanged among {self.width}, keys travel {hops} hops among {self.stations}",
        }[self.strategy]  # fmt: skip
        return (
            f"{self!r}\n  {min(counts)} to {max(counts)} tokens on a rank; the busiest has"
            f" {self.imbalance():.1%} more than the mean to do; {travel}"
        )


@lru_cache(16)
@layouts.lasting
def _dealt(layout: str, lengths: tuple[int, ...], ranks: int) -> list[Shard]:
    """Plans of one batch, and those that are compared for it, have the same."""
    return LAYOUTS[layout](lengths, ranks)


def _columns(runs: list[list[tuple[int, Run]]], dim: int) -> Iterator[Tensor]:
    """Of runs of several documents, as many of each: the station, start, size and step, broadcast along an axis."""
    rows = [[(at, run.start, run.size, run.step) for at, run in of] for of in runs]
    return iter(torch.tensor(rows).unsqueeze(dim).unbind(-1))
