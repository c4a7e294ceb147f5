"""What a function reads from outside (closures, globals, builtins). Functions with equal snapshots are the same mod."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.mods.expr import plain_number

DEPTH = 8  # of functions that call one another
LIBRARIES = ("torch", "math")  # whose names are not rebound
FIXED = (BuiltinFunctionType, str, bytes)
NUMBERS = (bool, int, float)
Path = tuple[tuple[str, Any], ...]  # of globals, cells and attributes by name or number


def outside(function: Callable[..., Any]) -> dict[str, Any]:
    """The current values of the names that the function reads and does not assign."""
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


def is_callable_object(value: Any) -> bool:
    """Whether the value is an object with a `__call__` written in Python, of a class that is not torch's or ours."""
    if isinstance(value, type) or type(value).__module__.partition(".")[0] in (*LIBRARIES, "tilewise"):
        return False
    return any(isinstance(vars(x).get("__call__"), FunctionType) for x in type(value).__mro__)


def name_of(function: Any) -> str:
    """The name of a function, or of an object that can be called.

    >>> from functools import partial
    >>> name_of(partial(name_of, 3)), name_of(lambda: 0), name_of(3)
    ('name_of', '<lambda>', 'int')
    """
    name: str = getattr(getattr(function, "func", function), "__name__", type(function).__name__)
    return name


def plain(value: Any) -> FunctionType | None:
    """The Python function that is traced for a value that a mod calls, if there is one."""
    inner = getattr(value, "function", value) if type(value).__name__ == "Modifier" else value
    return inner if isinstance(inner, FunctionType) and not inner.__module__.startswith("torch") else None


def snapshot(function: Callable[..., Any], tensors: dict[int, Tensor], above: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """All that the meaning of a function depends on. Tensors that it reads from outside are added to `tensors`, by
    their id, and stand in the snapshot by their position there and their kind. `above`: the ids of the functions, and
    (id, names) of the objects, through which this function was reached."""
    code = function.__code__
    above = (*above, id(function))
    reads = [(name, _state(value, code.co_names, tensors, above)) for name, value in outside(function).items()]
    defaults = tuple(_state(x, (), tensors, above) for x in function.__defaults__ or ())
    return code, defaults, *reads


def _state(value: Any, names: tuple[str, ...], tensors: dict[int, Tensor], above: tuple[Any, ...]) -> Any:
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
        return object()  # equal to no other
    if inner is None:
        own: Any = value if kind is ModuleType else (kind, getattr(value, "__name__", None))
    else:
        own = "above" if id(inner) in above else snapshot(inner, tensors, above)
    below = _attributes(value, inner, names)
    return own, *((n, _state(getattr(value, n), names, tensors, (*above, mark))) for n in below)


def _attributes(value: Any, inner: FunctionType | None, names: tuple[str, ...]) -> list[str]:
    """Which of the names are attributes of the value; of a function, only those that were set on it."""
    own = None if inner is None else vars(value)
    return [name for name in names if hasattr(value, name) and (own is None or name in own)]


def _is_fixed(value: Any) -> bool:
    kind = type(value)
    if kind is type or kind is ModuleType:
        home = value.__module__ if kind is type else value.__name__
        return str(home).partition(".")[0] in ("builtins", *LIBRARIES)
    return kind in FIXED


def paths(function: Callable[..., Any], above: tuple[Any, ...] = ()) -> Iterator[Path]:
    """The path from a function to each number and each function that its snapshot contains."""
    code = function.__code__
    cells = {name: n for n, name in enumerate(code.co_freevars)}
    for name, value in outside(function).items():
        step = ("cell", cells[name]) if name in cells else ("global", name)
        for rest in _paths_below(value, code.co_names, (*above, id(function))):
            yield step, *rest


def _paths_below(value: Any, names: tuple[str, ...], above: tuple[Any, ...]) -> Iterator[Path]:
    inner, mark = plain(value), (id(value), names)
    if _is_fixed(value) or isinstance(value, Tensor) or mark in above or len(above) > DEPTH:
        return
    if isinstance(value, NUMBERS):
        yield ()
        return
    if inner is not None and id(inner) not in above:
        step = () if inner is value else (("attribute", "function"),)
        yield step
        yield from ((*step, *rest) for rest in paths(inner, above))
    for name in _attributes(value, inner, names):
        for rest in _paths_below(getattr(value, name), names, (*above, mark)):
            yield ("attribute", name), *rest


def value_at(function: Callable[..., Any], path: Path) -> Any:
    """The current value at the end of a path. torch.compile, which follows it, compiles again when it has changed."""
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


def is_unchanged(function: Callable[..., Any], before: Closed) -> bool:
    """Whether the function has the same code, and its names the same values."""
    now = outside(function)
    return (
        function.__code__ is before.code
        and not function.__defaults__
        and len(now) == len(before.reads)
        and all(now.get(name) is x for name, x in before.reads.items())
    )
