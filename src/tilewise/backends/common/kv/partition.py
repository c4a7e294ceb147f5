"""How the keys of a KV cache are divided among programs, in plain numbers: what the host decides from shapes
(`Partition`), and what the schedule kernel computes from lengths (`ranges`), for `explain_kv`. Imports no Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..cost_profile import padded
from ..gpu import Gpu
from . import kv_tiles
from .kv_tiles import KvTile

MIN_SPLIT = 512  # keys that are worth a program
COUNTS, RECORD, ITEM = 2, 12, 8  # int64 numbers of the schedule's parts: see schedule.py


class Partition(NamedTuple):
    """The sizes of a schedule and its workspace. A split has one program for each KV head."""

    tile: KvTile
    items: int  # work items
    tiles: int  # row tiles of a sequence, 0 if packed
    num_splits: int
    kv_heads: int
    chunk_size: int  # keys
    slots: int  # partial results of a program
    rows: int  # of a partial result
    item_cost: int  # of beginning a work item, in chunks
    min_chunks: int = 1  # of a split

    @property
    def programs(self) -> int:
        return self.num_splits * self.kv_heads

    @property
    def schedule_numel(self) -> int:
        return COUNTS + RECORD * (2 * self.num_splits + 1) + self.items + 1 + ITEM * self.items

    def workspace_numel(self, dim_v: int) -> int:
        """Partial results with their lse (or m) and l, and a flag for each program."""
        return self.programs * (self.slots * self.rows * (dim_v + 2) + 1)


def partition(request: Any, gpu: Gpu, processors: int, tile: KvTile | None = None) -> Partition:
    """The partition of a `KvRequest`, from shapes alone, on a GPU with so many multiprocessors."""
    q, k, v = request.q, request.k, request.v
    group = q.shape[-2] // k.shape[-2]
    max_rows = request.most * group  # of a sequence; 0 if unknown
    if tile is None:
        tile = kv_tiles.tile(gpu.arch, q.element_size(), padded(max(q.shape[-1], v.shape[-1])), max_rows)
    if request.call.cu_q is None:
        tiles = -(-q.shape[1] * group // tile.block_m)
        items = q.shape[0] * tiles
    else:
        tiles = 0
        items = q.shape[0] * group // tile.block_m + request.places.batch + 1
    rows = min(max_rows or tile.block_m, tile.block_m)  # in this order torch.compile guards "no more than block_m"
    chunk_size = request.split or tile.block_n
    slots = 2 if request.split is None else 1 + -(-request.places.capacity(k) // chunk_size)
    item_cost, min_chunks = (0, 1) if request.split else (1, max(1, MIN_SPLIT // chunk_size))
    num_splits = max(1, processors * tile.programs_per_sm // k.shape[-2])
    return Partition(tile, items, tiles, num_splits, k.shape[-2], chunk_size, slots, rows, item_cost, min_chunks)


class Item(NamedTuple):
    """A tile of a sequence's rows, and the chunks of keys that they see; `keys` in all."""

    b: int
    first: int
    num_chunks: int
    keys: int


class Ranges(NamedTuple):
    """The schedule of a step: all work items with keys, one after another, cut into equal splits of `each` chunks
    (with the cost of beginning an item), or each a split of its own. `divided` row tiles of a KV head belong to several
    programs, which have `parts` partial results of them."""

    items: list[Item]
    each: int
    busy: int  # programs that have something to do
    divided: int
    parts: int


def ranges(
    dealt: Partition,
    sequences: Sequence[tuple[int, int, int]],
    group: int,
    before: int | None = None,
    after: int | None = None,
) -> Ranges:
    """The schedule of sequences with so many (queries, keys, first valid key), as the schedule kernel computes it.

    >>> dealt = Partition(KvTile(16, 64, 4, 2, 1), 2, 1, 4, 1, 64, 2, 16, 1)
    >>> ranges(dealt, [(1, 640, 0), (1, 64, 0)], 4, after=0)[1:]
    (4, 4, 1, 3)
    """
    items = [item for b, seq in enumerate(sequences) for item in _items(dealt, b, *seq, group, before, after)]
    items = [item for item in items if item.num_chunks]  # the combine kernel writes the rows of the others
    costs = [item.num_chunks + dealt.item_cost for item in items]
    total, heads = sum(costs), dealt.kv_heads
    each = max(-(-total // dealt.num_splits), dealt.min_chunks)
    longest = max((item.num_chunks for item in items), default=0)
    if len(items) <= dealt.num_splits and longest <= dealt.min_chunks:
        return Ranges(items, longest + dealt.item_cost, len(items) * heads, 0, 0)
    shared: dict[int, int] = {}
    n, begins = 0, 0  # the item at x, and where it begins
    for x in range(each, total, each):
        while begins + costs[n] <= x:
            begins += costs[n]
            n += 1
        if x - begins > dealt.item_cost:
            shared[n] = shared.get(n, 1) + 1
    return Ranges(items, each, -(-total // each) * heads, len(shared) * heads, sum(shared.values()) * heads)


def _items(
    dealt: Partition, b: int, n_q: int, n_k: int, start: int, group: int, before: int | None, after: int | None
) -> Iterator[Item]:
    for row in range(0, n_q * group, dealt.tile.block_m):
        at = row // group + n_k - n_q
        last = min((row + dealt.tile.block_m - 1) // group, n_q - 1) + n_k - n_q
        lo = start if before is None else max(start, at - before)
        hi = n_k if after is None else min(n_k, last + after + 1)
        keys = max(hi - lo, 0)
        yield Item(b, row, -(-hi // dealt.chunk_size) - lo // dealt.chunk_size if keys else 0, keys)
