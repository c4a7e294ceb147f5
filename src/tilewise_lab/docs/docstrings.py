"""Docstrings as Sphinx reads them. Ours are almost Markdown, with parameters as `name, name: text`.

>>> print("\\n".join(restructured(["Adds `a` to *it*.", "", "a, b: numbers,", "    of any kind"], {"a", "b"})))
Adds :py:obj:`a` to \\*it\\*.
<BLANKLINE>
:param a: numbers, of any kind
:param b: see `a`
<BLANKLINE>
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import Any

NAME = r"\w+(?: \([^)]*\))?"
PARAMETER = re.compile(rf"^({NAME}(?:, {NAME})*): (.*)")


def process(_app: Any, _what: str, _name: str, x: Any, _options: Any, lines: list[str]) -> None:
    """For Sphinx's event "autodoc-process-docstring": changes the lines in place."""
    try:
        names: Collection[str] = inspect.signature(x).parameters if callable(x) else ()
    except (TypeError, ValueError):
        names = ()
    lines[:] = restructured(lines, names)


def restructured(lines: Sequence[str], parameters: Collection[str]) -> list[str]:
    """reStructuredText of a docstring: paragraphs, examples, indented blocks as they are, parameters as fields."""
    made: list[str] = []
    for blank, group in groupby(lines, key=lambda line: not line.strip()):
        if blank:
            continue
        block = list(group)
        if block[0].startswith(">>>"):
            made += block
        elif block[0].startswith(" "):
            made += ["::", "", *("    " + line for line in block)]
        else:
            made += entries(block, parameters)
        made.append("")
    return made


def entries(block: Sequence[str], parameters: Collection[str]) -> Iterator[str]:
    """The lines of a block, each with what hangs below it; those that describe parameters become fields."""
    whole: list[str] = []
    for line in block:
        if line.startswith(" ") and whole:
            whole[-1] += " " + line.strip()
        else:
            whole.append(line)
    for before, line in zip(["", *whole], whole, strict=False):
        found = PARAMETER.match(line)
        names = [name.partition(" ")[0] for name in re.findall(NAME, found[1])] if found else []
        if found and set(names) <= set(parameters):
            if before and not PARAMETER.match(before):
                yield ""
            first, *others = names
            yield f":param {first}: {inline(found[2])}"
            yield from (f":param {name}: see `{first}`" for name in others)
        else:
            if PARAMETER.match(before) or line.startswith("- "):
                yield ""
            yield inline(line)


def inline(text: str) -> str:
    """
    >>> inline("`q` and `k[i]`: *args, x_ | y")
    ':py:obj:`q` and ``k[i]``: \\\\*args, x\\\\_ \\\\| y'
    """
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    return "".join(coded(part) if part.startswith("`") else escaped(part) for part in parts)


def coded(part: str) -> str:
    name = part.strip("`")
    return f":py:obj:`{name}`" if re.fullmatch(r"[\w.]+", name) and part[1] != "`" else f"``{name.strip()}``"


def escaped(text: str) -> str:
    return re.sub(r"([*|`])|(?<=\w)_(?!\w)", lambda found: "\\" + found[0], text)
