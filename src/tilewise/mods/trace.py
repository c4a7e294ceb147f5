"""From a function without source to an expression: it is called with values that note what is done to them.

Whatever needs to know such a value (`if`, `and`, `not`, `max(a, b)`, chained comparisons) cannot be followed this way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from traceback import extract_tb
from types import CellType, FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor

from tilewise.errors import AttentionError
from tilewise.mods import expr
from tilewise.mods.expr import Expr
from tilewise.mods.functions import (
    BITS,
    KNOWN,
    NO_NUMBER,
    PLACES,
    Captured,
    conversion,
    dtype_of,
    elementary,
    filled,
    spoken,
)
from tilewise.mods.program import kind_of
from tilewise.mods.source import is_called, name_of, outside

Finder = Callable[[Tensor], Captured | None]


def follow(function: Callable[..., Any], values: Sequence[Expr | Captured], captured: Finder) -> Expr:
    """The function's value when its positional parameters are `values`; `captured` knows the tensors that it reads."""
    code = getattr(function, "__code__", None)
    keywords = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount] if code else ()
    if any(name not in PLACES for name in keywords):
        _refuse(f"the keyword-only parameters {', '.join(keywords)}", "q_len, kv_len and q_pos")
    try:
        noted = _exchanged(function, captured, {})
        found = _expression(noted(*map(_Noted, values), **{name: _Noted(PLACES[name]) for name in keywords}))
        if expr.is_vector(found):
            _refuse(*NO_NUMBER)
        return found
    except AttentionError as error:
        _, found, expected = error.args
        raise AttentionError(f"mod {name_of(function)!r}, {_line(error)}", found, expected) from error
    except Exception as error:  # whatever a function does that was not written for such values
        raise AttentionError(f"mod {name_of(function)!r}, {_line(error)}", error, WHAT_WORKS) from error


def _line(error: Exception) -> str:
    """Where a function that was followed was when it went wrong."""
    frames = [x for x in extract_tb(error.__traceback__) if not x.filename.startswith(str(Path(__file__).parents[1]))]
    if not frames or not frames[-1].line:
        return "followed as it has no source"
    return f"{frames[-1].filename}:{frames[-1].lineno}, in `{frames[-1].line}`"


def followed(function: Callable[..., Any], values: Sequence[Expr | Captured]) -> tuple[Expr, list[Tensor]]:
    """The same, and the tensors that it reads, in the order of their positions."""
    found: dict[int, tuple[Tensor, Captured]] = {}

    def captured(x: Tensor) -> Captured:
        new = Captured(len(found), f"tensor {tuple(x.shape)}", x.dim(), kind_of(x))
        return found.setdefault(id(x), (x, new))[1]

    return follow(function, values, captured), [x for x, _ in found.values()]


WHAT_WORKS = "arithmetic, comparisons, & | ^ ~, torch.where and torch's elementary functions"


def _exchanged(value: Any, captured: Finder, done: dict[int, Any]) -> Any:
    """The value with the tensors that it holds or reads from outside exchanged for their notes: functions, methods,
    partials and objects that can be called, and lists and tuples of these."""
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, Tensor):
        known = captured(value)
        return value if known is None else _Noted(known)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_exchanged(x, captured, done) for x in value)
    if isinstance(value, partial):
        func, args, *named = _exchanged((value.func, value.args, *value.keywords.values()), captured, done)
        return partial(func, *args, **dict(zip(value.keywords, named, strict=True)))
    if isinstance(value, MethodType) and not isinstance(value.__self__, type):
        return MethodType(_exchanged(value.__func__, captured, done), _Held(value.__self__, captured, done))
    if is_called(value):
        return _Held(value, captured, done)
    if not isinstance(value, FunctionType) or len(done) > MOST_FUNCTIONS:
        return value
    done[id(value)] = value  # of one that calls itself
    reads = outside(value)
    own = value.__code__.co_freevars if (value.__module__ or "").startswith("torch") else reads
    new = {
        name: x for name in own if name in reads and (x := _exchanged(reads[name], captured, done)) is not reads[name]
    }
    if new:
        cells = tuple(
            CellType(new[name]) if name in new else cell
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        )
        made = FunctionType(value.__code__, value.__globals__ | new, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        done[id(value)] = made
    return done[id(value)]


MOST_FUNCTIONS = 64


class _Held:
    """An object whose tensors are exchanged when they are asked for; its methods ask it, too."""

    def __init__(self, value: Any, captured: Finder, done: dict[int, Any]) -> None:
        self._held = value, captured, done

    def __getattr__(self, name: str) -> Any:
        value, captured, done = self._held
        found = getattr(value, name)
        if isinstance(found, MethodType) and found.__self__ is value:
            return MethodType(_exchanged(found.__func__, captured, done), self)
        return _exchanged(found, captured, done)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)


class _Noted:
    """A value of which only the expression is known."""

    def __init__(self, value: Expr | Captured) -> None:
        self.noted = value

    def __getitem__(self, index: Any) -> _Noted:
        tensor = self.noted
        indices = [_expression(i) for i in (index if isinstance(index, tuple) else (index,))]
        if not isinstance(tensor, Captured):
            _refuse("an index into a value", "an index into a tensor")
        if len(indices) > tensor.rank or any(i.kind != "int" for i in indices):
            kinds = ", ".join(i.kind for i in indices)
            _refuse(f"{tensor.name!r} at {len(indices)} indices ({kinds})", f"{tensor.rank} of them, ints")
        found = tensor.at(indices)
        if found.rank and any(map(expr.is_vector, indices)):
            _refuse("rows chosen by a row", f"{tensor.rank} indices, if one of them is a row")
        return _Noted(found)

    def __bool__(self) -> NoReturn:
        _refuse("a choice by a value (if, and, or, not, min, max)", WHAT_WORKS)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> _Noted:
        return _call(function.__name__, *args, **(kwargs or {}))

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.noted)

    @property
    def shape(self) -> torch.Size:
        if isinstance(self.noted, Captured):
            _refuse(f"the shape of {self.noted.name!r}", "numbers, and tensors at their indices")
        return torch.Size([])

    def __getattr__(self, name: str) -> Callable[..., _Noted]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: _call(name, self, *args, **kwargs)

    __hash__ = None  # type: ignore[assignment]


def _call(name: str, *args: Any, **kwargs: Any) -> _Noted:
    if name in ("new_ones", "new_zeros"):  # as torch's own mask functions begin
        dtype = kwargs.get("dtype", args[0].dtype)
        return _Noted(filled(conversion(dtype) or "float", name == "new_ones"))
    if name == "index" and len(args) == 2 and isinstance(args[1], (list, tuple)):  # torch.ops.aten.index
        return args[0][tuple(args[1])]  # type: ignore[no-any-return]
    if name in ("to", "type", "type_as"):
        name, args, kwargs = _converted(name, *args, **kwargs)
    named = {k: v if v is None or isinstance(v, str) else _expression(v) for k, v in kwargs.items()}
    found = elementary(name, [_expression(a) for a in args], named)
    if found is None:
        _refuse(spoken(name, args, kwargs), f"one of {KNOWN}")
    return _Noted(found)


def _converted(name: str, x: Any, dtype: Any = None, **kwargs: Any) -> tuple[str, Any, dict[str, Any]]:
    """x.to(dtype), x.type(dtype) and x.type_as(y) as calls of float, int or bool."""
    dtype = dtype_of(dtype.noted) if isinstance(dtype, _Noted) else dtype
    kind = conversion(dtype) if isinstance(dtype, torch.dtype) and not kwargs else None
    if kind is None:
        _refuse(f"a call of {name} with {dtype}", "a dtype: of floats, torch.int32, torch.int64 or torch.bool")
    return kind, (x,), {}


def noted(value: Expr) -> _Noted:
    """A value that notes what is done to it."""
    return _Noted(value)


def expressed(value: Any) -> Expr:
    """What was noted."""
    return _expression(value)


def _expression(value: Any) -> Expr:
    if isinstance(value, _Noted):
        value = value.noted
    if isinstance(value, (bool, int, float)):
        return expr.const(value)
    if isinstance(value, Captured) and value.rank <= 1:
        return value.load()
    if isinstance(value, Expr):
        return value
    name = f"the tensor {value.name!r} whole" if isinstance(value, Captured) else f"a {type(value).__name__}"
    _refuse(name, "numbers, and tensors at their indices")


def _refuse(found: str, expected: str) -> NoReturn:
    raise AttentionError("followed as it has no source", found, expected)


def _operator(name: str, swapped: bool = False) -> Callable[..., _Noted]:
    def method(self: _Noted, *others: Any) -> _Noted:
        return _call(name, *others, self) if swapped else _call(name, self, *others)

    return method


for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", *BITS):
    setattr(_Noted, f"__{_name}__", _operator(BITS.get(_name, _name)))
    setattr(_Noted, f"__r{_name}__", _operator(BITS.get(_name, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs"):
    setattr(_Noted, f"__{_name}__", _operator(_name))
