"""Wave quantisation: a GPU runs blocks in waves, and a wave with one block in it lasts as long as a full one.

>>> # on the 108 SMs of an A100
>>> w = waves(matmul_blocks(1792, 1792, tile=(256, 128)), slots=108)
>>> w.blocks, w.waves, f"{w.efficiency:.1%}"
(98, 1, '90.7%')
>>> w = waves(matmul_blocks(1793, 1793, tile=(256, 128)), slots=108)
>>> w.blocks, w.waves, f"{w.efficiency:.1%}"
(120, 2, '55.6%')
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Waves(NamedTuple):
    """`efficiency` is the busy share of all slots over all waves."""

    blocks: int
    slots: int
    waves: int
    efficiency: float


def waves(blocks: int, slots: int) -> Waves:
    """`blocks` equal blocks on `slots` (SMs times blocks that fit in one)."""
    rounds = -(-blocks // slots)
    return Waves(blocks, slots, rounds, blocks / (rounds * slots) if rounds else 1.0)


def matmul_blocks(m: int, n: int, tile: tuple[int, int]) -> int:
    """⌈m / tile_m⌉ · ⌈n / tile_n⌉: every output tile is one block, also the one with a single row in it."""
    return -(-m // tile[0]) * -(-n // tile[1])


def cliffs(sizes: Iterable[int], tile: tuple[int, int], slots: int) -> list[tuple[int, int, int]]:
    """Where an n × n product starts another wave: (n, blocks before, blocks after).

    >>> cliffs(range(1500, 2900), (256, 128), slots=132)
    [(2049, 128, 153), (2817, 242, 276)]
    """
    found = []
    before: Waves | None = None
    for n in sizes:
        now = waves(matmul_blocks(n, n, tile), slots)
        if before and now.waves > before.waves:
            found.append((n, before.blocks, now.blocks))
        before = now
    return found


class Schedule(NamedTuple):
    """`finish` of the last block, and `efficiency` = work done / (slots · finish)."""

    finish: float
    efficiency: float


def schedule(work: Sequence[float], slots: int) -> Schedule:
    """Blocks of unequal work, started in order, each on the first slot that falls free: what the hardware does.

    >>> schedule([4, 3, 2, 1], slots=2)  # longest first
    Schedule(finish=5, efficiency=1.0)
    >>> schedule([1, 2, 3, 4], slots=2).finish
    6
    """
    if not work:
        return Schedule(0.0, 1.0)
    free = [type(work[0])(0)] * min(slots, len(work))
    for w in work:
        heapq.heapreplace(free, free[0] + w)
    finish = max(free)
    return Schedule(finish, sum(work) / (slots * finish) if finish else 1.0)
