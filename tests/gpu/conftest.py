"""Every test here is skipped where there is no CUDA device, or tests/gpu was not asked for by name. At the end of a
run, the error ratios of all calls in two tables: the grid, and the score terms by feature."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.cases import NAMES

Ratios = Iterable[tuple[str, str, float]]  # (row of the table, result, error over torch's own)


@pytest.fixture(scope="session", autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here, or no run of its own: ./run test tests/gpu")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, ())]
    found = [pair for report in reports for pair in report.user_properties]
    calls = [x for name, value in found if name == "ratios" for x in value]
    show(terminalreporter, calls, sum(result == "out" for _, result, _ in calls), "configurations", NAMES)
    features = [call for name, value in found if name == "features" for call in value]
    rows = [(row, result, ratio) for names, ratios in features for result, ratio in ratios for row in names]
    show(terminalreporter, rows, len(features), "combinations of terms", (*NAMES, "terms"))


def show(terminalreporter: Any, ratios: Ratios, count: int, what: str, columns: Iterable[str]) -> None:
    """A row for each name, a column for each result: the median of its ratios and the worst."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, result, ratio in ratios:
        values[row, result].append(ratio)
    if values:
        terminalreporter.section(f"largest error over torch's own, {count} {what}: median, worst")
        for row in sorted({row for row, _ in values}):
            cells = (cell(name, values[row, name]) for name in columns)
            terminalreporter.write_line(f"{row:24} " + "   ".join(cells))


def cell(name: str, values: list[float]) -> str:
    return f"{name} {sorted(values)[len(values) // 2]:.2f} {max(values):5.2f}" if values else f"{name}    -     -"
