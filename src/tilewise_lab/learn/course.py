"""Lessons: where they are, what is in them. A lesson is a script of `# %%` cells; Markdown cells are comments."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tilewise.spec import AttentionError


def home() -> Path:
    """The course's folder: beside `src` in a clone, inside the package in a wheel."""
    for folder in (Path(__file__).parents[3] / "course", Path(__file__).parent / "course"):
        if list(folder.glob("[0-9][0-9]_*.py")):
            return folder
    raise AttentionError("the course", "no lessons beside the package", "a clone of the repository, or its wheel")


@dataclass(frozen=True)
class Cell:
    kind: str  # "markdown" or "code"
    text: str
    line: int  # of its first line in the file


@dataclass(frozen=True)
class Lesson:
    number: int
    path: Path

    @cached_property
    def cells(self) -> list[Cell]:
        return list(parse(self.path.read_text(encoding="utf-8")))

    @cached_property
    def title(self) -> str:
        """The first heading: "# 3. Online softmax" -> "Online softmax"."""
        return re.sub(r"^# \d+\. ", "", next(c.text for c in self.cells if c.kind == "markdown").splitlines()[0])

    @cached_property
    def needs(self) -> str:
        """ "interpreter" (Triton on a CPU), "compiler" (Triton's, without running), or ""."""
        found = re.search(r"^# needs: (\w+)", self.path.read_text(encoding="utf-8"), re.M)
        return found[1] if found else ""

    def beside(self, folder: str) -> Path:
        """The lesson's file in exercises, checks or solutions."""
        return self.path.parent / folder / f"{self.number:02}.py"


def parse(source: str) -> list[Cell]:
    """
    >>> [(cell.kind, cell.text) for cell in parse("# %% [markdown]\\n# # Title\\n# text\\n# %%\\nx = 1\\n")]
    [('markdown', '# Title\\ntext'), ('code', 'x = 1')]
    """
    cells = []
    kind, lines, first = "", [], 0
    for number, line in enumerate([*source.splitlines(), "# %%"], 1):
        if not line.startswith("# %%"):
            lines.append(line)
            continue
        text = "\n".join(line.removeprefix("#").removeprefix(" ") if kind == "markdown" else line for line in lines)
        if kind and text.strip():
            cells.append(Cell(kind, text.strip("\n") if kind == "code" else text.strip(), first))
        kind, lines, first = ("markdown" if "[markdown]" in line else "code"), [], number + 1
    return cells


def lessons() -> list[Lesson]:
    return [Lesson(int(path.name[:2]), path) for path in sorted(home().glob("[0-9][0-9]_*.py"))]


def lesson(number: int) -> Lesson:
    found = {one.number: one for one in lessons()}
    if number not in found:
        raise AttentionError("lesson", number, f"1 to {max(found)}")
    return found[number]
