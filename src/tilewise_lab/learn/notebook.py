"""Lessons as Jupyter notebooks: the words of one language, and the code.

>>> [cell["cell_type"] for cell in notebook(lessons()[0], "en")["cells"]][:2]
['markdown', 'code']
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilewise_lab.language import language, say
from tilewise_lab.learn.course import Lesson, lessons

Notebook = dict[str, Any]


def notebook(one: Lesson, lang: str) -> Notebook:
    """nbformat 4.5, as a dict. Code is as in the lesson: it can be run, and changed."""
    cells = [
        _cell(cell.kind, f"{one.number:02}-{n:02}", cell.read_in(lang), folded(cell.tag))
        for n, cell in enumerate(one.cells_in(lang))
    ]
    if one.needs == "compiler":
        # Triton decides when it is imported whether it interprets or compiles.
        cells.insert(1, _cell("code", f"{one.number:02}-env", 'import os\n\nos.environ["TRITON_INTERPRET"] = "0"'))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def folded(tag: str) -> dict[str, Any]:
    """The metadata of a cell: JupyterLab hides the source of one that has a tag."""
    return {"tags": [tag], "jupyter": {"source_hidden": True}} if tag else {}


def _cell(kind: str, name: str, text: str, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    source = text.splitlines(keepends=True)
    made: dict[str, Any] = {"cell_type": kind, "id": name, "metadata": metadata or {}, "source": source}
    return made | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def write_all(folder: Path) -> int:
    """One .ipynb for each lesson, in the reader's language."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in lessons():
        made = json.dumps(notebook(one, language()), ensure_ascii=False, indent=1)
        (folder / f"{one.path.stem}.ipynb").write_text(made + "\n", encoding="utf-8")
    count = len(lessons())
    print(
        say(
            f"{count} notebooks in {folder}; open them with: jupyter lab {folder}",
            f"{count} 个 notebook 已写入 {folder}；打开：jupyter lab {folder}",
        )
    )
    return 0
