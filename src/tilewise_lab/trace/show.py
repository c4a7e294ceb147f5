"""Tables in a terminal: with `rich` where it is installed, else in plain columns."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence

from tilewise_lab.language import BOTH, LANGUAGES, language, only, say

RIGHT, WRONG, NOTE = "green", "red", "dim"


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]], styles: Sequence[str] = ()) -> None:
    """Print a table; `styles` colour its rows where colours can be had.

    >>> table("", ["i", "m"], [[1, "3"], [2, "3"]])
    i  m
    1  3
    2  3
    """
    cells = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and _rich_table(title, headers, cells, styles):
        return
    if language() == BOTH:  # each with columns as wide as its own words
        whole = [[title], list(headers), *cells]
        made = [_plain(*([only(cell, lang) for cell in row] for row in whole)) for lang in LANGUAGES]
        print(say(*made))
    else:
        print(_plain([title], list(headers), *cells))


def _plain(title: list[str], *rows: list[str]) -> str:
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell + " " * (most - width(cell)) for cell, most in zip(row, widths, strict=True)) for row in rows
    ]
    return "\n".join([*filter(None, title), *(line.rstrip() for line in lines)])


def width(text: str) -> int:
    """In columns of a terminal: Chinese characters take two.

    >>> width("softmax 课")
    10
    """
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _rich_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        return False
    made = Table(title=title or None, title_justify="left", title_style="bold")
    for header in headers:
        made.add_column(header)
    for index, row in enumerate(rows):
        made.add_row(*row, style=styles[index] if styles else None)
    Console().print(made)
    return True


def number(x: float | str, digits: int = 6) -> str:
    """
    >>> number(1.2034383), number("-inf"), number(3.0)
    ('1.203438', '-inf', '3')
    """
    return x if isinstance(x, str) else f"{x:.{digits}f}".rstrip("0").rstrip(".")


def numbers(xs: Sequence[float | str], digits: int = 3) -> str:
    return "[" + " ".join(number(x, digits) for x in xs) + "]"
