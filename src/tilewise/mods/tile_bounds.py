"""The kinds of the tiles of a mask without evaluating it for every pair: interval arithmetic over tiles.

Every int of the mask is bounded, tile by tile, by its least and greatest value; a bool is surely true, surely false, or
neither is known. A tensor that is read at an interval of indices is bounded by its least and greatest element there. So
for most tiles of documents, windows or trees it is known that they are empty or full. The mask is evaluated for the
pairs of the other tiles alone, some tiles at a time: O(tiles) memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .bounds import INT32, INT64
from .bounds import bounds as static_bounds
from .expr import Expr, Place, evaluate, is_vector, nodes

PAIRS = 1 << 20  # pairs for which a mask is evaluated at a time
Band = tuple[int | None, int | None]


class Interval(NamedTuple):
    """The least and the greatest value in each tile; broadcasts to (Tq, Tk). Of a bool: whether it is surely true, and
    whether it may be true."""

    lo: Tensor
    hi: Tensor


UNKNOWN = None  # the interval of a node without known bounds


class Tiles(NamedTuple):
    """The tiles of the pairs of one head, n_q queries by n_k keys; `first` and `last`: those from a row and column of
    tiles on, up to others (None: to the end)."""

    head: tuple[int, int]
    n_q: int
    n_k: int
    block: tuple[int, int]
    device: torch.device
    first: tuple[int, int] = (0, 0)
    last: tuple[int | None, int | None] = (None, None)

    def scalars(self) -> dict[str, int]:
        """The indices that are the same for all pairs."""
        return {"b": self.head[0], "h": self.head[1], "n_q": self.n_q, "n_k": self.n_k}

    def rows(self) -> Interval:
        """The queries of each row of tiles, (Tq, 1)."""
        return self._ranges(0, self.n_q)

    def columns(self) -> Interval:
        """The keys of each column of tiles, (1, Tk)."""
        return self._ranges(1, self.n_k)

    def _ranges(self, axis: int, n: int) -> Interval:
        size, last = self.block[axis], self.last[axis]
        stop = n if last is None else min(n, last * size)
        first = torch.arange(self.first[axis] * size, stop, size, device=self.device)
        return Interval(first.unsqueeze(axis - 1), (first + (size - 1)).clamp(max=n - 1).unsqueeze(axis - 1))


def tile_kinds(root: Expr, tiles: Tiles, band: Band, tensors: Sequence[Tensor], numbers: Sequence[float]) -> Tensor:
    """(rows, columns) int8: 0 empty, 1 the mask hides some pairs that the band shows, 2 only the band hides some, 3
    full."""
    rows, columns = tiles.rows(), tiles.columns()
    shift = tiles.n_k - tiles.n_q
    near, far = columns.lo - (rows.hi + shift), columns.hi - (rows.lo + shift)  # key - position of the query
    some = torch.ones_like(near, dtype=torch.bool)  # a tile has a pair in the band; all of its pairs are
    every = some.clone()
    before, after = band
    if before is not None:
        some &= far >= -before
        every &= near >= -before
    if after is not None:
        some &= near <= after
        every &= far <= after
    shown = interval_of(root, tiles, tensors, numbers)
    if shown is UNKNOWN:
        shown = Interval(torch.zeros_like(some), torch.ones_like(some))
    kinds = torch.where(some & shown.hi, torch.where(shown.lo, 2 + every.to(torch.int8), 1), 0).to(torch.int8)
    at = (some & shown.hi & ~shown.lo).nonzero()
    step = max(1, PAIRS // (tiles.block[0] * tiles.block[1]))
    for part in at.split(step) if len(at) else ():
        kinds[part[:, 0], part[:, 1]] = _evaluated(root, part, tiles, band, tensors, numbers)
    return kinds


def _evaluated(
    root: Expr, at: Tensor, tiles: Tiles, band: Band, tensors: Sequence[Tensor], numbers: Sequence[float]
) -> Tensor:
    """The kinds of the tiles `at`, (n, 2), from all of their pairs."""
    i, j = (
        (at[:, n, None] + tiles.first[n]) * tiles.block[n] + torch.arange(tiles.block[n], device=tiles.device)
        for n in (0, 1)
    )  # (n, queries), (n, keys)
    i, j = i[:, :, None], j[:, None, :]
    within = i.clamp(max=tiles.n_q - 1), j.clamp(max=tiles.n_k - 1)  # a mod may divide by n_q - q_idx
    place = Place(*tiles.head, *within, tiles.n_q, tiles.n_k)
    (shown,) = evaluate([root], place, None, tensors, numbers)
    shape = len(at), *tiles.block
    shown = torch.as_tensor(shown, device=tiles.device).expand(shape)
    exists = ((i < tiles.n_q) & (j < tiles.n_k)).expand(shape)
    in_band, (before, after) = exists, band
    position = i + (tiles.n_k - tiles.n_q)
    if before is not None:
        in_band = in_band & (j >= position - before)
    if after is not None:
        in_band = in_band & (j <= position + after)
    some = (shown & in_band).flatten(1).any(1)
    all_shown = (shown | ~in_band).flatten(1).all(1)
    full = all_shown & (in_band | ~exists).flatten(1).all(1)
    return some * (1 + all_shown.to(torch.int8) + full.to(torch.int8))


def interval_of(root: Expr, tiles: Tiles, tensors: Sequence[Tensor], numbers: Sequence[float]) -> Interval | None:
    """The interval of a mask, or None where nothing is known of it."""
    wide = {n for n, x in enumerate(tensors) if x.dtype == torch.int64 and _exceeds_32_bits(x)}
    limits = static_bounds(root)
    tables: dict[Any, RangeTable] = {}
    found: dict[Expr, Interval | None] = {}
    for x in nodes(root):
        args = [found[a] for a in x.args]
        if is_vector(x) or x.kind == "float" or (x.kind == "int" and limits[x] == INT64):
            found[x] = UNKNOWN  # a float may be nan; an int of 64 bits may overflow
        elif x.op == "index":
            found[x] = _index(x.value, tiles)
        elif x.op == "const":
            value = torch.tensor(x.value, device=tiles.device)
            found[x] = Interval(value, value)
        elif x.op == "load":
            found[x] = UNKNOWN if x.value in wide else _load(x, args, tensors[x.value], tiles, tables)
        elif x.op in ("and", "or"):
            found[x] = _logic(x.op, *args)
        elif x.op in ("eq", "le") and x.args[0] is x.args[1] and x.args[0].kind != "float":  # nan == nan is false
            found[x] = _truth(True, tiles)
        elif UNKNOWN in args or x.op not in RULES:
            found[x] = UNKNOWN
        else:
            found[x] = RULES[x.op](*args)
    return found[root]


def _exceeds_32_bits(x: Tensor) -> bool:
    """The static bounds of ints take tensors for 32-bit ones."""
    return bool(((x < INT32[0]) | (x > INT32[1])).any())


def _index(name: str, tiles: Tiles) -> Interval:
    if name in ("i", "j"):
        return tiles.rows() if name == "i" else tiles.columns()
    value = torch.tensor(tiles.scalars()[name], device=tiles.device)
    return Interval(value, value)


def _truth(value: bool, tiles: Tiles) -> Interval:
    x = torch.tensor(value, device=tiles.device)
    return Interval(x, x)


def _logic(op: str, a: Interval | None, b: Interval | None) -> Interval | None:
    """A known side may decide alone."""
    if a is UNKNOWN or b is UNKNOWN:
        known = a if b is UNKNOWN else b
        if known is UNKNOWN:
            return UNKNOWN
        return Interval(known.lo & False, known.hi) if op == "and" else Interval(known.lo, known.hi | True)
    if op == "and":
        return Interval(a.lo & b.lo, a.hi & b.hi)
    return Interval(a.lo | b.lo, a.hi | b.hi)


class RangeTable:
    """The least and the greatest element of any range of a vector. Level n, from starts[n] on, has those of the 2^n
    elements from each one on; a range is the union of two such."""

    def __init__(self, x: Tensor) -> None:
        self.length, width = len(x), 1
        least, most = [x], [x]
        while 2 * width <= self.length:
            for levels, pick in ((least, torch.minimum), (most, torch.maximum)):
                levels.append(pick(levels[-1][:-width], levels[-1][width:]))
            width *= 2
        self.starts = torch.tensor([0, *map(len, least)], device="cpu").cumsum(0).to(x.device)
        self.least, self.most = torch.cat(least), torch.cat(most)

    def bounds(self, index: Interval) -> Interval:
        """Of the elements at an interval of indices. An index past an end reads the nearest element."""
        first, last = (x.clamp(0, self.length - 1) for x in index)
        level = torch.log2((last - first + 1).double()).floor().long()
        a = self.starts[level] + first
        b = self.starts[level] + last + 1 - (1 << level)
        return Interval(torch.minimum(self.least[a], self.least[b]), torch.maximum(self.most[a], self.most[b]))


def _load(
    x: Expr, args: Sequence[Interval | None], tensor: Tensor, tiles: Tiles, tables: dict[Any, RangeTable]
) -> Interval | None:
    """The bounds of a tensor of ints or bools that is read at one number along all axes but one."""
    moving = [n for n, y in enumerate(x.args) if y.deps & {"i", "j"}]
    if len(moving) > 1 or tensor.numel() == 0:
        return UNKNOWN
    view = tensor
    for n, y in reversed([*enumerate(x.args)]):
        if n not in moving:
            if y.op not in ("const", "index"):
                return UNKNOWN
            at = y.value if y.op == "const" else tiles.scalars()[y.value]
            view = view.select(n, min(max(at, 0), tensor.shape[n] - 1))
    if not moving:
        value = view if view.dtype == torch.bool else view.long()
        return Interval(value, value)
    index = args[moving[0]]
    if index is UNKNOWN:
        return UNKNOWN
    key = x.value, *(None if n in moving else y for n, y in enumerate(x.args))
    if key not in tables:
        tables[key] = RangeTable(view.to(torch.uint8) if view.dtype == torch.bool else view)
    found = tables[key].bounds(index)
    return Interval(*(y.bool() if x.kind == "bool" else y.long() for y in found))


def _multiplied(a: Interval, b: Interval) -> Interval:
    products = [x * y for x in a for y in b]
    least, most = products[0], products[0]
    for x in products[1:]:
        least, most = torch.minimum(least, x), torch.maximum(most, x)
    return Interval(least, most)


def _absolute(a: Interval) -> Interval:
    outside = torch.maximum(a.lo, -a.hi).clamp(min=0)
    return Interval(outside, torch.maximum(-a.lo, a.hi))


def _divided(a: Interval, b: Interval) -> Interval | None:
    """Rounded down, by one positive number."""
    if b.lo.dim() or b.hi.dim() or not 0 < int(b.lo) == int(b.hi):  # the number of one head may be unknown
        return UNKNOWN
    return Interval(torch.floor_divide(a.lo, b.lo), torch.floor_divide(a.hi, b.lo))


def _remainder(a: Interval, b: Interval) -> Interval | None:
    times = _divided(a, b)
    if times is UNKNOWN:
        return UNKNOWN
    same = times.lo == times.hi
    low, high = torch.remainder(a.lo, b.lo), torch.remainder(a.hi, b.lo)
    return Interval(torch.where(same, low, 0), torch.where(same, high, b.lo - 1))


def _selected(c: Interval, a: Interval, b: Interval) -> Interval:
    if a.lo.dtype == torch.bool:
        return Interval((c.lo & a.lo) | (~c.hi & b.lo) | (a.lo & b.lo), (c.hi & a.hi) | (~c.lo & b.hi))
    low = torch.where(c.lo, a.lo, torch.where(c.hi, torch.minimum(a.lo, b.lo), b.lo))
    high = torch.where(c.lo, a.hi, torch.where(c.hi, torch.maximum(a.hi, b.hi), b.hi))
    return Interval(low, high)


def _equal(a: Interval, b: Interval) -> Interval:
    surely = (a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo)
    return Interval(surely, (a.lo <= b.hi) & (b.lo <= a.hi))


def _not(a: Interval) -> Interval:
    return Interval(~a.hi, ~a.lo)


RULES: dict[str, Callable[..., Interval | None]] = {
    "add": lambda a, b: Interval(a.lo + b.lo, a.hi + b.hi),
    "sub": lambda a, b: Interval(a.lo - b.hi, a.hi - b.lo),
    "neg": lambda a: Interval(-a.hi, -a.lo),
    "mul": _multiplied,
    "abs": _absolute,
    "min": lambda a, b: Interval(torch.minimum(a.lo, b.lo), torch.minimum(a.hi, b.hi)),
    "max": lambda a, b: Interval(torch.maximum(a.lo, b.lo), torch.maximum(a.hi, b.hi)),
    "floordiv": _divided,
    "mod": _remainder,
    "where": _selected,
    "lt": lambda a, b: Interval(a.hi < b.lo, a.lo < b.hi),
    "le": lambda a, b: Interval(a.hi <= b.lo, a.lo <= b.hi),
    "gt": lambda a, b: Interval(a.lo > b.hi, a.hi > b.lo),
    "ge": lambda a, b: Interval(a.lo >= b.hi, a.hi >= b.lo),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "not": _not,
}
