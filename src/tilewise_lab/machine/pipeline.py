"""Software pipelining: a loop of stages, one unit per stage. One at a time, or all at once?

>>> slots(sequential(7)), slots(pipelined(7))  # four stages, seven iterations
(28, 10)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

STAGES = ("load A", "load B", "A · B", "store C")


class Slot(NamedTuple):
    """Iteration `iteration` occupies unit `unit` (0 is the first stage) from `start` for `length`."""

    unit: int
    iteration: int
    start: int
    length: int = 1
    phase: str = ""

    @property
    def stop(self) -> int:
        return self.start + self.length


def sequential(iterations: int, stages: int = len(STAGES)) -> list[Slot]:
    """Each stage waits for the one before it, each iteration for the one before it: one unit is busy at a time."""
    return [Slot(s, i, i * stages + s) for i in range(iterations) for s in range(stages)]


def pipelined(iterations: int, stages: int = len(STAGES)) -> list[Slot]:
    """An iteration starts as soon as its first unit is free, if that unit works asynchronously.

    Prologue: the pipe fills. Steady: every unit is busy, each with another iteration. Epilogue: it drains.
    """

    def phase(at: int) -> str:
        return "prologue" if at < stages - 1 else "steady" if at < iterations else "epilogue"

    return [Slot(s, i, i + s, phase=phase(i + s)) for i in range(iterations) for s in range(stages)]


def issued(order: Sequence[tuple[int, int]], *, asynchronous: bool) -> list[Slot]:
    """(iteration, stage) on a core that starts operations in this order and no other, as those of a GPU do.

    An operation starts when its unit is free and the stage before it is done. Asynchronous: the core goes on at once,
    and only waits where it must. Otherwise it waits for each, and no order of the same operations saves a slot.

    >>> by_start = sorted(pipelined(7), key=lambda slot: slot.start)
    >>> order = [(slot.iteration, slot.unit) for slot in by_start]
    >>> [slots(issued(order, asynchronous=way)) for way in (False, True)]
    [28, 10]
    """
    clock, done, free = 0, dict[tuple[int, int], int](), dict[int, int]()
    plan = []
    for i, stage in order:
        start = max(clock, done.get((i, stage - 1), 0), free.get(stage, 0))
        plan.append(Slot(stage, i, start))
        done[i, stage] = free[stage] = start + 1
        clock = start if asynchronous else start + 1
    return plan


def slots(plan: Sequence[Slot]) -> int:
    """How long a plan takes."""
    return max(slot.stop for slot in plan)


def utilisation(plan: Sequence[Slot]) -> float:
    """Busy share of all units over the whole time.

    >>> utilisation(sequential(7)), utilisation(pipelined(7))
    (0.25, 0.7)
    """
    units = {slot.unit for slot in plan}
    return sum(slot.length for slot in plan) / (len(units) * slots(plan))


def in_flight(plan: Sequence[Slot]) -> int:
    """The most iterations that have begun and not ended at once: as many buffers must exist.

    >>> in_flight(sequential(7)), in_flight(pipelined(7))
    (1, 4)
    """
    spans: dict[int, tuple[int, int]] = {}
    for slot in plan:
        start, stop = spans.get(slot.iteration, (slot.start, slot.stop))
        spans[slot.iteration] = min(start, slot.start), max(stop, slot.stop)
    return max(sum(a <= t < b for a, b in spans.values()) for t in range(slots(plan)))


def stages_that_fit(shared: int, kept: int, streamed: int) -> int:
    """How many tiles of `streamed` bytes can be in flight beside `kept` bytes: num_stages of a kernel.

    >>> tile = 128 * 128 * 2  # bytes of 128 rows, D 128, 16 bits
    >>> stages_that_fit(227 * 1024, kept=tile, streamed=2 * tile)
    3
    """
    return max(0, (shared - kept) // streamed)


def bubble(devices: int, batches: int) -> float:
    """The idle share of pipeline parallelism with p devices and m batches: (p - 1) / (m + p - 1).

    >>> bubble(4, 4), bubble(4, 28)
    (0.42857142857142855, 0.0967741935483871)
    """
    return (devices - 1) / (batches + devices - 1)


def forward_only(devices: int, batches: int) -> list[Slot]:
    """Layers on devices: device d works on batch b at time b + d. GPU₁ is a batch ahead of GPU₂, two ahead of GPU₃."""
    return pipelined(batches, stages=devices)


def forward_backward(devices: int, batches: int) -> list[Slot]:
    """All forwards, then all backwards in the other direction (GPipe); iterations from number `batches` on are
    backwards."""
    turn = batches + devices - 1
    forward = forward_only(devices, batches)
    return forward + [Slot(devices - 1 - s.unit, batches + s.iteration, turn + s.start) for s in forward]


def at(plan: Sequence[Slot], time: int) -> Iterator[tuple[int, int]]:
    """(unit, iteration) of what is running at a time."""
    yield from sorted((slot.unit, slot.iteration) for slot in plan if slot.start <= time < slot.stop)
