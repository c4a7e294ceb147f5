"""Ulysses (head parallelism): the ranks of a group exchange heads for tokens before attention, and back after it.

Each rank then has the tokens of the whole group for some of the heads. The number of heads need not be divisible: some
ranks have one more than others, or none. Where a rank's query heads are not whole groups of their KV heads (GQA), it
repeats the KV heads, one for each query head.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cluster import Exchange
from .layout import even_splits, token_index
from .partition import Partition

Exchanged = Generator[Exchange | int, None, list[Tensor]]


class HeadShare(NamedTuple):
    """A rank's query heads q0 to q1 - 1 and the KV heads c0 to c1 - 1 that they read. `repeats`: the KV head, counted
    from c0, of each query head; None where these are whole groups."""

    q0: int
    q1: int
    c0: int
    c1: int
    repeats: tuple[int, ...] | None

    def slices(self, n: int, kv: int) -> list[slice]:
        """The heads of n tensors. The last `kv` of them have KV heads."""
        return [slice(self.q0, self.q1)] * (n - kv) + [slice(self.c0, self.c1)] * kv


def head_share(heads: int, kv_heads: int, size: int, member: int) -> HeadShare:
    """The heads of a member of a group of `size` ranks.

    >>> head_share(32, 8, 8, 1)
    HeadShare(q0=4, q1=8, c0=1, c1=2, repeats=None)
    >>> head_share(6, 2, 4, 2)
    HeadShare(q0=3, q1=4, c0=1, c1=2, repeats=None)
    >>> head_share(10, 5, 4, 1)
    HeadShare(q0=2, q1=5, c0=1, c1=3, repeats=(0, 0, 1))
    """
    ends, group = even_splits(heads, size), heads // max(1, kv_heads)
    a, b = ends[member], ends[member + 1]
    if a == b:
        return HeadShare(a, b, 0, 0, None)
    c0, c1 = a // group, -(-b // group)
    is_whole = (a % group == 0 and b % group == 0) or c1 - c0 == 1
    return HeadShare(a, b, c0, c1, None if is_whole else tuple(h // group - c0 for h in range(a, b)))


class Ulysses:
    """A rank's place in its group, for a call with so many heads. Without Ulysses the exchanges do nothing."""

    def __init__(self, plan: Partition, rank: int, heads: int, kv_heads: int) -> None:
        size = plan.ulysses_size
        self.plan, self.rank, self.size, self.kv_heads = plan, rank, size, kv_heads
        self.ring_rank, self.member = divmod(rank, size)
        self.shares = [head_share(heads, kv_heads, size, m) for m in range(size)]
        self.own = self.shares[self.member]
        self.counts = plan.counts()[self.ring_rank * size : (self.ring_rank + 1) * size]

    def heads_of(self, x: Tensor, dim: int) -> Tensor:
        """The view of this rank's heads of a tensor with all query heads (or 1) along `dim`."""
        if x.shape[dim] == 1 or self.size == 1:
            return x
        return x.narrow(dim, self.own.q0, self.own.q1 - self.own.q0)

    def to_heads(self, number: int, tensors: Sequence[Tensor], kv: int = 0) -> Exchanged:
        """(B, tokens of the rank, all heads, ...) -> (B, tokens of the group, heads of the rank, ...).

        The last `kv` tensors have KV heads, the others query heads.
        """
        if self.size == 1:
            return list(tensors)
        n = len(tensors)
        sends = [[x[:, :, heads] for x, heads in zip(tensors, s.slices(n, kv), strict=True)] for s in self.shares]
        own = sends[self.member]
        receives = [[x.new_empty((x.shape[0], count, *x.shape[2:])) for x in own] for count in self.counts]
        yield from self._all_to_all(number, sends, receives)
        order, _ = self._orders(tensors[0].device)
        found = [torch.cat(parts, 1).index_select(1, order) for parts in zip(*receives, strict=True)]
        if self.own.repeats is not None:
            repeats = self._repeats(order.device)
            found[n - kv :] = [x.index_select(2, repeats) for x in found[n - kv :]]
        return found

    def to_tokens(self, number: int, tensors: Sequence[Tensor], kv: int = 0) -> Exchanged:
        """The reverse of `to_heads`, for results and gradients. Ranks that read the same KV head have each a part of
        its gradient: these are summed."""
        if self.size == 1:
            return list(tensors)
        n = len(tensors)
        tensors = [*tensors[: n - kv], *map(self._sum_repeats, tensors[n - kv :])]
        rows = self._orders(tensors[0].device)[1].split(self.counts)
        sends = [[x.index_select(1, r) for x in tensors] for r in rows]
        own = sends[self.member]
        receives = [
            [
                x.new_empty((*x.shape[:2], heads.stop - heads.start, *x.shape[3:]))
                for x, heads in zip(own, s.slices(n, kv), strict=True)
            ]
            for s in self.shares
        ]
        yield from self._all_to_all(number, sends, receives)
        parts = list(zip(*receives, strict=True))
        return [*(torch.cat(x, 2) for x in parts[: n - kv]), *(self._sum_shares(x) for x in parts[n - kv :])]

    def _all_to_all(self, number: int, sends: list[Any], receives: list[Any]) -> Generator[Exchange | int, None, None]:
        """Sends sends[m] to member m, and receives receives[m] from it."""
        receives[self.member] = sends[self.member]
        first = self.ring_rank * self.size
        others = [m for m in range(self.size) if m != self.member]
        yield Exchange(
            number,
            [(first + m, x.contiguous()) for m in others for x in sends[m]],
            [(first + m, x) for m in others for x in receives[m]],
        )
        yield number

    def _orders(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`_order` and its inverse."""

        def made() -> tuple[Tensor, Tensor]:
            order = _order(self.plan, self.ring_rank)
            return order.to(device), order.argsort().to(device)

        return self.plan.tensors.get(("orders", self.ring_rank), device, made)

    def _repeats(self, device: torch.device) -> Tensor:
        repeats = self.own.repeats
        return self.plan.tensors.get(("repeats", repeats), device, lambda: torch.tensor(repeats, device=device))

    def _sum_repeats(self, x: Tensor) -> Tensor:
        """The gradient of KV heads from that of their repeats."""
        if self.own.repeats is None:
            return x
        total = x.new_zeros((*x.shape[:2], self.own.c1 - self.own.c0, *x.shape[3:]))
        return total.index_add_(2, self._repeats(x.device), x)

    def _sum_shares(self, parts: Sequence[Tensor]) -> Tensor:
        """The gradient of all KV heads from the parts of the members."""
        x = parts[0]
        total = x.new_zeros((*x.shape[:2], self.kv_heads, *x.shape[3:]))
        for part, s in zip(parts, self.shares, strict=True):
            total[:, :, s.c0 : s.c1] += part
        return total


def _order(plan: Partition, ring_rank: int) -> Tensor:
    """For each row of the group, its row in the concatenation of its ranks' rows."""
    members = range(ring_rank * plan.ulysses_size, (ring_rank + 1) * plan.ulysses_size)
    tokens = torch.cat([token_index(plan.shards[r], plan.lengths) for r in members])
    place = torch.zeros(plan.tokens, dtype=torch.int64, device="cpu")
    place[tokens] = torch.arange(len(tokens), device="cpu")
    return place[token_index(plan.ring_shards[ring_rank], plan.lengths)]
