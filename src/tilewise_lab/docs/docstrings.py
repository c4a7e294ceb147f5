"""Docstrings as Sphinx reads them. Ours are almost Markdown, with sections in Google's style (Args, Returns, Raises).

>>> lines = ["Adds `a` to *it*.", "", "a, b: numbers,", "    of any kind"]
>>> print("\\n".join(filter(None, restructured(lines, ["x", "a", "b"]))))
Adds :py:obj:`a` to \\*it\\*.
:param a: numbers, of any kind
:param b: see ``a``
>>> print("\\n".join(restructured(["Args:", "    x: a *number*", "Returns:", "    `x`"], ["x"])))
:param x: a \\*number\\*
:returns: :py:obj:`x`

An entry `options` or `others` that begins with "as in `f`" stands for the parameters that f describes.

The Chinese pages show docstrings in Chinese: `docs/zh/reference.po` has the translation of every paragraph and entry.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import tilewise

Translate = Callable[[str], str]

NAME = r"\w+(?: \([^)]*\))?"
PARAMETER = re.compile(rf"^({NAME}(?:, {NAME})*): (.*)")
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")
PARAMETERS = ("Args", "Attributes")
REST = ("options", "others")  # entries that stand for the parameters of another function
REFERENCE = re.compile(r"as in `([\w.]+)`(\.?$)?")


def process(x: Any, lines: list[str], translate: Translate) -> None:
    """Changes the lines of an object's docstring in place."""
    try:
        names: Collection[str] = list(inspect.signature(x).parameters) if callable(x) else ()
    except (TypeError, ValueError):
        names = ()
    lines[:] = restructured(lines, names, referred(x, texts(lines, names)), translate)


def skip(_app: Any, _what: str, _name: str, x: Any, skipped: bool, _options: Any) -> bool | None:
    """For "autodoc-skip-member": fields of a NamedTuple are its parameters, and are not told again."""
    return True if str(getattr(x, "__doc__", "")).startswith("Alias for field number") else None


def short_defaults(signature: str) -> str:
    """A signature without the defaults of a dataclass that a function makes, and of objects with a long repr.

    >>> short_defaults("(n: int = <factory>, m: M = M(a={1: 2}, b=" + "'x'" * 30 + "), k=(1, 2))")
    '(n: int = ..., m: M = ..., k=(1, 2))'
    """
    signature = re.sub(r"(?<==)( ?)<\w+>", r"\1...", signature)
    return re.sub(
        r"(?<== )[A-Z]\w*\([^()]*(?:\([^()]*\)[^()]*)*\)", lambda x: x[0] if len(x[0]) < 60 else "...", signature
    )


def described(x: Any) -> dict[str, str]:
    """The parameters of a function or class that its docstring explains, or those of its base classes.

    >>> sorted(described(tilewise.plan_kv))[:3]
    ['alibi_slopes', 'backend', 'cache_rows']
    """
    names = list(inspect.signature(x).parameters)
    found: dict[str, str] = {}
    for owner in x.__mro__[:-1] if isinstance(x, type) else (x,):
        lines = inspect.cleandoc(owner.__doc__ or "").splitlines()
        own = texts(lines, names)
        found = referred(owner, own) | own | found
    return {name: text for name, text in found.items() if text}


def referred(x: Any, own: Mapping[str, str]) -> dict[str, str]:
    """The parameters that a docstring leaves to another function, with what that one says of them."""
    names = [match[1] for name in REST if (match := REFERENCE.match(own.get(name, "")))]
    module = sys.modules.get(getattr(x, "__module__", ""), tilewise)
    found: dict[str, str] = {}
    for name in names:
        other: Any = getattr(module, name, None)
        if other is None or other is x:
            other = tilewise
            for part in name.removeprefix("tilewise.").split("."):
                other = getattr(other, part)
        found |= described(other)
    return found


def texts(lines: Sequence[str], parameters: Collection[str]) -> dict[str, str]:
    """What the lines of a docstring say of each parameter."""
    found: dict[str, str] = {}
    for block in blocks(lines):
        section = SECTION.match(block[0])
        if section and section[1] in PARAMETERS:
            content = entries([line.removeprefix("    ") for line in block[1:]])
            found |= {name: text for name, _, text in (entry.partition(": ") for entry in content)}
        elif not section and not block[0].startswith((">>>", " ")):
            for entry in entries(block):
                found |= in_paragraph(entry, parameters)
    return found


def restructured(
    lines: Sequence[str],
    parameters: Collection[str],
    others: Mapping[str, str] | None = None,
    translate: Translate = str,
) -> list[str]:
    """reStructuredText of a docstring: paragraphs, examples, indented blocks as they are; then the parameters.

    others: texts of parameters that the docstring does not explain.
    """

    def inline(text: str) -> str:
        return as_inline(translate(text))

    made: list[str] = []
    last: list[str] = []
    for block in blocks(lines):
        section = SECTION.match(block[0])
        if section:
            content = list(entries([line.removeprefix("    ") for line in block[1:]]))
            if section[1] in ("Returns", "Yields"):
                last.append(f":returns: {inline(' '.join(content))}")
            elif section[1] == "Raises":
                last += [f":raises {name}: {inline(text)}" for name, _, text in (x.partition(": ") for x in content)]
            continue
        if block[0].startswith(">>>"):
            made += block
        elif block[0].startswith(" "):
            made += ["::", "", *("    " + line for line in block)]
        else:
            for text in paragraphs([x for x in entries(block) if not in_paragraph(x, parameters)]):
                made += [""] * text.startswith("- ") + [inline(text)]
        made.append("")
    fields = {name: text for name, text in (others or {}).items() if name in parameters} | texts(lines, parameters)
    for name in REST:  # one that says no more than "as in `f`"
        match = REFERENCE.match(fields.get(name, ""))
        if match and match[2] is not None and name not in parameters:
            del fields[name]
    names = [*parameters, *(name for name in fields if name not in parameters)]
    return made + [f":param {name}: {inline(fields[name])}" for name in names if fields.get(name)] + last


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


def paragraphs(block: Sequence[str]) -> Iterator[str]:
    """The lines of a block joined, but for the items of a list.

    >>> list(paragraphs(["Two", "lines:", "- one", "- two"]))
    ['Two lines:', '- one', '- two']
    """
    for is_item, lines in groupby(block, key=lambda line: line.startswith("- ")):
        group = list(lines)
        yield from group if is_item else [" ".join(group)]


def in_paragraph(entry: str, parameters: Collection[str]) -> dict[str, str]:
    """What a line of a paragraph says of parameters, if it does: of the first, to which the others refer."""
    found = PARAMETER.match(entry)
    names = [name.partition(" ")[0] for name in re.findall(NAME, found[1])] if found else []
    if not found or not set(names) <= set(parameters):
        return {}
    return {names[0]: found[2]} | dict.fromkeys(names[1:], f"see ``{names[0]}``")


def as_inline(text: str) -> str:
    """
    >>> as_inline("`q` and `k[i]`: *args, x_ | y")
    ':py:obj:`q` and ``k[i]``: \\\\*args, x\\\\_ \\\\| y'
    >>> as_inline("`q`（可选）")  # reStructuredText ends code before a space or ASCII punctuation alone
    ':py:obj:`q`\\\\ （可选）'
    """
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    made = "".join(coded(part) if part.startswith("`") else escaped(part) for part in parts)
    return re.sub(r"(?<=`)(?=[（《“])", r"\\ ", made)


def coded(part: str) -> str:
    name = part.strip("`")
    return f":py:obj:`{name}`" if re.fullmatch(r"[\w.]+", name) and part[1] != "`" else f"``{name.strip()}``"


def escaped(text: str) -> str:
    return re.sub(r"([*|`])|(?<=\w)_(?!\w)", lambda found: "\\" + found[0], text)
