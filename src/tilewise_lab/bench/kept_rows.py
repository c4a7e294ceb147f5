"""Single measured numbers in documents, each read from the note or file of `bench/results/` that has it.

`bench/results/rows.json` has one case per row: where its number stands (a file, and a pattern that matches once in it),
the peer and the commit. `<!-- rows:TABLE -->` to `<!-- /rows:TABLE -->` in a document becomes the table of those cases,
and `<!-- number:KEY -->` to `<!-- /number -->` one number. `tilewise bench --readme` writes them, and a test compares.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path

from tilewise.errors import AttentionError

RESULTS = Path("bench/results")
FILE = RESULTS / "rows.json"
TABLE = re.compile(r"(<!-- rows:([\w-]+) -->\n)(.*?)(<!-- /rows:\2 -->)", re.S)
NUMBER = re.compile(r"(<!-- number:([\w-]+) -->)(.*?)(<!-- /number -->)", re.S)
NOTES = re.compile(r"(<!-- notes -->\n).*?(<!-- /notes -->)", re.S)
HEADS = {
    "en": ("case", "beside", "times as fast", "measured"),
    "zh": ("情形", "对照", "速度之比", "测量"),
}


@dataclass(frozen=True)
class Row:
    """A case. `find` matches once in the file `source`; its group is the number. `tables`: where the case stands."""

    key: str
    tables: tuple[str, ...]
    case: str
    zh: str
    peer: str
    source: str
    find: str
    commit: str = ""
    digits: int = 2

    @property
    def date(self) -> str:
        return self.source[:10]

    def number(self, root: Path) -> str:
        text = _text(root / RESULTS / self.source)
        found = re.findall(self.find, text, re.M)
        if len(found) != 1:
            raise AttentionError(
                f"{FILE.as_posix()}: {self.key}", f"{len(found)} matches of {self.find!r} in {self.source}", "one"
            )
        if self.commit and self.commit not in text:
            raise AttentionError(
                f"{FILE.as_posix()}: {self.key}", f"commit {self.commit}", f"a commit that {self.source} names"
            )
        return rounded(found[0], self.digits)


def rounded(number: str, digits: int) -> str:
    """
    >>> rounded("1.075", 2), rounded("1573.5", 0), rounded("2", 2)
    ('1.08', '1574', '2.00')
    """
    return str(Decimal(number).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def load(root: Path) -> list[Row]:
    """The rows of the file, in its order; none where there is no file. A source like "*cpu*.json" is the newest such
    file; tables leave the row out as long as there is none."""
    path = root / FILE
    rows = []
    for raw in json.loads(path.read_text(encoding="utf-8")) if path.exists() else ():
        raw["tables"] = tuple(raw["tables"])
        if "*" in raw["source"]:
            found = sorted((root / RESULTS).glob(raw["source"]))
            raw["source"] = found[-1].name if found else raw["source"]
        rows.append(Row(**raw))
    return rows


def fill(text: str, document: str, root: Path, rows: list[Row]) -> str:
    """A document with its tables and numbers, as they should be."""
    by_key = {row.key: row for row in rows}
    language = "zh" if document.startswith("docs/zh/") else "en"

    def table(match: re.Match[str]) -> str:
        chosen = [row for row in rows if match[2] in row.tables]
        if not chosen:
            raise AttentionError(f"marker in {document}", f"rows:{match[2]}", f"a table of {FILE.as_posix()}")
        return match[1] + "".join(f"{line}\n" for line in lines(chosen, document, root, language)) + match[4]

    def number(match: re.Match[str]) -> str:
        if match[2] not in by_key:
            raise AttentionError(f"marker in {document}", f"number:{match[2]}", f"a key of {FILE.as_posix()}")
        return match[1] + by_key[match[2]].number(root) + match[4]

    text = NOTES.sub(lambda match: match[1] + notes(root) + match[2], text)
    return NUMBER.sub(number, TABLE.sub(table, text))


def documents(root: Path) -> list[Path]:
    """Those that may show numbers."""
    named = (root / "README.md", root / "bench/README.md", root / RESULTS / "README.md")
    return [path for path in (*named, *sorted((root / "docs").rglob("*.md"))) if path.exists()]


def has_markers(text: str) -> bool:
    return any(marker.search(text) for marker in (TABLE, NUMBER, NOTES))


def notes(root: Path) -> str:
    """A list of the notes and of the other files, newest first."""
    files = sorted((root / RESULTS).glob("2*.*"), reverse=True)
    said = []
    for path in files:
        heading = re.match(r"# (.*)", _text(path)) if path.suffix == ".md" else None
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]) if heading else path.stem[11:]
        said.append(f"- {path.name[:10]}: [{title}]({path.name})\n")
    return "".join(said)


def lines(rows: list[Row], document: str, root: Path, language: str) -> Iterator[str]:
    """The lines of a table; none where nothing of it was measured yet."""
    measured = [row for row in rows if "*" not in row.source]
    if measured:
        yield f"| {' | '.join(HEADS[language])} |"
        yield "|---|---|---:|---|"
    for row in measured:
        path = posixpath.relpath((RESULTS / row.source).as_posix(), posixpath.dirname(document) or ".")
        when = f"{row.date}, {row.commit}" if row.commit else row.date
        case = row.zh if language == "zh" else row.case
        yield f"| {case} | {row.peer} | {row.number(root)} | [{when}]({path}) |"


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
