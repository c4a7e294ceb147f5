"""From a function without source to an expression: it is called with values that note what is done to them.

Whatever needs to know such a value (`if`, `and`, `not`, `max(a, b)`, chained comparisons) cannot be followed this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CellType, FunctionType
from typing import Any, NoReturn

from torch import Tensor

from tilewise.mods import expr
from tilewise.mods.expr import Expr
from tilewise.mods.functions import KNOWN, PLACES, Captured, elementary
from tilewise.mods.source import outside
from tilewise.spec import AttentionError


def follow(function: Callable[..., Any], values: Sequence[Expr | Captured], tensors: Mapping[int, Captured]) -> Expr:
    """The function's value when its positional parameters are `values`."""
    keywords = function.__code__.co_varnames[function.__code__.co_argcount :][: function.__code__.co_kwonlyargcount]
    if any(name not in PLACES for name in keywords):
        _refuse(f"the keyword-only parameters {', '.join(keywords)}", "q_len, kv_len and q_pos")
    try:
        result = _with(function, tensors)(*map(_Noted, values), **{name: _Noted(PLACES[name]) for name in keywords})
        return _expression(result)
    except AttentionError as error:
        what, found, expected = error.args
        raise AttentionError(f"mod {function.__name__!r}, {what}", found, expected) from error
    except (TypeError, ArithmeticError, AttributeError) as error:
        raise AttentionError(f"mod {function.__name__!r}, followed as it has no source", error, WHAT_WORKS) from error


WHAT_WORKS = "arithmetic, comparisons, & | ~, torch.where and torch's elementary functions; or a `def` in a file"


def _with(function: Callable[..., Any], tensors: Mapping[int, Captured]) -> Callable[..., Any]:
    """The function with the tensors that it reads from outside exchanged for their notes."""
    known = {
        name: _Noted(tensors[id(x)])
        for name, x in outside(function).items()
        if isinstance(x, Tensor) and id(x) in tensors
    }
    code, closure = function.__code__, function.__closure__ or ()
    cells = tuple(
        CellType(known[name]) if name in known else cell for name, cell in zip(code.co_freevars, closure, strict=True)
    )
    noted = FunctionType(code, {**function.__globals__, **known}, function.__name__, function.__defaults__, cells)
    noted.__kwdefaults__ = function.__kwdefaults__
    return noted


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
        return _Noted(tensor.at(indices))

    def __bool__(self) -> NoReturn:
        _refuse("a choice by a value (if, and, or, not, min, max)", WHAT_WORKS)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> _Noted:
        return _call(function.__name__, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Callable[..., _Noted]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: _call(name, self, *args, **kwargs)

    __hash__ = None  # type: ignore[assignment]


def _call(name: str, *args: Any, **kwargs: Any) -> _Noted:
    found = elementary(name, [_expression(a) for a in args], {k: _expression(v) for k, v in kwargs.items()})
    if found is None:
        _refuse(f"a call of {name} with {len(args)} arguments", f"one of {KNOWN}")
    return _Noted(found)


def _expression(value: Any) -> Expr:
    if isinstance(value, _Noted):
        value = value.noted
    if isinstance(value, (bool, int, float)):
        return expr.const(value)
    if isinstance(value, Captured) and value.rank == 0:
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


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or"):
    _named = f"bitwise_{_name}" if _name in ("and", "or") else _name
    setattr(_Noted, f"__{_name}__", _operator(_named))
    setattr(_Noted, f"__r{_name}__", _operator(_named, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
    setattr(_Noted, f"__{_name}__", _operator("bitwise_not" if _name == "invert" else _name))
