"""What a run leaves behind, as JSON; and the few numbers everything else is drawn from: rates, ratios, best peers.

Times are kept as measured, one per round. Whatever is derived from them is derived here, when it is looked at.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.errors import AttentionError

SCHEMA = 1
OURS = "tilewise"


class Spread(NamedTuple):
    """Median and quartiles of one number per round.

    >>> Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
    Spread(low=2.0, median=3.0, high=4.0, rounds=5)
    """

    low: float
    median: float
    high: float
    rounds: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return Spread(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(low, median, high, len(values))

    @property
    def noise(self) -> float:
        """The standard error of the median, relative: 1.25 sigma / sqrt(n), with sigma = IQR / 1.35."""
        return 0.93 * (self.high - self.low) / self.median / math.sqrt(self.rounds)


@dataclass
class Entry:
    """One provider in one cell. Only an "ok" one has times."""

    status: str  # ok, missing, refused, failed, out of memory, wrong
    reason: str | None = None
    errors: dict[str, list[float | None]] = field(default_factory=dict)  # tensor: [largest, allowed]
    first: float | None = None  # seconds of the first call, with whatever it compiles
    times: list[float] = field(default_factory=list)

    def share_of_limit(self) -> float | None:
        """The largest error as a share of what is allowed; None where nothing was compared or it is not finite."""
        shares = [found / limit for found, limit in self.errors.values() if found is not None and limit]
        return max(shares) if len(shares) == len(self.errors) > 0 else None


@dataclass
class Cell:
    """One case in one pass, and all providers that were asked to run it."""

    group: str
    name: str
    case: dict[str, Any]
    flops: float | None
    ours: str | None  # the provider that tilewise chooses by itself
    entries: dict[str, Entry]
    ceilings: dict[str, dict[str, Any]] = field(default_factory=dict)  # amount, unit, times
    sensors: dict[str, list[float]] = field(default_factory=dict)
    checked: str | None = None

    @property
    def key(self) -> str:
        return f"{self.group}: {self.name}"

    def timed(self) -> list[str]:
        return [name for name, entry in self.entries.items() if entry.times]

    def peers(self) -> list[str]:
        return [name for name in self.timed() if not name.startswith(OURS)]

    def seconds(self, name: str) -> Spread:
        return Spread.of(self.entries[name].times)

    def rate(self, name: str) -> Spread:
        """FLOP/s"""
        assert self.flops is not None
        return Spread.of([self.flops / t for t in self.entries[name].times])

    def ratio(self, name: str, peer: str) -> Spread:
        """How many times as fast `name` is as `peer`, round by round."""
        both = zip(self.entries[name].times, self.entries[peer].times, strict=True)
        return Spread.of([theirs / mine for mine, theirs in both])

    def best_peer(self) -> str | None:
        return min(self.peers(), key=lambda name: self.seconds(name).median, default=None)

    def chosen(self) -> str | None:
        """The provider tilewise chooses, if it was timed."""
        return self.ours if self.ours in self.timed() else None

    def ratio_to_best(self) -> Spread | None:
        ours, best = self.chosen(), self.best_peer()
        return self.ratio(ours, best) if ours and best else None

    def ceiling(self, name: str) -> Spread | None:
        """Operations or bytes per second of a ceiling."""
        found = self.ceilings.get(name)
        return Spread.of([found["amount"] / t for t in found["times"]]) if found else None

    def share_of_ceiling(self) -> Spread | None:
        ours, matmul = self.chosen(), self.ceilings.get("matmul")
        if ours is None or matmul is None or self.flops is None:
            return None
        both = zip(self.entries[ours].times, matmul["times"], strict=True)
        return Spread.of([(self.flops / mine) / (matmul["amount"] / best) for mine, best in both])


@dataclass
class Peak:
    """Memory of one forward and backward, beyond the inputs. None: out of memory."""

    provider: str
    length: int
    bytes: int | None


@dataclass
class Results:
    machine: dict[str, Any]
    settings: dict[str, Any]
    providers: dict[str, dict[str, Any]] = field(default_factory=dict)  # about, version, asked, missing
    cells: list[Cell] = field(default_factory=list)
    memory: list[Peak] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)  # import_ms, profiler_us, ...
    seconds: float = 0.0
    schema: int = SCHEMA

    def unit(self) -> Unit:
        return Unit.of(max((c.rate(n).median for c in self.cells if c.flops for n in c.timed()), default=1e12))

    def of(self, *groups: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.group in groups]

    def wrong(self, ours: bool) -> list[tuple[Cell, str]]:
        return [
            (cell, name)
            for cell in self.cells
            for name, entry in cell.entries.items()
            if entry.status == "wrong" and name.startswith(OURS) == ours
        ]

    def save(self, path: Path) -> None:
        """One line per cell, so that two files can be read side by side; whole or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(_lines(asdict(self)), encoding="utf-8")
        partial.replace(path)


def load(path: Path) -> Results:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AttentionError(f"results in {path}", error, "a file that `tilewise bench` wrote") from None
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
        raise AttentionError(f"schema of {path}", found, f"{SCHEMA}")
    raw.pop("unmeasured", None)  # in older files: targets that could not be measured
    cells = [Cell(**{**cell, "entries": {n: Entry(**e) for n, e in cell["entries"].items()}}) for cell in raw["cells"]]
    return Results(**{**raw, "cells": cells, "memory": [Peak(**peak) for peak in raw["memory"]]})


def _lines(raw: dict[str, Any]) -> str:
    def value(x: Any) -> str:
        if isinstance(x, list) and x:
            return "[\n  " + ",\n  ".join(json.dumps(item, allow_nan=False) for item in x) + "\n ]"
        return json.dumps(x, allow_nan=False)

    return "{\n" + ",\n".join(f" {json.dumps(key)}: {value(x)}" for key, x in raw.items()) + "\n}\n"


class Unit(NamedTuple):
    """What rates are told in.

    >>> Unit.of(3.2e14), Unit.of(4.0e9)
    (Unit(name='TFLOP/s', size=1000000000000.0), Unit(name='GFLOP/s', size=1000000000.0))
    """

    name: str
    size: float

    @staticmethod
    def of(largest: float) -> Unit:
        return Unit("TFLOP/s", 1e12) if largest >= 1e12 else Unit("GFLOP/s", 1e9)

    def __call__(self, rate: Spread) -> Spread:
        return Spread(rate.low / self.size, rate.median / self.size, rate.high / self.size, rate.rounds)

    def say(self, rate: Spread) -> str:
        return f"{rate.median / self.size:.3g}"


def geometric_mean(values: Iterable[float]) -> float | None:
    """
    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


@dataclass(frozen=True)
class Standing:
    """Ours against one peer over a group of cells."""

    group: str
    ours: str
    peer: str
    ratio: float
    cells: int
    worst: float
    best: float


def standings(results: Results) -> list[Standing]:
    """In each group of several cells: each backend against each peer and, as peer "best", the fastest of each cell."""
    found = []
    for group in dict.fromkeys(cell.group for cell in results.cells):
        cells = results.of(group)
        backends = sorted({name for cell in cells for name in cell.timed() if name.startswith(OURS)})
        peers = dict.fromkeys(name for cell in cells for name in cell.peers())
        for ours in backends:
            for peer in (*peers, "best"):
                ratios = [r.median for cell in cells if (r := against(cell, ours, peer))]
                mean = geometric_mean(ratios)
                if mean is not None and len(cells) > 1:
                    found.append(Standing(group, ours, peer, mean, len(ratios), min(ratios), max(ratios)))
    return found


def against(cell: Cell, ours: str, peer: str) -> Spread | None:
    other = cell.best_peer() if peer == "best" else peer
    return cell.ratio(ours, other) if other in cell.timed() and ours in cell.timed() and other is not None else None


def absent(results: Results) -> list[tuple[str, str, str]]:
    """Every provider that gave no speed somewhere, with its reason."""
    found = []
    for name, facts in results.providers.items():
        if facts["missing"]:
            found.append((name, "this machine", facts["missing"]))
        elif not facts["asked"]:
            found.append((name, "this run", "not asked for (--peers)"))
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell in results.cells:
        for name, entry in cell.entries.items():
            if entry.status not in ("ok", "missing"):
                why = entry.status + (f": {entry.reason}" if entry.reason else "")
                reasons.setdefault((name, why), []).append(cell.key)
    for (name, why), cells in reasons.items():
        found.append((name, cells[0] if len(cells) == 1 else f"{cells[0]} and {len(cells) - 1} more", why))
    return found
