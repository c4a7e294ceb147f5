"""What was measured, as pages: a table for every file that holds one, and a list of the benchmark's own reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def tables(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, Markdown) of the files that are tables with columns and rows."""
    for file, raw in _files(folder):
        if {"columns", "rows"} <= raw.keys():
            facts = " · ".join(str(raw[key]) for key in ("device", "date", "torch", "triton", "commit") if key in raw)
            lines = [f"# {file.stem}", facts, str(raw.get("method", "")), table(raw["columns"], raw["rows"])]
            yield file.stem, "\n\n".join(lines) + "\n"


def table(columns: list[Any], rows: list[list[Any]]) -> str:
    """
    >>> print(table(["pass", "ms"], [["a|b", 1.5]]))
    | pass | ms |
    |---|---|
    | a\\|b | 1.5 |
    """
    lines = [columns, *rows]
    text = ["| " + " | ".join(str(x).replace("|", "\\|") for x in line) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(columns), *text[1:]])


def reports(folder: Path) -> dict[str, Path]:
    """The results that `tilewise bench` draws whole reports of, by name."""
    return {file.stem: file for file, raw in _files(folder) if {"machine", "cells", "schema"} <= raw.keys()}


def list_of_reports(folder: Path, root: str) -> str:
    links = (f'- <a href="{root}results/report-{name}.html">The report of {name}</a>' for name in reports(folder))
    return "\n".join(links)


def list_of_pages(pages: Iterable[str], root: str) -> str:
    """Links to the pages of results, newest first, on the English site.

    >>> list_of_pages(["faq.md", "results/2026-11-17-kv.md", "results/index.md"], "../")
    '- <a href="../results/2026-11-17-kv.html">2026-11-17-kv</a>'
    """
    names = sorted((page[len("results/") : -len(".md")] for page in pages if page.startswith("results/")), reverse=True)
    return "\n".join(f'- <a href="{root}results/{name}.html">{name}</a>' for name in names if name != "index")


def write_report(file: Path, path: Path) -> None:
    from tilewise_lab.bench import report, results

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report.render(results.load(file)), encoding="utf-8")


def _files(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in sorted(folder.glob("*.json"), reverse=True):
        raw = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(raw, dict):
            yield file, raw
