"""Tiles: what the queries of one run compute with the keys of another, as a call of attention with a window.

A run of queries and a run of keys of the same document span a rectangle of pairs. The band of the whole sequence
(causal, window) leaves a diagonal strip of it:

    query i sees key j   if   lo <= j - i <= hi

Trimmed to the rows and columns that see something, the strip is a window as `attention` takes it: the last query is
aligned with the last key, with (k1 - q1 - lo) keys to its left and (hi + q1 - k1) to its right, both >= 0. Kernels
therefore need no code for ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout import Run

Band = tuple[int | None, int | None]  # (before, after): how many keys a query sees to its left and right; None: all


class Piece(NamedTuple):
    """A run, and the row of the rank's tensors at which it begins."""

    row: int
    run: Run


class Tile(NamedTuple):
    """Query rows q0 to q1 - 1, key rows k0 to k1 - 1, and the strip (None: unbounded), in rows of the rank's tensors.

    The first query and the first key have positions i_0 and j_0 in the document, the next ones `step` further each.
    A tile that was fused from several has no such positions, and step 0.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int | None
    hi: int | None
    document: int = 0
    i_0: int = 0
    j_0: int = 0
    step: int = 1

    @property
    def window(self) -> Band:
        """(left, right) as `attention` takes it."""
        return (
            None if self.lo is None else self.k1 - self.q1 - self.lo,
            None if self.hi is None else self.hi + self.q1 - self.k1,
        )

    @property
    def pairs(self) -> int:
        """The number of visible pairs."""
        shift = self.q0 - self.k0
        lo, hi = (None if x is None else x + shift for x in (self.lo, self.hi))
        return int(count(self.q1 - self.q0, self.k1 - self.k0, lo, hi))


Call = tuple[Tile, ...]  # tiles of one window without common rows: one call of attention, packed if several


def pieces(shard: Sequence[Run]) -> list[Piece]:
    """The runs, stored one after the other."""
    found, row = [], 0
    for run in shard:
        found.append(Piece(row, run))
        row += run.size
    return found


def strip(distance: Any, step: Any, band: Band) -> tuple[Any, Any]:
    """(lo, hi) for indices within two runs of one step, whose starts are `distance` apart (queries' minus keys'); ints,
    or tensors of them.

    >>> strip(8 - 4, 1, (None, 0)), strip(1 - 2, 4, (None, 0))
    ((None, 4), (None, -1))
    """
    before, after = band
    lo = None if before is None else -((before - distance) // step)
    return lo, None if after is None else (distance + after) // step


def tile(q: Piece, k: Piece, band: Band) -> Tile | None:
    """The tile of two runs of a document, or None if no pair is visible.

    >>> tile(Piece(0, Run(0, 4, 1, 4)), Piece(0, Run(0, 0, 1, 8)), (None, 0))
    Tile(q0=0, q1=4, k0=0, k1=8, lo=None, hi=4, document=0, i_0=4, j_0=0, step=1)
    """
    lo, hi = strip(q.run.start - k.run.start, q.run.step, band)
    n, m = q.run.size, k.run.size
    # queries a to b - 1 see some key; keys c to d - 1 are seen by some query
    a, c = max(0, 0 if hi is None else -hi), max(0, 0 if lo is None else lo)
    b, d = min(n, n if lo is None else m - lo), min(m, m if hi is None else n + hi)
    if a >= b or c >= d or (lo is not None and hi is not None and lo > hi):
        return None
    if hi is not None and d - 1 - a <= hi:
        hi = None
    if lo is not None and c - (b - 1) >= lo:
        lo = None
    shift = k.row - q.row
    lo, hi = None if lo is None else lo + shift, None if hi is None else hi + shift
    i_0, j_0 = q.run.part(a, b).start, k.run.part(c, d).start
    return Tile(q.row + a, q.row + b, k.row + c, k.row + d, lo, hi, q.run.document, i_0, j_0, q.run.step)


def tiles(queries: Iterable[Piece], keys: Iterable[Piece], band: Band) -> list[Tile]:
    """All tiles of these queries with these keys."""
    by_document: dict[int, list[Piece]] = {}
    for piece in keys:
        by_document.setdefault(piece.run.document, []).append(piece)
    pairs = ((q, k) for q in queries for k in by_document.get(q.run.document, ()))
    return [found for q, k in pairs if (found := tile(q, k, band)) is not None]


def fuse(found: Sequence[Tile]) -> list[Tile]:
    """The same pairs in fewer tiles: tiles are fused where one strip describes both. For calls without mods or dropout,
    which need positions.

    >>> a, b = Run(0, 0, 1, 4), Run(0, 12, 1, 4)  # a rank's own zig-zag tiles are one causal call
    >>> own = pieces([a, b])
    >>> fuse(tiles(own, own, (None, 0)))
    [Tile(q0=0, q1=8, k0=0, k1=8, lo=None, hi=0, document=0, i_0=0, j_0=0, step=0)]
    """
    by_document: dict[int, list[Tile]] = {}
    for x in found:
        by_document.setdefault(x.document, []).append(x)
    done: list[Tile] = []
    for rest in by_document.values():
        while rest:
            one = rest.pop()
            while fusable := next(((n, union) for n, y in enumerate(rest) if (union := _union(one, y))), None):
                n, one = fusable
                del rest[n]
            done.append(one)
    return sorted(done)


def _union(x: Tile, y: Tile) -> Tile | None:
    """One tile with exactly the pairs of two tiles that have no pair in common, or None if its strip would add or lose
    a pair."""
    los, his = ([z for z in side if z is not None] for side in ((x.lo, y.lo), (x.hi, y.hi)))
    lo, hi = max(los, default=None), min(his, default=None)
    rows = min(x.q0, y.q0), max(x.q1, y.q1), min(x.k0, y.k0), max(x.k1, y.k1)
    union = Tile(*rows, lo, hi, x.document, step=0)
    same = all(z._replace(lo=lo, hi=hi).pairs == z.pairs for z in (x, y))
    return union if same and union.pairs == x.pairs + y.pairs else None


def group(found: Sequence[Tile], packed: bool) -> list[Call]:
    """The tiles as calls of attention; only `packed` calls have several tiles."""
    if not packed:
        return [(x,) for x in found]
    groups: list[list[Tile]] = []
    ends: list[tuple[int, int]] = []  # of each group's queries and keys: a tile past both has no common rows
    for x in found:
        for n in reversed(range(len(groups))):
            group, (q_end, k_end) = groups[n], ends[n]
            beyond = x.q0 >= q_end and x.k0 >= k_end
            if group[0].window == x.window and (beyond or all(_are_disjoint(x, y) for y in group)):
                group.append(x)
                ends[n] = max(q_end, x.q1), max(k_end, x.k1)
                break
        else:
            groups.append([x])
            ends.append((x.q1, x.k1))
    return [tuple(group) for group in groups]


def _are_disjoint(x: Tile, y: Tile) -> bool:
    return (x.q1 <= y.q0 or y.q1 <= x.q0) and (x.k1 <= y.k0 or y.k1 <= x.k0)


def count(n: Any, m: Any, lo: Any, hi: Any) -> Any:
    """The number of pairs (i, j) of n rows and m columns with lo <= j - i <= hi; ints, or tensors of them.

    >>> count(4, 4, None, 0), count(4, 4, -1, 1), count(4, 4, None, None), count(4, 4, 9, None)
    (10, 10, 16, 0)
    """
    up_to = n * m if hi is None else _clipped_sum(hi + 1 + n, m) - _clipped_sum(hi + 1, m)
    before = 0 if lo is None else _clipped_sum(lo + n, m) - _clipped_sum(lo, m)
    difference = up_to - before
    return difference.clamp(min=0) if isinstance(difference, Tensor) else max(0, difference)


def _clipped_sum(y: Any, m: Any) -> Any:
    """The sum of min(max(t, 0), m) over t < y."""
    if isinstance(y, Tensor):
        positive = y.clamp(min=0)
        below = torch.minimum(positive, m)
    else:
        positive = max(y, 0)
        below = min(positive, m)
    return below * (below - 1) // 2 + (positive - below) * m
