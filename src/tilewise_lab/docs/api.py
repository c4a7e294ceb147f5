"""The pages of a module, from what it says of itself."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from html import escape
from importlib import import_module
from types import ModuleType
from typing import Any

from tilewise_lab.docs.text import Link, block, docstring

# What a reader looks things up in; kernels and commands are read in their source.
PACKAGES = (
    "tilewise",
    "tilewise.mods",
    "tilewise.reference",
    "tilewise_lab.trace",
    "tilewise_lab.machine",
    "tilewise.costs",
)
SKIPPED = {"command", "show", "plain", "check", "compiled", "explanation", "expr", "parse", "program"}
SKIPPED |= {"builtin", "blocks"}


def modules() -> Iterator[ModuleType]:
    """Each package, then its modules, in the order of their names."""
    for package in PACKAGES:
        found = import_module(package)
        yield found
        if package == "tilewise":
            names = "spec", "checks", "kernels.portable.tiles", "kernels.hopper.tiles"
            yield from (import_module(f"tilewise.{name}") for name in names)
            continue
        others = (name for _, name, _ in pkgutil.iter_modules(found.__path__) if name not in SKIPPED)
        yield from (import_module(f"{package}.{name}") for name in others)


def members(module: ModuleType) -> dict[str, Any]:
    """The public names of a module that are its own, or that it lists in `__all__`, modules apart."""
    names = getattr(module, "__all__", None)
    if names is not None:
        return {name: x for name in names if not inspect.ismodule(x := getattr(module, name))}
    public = {name: x for name, x in vars(module).items() if not name.startswith("_")}
    return {
        name: x
        for name, x in public.items()
        if (inspect.isfunction(x) or inspect.isclass(x)) and x.__module__ == module.__name__
    }


def body(module: ModuleType, link: Link) -> str:
    own = members(module)
    parts = [f"<h1><code>{module.__name__}</code></h1>", docstring(inspect.getdoc(module) or "", link)]
    if len(own) > 1:
        items = "".join(f'<li><a href="#{name}"><code>{escape(name)}</code></a></li>' for name in own)
        parts.append(f'<ul class="names">{items}</ul>')
    parts += [entry(name, x, link) for name, x in own.items()]
    return "\n".join(parts)


def entry(name: str, x: Any, link: Link) -> str:
    text = x.__doc__ if inspect.isclass(x) or callable(x) else None
    head = f'<section class="entry"><h2 id="{name}"><code>{escape(name)}</code></h2>{block(signature(name, x))}'
    methods = ""
    if inspect.isclass(x):
        own = {
            key: f
            for key, f in vars(x).items()
            if not key.startswith("_") and (inspect.isfunction(f) or isinstance(f, property))
        }
        methods = "".join(method(key, f, link) for key, f in own.items() if getattr(f, "__doc__", None))
    return head + (docstring(inspect.cleandoc(text), link) if text else "") + methods + "</section>"


def method(name: str, f: Any, link: Link) -> str:
    line = name if isinstance(f, property) else signature(name, f)
    return f'<div class="method">{block(line)}{docstring(inspect.cleandoc(f.__doc__), link)}</div>'


def signature(name: str, x: Any) -> str:
    """A call as it would be written; one argument a line where it is long."""
    if not callable(x):
        return f"{name} = {x!r}"[:200]
    word = "class " if inspect.isclass(x) else "def " if inspect.isfunction(x) else ""
    try:
        told = str(inspect.signature(x)).replace("tilewise.", "").replace("torch.", "")
    except (TypeError, ValueError):
        return f"{word}{name}"
    whole = f"{word}{name}{told}".replace("'", "")
    if len(whole) <= 96:
        return whole
    inside, close, result = whole.partition("(")[2].rpartition(")")
    return f"{word}{name}(\n    " + ",\n    ".join(_arguments(inside)) + f",\n{close}{result}"


def _arguments(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets.

    >>> list(_arguments("a: tuple[int, int], b=(1, 2)"))
    ['a: tuple[int, int]', 'b=(1, 2)']
    """
    depth, start = 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    if text[start:].strip():
        yield text[start:].strip()
