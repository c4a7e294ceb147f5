"""The few numbers a reader wants first, from a finished run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilewise_lab.bench.results import OURS, Cell, Results, Spread, geometric_mean


@dataclass(frozen=True)
class Bar:
    """A goal and what was found. `found` is None where this run did not measure it."""

    what: str
    found: float | None
    goal: float
    unit: str
    at_least: bool

    @property
    def met(self) -> bool | None:
        return None if self.found is None else self.found >= self.goal if self.at_least else self.found <= self.goal

    @property
    def said(self) -> str:
        return "not measured" if self.found is None else f"{self.found:.3g} {self.unit}"

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.goal:g} {self.unit}"


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
    """On the grid: each backend against each peer and, as peer "best", against the fastest peer of each cell."""
    found = []
    for group in ("forward", "backward"):
        cells = results.of(group)
        backends = sorted({name for cell in cells for name in cell.timed() if name.startswith(OURS)})
        peers = dict.fromkeys(name for cell in cells for name in cell.peers())
        for ours in backends:
            for peer in (*peers, "best"):
                ratios = [r.median for cell in cells if (r := against(cell, ours, peer))]
                mean = geometric_mean(ratios)
                if mean is not None:
                    found.append(Standing(group, ours, peer, mean, len(ratios), min(ratios), max(ratios)))
    return found


def against(cell: Cell, ours: str, peer: str) -> Spread | None:
    other = cell.best_peer() if peer == "best" else peer
    return cell.ratio(ours, other) if other in cell.timed() and ours in cell.timed() and other is not None else None


def bars(results: Results) -> list[Bar]:
    """The goals of the portable kernels, of the CPU backend and of the host side."""
    overhead = next(iter(results.of("overhead")), None)
    host = overhead.seconds(OURS).median * 1e6 if overhead and OURS in overhead.timed() else None
    found = [Bar("import tilewise, beyond import torch", results.notes.get("import_ms"), 50, "ms", False)]
    if results.machine["kind"] == "cuda":
        triton = f"{OURS}-triton"
        portable = "triton {} / torch FA2, geometric mean, D 64 and 128, 1k to 16k"
        return [
            Bar(portable.format("forward"), _mean(_portable(results, "forward"), triton, "fa2"), 1.35, "x", True),
            Bar(portable.format("backward"), _mean(_portable(results, "backward"), triton, "fa2"), 1.25, "x", True),
            Bar("host time of one eager forward call", host, 60, "µs", False),
            *found,
        ]
    return [Bar("forward + backward time / torch SDPA's, D 64, longest full", _cpu(results), 1.5, "x", False), *found]


def _portable(results: Results, which: str) -> list[Cell]:
    cells = results.of(which)
    return [cell for cell in cells if cell.case["dim"] in (64, 128) and 1024 <= cell.case["seq"] <= 16384]


def _mean(cells: Iterable[Cell], ours: str, peer: str) -> float | None:
    return geometric_mean(r.median for cell in cells if (r := against(cell, ours, peer)))


def _cpu(results: Results) -> float | None:
    """Our time over torch's for forward and backward together, at the longest sequence of the grid."""
    mine = theirs = 0.0
    for which in ("forward", "backward"):
        cells = [c for c in results.of(which) if c.case["dim"] == 64 and not c.case["causal"]]
        cell = max(cells, key=lambda cell: int(cell.case["seq"]), default=None)
        ours = cell.chosen() if cell else None
        if cell is None or ours is None or "sdpa" not in cell.timed():
            return None
        mine += cell.seconds(ours).median
        theirs += cell.seconds("sdpa").median
    return mine / theirs


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
