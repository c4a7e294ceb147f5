"""Which keys of a KV cache each program reads, computed on the host as the plan kernel computes it on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tilewise.backends.common.kv.partition import Deal


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
    dealt: Deal,
    sequences: Sequence[tuple[int, int, int]],
    group: int,
    before: int | None = None,
    after: int | None = None,
) -> Ranges:
    """Of sequences with so many (queries, keys, first valid key), as the plan kernel computes it.

    >>> from tilewise.backends.common.kv.kv_tiles import KvTile
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
