"""The reports of the benchmark, as pages, and their list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def reports(folder: Path) -> dict[str, Path]:
    """The results that `tilewise bench` draws whole reports of, by name."""
    return {file.stem: file for file, raw in _files(folder) if {"machine", "cells", "schema"} <= raw.keys()}


def list_of_reports(folder: Path, root: str) -> str:
    links = (f'- <a href="{root}results/report-{name}.html">The report of {name}</a>' for name in reports(folder))
    return "\n".join(links)


def write_report(file: Path, path: Path) -> None:
    from tilewise_lab.bench import report, results

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report.render(results.load(file)), encoding="utf-8")


def _files(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in sorted(folder.glob("*.json"), reverse=True):
        raw = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(raw, dict):
            yield file, raw
