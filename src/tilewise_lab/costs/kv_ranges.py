"""Which keys of a KV cache each program reads, computed on the host as the schedule kernel computes it on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tilewise.backends.common.kv.partition import CLASSES, Partition


class Item(NamedTuple):
    """A tile of a sequence's rows, with the number of visible keys and of the chunks of keys that hold them."""

    b: int
    first: int
    num_chunks: int
    keys: int


class Ranges(NamedTuple):
    """What the programs of a step read. `each`: no program has more chunks."""

    items: list[Item]  # as they are started: those that are divided, then from long to short
    each: int
    busy: int  # programs with keys
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

    >>> from tilewise.backends.common.kv.partition import KvTile
    >>> partition = Partition(KvTile(16, 64, 4, 2, 1), 2, 1, 4, 2, 4, 1, 64, 1, 16, 1)
    >>> ranges(partition, [(1, 64, 0), (1, 640, 0)], 4, after=0)
    Ranges(items=[Item(b=1, first=0, num_chunks=10, keys=640), Item(b=0, first=0, num_chunks=1, keys=64)], each=5, \
busy=3, divided=1, parts=2)
    """
    items = [item for b, seq in enumerate(sequences) for item in _items(partition, b, *seq, group, before, after)]
    items = [item for item in items if item.num_chunks]  # rows without keys are written without reading keys
    chunks, longest = sum(item.num_chunks for item in items), max((item.num_chunks for item in items), default=0)
    worth = (partition.min_chunks + 1) // 2  # a program
    if longest * len(items) * 4 <= chunks * 5:
        remainder = len(items) % partition.resident
        pieces = partition.resident // max(remainder, 1)
        remainder = remainder if pieces > 1 else 0
        found = [min(-(-item.num_chunks // worth), pieces) if n < remainder else 1 for n, item in enumerate(items)]
    else:
        cost = chunks + len(items) * partition.item_cost
        few = len(items) <= partition.least
        shares = max(partition.resident - len(items), partition.least) if few else partition.wanted_splits
        most = max(-(-cost // shares), worth)
        found = [-(-item.num_chunks // most) for item in items]
        longest = min(longest, most)
    found = [n if item.num_chunks > partition.min_chunks else 1 for item, n in zip(items, found, strict=True)]

    def rank(pair: tuple[Item, int]) -> int:
        shorter = max(longest - pair[0].num_chunks, 0)
        return 0 if pair[1] > 1 else min(1 + shorter * (CLASSES - 1) // longest, CLASSES - 1)

    divided = sorted(zip(items, found, strict=True), key=rank)
    parts, heads = [n for _, n in divided], partition.kv_heads
    shared = [n for n in parts if n > 1]
    each = max((-(-item.num_chunks // n) for item, n in divided), default=0)
    return Ranges([item for item, _ in divided], each, sum(parts) * heads, len(shared) * heads, sum(shared) * heads)


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
