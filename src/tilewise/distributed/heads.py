"""Heads for tokens: within a station of several ranks, each gets the tokens of all for some of the heads, and back.

Heads need not divide by the ranks: some have one more than others, or none. Where a rank's query heads do not make up
whole groups of their KV heads, it repeats the KV heads, one for each query head.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cluster import Exchange
from .division import Division
from .layout import cut, lasting, tokens


class Share(NamedTuple):
    """A member's query heads q0 .. q1, the KV heads c0 .. c1 they read; and which of these each reads, if they are no
    whole groups."""

    q0: int
    q1: int
    c0: int
    c1: int
    spread: tuple[int, ...] | None


def share(heads: int, kv_heads: int, width: int, member: int) -> Share:
    """
    >>> share(32, 8, 8, 1)
    Share(q0=4, q1=8, c0=1, c1=2, spread=None)
    >>> share(6, 2, 4, 2)
    Share(q0=3, q1=4, c0=1, c1=2, spread=None)
    >>> share(10, 5, 4, 1)
    Share(q0=2, q1=5, c0=1, c1=3, spread=(0, 0, 1))
    """
    ends, group = cut(heads, width), heads // max(1, kv_heads)
    a, b = ends[member], ends[member + 1]
    if a == b:
        return Share(a, b, 0, 0, None)
    c0, c1 = a // group, -(-b // group)
    whole = (a % group == 0 and b % group == 0) or c1 - c0 == 1
    return Share(a, b, c0, c1, None if whole else tuple(h // group - c0 for h in range(a, b)))


class Heads:
    """One rank's place in its station, for a call with so many heads."""

    def __init__(self, plan: Division, rank: int, heads: int, kv_heads: int) -> None:
        self.plan, self.rank, self.kv_heads = plan, rank, kv_heads
        self.station, self.member = divmod(rank, plan.width)
        self.shares = [share(heads, kv_heads, plan.width, m) for m in range(plan.width)]
        self.own = self.shares[self.member]
        first = self.station * plan.width
        self.ranks = range(first, first + plan.width)
        self.counts = [sum(run.size for run in plan.shards[r]) for r in self.ranks]

    def of(self, x: Tensor, dim: int = 0) -> Tensor:
        """This member's part of a tensor with an axis of query heads (or of size 1)."""
        return x if x.shape[dim] == 1 or self.plan.width == 1 else x.narrow(dim, self.own.q0, self.own.q1 - self.own.q0)

    def enter(self, number: int, *tensors: Tensor | None, keys: bool = False) -> Generator[Any, None, list[Any]]:
        """(B, tokens of the rank, all heads, ..) -> (B, tokens of the station, its heads, ..); the last two of
        `tensors` have KV heads, if `keys`."""
        if self.plan.width == 1:
            return list(tensors)
        kinds = [keys and n >= len(tensors) - 2 for n in range(len(tensors))]
        given = [(x, kind) for x, kind in zip(tensors, kinds, strict=True) if x is not None]
        rooms = [
            [x.new_empty((x.shape[0], n, _count(self.own, kind), *x.shape[3:])) for x, kind in given]
            for n in self.counts
        ]
        sends = [[_heads_of(x, self.shares[m], kind) for x, kind in given] for m in range(self.plan.width)]
        rooms[self.member] = sends[self.member]
        yield from self._exchange(number, sends, rooms)
        order = _order(self.plan, self.station, given[0][0].device)
        found = iter(torch.cat(parts, 1).index_select(1, order) for parts in zip(*rooms, strict=True))
        whole = [None if x is None else next(found) for x in tensors]
        spread = self.own.spread
        if spread is None:
            return whole
        return [
            x.index_select(2, torch.tensor(spread, device=x.device)) if kind and x is not None else x
            for x, kind in zip(whole, kinds, strict=True)
        ]

    def leave(self, number: int, *tensors: Tensor | None, keys: bool = False) -> Generator[Any, None, list[Any]]:
        """The way back. Members that share a KV head have each a part of its gradient: the sum is taken here."""
        if self.plan.width == 1:
            return list(tensors)
        kinds = [keys and n >= len(tensors) - 2 for n in range(len(tensors))]
        given = [
            (_gathered(x, self.own) if kind else x, kind)
            for x, kind in zip(tensors, kinds, strict=True)
            if x is not None
        ]
        rooms = [
            [x.new_empty((x.shape[0], self.counts[self.member], _count(s, kind), *x.shape[3:])) for x, kind in given]
            for s in self.shares
        ]
        order = _order(self.plan, self.station, given[0][0].device).argsort().split(self.counts)
        sends = [[x.index_select(1, rows) for x, _ in given] for rows in order]
        rooms[self.member] = sends[self.member]
        yield from self._exchange(number, sends, rooms)
        found = iter(
            self._sum(parts) if kind else torch.cat(parts, 2)
            for parts, (_, kind) in zip(zip(*rooms, strict=True), given, strict=True)
        )
        return [None if x is None else next(found) for x in tensors]

    def _exchange(self, number: int, sends: list[Any], rooms: list[Any]) -> Generator[Any, None, None]:
        others = [m for m in range(self.plan.width) if m != self.member]
        yield Exchange(
            number,
            [(self.ranks[m], x.contiguous()) for m in others for x in sends[m]],
            [(self.ranks[m], x) for m in others for x in rooms[m]],
        )
        yield number

    def _sum(self, parts: tuple[Tensor, ...]) -> Tensor:
        x = parts[0]
        total = x.new_zeros((*x.shape[:2], self.kv_heads, *x.shape[3:]))
        for part, s in zip(parts, self.shares, strict=True):
            total[:, :, s.c0 : s.c1] += part
        return total


def _count(s: Share, keys: bool) -> int:
    return s.c1 - s.c0 if keys else s.q1 - s.q0


def _heads_of(x: Tensor, s: Share, keys: bool) -> Tensor:
    return x[:, :, s.c0 : s.c1] if keys else x[:, :, s.q0 : s.q1]


def _gathered(x: Tensor, s: Share) -> Tensor:
    """The gradient of KV heads from that of their copies."""
    if s.spread is None:
        return x
    total = x.new_zeros((*x.shape[:2], s.c1 - s.c0, *x.shape[3:]))
    return total.index_add_(2, torch.tensor(s.spread, device=x.device), x)


@lru_cache(4096)
@lasting
def _order(plan: Division, station: int, device: torch.device) -> Tensor:
    """For each row of the station, its row among those of its members, one after the other."""
    members = range(station * plan.width, (station + 1) * plan.width)
    come = torch.cat([tokens(plan.shards[r], plan.lengths) for r in members])
    place = torch.zeros(plan.tokens, dtype=torch.int64)
    place[come] = torch.arange(len(come))
    return place[tokens(plan.held[station], plan.lengths)].to(device)
