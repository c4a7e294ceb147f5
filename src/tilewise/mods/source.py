"""Where a function's text is, and what it reads from outside: closures, globals, builtins."""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.errors import AttentionError
from tilewise.mods.expr import plain_number

DEPTH = 8  # functions inlined into one another
LIBRARIES = ("torch", "math")  # whose names stand for what they always did
FIXED = (BuiltinFunctionType, str, bytes)
NUMBERS = (bool, int, float)
Path = tuple[tuple[str, Any], ...]  # of globals, cells and attributes by name or number


class Definition(NamedTuple):
    """A `def` or a lambda, with the lines of the file it stands in."""

    node: ast.FunctionDef | ast.Lambda
    lines: list[str]


def definition(function: Callable[..., Any]) -> Definition | None:
    """None where Python keeps no source: of `python -c`, of its standard input, of `exec`."""
    try:
        lines, _ = inspect.findsource(function)
        tree = _tree("".join(lines))
    except (OSError, TypeError, SyntaxError):
        return None
    code = function.__code__
    if code.co_name != "<lambda>":
        for x in ast.walk(tree):
            if isinstance(x, ast.FunctionDef) and x.name == code.co_name:
                first = x.decorator_list[0].lineno if x.decorator_list else x.lineno
                if first == code.co_firstlineno:
                    return Definition(x, lines)
        return None
    lambdas = [x for x in ast.walk(tree) if isinstance(x, ast.Lambda) and x.lineno == code.co_firstlineno]
    if len(lambdas) > 1:
        places: list[Any] = [p for p in code.co_positions() if None not in p and p[2:] != (0, 0)]
        lambdas = [x for x in lambdas if places and all(_holds(x.body, *p) for p in places)]
        lambdas = [x for x in lambdas if not any(x is not y and _holds(x, *_place(y)) for y in lambdas)]
    if not lambdas:
        line = lines[code.co_firstlineno - 1].strip()
        raise AttentionError(f"a mod in `{line}`", "lambdas that cannot be told apart", "one to a line, or a `def`")
    return Definition(lambdas[0], lines)


@lru_cache(8)
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


def _place(x: ast.expr) -> tuple[int, int, int, int]:
    """As `co_positions` has it: first and last line, first and last column."""
    return x.lineno, x.end_lineno or x.lineno, x.col_offset, x.end_col_offset or x.col_offset


def _holds(x: ast.expr, first: int, last: int, left: int, right: int) -> bool:
    top, bottom, start, end = _place(x)
    return (top, start) <= (first, left) and (last, right) <= (bottom, end)


def outside(function: Callable[..., Any]) -> dict[str, Any]:
    """What the names that the function does not assign stand for just now."""
    code = function.__code__
    space = function.__globals__
    builtins = space["__builtins__"]
    known = vars(builtins) if isinstance(builtins, ModuleType) else builtins
    found = {}
    for name in code.co_names:
        if name in space:
            found[name] = space[name]
        elif name in known:
            found[name] = known[name]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            found.pop(name, None)
    return found


def is_called(value: Any) -> bool:
    """Whether it is an object of somebody's own class that can be called."""
    if isinstance(value, type) or type(value).__module__.partition(".")[0] in (*LIBRARIES, "tilewise"):
        return False
    return any(isinstance(vars(x).get("__call__"), FunctionType) for x in type(value).__mro__)


def name_of(function: Any) -> str:
    """What to call a function, or what can be called like one.

    >>> from functools import partial
    >>> name_of(partial(name_of, 3)), name_of(lambda: 0), name_of(3)
    ('name_of', '<lambda>', 'int')
    """
    name: str = getattr(getattr(function, "func", function), "__name__", type(function).__name__)
    return name


def plain(value: Any) -> FunctionType | None:
    """The Python function that a mod would inline for a value that it calls, if any."""
    inner = getattr(value, "function", value) if type(value).__name__ == "Modifier" else value
    return inner if isinstance(inner, FunctionType) and not inner.__module__.startswith("torch") else None


def snapshot(function: Callable[..., Any], tensors: dict[int, Tensor], above: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """All that the meaning of a function rests on: equal snapshots, equal programs. Tensors that it reads from outside
    are added to `tensors`, by their id, and stand in it by their place there and their kind. `above`: how
    this one was reached, the ids of functions, and (id, names) of objects that were asked for these attributes."""
    code = function.__code__
    above = (*above, id(function))
    reads = [(name, _worth(value, code.co_names, tensors, above)) for name, value in outside(function).items()]
    defaults = tuple(_worth(x, (), tensors, above) for x in function.__defaults__ or ())
    return code, defaults, *reads


def paths(function: Callable[..., Any], above: tuple[Any, ...] = ()) -> Iterator[Path]:
    """The way from a function to each number and each function that its snapshot holds."""
    code = function.__code__
    cells = {name: n for n, name in enumerate(code.co_freevars)}
    for name, value in outside(function).items():
        step = ("cell", cells[name]) if name in cells else ("global", name)
        for rest in _below(value, code.co_names, (*above, id(function))):
            yield step, *rest


def _below(value: Any, names: tuple[str, ...], above: tuple[Any, ...]) -> Iterator[Path]:
    inner, mark = plain(value), (id(value), names)
    if _is_fixed(value) or isinstance(value, Tensor) or mark in above or len(above) > DEPTH:
        return
    if isinstance(value, NUMBERS):
        yield ()
        return
    if inner is not None and id(inner) not in above:
        way = () if inner is value else (("attribute", "function"),)
        yield way
        yield from ((*way, *rest) for rest in paths(inner, above))
    for name in _attributes(value, inner, names):
        for rest in _below(getattr(value, name), names, (*above, mark)):
            yield ("attribute", name), *rest


def _attributes(value: Any, inner: FunctionType | None, names: tuple[str, ...]) -> list[str]:
    """Which of the names are attributes of the value; of a function those alone that were set on it."""
    own = None if inner is None else vars(value)
    return [name for name in names if hasattr(value, name) and (own is None or name in own)]


def found_at(function: Callable[..., Any], path: Path) -> Any:
    """What lies at the end of a path now. torch.compile, which follows it, compiles again when that has changed."""
    value: Any = function
    for kind, name in path:
        if kind == "global":
            value = value.__globals__[name]
        elif kind == "cell":
            value = value.__closure__[name].cell_contents
        else:
            value = getattr(value, name)
    if isinstance(value, float):
        return value.hex()  # torch.compile would take the number itself for a variable
    return operator.index(value) if isinstance(value, int) else value


class Closed(NamedTuple):
    """A function that reads nothing from outside but builtins and libraries: its code, and what it reads."""

    code: CodeType
    reads: dict[str, Any]


def closed(function: Callable[..., Any]) -> Closed | None:
    """None if the function has defaults, or reads something else."""
    reads = outside(function)
    if function.__defaults__ or not all(map(_is_fixed, reads.values())):
        return None
    return Closed(function.__code__, reads)


def is_still(function: Callable[..., Any], before: Closed) -> bool:
    """Whether the function has the same code, and its names stand for the same objects."""
    now = outside(function)
    return (
        function.__code__ is before.code
        and not function.__defaults__
        and len(now) == len(before.reads)
        and all(now.get(name) is x for name, x in before.reads.items())
    )


def _is_fixed(value: Any) -> bool:
    kind = type(value)
    if kind is type or kind is ModuleType:
        home = value.__module__ if kind is type else value.__name__
        return str(home).partition(".")[0] in ("builtins", *LIBRARIES)
    return kind in FIXED


def _worth(value: Any, names: tuple[str, ...], tensors: dict[int, Tensor], above: tuple[Any, ...]) -> Any:
    kind = type(value)
    if isinstance(value, NUMBERS):
        return kind, repr(plain_number(value))
    if _is_fixed(value):
        return value
    if isinstance(value, Tensor):
        tensors.setdefault(id(value), value)
        return "tensor", list(tensors).index(id(value)), value.dim(), value.dtype
    inner, mark = plain(value), (id(value), names)
    if mark in above:
        return "above"
    if len(above) > DEPTH:
        return object()  # unlike anything remembered
    if inner is None:
        own: Any = value if kind is ModuleType else (kind, getattr(value, "__name__", None))
    else:
        own = "above" if id(inner) in above else snapshot(inner, tensors, above)
    below = _attributes(value, inner, names)
    return own, *((n, _worth(getattr(value, n), names, tensors, (*above, mark))) for n in below)
