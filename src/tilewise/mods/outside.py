"""What a function reads from outside (globals, closures, attributes): recorded while it is traced, compared later.

A trace gives the same program as long as every value that it read has the same state: a number its type and value, a
tensor its kind and which of the tensors it is, a function its code.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .expr import plain_number
from .functions import Captured
from .program import kind_of

LIBRARIES = ("torch", "math")  # whose names are not rebound
NUMBERS = (bool, int, float)
Step = tuple[str, Any]
Path = tuple[Step, ...]  # how a value is reached: from the functions of a mod, by items, globals, cells and attributes


class Unreadable(NamedTuple):
    """In place of a value that cannot be read: a name that is not assigned, a property that raises."""

    kind: type[Exception]
    text: str


def follow(value: Any, path: Path) -> Any:
    """The value at the end of a path from `value`."""
    for kind, name in path:
        if kind == "item":
            value = value[name]
        elif kind == "attribute":
            value = getattr(value, name)
        elif kind == "global":
            space = value.__globals__
            value = space[name] if name in space else value.__builtins__[name]
        else:
            value = value.__closure__[name].cell_contents
    return value


def name_step(function: Any, name: str) -> Step:
    """The step from a function to what a name means in it."""
    cells = function.__code__.co_freevars
    return ("cell", cells.index(name)) if name in cells else ("global", name)


def values_at(functions: tuple[Any, ...], paths: Sequence[Path]) -> list[Any]:
    """The current values at the ends of paths."""
    found = []
    for path in paths:
        try:
            found.append(follow(functions, path))
        except Exception as error:
            found.append(Unreadable(type(error), str(error)))
    return found


def compiled_value(functions: tuple[Any, ...], path: Path) -> Any:
    """The current number or function at the end of a path. torch.compile, which follows it, compiles again when it has
    changed."""
    value = follow(functions, path)
    if isinstance(value, float):
        return value.hex()  # torch.compile would take the number itself for a variable
    return operator.index(value) if isinstance(value, int) else value


def states(values: Sequence[Any]) -> tuple[Any, ...]:
    """What a trace depends on of each value that it read."""
    tensors: dict[int, int] = {}
    return tuple([_state(value, tensors) for value in values])


def _state(value: Any, tensors: dict[int, int]) -> Any:
    if isinstance(value, NUMBERS):
        return type(value), repr(plain_number(value))
    if isinstance(value, Tensor):
        return "tensor", tensors.setdefault(id(value), len(tensors)), value.dim(), value.dtype, value.layout
    if isinstance(value, (CodeType, Unreadable, torch.dtype)) or is_fixed(value):
        return value
    if isinstance(value, tuple):  # the defaults of a function, whose elements have paths of their own
        return len(value)
    return type(value), str(getattr(value, "__name__", None)) if callable(value) else None


class Reads:
    """What a trace has read from outside.

    Attributes:
        values: by their paths.
        tensors: those that it reads, by their id, with what stands for them in the expression.
        complete: whether `values` has all that the trace depends on. If not, its program is not used again.
    """

    def __init__(self, first: int = 0) -> None:
        """`first`: the position of the first tensor; arguments of the mod come before."""
        self.values: dict[Path, Any] = {}
        self.tensors: dict[int, tuple[Tensor, Captured]] = {}
        self.complete = True
        self._first = first

    def record(self, path: Path, value: Any) -> None:
        before = self.values.setdefault(path, value)
        if before is not value and states([before]) != states([value]):
            self.complete = False  # a property with another value at each reading

    def captured(self, x: Tensor) -> Captured:
        """What stands for a tensor."""
        if id(x) not in self.tensors:
            name, position = f"tensor {tuple(x.shape)}", self._first + len(self.tensors)
            self.tensors[id(x)] = x, Captured(position, name, x.dim(), kind_of(x))
        return self.tensors[id(x)][1]


def is_fixed(value: Any) -> bool:
    """Whether a value cannot change: a builtin function or type, or a part of torch or math."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in ("builtins", *LIBRARIES)
    if isinstance(value, type):
        return home_of(value) in LIBRARIES or getattr(builtins, value.__name__, None) is value
    return isinstance(value, (BuiltinFunctionType, str, bytes))


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


def home_of(value: Any) -> str:
    """The package that defines a function, a class, or the class of an object; empty if that is not known."""
    home = getattr(value, "__module__", None) or type(value).__module__ or ""
    return str(home).partition(".")[0]


def plain(value: Any) -> FunctionType | None:
    """The Python function that is traced for a value that a mod calls, if there is one."""
    inner = getattr(value, "function", value) if type(value).__name__ == "Modifier" else value
    return inner if isinstance(inner, FunctionType) and home_of(inner) != "torch" else None
