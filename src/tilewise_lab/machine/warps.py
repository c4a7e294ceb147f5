"""Threads in blocks, lanes in warps.

>>> # 8 elements still occupy a warp of 32
>>> [(warp.active, warp.masked) for warp in warps(8)]
[(8, 24)]
>>> grid(1_000_000, block=32)
31250
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WARP = 32


class Warp(NamedTuple):
    """A warp of 32 threads. Threads `first` to `first + active - 1` have an element; the `masked` others are switched
    off, not looping."""

    first: int
    active: int
    masked: int


def warps(n: int) -> list[Warp]:
    """The warps that `if (i < n)` needs for n elements: threads come in groups of 32, wanted or not."""
    return [Warp(i, min(WARP, n - i), max(0, i + WARP - n)) for i in range(0, n, WARP)]


def grid(n: int, block: int) -> int:
    """Blocks of `block` threads for n elements: ⌈n / block⌉."""
    return -(-n // block)


def element(block_id: int, block: int, thread_id: int) -> int:
    """i = block_id · block_size + thread_id

    >>> # 8 elements on 4 cores
    >>> [[element(b, 2, t) for t in range(2)] for b in range(4)]
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """
    return block_id * block + thread_id


class Divergence(NamedTuple):
    """Cycles of one warp: what it takes, and what it would if both sides could run at once."""

    taken: int
    at_best: int


def branch(condition: Sequence[bool], then: int, otherwise: int) -> Divergence:
    """A warp has one program counter: if its lanes disagree, both sides run, one after the other.

    >>> branch([lane < 16 for lane in range(32)], then=10, otherwise=7)
    Divergence(taken=17, at_best=10)
    >>> branch([True] * 32, then=10, otherwise=7)
    Divergence(taken=10, at_best=10)
    """
    sides = [then] * any(condition) + [otherwise] * (not all(condition))
    return Divergence(sum(sides), max(sides))


def branches(condition: Sequence[bool], then: int, otherwise: int) -> int:
    """Cycles over all warps of a longer array: sorting the condition makes most warps agree."""
    return sum(branch(condition[i : i + WARP], then, otherwise).taken for i in range(0, len(condition), WARP))


class Segment(NamedTuple):
    """What a task does from `start` to `stop`: "compute", "wait" for memory, or nothing ("idle")."""

    task: int
    start: int
    stop: int
    doing: str


def run_to_completion(tasks: int, compute: int, wait: int, rounds: int = 2) -> list[Segment]:
    """A core that finishes one task before the next: each task is done as soon as it can be (latency)."""
    return _schedule(tasks, compute, wait, rounds, switch=False)


def switch_on_wait(tasks: int, compute: int, wait: int, rounds: int = 2) -> list[Segment]:
    """A core that picks up another task whenever one waits: all are done sooner (throughput).

    >>> finish(run_to_completion(4, compute=2, wait=4))
    48
    >>> finish(switch_on_wait(4, compute=2, wait=4))
    20
    """
    return _schedule(tasks, compute, wait, rounds, switch=True)


def _schedule(tasks: int, compute: int, wait: int, rounds: int, *, switch: bool) -> list[Segment]:
    segments = []
    core, ready, left = 0, [0] * tasks, [rounds] * tasks
    while any(left):
        waiting = [t for t in range(tasks) if left[t]]
        task = min(waiting, key=lambda t: ready[t]) if switch else waiting[0]
        start = max(core, ready[task])
        segments += [
            Segment(task, start, start + compute, "compute"),
            Segment(task, start + compute, start + compute + wait, "wait"),
        ]
        ready[task], left[task] = start + compute + wait, left[task] - 1
        core = start + compute + (0 if switch else wait)
    return segments


def finish(segments: Sequence[Segment]) -> int:
    return max(segment.stop for segment in segments)
