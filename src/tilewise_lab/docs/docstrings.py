"""Docstrings as Sphinx reads them. Ours are almost Markdown, with sections in Google's style (Args, Returns, Raises).

>>> lines = ["Adds `a` to *it*.", "", "a, b: numbers,", "    of any kind"]
>>> print("\\n".join(filter(None, restructured(lines, ["x", "a", "b"]))))
Adds :py:obj:`a` to \\*it\\*.
:param x:
:param a: numbers, of any kind
:param b: see ``a``
>>> print("\\n".join(restructured(["Args:", "    x: a *number*", "Returns:", "    `x`"], ["x"])))
:param x: a \\*number\\*
:returns: :py:obj:`x`
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import Any

NAME = r"\w+(?: \([^)]*\))?"
PARAMETER = re.compile(rf"^({NAME}(?:, {NAME})*): (.*)")
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$")


def process(_app: Any, _what: str, _name: str, x: Any, _options: Any, lines: list[str]) -> None:
    """For Sphinx's event "autodoc-process-docstring": changes the lines in place."""
    try:
        names: Collection[str] = list(inspect.signature(x).parameters) if callable(x) else ()
    except (TypeError, ValueError):
        names = ()
    lines[:] = restructured(lines, names)


def skip(_app: Any, _what: str, _name: str, x: Any, skipped: bool, _options: Any) -> bool | None:
    """For "autodoc-skip-member": fields of a NamedTuple are its parameters, and are not told again."""
    return True if str(getattr(x, "__doc__", "")).startswith("Alias for field number") else None


def restructured(lines: Sequence[str], parameters: Collection[str]) -> list[str]:
    """reStructuredText of a docstring: paragraphs, examples, indented blocks as they are; then the parameters."""
    made: list[str] = []
    fields: dict[str, str] = {}
    last: list[str] = []
    for block in blocks(lines):
        section = SECTION.match(block[0])
        if section:
            content = list(entries([line.removeprefix("    ") for line in block[1:]]))
            if section[1] in ("Args", "Attributes"):
                fields |= {name: inline(text) for name, _, text in (entry.partition(": ") for entry in content)}
            elif section[1] == "Returns":
                last.append(f":returns: {inline(' '.join(content))}")
            else:
                last += [f":raises {name}: {inline(text)}" for name, _, text in (x.partition(": ") for x in content)]
            continue
        if block[0].startswith(">>>"):
            made += block
        elif block[0].startswith(" "):
            made += ["::", "", *("    " + line for line in block)]
        else:
            for entry in entries(block):
                found = described(entry, parameters)
                fields |= found
                if not found:
                    made += [""] * entry.startswith("- ") + [inline(entry)]
        made.append("")
    names = [*parameters, *(name for name in fields if name not in parameters)]
    return made + [f":param {name}: {fields.get(name, '')}".rstrip() for name in names if fields] + last


def blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Paragraphs. A section of Google's style ends where the indentation does."""
    for blank, group in groupby(lines, key=lambda line: not line.strip()):
        if blank:
            continue
        block: list[str] = []
        for line in group:
            if block and (SECTION.match(line) or (SECTION.match(block[0]) and not line.startswith(" "))):
                yield block
                block = []
            block.append(line)
        yield block


def entries(block: Sequence[str]) -> Iterator[str]:
    """The lines of a block, each with what hangs below it."""
    entry = block[0]
    for line in block[1:]:
        if line.startswith(" "):
            entry += " " + line.strip()
        else:
            yield entry
            entry = line
    yield entry


def described(entry: str, parameters: Collection[str]) -> dict[str, str]:
    """What a line says of parameters, if it is one that does: of the first, to which the others refer."""
    found = PARAMETER.match(entry)
    names = [name.partition(" ")[0] for name in re.findall(NAME, found[1])] if found else []
    if not found or not set(names) <= set(parameters):
        return {}
    return {names[0]: inline(found[2])} | dict.fromkeys(names[1:], f"see ``{names[0]}``")


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
