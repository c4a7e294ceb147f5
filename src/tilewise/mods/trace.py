"""From a Python function to an expression: the function is called with values that record what is done to them.

`read` rewrites the function first (see `rewrite`), so that it can choose by such values. It then reads nothing that is
not in its snapshot. `trace` calls any function as it is: loops, tuples, methods and objects work, a choice by a traced
value raises. Both use the same values, and the same functions of them.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from traceback import extract_tb
from types import CellType, FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor

from tilewise.errors import AttentionError
from tilewise.mods import expr, rewrite
from tilewise.mods.expr import Expr
from tilewise.mods.functions import BITS, KEYWORDS, KNOWN, Captured, conversion, dtype_of, elementary, filled
from tilewise.mods.program import kind_of
from tilewise.mods.rewrite import UnsupportedError
from tilewise.mods.snapshot import DEPTH, NUMBERS, is_callable_object, name_of, outside, plain

Finder = Callable[[Tensor], Captured | None]
OWN_FILES = [
    str(Path(__file__).with_name(f"{name}.py")) for name in ("trace", "functions", "composed", "expr", "program")
]
MAX_FUNCTIONS = 64
WHAT_WORKS = "arithmetic, comparisons, & | ^ ~, torch.where and torch's elementary functions"
NO_SOURCE = "followed as it has no source"
NO_NUMBER = "a row of a tensor", "a number: .sum(), .any() or .all() of it, torch.dot with another, or an index more"
NAMES = "a parameter, a name assigned above, a number or a tensor"
NUMERIC = "integers of 64 bits, real numbers, no division by 0, no sum within a sum"


def read(function: Any, values: Sequence[Expr | Captured], tensors: Mapping[int, Captured]) -> Expr:
    """The function's value when its positional parameters are `values`. `tensors`: those that it reads from outside, by
    their id. Without source the function is traced as it is."""

    def find(x: Tensor) -> Captured | None:
        return tensors.get(id(x))

    done: dict[int, Any] = {}
    try:
        return _traced(function, values, lambda: _rewritten(function, find, done) or _exchanged(function, find, done))
    finally:
        done.clear()  # a cycle that would keep the tensors of a closure until the garbage collector runs


def trace(function: Any, values: Sequence[Expr | Captured]) -> tuple[Expr, list[Tensor]]:
    """The value of the function, called as it is, and the tensors that it reads, in the order of their positions."""
    found: dict[int, tuple[Tensor, Captured]] = {}

    def find(x: Tensor) -> Captured:
        new = Captured(len(found), f"tensor {tuple(x.shape)}", x.dim(), kind_of(x))
        return found.setdefault(id(x), (x, new))[1]

    return _traced(function, values, lambda: _exchanged(function, find, {})), [x for x, _ in found.values()]


def _traced(function: Any, values: Sequence[Expr | Captured], prepare: Callable[[], Callable[..., Any]]) -> Expr:
    """The value of what `prepare` returns, a form of the function that takes traced values."""
    try:
        keywords = {name: Traced(KEYWORDS[name]) for name in _keyword_only(function)}
        value = expression_of(prepare()(*map(Traced, values), **keywords))
        if expr.is_vector(value):
            raise UnsupportedError(*NO_NUMBER)
        return value
    except Exception as error:  # whatever a function does that was not written for such values
        line, code_at_fault = _place(error)
        found, expected = str(error), NUMERIC if isinstance(error, ArithmeticError) else WHAT_WORKS
        if isinstance(error, AttentionError):
            _, found, expected = error.args
        elif isinstance(error, UnsupportedError):
            line, found, expected = error.line or line, error.found, error.expected
            found = found.replace("{code}", code_at_fault).replace("{indexed}", code_at_fault.partition("[")[0])
        elif isinstance(error, RecursionError):
            line, found, expected = "", "calls nested too deep", "no recursion: a mod is one expression"
        raise AttentionError(f"mod {name_of(function)!r}, {line or _return_line(function)}", found, expected) from error


def _keyword_only(function: Any) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    names: tuple[str, ...] = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount] if code else ()
    if any(name not in KEYWORDS for name in names):
        raise UnsupportedError(f"the keyword-only parameters {', '.join(names)}", "q_len, kv_len and q_pos")
    return names


def _place(error: Exception) -> tuple[str, str]:
    """The line, as errors quote it, and the code of the operation in which the function raised; empty if not known."""
    frames = [x for x in extract_tb(error.__traceback__) if x.filename not in OWN_FILES]
    if not frames or not frames[-1].line:
        return "", "an operation"
    at = frames[-1]
    line = linecache.getline(at.filename, at.lineno or 1)
    return f"{at.filename}:{at.lineno}, in `{at.line}`", line[at.colno : at.end_colno].strip()


def _return_line(function: Any) -> str:
    try:
        found = rewrite.rewritten(function)
    except (AttributeError, UnsupportedError):
        found = None
    return NO_SOURCE if found is None else found.returns


def _rewritten(function: Any, find: Finder, done: dict[int, Any], depth: int = 0) -> FunctionType | None:
    """The rewritten function, which exchanges what it reads from outside for traced values; None without source."""
    if id(function) in done:
        return done[id(function)]  # type: ignore[no-any-return]
    found = rewrite.rewritten(function)
    if found is None:
        return None
    names = outside(function)

    def look_up(name: str, *attributes: str) -> Any:
        if name not in names:
            raise UnsupportedError(f"the unknown name {name!r}", NAMES)
        value = names[name]
        for n, attribute in enumerate(attributes):
            if isinstance(value, Tensor):
                value = exchange(value, name)
                for rest in attributes[n:]:
                    value = getattr(value, rest)
                return value
            value = getattr(value, attribute)
        return exchange(value, ".".join((name, *attributes)))

    def exchange(value: Any, name: str) -> Any:
        if isinstance(value, NUMBERS):
            return Traced(expr.const(value))
        if isinstance(value, Tensor):
            return _exchanged(value, find, done)
        if isinstance(value, torch.dtype):
            return value
        inner = plain(value)
        if inner is not None:
            if depth == DEPTH:
                raise UnsupportedError(f"calls nested {DEPTH} deep", "no recursion: a mod is one expression")
            made = _rewritten(inner, find, done, depth + 1)
            if made is None:
                raise UnsupportedError(f"{inner.__name__!r}, which has no source", "a function in a file or a notebook")
            return made
        if callable(value):
            return partial(call, getattr(value, "__name__", name))
        raise UnsupportedError(f"{name!r}, a {type(value).__name__}", NAMES)

    space = {rewrite.OUTSIDE: look_up, **OPERATIONS}
    defaults = tuple(exchange(x, "a default") for x in function.__defaults__ or ())
    done[id(function)] = made = FunctionType(found.code, space, function.__name__, defaults)
    made.__kwdefaults__ = {x: Traced(KEYWORDS[x]) for x in _keyword_only(function)}
    return made


def _exchanged(value: Any, find: Finder, done: dict[int, Any]) -> Any:
    """The value with the tensors that it contains or reads from outside exchanged for traced ones: in functions,
    methods, partials and objects that can be called, and in lists and tuples of these."""
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, Tensor):
        known = find(value)
        return value if known is None else Traced(known)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_exchanged(x, find, done) for x in value)
    if isinstance(value, partial):
        func, args, *named = _exchanged((value.func, value.args, *value.keywords.values()), find, done)
        return partial(func, *args, **dict(zip(value.keywords, named, strict=True)))
    if isinstance(value, MethodType) and not isinstance(value.__self__, type):
        return MethodType(_exchanged(value.__func__, find, done), _Object(value.__self__, find, done))
    if is_callable_object(value):
        return _Object(value, find, done)
    if not isinstance(value, FunctionType) or len(done) > MAX_FUNCTIONS:
        return value
    done[id(value)] = value  # for a function that calls itself
    reads = outside(value)
    own = value.__code__.co_freevars if (value.__module__ or "").startswith("torch") else reads
    new = {name: x for name in own if name in reads and (x := _exchanged(reads[name], find, done)) is not reads[name]}
    if new:
        cells = tuple(
            CellType(new[name]) if name in new else cell
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        )
        made = FunctionType(value.__code__, value.__globals__ | new, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        done[id(value)] = made
    return done[id(value)]


class _Object:
    """An object whose tensors are exchanged when they are read, also by its methods."""

    def __init__(self, value: Any, find: Finder, done: dict[int, Any]) -> None:
        self._object = value, find, done

    def __getattr__(self, name: str) -> Any:
        value, find, done = self._object
        found = getattr(value, name)
        if isinstance(found, MethodType) and found.__self__ is value:
            return MethodType(_exchanged(found.__func__, find, done), self)
        return _exchanged(found, find, done)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)


class Traced:
    """A value of which only the expression is known."""

    def __init__(self, value: Expr | Captured) -> None:
        self._traced = value

    def __getitem__(self, index: Any) -> Traced:
        tensor = self._traced
        indices = [expression_of(i) for i in (index if isinstance(index, tuple) else (index,))]
        if not isinstance(tensor, Captured):
            raise UnsupportedError("an index into '{indexed}'", "an index into a tensor the mod was called with")
        if len(indices) > tensor.rank:
            raise UnsupportedError(f"{len(indices)} indices", f"{tensor.rank}, as many as {tensor.name!r} has axes")
        for i in indices:
            if i.kind != "int":
                raise UnsupportedError(f"a {i.kind} as an index", "an int: write int(...) around it")
        found = tensor.at(indices)
        if found.rank and any(map(expr.is_vector, indices)):
            raise UnsupportedError("rows chosen by a row", f"{tensor.rank} indices, if one of them is a row")
        return Traced(found)

    def __bool__(self) -> NoReturn:
        raise UnsupportedError("a choice by a value (if, and, or, not, min, max)", WHAT_WORKS)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Traced:
        return call(function.__name__, *args, **(kwargs or {}))

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self._traced)

    @property
    def shape(self) -> torch.Size:
        if isinstance(self._traced, Captured):
            raise UnsupportedError(f"the shape of {self._traced.name!r}", "numbers, and tensors at their indices")
        return torch.Size([])

    def __getattr__(self, name: str) -> Callable[..., Traced]:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(call, name, self)

    def __pos__(self) -> Traced:
        return self

    __hash__ = None  # type: ignore[assignment]


def expression_of(value: Any) -> Expr:
    """The expression of a traced value or of a number."""
    if isinstance(value, Traced):
        value = value._traced
    if isinstance(value, NUMBERS):
        return expr.const(value)
    if isinstance(value, Captured) and value.rank <= 1:
        return value.load()
    if isinstance(value, Expr):
        return value
    if isinstance(value, Captured):
        raise UnsupportedError(f"the tensor {value.name!r} whole", f"{value.name} at {value.rank} indices")
    raise UnsupportedError(f"a {type(value).__name__}", "numbers, and tensors at their indices")


def call(name: str, *args: Any, **kwargs: Any) -> Traced:
    """What Python's, math's or torch's function of this name returns for traced values and numbers."""
    if name in ("new_ones", "new_zeros"):  # as torch's own mask functions begin
        dtype = kwargs.get("dtype", args[0].dtype)
        return Traced(filled(conversion(dtype) or "float", name == "new_ones"))
    if name == "index" and len(args) == 2 and isinstance(args[1], (list, tuple)):  # torch.ops.aten.index
        return args[0][tuple(args[1])]  # type: ignore[no-any-return]
    if name == "float" and len(args) == 1 and isinstance(args[0], str):  # float("-inf")
        try:
            return Traced(expr.const(float(args[0])))
        except ValueError:
            raise UnsupportedError(f"float({args[0]!r})", "a number in it") from None
    if name in ("to", "type", "type_as"):
        name, args, kwargs = _conversion(name, *args, **kwargs)
    named = {k: v if v is None or isinstance(v, str) else expression_of(v) for k, v in kwargs.items()}
    values = [expression_of(a) for a in args]
    found = elementary(name, values, named)
    if found is None and name in BITS.values():
        expected = "& | ^ ~ << >> of integers, or & | ^ ~ of what is true or false"
        raise UnsupportedError(f"'{{code}}', of {', '.join(x.kind for x in values)}", expected)
    if found is None:
        given = ", ".join([f"{len(args)} arguments", *kwargs])
        raise UnsupportedError(f"a call of {name} with {given}", f"one of {KNOWN}, or a function made of them")
    return Traced(found)


def _conversion(name: str, x: Any, dtype: Any = None, **kwargs: Any) -> tuple[str, Any, dict[str, Any]]:
    """x.to(dtype), x.type(dtype) and x.type_as(y) as calls of float, int or bool."""
    dtype = dtype.dtype if isinstance(dtype, Traced) else dtype
    kind = conversion(dtype) if isinstance(dtype, torch.dtype) and not kwargs else None
    if kind is None:
        expected = "a dtype: of floats, torch.int32, torch.int64 or torch.bool"
        raise UnsupportedError(f"a call of {name} with {dtype}", expected)
    return kind, (x,), {}


def _logic(op: str, *args: Any) -> Traced:
    first, *rest = map(expression_of, args)
    if op == "not":
        return Traced(expr.logic("not", first))
    for x in rest:
        first = expr.logic(op, first, x)
    return Traced(first)


def _chain(ops: str, *args: Any) -> Traced:
    """a < b <= c, of ops "lt le"."""
    values = [expression_of(x) for x in args]
    first, *rest = (expr.compare(op, a, b) for op, a, b in zip(ops.split(), values, values[1:], strict=False))
    for x in rest:
        first = expr.logic("and", first, x)
    return Traced(first)


OPERATIONS = {  # that rewritten functions call
    rewrite.CONST: lambda value: Traced(expr.const(value)),
    rewrite.LOGIC: _logic,
    rewrite.CHAIN: _chain,
    rewrite.WHERE: partial(call, "where"),
}


def _operator(name: str, swapped: bool = False) -> Callable[..., Traced]:
    def method(self: Traced, *others: Any) -> Traced:
        return call(name, *others, self) if swapped else call(name, self, *others)

    return method


for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", *BITS):
    setattr(Traced, f"__{_name}__", _operator(BITS.get(_name, _name)))
    setattr(Traced, f"__r{_name}__", _operator(BITS.get(_name, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs"):
    setattr(Traced, f"__{_name}__", _operator(_name))
