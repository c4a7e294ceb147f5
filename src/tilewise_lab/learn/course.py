"""Lessons: where they are, what is in them.

A lesson is a script of `# %%` cells; Markdown cells are comments. Its words are there twice, in cells marked
`# %% [markdown]` and, right behind each, `# %% [markdown] lang="zh"`; its code once, with
`say(en, zh)` where it speaks. Cells marked `# %% tags=["check"]` hold the assertions, those marked
`# %% tags=["figure"]` the code of figures: they run, and are folded. Formulas are LaTeX, `$..$` and `$$..$$`.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tilewise.errors import AttentionError


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
    lang: str = ""  # of words: "en" or "zh"
    tag: str = ""  # of code that is folded: "check" or "figure"

    @property
    def check(self) -> bool:
        return self.tag == "check"

    def read_in(self, lang: str) -> str:
        """The cell as a reader of one language gets it."""
        return self.text if self.kind == "markdown" else spoken(self.text, lang)


@dataclass(frozen=True)
class Lesson:
    number: int
    path: Path

    @cached_property
    def all_cells(self) -> list[Cell]:
        return parse(self.path.read_text(encoding="utf-8"))

    def cells_in(self, lang: str) -> list[Cell]:
        """The words in one language, and the code."""
        return [cell for cell in self.all_cells if cell.lang in ("", lang)]

    @property
    def cells(self) -> list[Cell]:
        return self.cells_in("en")

    def title_in(self, lang: str) -> str:
        """The first heading: "# 3. Online softmax" -> "Online softmax"."""
        return re.sub(r"^# \d+\. ", "", next(c.text for c in self.cells_in(lang) if c.lang).splitlines()[0])

    @property
    def title(self) -> str:
        return self.title_in("en")

    @cached_property
    def needs(self) -> str:
        """ "interpreter" (Triton on a CPU), "compiler" (Triton's, without running), or ""."""
        found = re.search(r"^# needs: (\w+)", self.path.read_text(encoding="utf-8"), re.M)
        return found[1] if found else ""

    def beside(self, folder: str) -> Path:
        """The lesson's file in exercises, checks or solutions."""
        return self.path.parent / folder / f"{self.number:02}.py"


MARKER = re.compile(r'# %%(?: (\[markdown\])(?: lang="(\w+)")?)?(?: tags=\["(\w+)"\])?')
COLUMNS = 78  # of code: a terminal of 80, less the two that the code is indented by


def parse(source: str) -> list[Cell]:
    """
    >>> source = '# %% [markdown]\\n# # Title\\n# %% [markdown] lang="zh"\\n# # 标题\\n# %%\\nx = 1\\n'
    >>> [(cell.kind, cell.lang, cell.text) for cell in parse(source)]
    [('markdown', 'en', '# Title'), ('markdown', 'zh', '# 标题'), ('code', '', 'x = 1')]
    >>> [cell.tag for cell in parse('# %%\\nx = 1\\n# %% tags=["check"]\\nassert x\\n')]
    ['', 'check']
    """
    cells = []
    kind, lang, tag, lines, first = "", "", "", [], 0
    for number, line in enumerate([*source.splitlines(), "# %%"], 1):
        marker = MARKER.match(line)
        if not marker:
            lines.append(line)
            continue
        text = "\n".join(line.removeprefix("#").removeprefix(" ") if lang else line for line in lines)
        if kind and text.strip():
            blank = 0 if lang else len(text) - len(text.lstrip("\n"))
            text = text.strip("\n") if kind == "code" else text.strip()
            cells.append(Cell(kind, text, first + blank, lang, tag))
        words, chosen, tagged = marker.groups()
        kind, lang = ("markdown", chosen or "en") if words else ("code", "")
        lines, first, tag = [], number + 1, tagged or ""
    return cells


def chosen(source: str, lang: str) -> str:
    """An exercise in one language: its docstrings hold both, with --- between them.

    >>> quotes = 3 * chr(34)
    >>> print(chosen(f"{quotes}English --- 中文{quotes}", "zh").strip(chr(34)))
    中文
    """

    def one(both: re.Match[str]) -> str:
        english, between, chinese = both.groups()
        text = (chinese if lang == "zh" else english).rstrip()
        indent = between.rpartition("\n")[2]
        return f'"""{text}' + (f"\n{indent}" if "\n" in text else "") + '"""'

    return re.sub(r'"""((?:(?!""").)*?)(\s+)---\s+(.*?)"""', one, source, flags=re.S)


def spoken(code: str, lang: str) -> str:
    """Code in one language: every `say(en, zh)` becomes the text in that language.

    >>> print(spoken('print(say(f"{n} tiles", f"{n} 块"))', "zh"))
    print(f"{n} 块")
    """
    lines = code.encode().splitlines(keepends=True)  # as ast counts columns

    def at(line: int | None, column: int | None) -> int:
        return sum(map(len, lines[: (line or 1) - 1])) + (column or 0)

    def place(node: ast.expr) -> slice:
        return slice(at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset))

    made = code.encode()
    nodes = list(ast.walk(ast.parse(code)))
    enclosed = {id(x) for node in nodes if isinstance(node, ast.Call) for x in node.args}
    enclosed |= {id(x) for node in nodes if isinstance(node, ast.List | ast.Tuple) for x in node.elts}
    said = [x for x in nodes if isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id == "say"]
    for call in sorted(said, key=lambda call: place(call).start, reverse=True):  # what is behind stays where it is
        node = call.args[lang == "zh"]
        kept = made[place(node)]
        first = lines[call.lineno - 1]
        indent = b" " * (len(first) - len(first.lstrip()))
        if isinstance(node, ast.List):  # as far to the left as the call was
            there = lines[node.lineno - 1]
            shift = len(there) - len(there.lstrip()) - len(indent)
            kept = kept.replace(b"\n" + b" " * shift, b"\n")
        elif node.end_lineno != node.lineno:  # strings, one below the other
            inner = indent if id(call) in enclosed else indent + b"    "
            kept = (b"\n" + inner).join(part.strip() for part in kept.split(b"\n"))
            kept = kept if id(call) in enclosed else b"(\n" + inner + kept + b"\n" + indent + b")"
        made = made[: place(call).start] + kept + made[place(call).stop :]
    text = re.sub(r"(?m)^(from tilewise_lab\.learn import .*), say\b", r"\1", made.decode())
    return re.sub(r"(?m)^( *)(.*\()\n +(.*[^,\n])\n *\)$", _joined, text)


def _joined(call: re.Match[str]) -> str:
    indent, opening, argument = call.groups()
    line = f"{indent}{opening}{argument})"
    return line if width(line) <= COLUMNS else call[0]


def width(line: str) -> int:
    """The columns that a line takes in a terminal: a Chinese letter takes two.

    >>> width("x = 块")
    6
    """
    return sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in line)


def lessons() -> list[Lesson]:
    return [Lesson(int(path.name[:2]), path) for path in sorted(home().glob("[0-9][0-9]_*.py"))]


def lesson(number: int) -> Lesson:
    found = {one.number: one for one in lessons()}
    if number not in found:
        raise AttentionError("lesson", number, f"1 to {max(found)}")
    return found[number]
