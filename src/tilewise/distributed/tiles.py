"""What is computed: tiles, each an ordinary call of attention with a window.

Two runs of the same document, one of queries and one of keys, meet in a rectangle of pairs; the band of the whole
(causal, window) cuts a diagonal strip out of it:

    query i sees key j   if   lo <= j - i <= hi

Trimmed to the rows and columns that see something, the strip is what `attention` calls a window: the last query sits at
the last key, (k1 - q1 - lo) keys to the left and (hi + q1 - k1) to the right, neither of them below 0. So no kernel
needs to know of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout import Run

Band = tuple[int | None, int | None]  # how far a query sees, before and after itself


class Piece(NamedTuple):
    """A run, and the row at which it begins where it is kept."""

    row: int
    run: Run


class Tile(NamedTuple):
    """Queries q0 .. q1 and keys k0 .. k1, as rows of where they are kept, and the strip (None: no limit). The first of
    each sits at position i_0 and j_0 of the document; `step` apart the next (0 where tiles were put together: then they
    have no common origin)."""

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
        """As `attention` takes it."""
        return (
            None if self.lo is None else self.k1 - self.q1 - self.lo,
            None if self.hi is None else self.hi + self.q1 - self.k1,
        )

    @property
    def pairs(self) -> int:
        """How many pairs see each other."""
        return int(count(self.q1 - self.q0, self.k1 - self.k0, *_relative(self)))


class Call(NamedTuple):
    """Tiles of one window in which no row appears twice: one call of attention, over packed sequences if several."""

    tiles: tuple[Tile, ...]

    @property
    def window(self) -> Band:
        return self.tiles[0].window


def pieces(shard: Sequence[Run]) -> list[Piece]:
    """Runs kept one after the other."""
    found, row = [], 0
    for run in shard:
        found.append(Piece(row, run))
        row += run.size
    return found


def strip(q: Run, k: Run, band: Band) -> tuple[int | None, int | None]:
    """(lo, hi) for indices within the runs.

    >>> strip(Run(0, 8, 1, 4), Run(0, 4, 1, 4), (None, 0)), strip(Run(0, 1, 4, 9), Run(0, 2, 4, 9), (None, 0))
    ((None, 4), (None, -1))
    """
    before, after = band
    step, away = q.step, q.start - k.start
    return None if before is None else -((before - away) // step), None if after is None else (away + after) // step


def tile(q: Piece, k: Piece, band: Band) -> Tile | None:
    """What two runs have to compute, or None.

    >>> tile(Piece(0, Run(0, 4, 1, 4)), Piece(0, Run(0, 0, 1, 8)), (None, 0))
    Tile(q0=0, q1=4, k0=0, k1=8, lo=None, hi=4, document=0, i_0=4, j_0=0, step=1)
    """
    if q.run.document != k.run.document:
        return None
    lo, hi = strip(q.run, k.run, band)
    n, m = q.run.size, k.run.size
    # rows that see some key, and keys that some row sees
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


def by_document(some: Iterable[Piece]) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in some:
        found.setdefault(piece.run.document, []).append(piece)
    return found


def tiles(queries: Iterable[Piece], keys: Iterable[Piece], band: Band) -> list[Tile]:
    """All that these queries and keys have to compute."""
    of = by_document(keys)
    return [found for q in queries for k in of.get(q.run.document, ()) if (found := tile(q, k, band)) is not None]


def fused(found: Sequence[Tile]) -> list[Tile]:
    """The same pairs in fewer tiles, where rows that lie beside each other may be taken together. Mods and dropout,
    which ask for positions, must not be in the call.

    >>> a, b = Run(0, 0, 1, 4), Run(0, 12, 1, 4)  # a rank's own zigzag tiles are one causal call
    >>> own = pieces([a, b])
    >>> fused(tiles(own, own, (None, 0)))
    [Tile(q0=0, q1=8, k0=0, k1=8, lo=None, hi=0, document=0, i_0=0, j_0=0, step=0)]
    """
    done: list[Tile] = []
    of: dict[int, list[Tile]] = {}
    for x in found:
        of.setdefault(x.document, []).append(x)
    for rest in of.values():
        while rest:
            one, merged = rest.pop(), True
            while merged:
                merged = False
                for n, other in enumerate(rest):
                    union = _union(one, other)
                    if union is not None:
                        one, merged = union, True
                        del rest[n]
                        break
            done.append(one)
    return sorted(done)


def _union(x: Tile, y: Tile) -> Tile | None:
    """One tile of exactly the pairs of two that have none in common: its strip must hide the pairs that neither has,
    and none that one has."""
    los, his = ([z for z in side if z is not None] for side in ((x.lo, y.lo), (x.hi, y.hi)))
    lo, hi = max(los, default=None), min(his, default=None)
    union = Tile(
        min(x.q0, y.q0), max(x.q1, y.q1), min(x.k0, y.k0), max(x.k1, y.k1), lo, hi, x.document, 0, 0, 0
    )  # fmt: skip
    same = all(z._replace(lo=lo, hi=hi).pairs == z.pairs for z in (x, y))
    return union if same and union.pairs == x.pairs + y.pairs else None


def calls(found: Sequence[Tile], packed: bool) -> list[Call]:
    """Tiles as calls; several to a call only if `packed`."""
    if not packed:
        return [Call((x,)) for x in found]
    groups: list[list[Tile]] = []
    ends: list[tuple[int, int]] = []  # of their queries and keys: what begins after both need not be compared
    for x in found:
        for n in reversed(range(len(groups))):
            group, (q_end, k_end) = groups[n], ends[n]
            beyond = x.q0 >= q_end and x.k0 >= k_end
            if group[0].window == x.window and (beyond or all(_apart(x, y) for y in group)):
                group.append(x)
                ends[n] = max(q_end, x.q1), max(k_end, x.k1)
                break
        else:
            groups.append([x])
            ends.append((x.q1, x.k1))
    return [Call(tuple(group)) for group in groups]


def _apart(x: Tile, y: Tile) -> bool:
    return (x.q1 <= y.q0 or y.q1 <= x.q0) and (x.k1 <= y.k0 or y.k1 <= x.k0)


def _relative(x: Tile) -> tuple[int | None, int | None]:
    shift = x.q0 - x.k0
    return None if x.lo is None else x.lo + shift, None if x.hi is None else x.hi + shift


def count(n: Any, m: Any, lo: Any, hi: Any) -> Any:
    """Pairs (i, j) of n rows and m columns with lo <= j - i <= hi; ints, or tensors of them.

    >>> count(4, 4, None, 0), count(4, 4, -1, 1), count(4, 4, None, None), count(4, 4, 9, None)
    (10, 10, 16, 0)
    """
    up_to = n * m if hi is None else _below(hi + 1 + n, m) - _below(hi + 1, m)
    before = 0 if lo is None else _below(lo + n, m) - _below(lo, m)
    difference = up_to - before
    return difference.clamp(min=0) if isinstance(difference, Tensor) else max(0, difference)


def _below(y: Any, m: Any) -> Any:
    """Sum of min(max(t, 0), m) over t < y."""
    if isinstance(y, Tensor):
        c = torch.minimum(y.clamp(min=0), m)
        return c * (c - 1) // 2 + (y - m).clamp(min=0) * m
    c = min(max(y, 0), m)
    return c * (c - 1) // 2 + max(y - m, 0) * m
