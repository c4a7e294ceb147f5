"""Which keys of a KV cache each program reads, computed on the host as the schedule kernel computes it on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tilewise.backends.common.kv.partition import Partition


class Item(NamedTuple):
    """A tile of a sequence's rows, with the number of visible keys and of the chunks of keys that hold them."""

    b: int
    first: int
    num_chunks: int
    keys: int


class Ranges(NamedTuple):
    """What the programs of a step read: all items with keys, one after another, divided into equal ranges of `each`
    chunks (the cost of starting an item included), or one range for each item."""

    items: list[Item]
    each: int
    busy: int  # programs with a range
    divided: int  # items that several programs share, times heads
    parts: int  # of all divided items


def ranges(
    partition: Partition,
    sequences: Sequence[tuple[int, int, int]],
    group: int,
    before: int | None = None,
    after: int | None = None,
) -> Ranges:
    """The ranges of sequences of (queries, keys, first valid key), as the schedule kernel computes them.

    >>> from tilewise.backends.common.kv.kv_tiles import KvTile
    >>> partition = Partition(KvTile(16, 64, 4, 2, 1), 2, 1, 4, 1, 64, 2, 16, 1)
    >>> ranges(partition, [(1, 640, 0), (1, 64, 0)], 4, after=0)[1:]
    (4, 4, 1, 3)
    """
    items = [item for b, seq in enumerate(sequences) for item in _items(partition, b, *seq, group, before, after)]
    items = [item for item in items if item.num_chunks]  # rows without keys are written without reading keys
    costs = [item.num_chunks + partition.item_cost for item in items]
    total, heads = sum(costs), partition.kv_heads
    each = max(-(-total // partition.num_splits), partition.min_chunks)
    longest = max((item.num_chunks for item in items), default=0)
    if len(items) <= partition.num_splits and longest <= partition.min_chunks:
        return Ranges(items, longest + partition.item_cost, len(items) * heads, 0, 0)
    shared: dict[int, int] = {}
    n, begins = 0, 0  # the item at x, and where it begins
    for x in range(each, total, each):
        while begins + costs[n] <= x:
            begins += costs[n]
            n += 1
        if x - begins > partition.item_cost:
            shared[n] = shared.get(n, 1) + 1
    return Ranges(items, each, -(-total // each) * heads, len(shared) * heads, sum(shared.values()) * heads)


def _items(
    partition: Partition, b: int, n_q: int, n_k: int, start: int, group: int, before: int | None, after: int | None
) -> Iterator[Item]:
    for row in range(0, n_q * group, partition.tile.block_m):
        at = row // group + n_k - n_q
        last = min((row + partition.tile.block_m - 1) // group, n_q - 1) + n_k - n_q
        lo = start if before is None else max(start, at - before)
        hi = n_k if after is None else min(n_k, last + after + 1)
        keys = max(hi - lo, 0)
        yield Item(b, row, -(-hi // partition.chunk_size) - lo // partition.chunk_size if keys else 0, keys)
