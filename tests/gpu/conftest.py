"""The error ratios of the whole grid, in one table at the end of the run."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tests.cases import NAMES


def pytest_terminal_summary(terminalreporter: Any) -> None:
    worst: dict[tuple[str, str], list[float]] = defaultdict(list)
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, ())]
    for name, value in (pair for report in reports for pair in report.user_properties):
        if name == "ratios":
            for dtype, result, ratio in value:
                worst[dtype, result].append(ratio)
    if worst:
        configurations = sum(len(x) for (_, result), x in worst.items() if result == "out")
        terminalreporter.section(f"largest error over torch's own, {configurations} configurations: median, worst")
        for dtype in sorted({dtype for dtype, _ in worst}):
            cells = (f"{name} {middle(worst[dtype, name]):.2f} {max(worst[dtype, name]):5.2f}" for name in NAMES)
            terminalreporter.write_line(f"{dtype:20} " + "   ".join(cells))


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
