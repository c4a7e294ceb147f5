"""Two runs side by side: which ratios changed by more than their noise; and the gate built on that."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilewise.errors import AttentionError
from tilewise_lab.bench.results import OURS, Cell, Results, Spread

FLOOR = 0.03  # two runs of the same code agree to this; a smaller change proves nothing


@dataclass(frozen=True)
class Change:
    """How the ratio of one of our backends to the same peer changed in one cell."""

    cell: str
    ours: str
    peer: str
    before: Spread
    after: Spread
    floor: float = FLOOR

    @property
    def factor(self) -> float:
        return self.after.median / self.before.median

    @property
    def noise(self) -> float:
        """Three standard errors of the two medians together, and never less than the floor."""
        return max(self.floor, 3 * math.hypot(self.before.noise, self.after.noise))

    @property
    def faster(self) -> bool:
        return self.factor > 1 + self.noise

    @property
    def slower(self) -> bool:
        return self.factor < 1 / (1 + self.noise)


class Agreement(NamedTuple):
    """How far ratios of two runs lie apart; within: the share of them that agree to the floor."""

    ratios: int
    median: float
    widest: float
    within: float

    @staticmethod
    def of(changes: Sequence[Change], floor: float = FLOOR) -> Agreement:
        apart = sorted(math.exp(abs(math.log(change.factor))) - 1 for change in changes)
        within = sum(x <= floor for x in apart) / len(apart)
        return Agreement(len(apart), statistics.median(apart), apart[-1], within)

    def __str__(self) -> str:
        return f"apart by {self.median:.1%} (median), {self.widest:.1%} at most; {self.within:.0%} within {FLOOR:.0%}"


@dataclass(frozen=True)
class Loss:
    """A backend of ours that was timed before and gives no speed now."""

    cell: str
    ours: str
    status: str
    reason: str | None


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    losses: list[Loss]
    only_before: list[str]
    only_after: list[str]
    other_company: list[str]  # cells that were timed among other providers: at a power limit, that moves ratios

    @property
    def passed(self) -> bool:
        return bool(self.changes) and not self.losses and not any(change.slower for change in self.changes)

    @property
    def widest(self) -> Change:
        return max(self.changes, key=lambda change: abs(math.log(change.factor)))


def compare(before: Results, after: Results, floor: float = FLOOR) -> Comparison:
    """Cells that only one of the two has are named, not judged."""
    if before.machine["device"] != after.machine["device"]:
        raise AttentionError("device of the newer results", after.machine["device"], f"{before.machine['device']}")
    old, new = ({cell.key: cell for cell in results.cells} for results in (before, after))
    both = [key for key in old if key in new]
    return Comparison(
        [change for key in both for change in _changes(old[key], new[key], floor)],
        [loss for key in both for loss in _losses(old[key], new[key])],
        [key for key in old if key not in new],
        [key for key in new if key not in old],
        [key for key in both if set(old[key].timed()) != set(new[key].timed())],
    )


def _changes(old: Cell, new: Cell, floor: float) -> list[Change]:
    both = set(old.timed()) & set(new.timed())
    return [
        Change(old.key, ours, peer, old.ratio(ours, peer), new.ratio(ours, peer), floor)
        for ours in old.timed()
        for peer in old.peers()
        if ours.startswith(OURS) and {ours, peer} <= both
    ]


def _losses(old: Cell, new: Cell) -> list[Loss]:
    return [
        Loss(old.key, name, entry.status, entry.reason)
        for name in old.timed()
        if name.startswith(OURS) and (entry := new.entries.get(name)) and not entry.times
    ]
