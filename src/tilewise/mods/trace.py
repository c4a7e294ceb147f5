"""From a Python function to an expression: the function is called with values that record what is done to them.

A function with source is rewritten first (see `rewrite`), so that it can choose by such values, and looks up by a call
what it reads from outside; `Reads` has all of it. A function without source is called as it is: loops, tuples, methods
and objects work, a choice by a traced value raises. What it reads from outside is known if that is no more than
numbers, tensors, elementary functions, and functions of these; otherwise it is traced at every call.
"""

from __future__ import annotations

import builtins
import dis
import linecache
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path as File
from traceback import extract_tb
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import AttentionError
from . import expr, rewrite
from .expr import Expr
from .functions import (
    BITS,
    KEYWORDS,
    KNOWN,
    Captured,
    conversion,
    dtype_of,
    elementary,
    filled,
    is_elementary,
)
from .outside import (
    NUMBERS,
    Path,
    Reads,
    Unreadable,
    follow,
    home_of,
    is_callable_object,
    is_fixed,
    name_of,
    name_step,
    plain,
)
from .rewrite import UnsupportedError

OWN_FILES = [
    str(File(__file__).with_name(f"{name}.py"))
    for name in ("trace", "functions", "composed", "expr", "outside", "program")
]
DEPTH = 8  # of functions that call one another
MAX_FUNCTIONS = 64
WHAT_WORKS = "arithmetic, comparisons, & | ^ ~, torch.where and torch's elementary functions"
NO_SOURCE = "followed as it has no source"
NO_NUMBER = "a row of a tensor", "a number: .sum(), .any() or .all() of it, torch.dot with another, or an index more"
NAMES = "a parameter, a name assigned above, a number or a tensor"
NUMERIC = "integers of 64 bits, real numbers, no division by 0, no sum within a sum"
NAMED = ("builtins", "math", "numpy", "operator", "scipy", "torch")  # whose functions are known by their names


def trace(function: Any, values: Sequence[Expr | Captured], reads: Reads, path: Path) -> Expr:
    """The function's value when its positional parameters are `values`. What it reads from outside is added to `reads`;
    `path` leads to the function."""
    done: dict[Any, Any] = {}
    try:
        return _traced(
            function, values, lambda: _rewritten(function, reads, path, done) or _exchanged(function, reads, path, done)
        )
    finally:
        done.clear()  # a cycle that would keep the tensors of a closure until the garbage collector runs


def trace_as_is(function: Any, values: Sequence[Expr | Captured]) -> tuple[Expr, list[Tensor]]:
    """The value of any callable, called as it is though it may have source, and the tensors that it reads, in the order
    of their positions."""
    reads = Reads()
    root = _traced(function, values, lambda: _exchanged(function, reads, None, {}))
    return root, [x for x, _ in reads.tensors.values()]


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


def _rewritten(function: Any, reads: Reads, path: Path, done: dict[Any, Any], depth: int = 0) -> FunctionType | None:
    """The rewritten function, which exchanges what it reads from outside for traced values; None without source."""
    if path in done:
        return done[path]  # type: ignore[no-any-return]
    found = rewrite.rewritten(function)
    if found is None:
        return None
    reads.record((*path, ("attribute", "__code__")), function.__code__)

    def look_up(name: str, *attributes: str) -> Any:
        value, here = function, path
        steps = [name_step(function, name), *(("attribute", x) for x in attributes)]
        for n, step in enumerate(steps):
            here = *here, step
            try:
                value = follow(value, (step,))
            except Exception as error:
                reads.record(here, Unreadable(type(error), str(error)))
                if n == 0:
                    raise UnsupportedError(f"the unknown name {name!r}", NAMES) from None
                raise
            if isinstance(value, Tensor) or is_fixed(value):  # what comes next cannot change
                reads.record(here, value)
                value = Traced(reads.captured(value)) if isinstance(value, Tensor) else value
                for attribute in attributes[n:]:
                    value = getattr(value, attribute)
                return value if isinstance(value, Traced) else exchange(value, None, name)
        return exchange(value, here, ".".join((name, *attributes)))

    def exchange(value: Any, here: Path | None, name: str) -> Any:
        """`here`: the path to the value; None if it cannot change."""
        if here is not None:
            reads.record(here, value)
        if isinstance(value, NUMBERS):
            return Traced(expr.const(value))
        if isinstance(value, Tensor):
            return Traced(reads.captured(value))
        if isinstance(value, torch.dtype):
            return value
        inner = plain(value)
        if inner is not None and here is not None:
            if depth == DEPTH:
                raise UnsupportedError(f"calls nested {DEPTH} deep", "no recursion: a mod is one expression")
            below = here if inner is value else (*here, ("attribute", "function"))
            made = _rewritten(inner, reads, below, done, depth + 1)
            if made is None:
                raise UnsupportedError(f"{inner.__name__!r}, which has no source", "a function in a file or a notebook")
            return made
        if callable(value) and home_of(value) in NAMED:
            return partial(call, getattr(value, "__name__", name.rpartition(".")[2]))
        raise UnsupportedError(f"{name!r}, a {type(value).__name__}", NAMES)

    defaults: tuple[Any, ...] = ()
    if depth:  # the mod itself is called with all of its arguments
        defaults = function.__defaults__ or ()
        reads.record((*path, ("attribute", "__defaults__")), function.__defaults__)
        places = [(*path, ("attribute", "__defaults__"), ("item", n)) for n in range(len(defaults))]
        defaults = tuple(exchange(x, place, "a default") for x, place in zip(defaults, places, strict=True))
    space = {rewrite.OUTSIDE: look_up, **OPERATIONS}
    done[path] = made = FunctionType(found.code, space, function.__name__, defaults)
    made.__kwdefaults__ = {x: Traced(KEYWORDS[x]) for x in _keyword_only(function)}
    return made


def _exchanged(value: Any, reads: Reads, path: Path | None, done: dict[Any, Any]) -> Any:
    """The value with the tensors that it contains or reads from outside exchanged for traced ones: in functions,
    methods, partials and objects that can be called, and in lists and tuples of these. `path`: None if a change of the
    value would not be seen."""
    if isinstance(value, FunctionType) and len(done) <= MAX_FUNCTIONS:
        return _exchanged_function(value, reads, path, done)
    if path is None or not _is_comparable(value):
        reads.complete = False
    else:
        reads.record(path, value)
    if isinstance(value, Tensor):
        return Traced(reads.captured(value))
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_exchanged(x, reads, None, done) for x in value)
    if isinstance(value, partial):
        func, args, *named = _exchanged((value.func, value.args, *value.keywords.values()), reads, None, done)
        return partial(func, *args, **dict(zip(value.keywords, named, strict=True)))
    if isinstance(value, MethodType) and not isinstance(value.__self__, type):
        return MethodType(_exchanged(value.__func__, reads, None, done), _Object(value.__self__, reads, done))
    if is_callable_object(value):
        return _Object(value, reads, done)
    return value


def _exchanged_function(value: FunctionType, reads: Reads, path: Path | None, done: dict[Any, Any]) -> Any:
    if id(value) in done:
        reads.complete = False  # reached by a second path
        return done[id(value)]
    done[id(value)] = value  # for a function that calls itself
    code, is_torchs, defaults = value.__code__, home_of(value) == "torch", value.__defaults__ or ()
    names = _names(code)
    known = not is_torchs and names.known and not value.__kwdefaults__ and all(isinstance(x, NUMBERS) for x in defaults)
    if path is None or not known:
        path, reads.complete = None, False
    else:
        reads.record((*path, ("attribute", "__code__")), code)
        reads.record((*path, ("attribute", "__defaults__")), value.__defaults__)
        for n, x in enumerate(defaults):
            reads.record((*path, ("attribute", "__defaults__"), ("item", n)), x)
    new = {}
    for name in code.co_freevars if is_torchs else (*names.outside, *code.co_freevars):
        step = name_step(value, name)
        try:
            before = follow(value, (step,))
        except (KeyError, ValueError) as error:  # not assigned yet
            if path is not None:
                reads.record((*path, step), Unreadable(type(error), str(error)))
            continue
        now = _exchanged(before, reads, None if path is None else (*path, step), done)
        if now is not before:
            new[name] = now
    if new:
        cells = tuple(
            CellType(new[name]) if name in new else cell
            for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True)
        )
        made = FunctionType(code, value.__globals__ | new, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        done[id(value)] = made
    return done[id(value)]


class _Names(NamedTuple):
    """The names that a function's code reads from globals or builtins, in order. `known`: whether it reads nothing else
    from outside but its closure: no import, no attributes but elementary functions."""

    outside: tuple[str, ...]
    known: bool


@lru_cache(256)
def _names(code: CodeType) -> _Names:
    found: dict[str, None] = {}
    known = True
    for x in dis.get_instructions(code):
        if x.opname == "LOAD_GLOBAL":
            found[x.argval] = None
        elif x.opcode in dis.hasname:
            known &= x.opname in ("LOAD_ATTR", "LOAD_METHOD") and is_elementary(x.argval)
    for inner in (x for x in code.co_consts if isinstance(x, CodeType)):
        found |= dict.fromkeys(_names(inner).outside)
        known &= _names(inner).known
    return _Names(tuple(found), known)


PURE = "abs all any bool divmod enumerate float int len list max min pow range round sum tuple zip"


def _is_comparable(value: Any) -> bool:
    """Whether a change of a value that a function without source reads is seen by its state: a number, a tensor, or an
    elementary function. Two elementary functions with one name are the same."""
    places = torch, math, torch.nn.functional
    if type(value) in NUMBERS or isinstance(value, (Tensor, torch.dtype)) or any(value is x for x in places):
        return True
    name = str(getattr(value, "__name__", ""))
    if name in PURE.split() and value is getattr(builtins, name):
        return True
    return is_elementary(name) and any(getattr(place, name, None) is value for place in places)


class _Object:
    """An object whose tensors are exchanged when they are read, also by its methods."""

    def __init__(self, value: Any, reads: Reads, done: dict[Any, Any]) -> None:
        reads.complete = False
        self._object = value, reads, done

    def __getattr__(self, name: str) -> Any:
        value, reads, done = self._object
        found = getattr(value, name)
        if isinstance(found, MethodType) and found.__self__ is value:
            return MethodType(_exchanged(found.__func__, reads, None, done), self)
        return _exchanged(found, reads, None, done)

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
