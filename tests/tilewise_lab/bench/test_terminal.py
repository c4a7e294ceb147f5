from __future__ import annotations

import io
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the tables need the cli extra")
from rich.console import Console

from tilewise_lab.bench import terminal
from tilewise_lab.bench.results import load

KEPT = Path(__file__).parents[3] / "bench/results/2026-11-15-nvidia-h200.json"


def test_tables_fit_80_columns():
    """Of the widest result that is kept: no column of numbers is cut, and where everyone fits, everyone is shown."""
    results = load(KEPT)
    narrow = Console(width=80, record=True, file=io.StringIO())
    for title, cells in terminal.groups(results):
        narrow.print(terminal.fitting_table(title, cells, results.unit(), narrow.width))
        wide = terminal.fitting_table(title, cells, results.unit(), 1000)
        assert {"cudnn", "fa3"} <= {str(column.header) for column in wide.columns}
    said = narrow.export_text()
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 80
