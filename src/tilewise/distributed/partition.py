"""The partition of a sequence: which rank holds which tokens, computes which tiles and sends which keys.

It has no tensors of the call and needs no GPU: it is executed, simulated, checked and drawn alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from ..tensor_cache import TensorCache
from .layout import LAYOUTS, Run, Shard, TokenLayout, cacheable, merge_ranges, merge_runs
from .tiles import Band, Call, Piece, count, fuse, group, pieces, strip, tiles

Strategy = Literal["ring", "allgather", "ulysses", "two-level", "halo", "tree"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
GATHERING = ("allgather", "halo")  # the strategies that send each rank all keys it needs in one exchange
COUNTED_TOGETHER = 1 << 22  # pairs of runs in one tensor operation
MIN_TENSOR_BYTES, TENSOR_BYTES_OF_TOKEN = 8 << 20, 64  # that a plan keeps: indices have 8 bytes for each token
P = ParamSpec("P")
T = TypeVar("T")
Found = TypeVar("Found")


def kept(function: Callable[Concatenate[Found, P], T]) -> Callable[Concatenate[Found, P], T]:
    """Decorates a function of a partition and of hashable arguments: results are kept on the partition, as long as it
    lives."""

    @wraps(function)
    def found(of: Found, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = function, args, *kwargs.items()
        results: dict[Any, T] = of.results  # type: ignore[attr-defined]
        if key not in results:
            results[key] = function(of, *args, **kwargs)
        return results[key]

    return found


@dataclass(frozen=True, eq=False)
class Partition:
    """A sequence, divided among ranks.

    With Ulysses, `ulysses_size` neighbouring ranks exchange heads for tokens and form one member of the ring: they hold
    the same tokens, each for some of the heads. A `ring_rank` is the number of such a group; without Ulysses it is the
    rank. Keys and values are sent between ring ranks.
    """

    ranks: int
    lengths: tuple[int, ...]  # of the documents; a dense sequence is one document
    packed: bool  # whether the documents were given as cu_seqlens
    band: Band
    strategy: Strategy
    layout: TokenLayout
    ulysses_size: int = 1
    queries: int = 0  # strategy "tree": their number; they are the last of the sequence, and on all ranks

    def __repr__(self) -> str:
        before, after = self.band
        names: dict[Band, str] = {(None, None): "all", (None, 0): "causal"}
        mask = names.get(self.band, f"window ({before}, {after})")
        what = f"{len(self.lengths)} documents, {self.tokens} tokens" if self.packed else f"{self.tokens} tokens"
        sizes = f" of {self.ulysses_size} x {self.ring_size}" if self.strategy == "two-level" else ""
        return f"<plan: {what} on {self.ranks} ranks, {mask}, {self.strategy}{sizes}, {self.layout}>"

    @cached_property
    def results(self) -> dict[Any, Any]:
        """Of functions that are `kept`."""
        return {}

    @cached_property
    def tensors(self) -> TensorCache:
        """What calls need of this partition on a device."""
        return TensorCache(max(MIN_TENSOR_BYTES, TENSOR_BYTES_OF_TOKEN * self.tokens))

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def ring_size(self) -> int:
        return self.ranks // self.ulysses_size

    @cached_property
    def shards(self) -> list[Shard]:
        """The runs that each rank holds."""
        return _shards(self.layout, self.lengths, self.ranks)

    @cached_property
    def ring_shards(self) -> list[Shard]:
        """The runs that each ring rank holds: those of all its ranks."""
        size = self.ulysses_size
        if size == 1:
            return self.shards
        if self.ring_size == 1:
            return [tuple(Run(d, 0, 1, n) for d, n in enumerate(self.lengths) if n)]
        groups = (self.shards[r * size : (r + 1) * size] for r in range(self.ring_size))
        return [merge_runs(itertools.chain(*shards)) for shards in groups]

    def rows(self, ring_rank: int) -> int:
        """The number of tokens of a ring rank."""
        return sum(run.size for run in self.ring_shards[ring_rank])

    def counts(self) -> list[int]:
        """The number of tokens of each rank."""
        return [sum(run.size for run in shard) for shard in self.shards]

    def query_pieces(self, ring_rank: int) -> list[Piece]:
        """The queries of a ring rank."""
        if self.strategy != "tree":
            return pieces(self.ring_shards[ring_rank])
        # the runs of a tile have one step: beside striped keys each query is a run of its own
        step, first = self.ranks if self.layout == "striped" else 1, self.tokens - self.queries
        size = self.queries if step == 1 else 1
        return [Piece(n, Run(0, first + n, step, size)) for n in range(0, self.queries, size)]

    @kept
    def rows_sent(self, to: int, source: int) -> tuple[tuple[int, int], ...]:
        """The ranges of rows that `source` sends to another ring rank when keys are gathered: with "halo" those that
        it sees, else all."""
        if self.strategy != "halo":
            n = self.rows(source)
            return ((0, n),) if n else ()
        visible = tiles(self.query_pieces(to), pieces(self.ring_shards[source]), self.band)
        return merge_ranges(sorted((x.k0, x.k1) for x in visible))

    def received(self, rank: int) -> int:
        """An upper bound of the keys that a rank receives if it gathers those that it sees: of each document from the
        first to the last, or the reach of the band beside each of its runs."""
        (before, after), total = self.band, 0
        for document, runs in itertools.groupby(self.shards[rank], lambda run: run.document):
            of = list(runs)
            n = self.lengths[document]
            first = 0 if before is None else max(0, of[0].start - before)
            last = n if after is None else min(n, max(run.start + run.step * (run.size - 1) for run in of) + after + 1)
            found = last - first - sum(run.size for run in of)
            if before is not None and after is not None:
                found = min(found, len(of) * (before + after))
            total += found
        return total

    def gathers(self, ring_rank: int, sources: Sequence[int]) -> bool:
        """Whether the keys of these sources are gathered into one tensor, sorted by position."""
        return self.strategy in GATHERING and tuple(sources) != (ring_rank,)

    def key_runs(self, ring_rank: int, sources: Sequence[int]) -> list[tuple[int, int, Run]]:
        """The runs of keys from some sources in the order in which a ring rank computes with them, each as (source,
        first row among those the source has sent, run)."""
        gathers = self.gathers(ring_rank, sources)
        found = []
        for source in sources:
            sent = 0
            for a, b in self.rows_sent(ring_rank, source) if gathers else ((0, self.rows(source)),):
                for row, run in pieces(self.ring_shards[source]):
                    low, high = max(a, row), min(b, row + run.size)
                    if low < high:
                        found.append((source, sent + low - a, run.part(low - row, high - row)))
                sent += b - a
        return sorted(found, key=lambda x: x[2]) if gathers else found

    @kept
    def calls(self, ring_rank: int, sources: tuple[int, ...], positions: bool, biased: bool) -> list[Call]:
        """The calls of a ring rank's queries with the keys of some sources, in rows as `key_runs` orders them.

        `positions`: mods or dropout need positions, which fused tiles do not have. `biased`: a call has one tile, since
        the columns of a bias are those of one tile.
        """
        keys = pieces(merge_runs(run for _, _, run in self.key_runs(ring_rank, sources)))
        found = tiles(self.query_pieces(ring_rank), keys, self.band)
        return group(found if positions or biased else fuse(found), self.packed and not biased)

    @cached_property
    @cacheable
    def pairs(self) -> Tensor:
        """(ring_size, ring_size): the number of visible pairs of a ring rank's queries and another's keys."""
        n = self.ring_size
        queries = _by_document((r, run) for r in range(n) for _, run in self.query_pieces(r))
        keys = _by_document((r, run) for r in range(n) for run in self.ring_shards[r])
        # documents with equal numbers of runs are counted in one operation
        alike: dict[tuple[int, int], list[int]] = {}
        for document in queries.keys() & keys.keys():
            alike.setdefault((len(queries[document]), len(keys[document])), []).append(document)
        total = torch.zeros(n * n, dtype=torch.int64, device="cpu")
        for (n_q, n_k), documents in alike.items():
            size = max(1, COUNTED_TOGETHER // (n_q * n_k))
            for some in (documents[a : a + size] for a in range(0, len(documents), size)):
                q_rank, i, rows, step = _columns([queries[d] for d in some], 2)
                k_rank, j, columns, _ = _columns([keys[d] for d in some], 1)
                distance = i - j
                found = count(rows.expand_as(distance), columns.expand_as(distance), *strip(distance, step, self.band))
                total.index_add_(0, (q_rank * n + k_rank).flatten(), found.flatten())
        return total.view(n, n)

    @cached_property
    @cacheable
    def hops(self) -> list[int]:
        """How many hops the keys of each ring rank travel: to the last ring rank that sees some of them."""
        rank = torch.arange(self.ring_size, device="cpu")
        distance = (rank[:, None] - rank) % self.ring_size  # from the keys of a column to the queries of a row
        return [int(x) for x in torch.where(self.pairs > 0, distance, 0).amax(0)]

    def imbalance(self) -> float:
        """The work of the busiest rank over the mean, minus 1."""
        work = self.pairs.sum(1).double()
        return float(work.max() / work.mean() - 1) if work.sum() else 0.0

    def explain(self) -> str:
        """A text about the plan: tokens of each rank, balance of the work, and what ranks send."""
        counts, hops = self.counts(), max(self.hops, default=0)
        times = f"{hops} time" + "s" * (hops != 1)
        sent = {
            "ring": f"every shard of keys is passed on {times}",
            "allgather": "all keys are sent to all ranks",
            "halo": "every rank receives the keys that it sees",
            "ulysses": "heads are exchanged for tokens",
            "two-level": f"{self.ulysses_size} ranks exchange heads;"
            f" every shard of keys is passed on {times} among {self.ring_size} groups",
            "tree": "partial results are merged",
        }[self.strategy]
        return (
            f"{self!r}\n  {min(counts)} to {max(counts)} tokens on a rank;"
            f" the busiest has {self.imbalance():.1%} more work than the mean\n  {sent}"
        )


@lru_cache(16)
@cacheable
def _shards(layout: TokenLayout, lengths: tuple[int, ...], ranks: int) -> list[Shard]:
    """Cached: the plans of a batch, and those compared for it, have the same shards."""
    return LAYOUTS[layout](lengths, ranks)


def _by_document(runs: Iterable[tuple[int, Run]]) -> dict[int, list[tuple[int, Run]]]:
    found: dict[int, list[tuple[int, Run]]] = {}
    for ring_rank, run in runs:
        found.setdefault(run.document, []).append((ring_rank, run))
    return found


def _columns(runs: list[list[tuple[int, Run]]], dim: int) -> Iterator[Tensor]:
    """Ring rank, start, size and step of the runs of several documents (equally many each), broadcast along `dim`."""
    rows = [[(ring_rank, run.start, run.size, run.step) for ring_rank, run in of] for of in runs]
    return iter(torch.tensor(rows, device="cpu").unsqueeze(dim).unbind(-1))
