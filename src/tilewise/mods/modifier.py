"""The decorators `score_mod` and `mask_mod`: from a plain Python function of one pair to a `Mod`.

    @score_mod
    def relative(score, b, h, q_idx, kv_idx, slopes):
        return score + slopes[h] * (kv_idx - q_idx)

    attention(q, k, v, score_mod=relative(slopes))

Calling the decorated function returns a `Mod`: a program, with its tensors and floats. Tensors are read (and get
gradients) where the mod indexes them, floats are passed to the kernel when it runs, ints and bools are compiled in.
Numbers and tensors that the function reads from outside have their values of the time of the call; the numbers are
compiled in.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from itertools import count
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tilewise.errors import AttentionError, shown
from tilewise.mods import expr, trace
from tilewise.mods.expr import Expr
from tilewise.mods.functions import Captured
from tilewise.mods.program import Mod, Program, kind_of, register
from tilewise.mods.snapshot import Closed, Path, closed, is_unchanged, paths, snapshot, value_at
from tilewise.request import LIMIT
from tilewise.torch_internals import constant

PAIR = (expr.B, expr.H, expr.I, expr.J)

_modifiers: WeakValueDictionary[str, Modifier] = WeakValueDictionary()
_programs: dict[Any, str | tuple[str, ...]] = {}  # by all that they depend on; the args of the error, if there is one
_numbers = count()


class Modifier:
    """A decorated function; calling it with its tensors and numbers gives a `Mod`."""

    def __init__(self, function: Callable[..., Any], kind: str, grad: Callable[..., Any] | None = None) -> None:
        if not hasattr(function, "__code__"):
            raise AttentionError(f"{kind}_mod", shown(function), "a plain function")
        self.function, self.kind, self.grad = function, kind, grad
        self.__doc__, self.__name__, self.__wrapped__ = function.__doc__, function.__name__, function
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__
        leading = len(PAIR) + (kind == "score")
        code = function.__code__
        if code.co_argcount < leading and not code.co_flags & inspect.CO_VARARGS:
            found = ", ".join(code.co_varnames[: code.co_argcount]) or "none"
            expected = f"{'score, ' * (kind == 'score')}b, h, q_idx, kv_idx, then its tensors and numbers"
            raise AttentionError(f"parameters of the {kind} mod {function.__name__!r}", found, expected)
        self.parameters = function.__code__.co_varnames[leading : function.__code__.co_argcount]
        self.defaults = function.__defaults__ or ()
        self.__signature__ = _call_signature(function, self.parameters)
        self.known: dict[tuple[str, ...], tuple[str, list[Closed]]] = {}  # programs of functions that are `closed`
        self.id = f"{function.__name__}-{next(_numbers)}"
        _modifiers[self.id] = self

    def __call__(self, *args: Any) -> Mod:
        missing = len(self.parameters) - len(args)
        if 0 < missing <= len(self.defaults):
            args = (*args, *self.defaults[-missing:])
        tensors = tuple(a for a in args if isinstance(a, Tensor))
        numbers = tuple(a for a in args if isinstance(a, float))
        signature = tuple(_signature(a) for a in args)
        if torch.compiler.is_dynamo_compiling():
            functions: Any = (self.function, self.grad)
            reads = tuple([value_at(functions[n], path) for n, path in _reads(self.id)])
            key = _compiled(self.id, signature, reads)
            if not key:
                found = "tensors from outside, or what cannot be compiled"
                expected = "a mod that works outside of it, and whose tensors are its arguments"
                raise AttentionError(f"the mod {self.__name__!r} in torch.compile", found, expected)
            return Mod(self.kind, key, tensors, numbers, self.__name__)
        key, more = _bind(self, signature)
        if more:
            tensors += more
        if len(tensors) > 1 and len({x.device for x in tensors}) > 1:
            places = ", ".join(sorted({str(x.device) for x in tensors}))
            raise AttentionError(f"tensors of the mod {self.__name__!r}", f"on {places}", "all on one device")
        return Mod(self.kind, key, tensors, numbers, self.__name__)

    def __repr__(self) -> str:
        given = ", ".join(self.parameters)
        return f"<{self.kind}_mod {self.__name__}({given}): call it, and give attention what it returns>"

    def __reduce__(self) -> str:
        return self.__qualname__

    def __deepcopy__(self, memo: Any) -> Modifier:
        return self


def _call_signature(function: Callable[..., Any], names: Sequence[str]) -> inspect.Signature:
    """The parameters of a call of the decorated function: its tensors and numbers."""
    known = inspect.signature(function).parameters
    return inspect.Signature([known[name] for name in names])


def score_mod(function: Callable[..., Any] | None = None, *, grad: Callable[..., Any] | None = None) -> Any:
    """Decorate `f(score, b, h, q_idx, kv_idx, *captured) -> score`, a function of one pair in plain Python.

    >>> @score_mod
    ... def softcapped(score, b, h, q_idx, kv_idx, cap):
    ...     return cap * torch.tanh(score / cap)
    >>> softcapped(2.0)(torch.tensor([0.0, 100.0]), 0, 0, 0, 0)
    tensor([0., 2.])

    Indices count from 0 within the sequence. Optional keyword-only parameters of f: the lengths q_len and kv_len, and
    q_pos, the key position of the query, q_idx + kv_len - q_len (as in `causal`; decoding with a cache needs it).

    On every backend integers have 64 bits, floats those of the scores, and an index outside a tensor reads its nearest
    element: -1 reads the first.

    Args:
        function: the function f. Its parameters after kv_idx are tensors and numbers, given when the mod is made.
        grad: the derivative of f with respect to the score, a function of the same parameters. Default: derived from f.

    Returns:
        The decorated function. Calling it with its tensors and numbers returns a `tilewise.mods.Mod`, for the option
        score_mod of `attention`. Without `function`, a decorator.

    Raises:
        AttentionError: f is not a plain function with these parameters. What its body may contain is checked when the
            mod is made.
    """
    if function is None:
        return lambda f: Modifier(f, "score", grad)
    return Modifier(function, "score", grad)


def mask_mod(function: Callable[..., Any]) -> Modifier:
    """Decorate `f(b, h, q_idx, kv_idx, *captured) -> bool`: True where the query sees the key.

    >>> @mask_mod
    ... def even_keys(b, h, q_idx, kv_idx):
    ...     return kv_idx % 2 == 0
    >>> even_keys()(0, 0, 0, torch.arange(4))
    tensor([ True, False,  True, False])

    Integers and indices are as in `score_mod`.

    Args:
        function: the function f. Its parameters after kv_idx are tensors and numbers, given when the mod is made.

    Returns:
        The decorated function. Calling it with its tensors and numbers returns a `tilewise.mods.Mod`, for the option
        mask_mod of `attention`.

    Raises:
        AttentionError: f is not a plain function with these parameters. What its body may contain is checked when the
            mod is made.
    """
    return Modifier(function, "mask")


def as_mod(kind: str, value: Any) -> Any:
    """The mod of a plain function, or of a decorated one that needs no arguments; any other value as it is.

    A plain function is decorated at each call. It is recognised by its snapshot, as every mod is, and traced once.
    """
    if isinstance(value, FunctionType):
        if torch.compiler.is_dynamo_compiling():
            expected = f"a function decorated with tilewise.{kind}_mod outside of it"
            raise AttentionError(f"{kind}_mod in torch.compile", "a plain function", expected)
        return Modifier(value, kind)()
    if isinstance(value, Modifier) and len(value.parameters) <= len(value.defaults):
        return value()
    return value


def _signature(argument: Any) -> str:
    """What is compiled in for an argument: a tensor's kind and rank, the value of an int, nothing of a float."""
    if isinstance(argument, Tensor):
        return f"{kind_of(argument)} {argument.dim()}"
    if isinstance(argument, (bool, int)):
        if not -(2**63) <= argument < 2**63:
            raise AttentionError("an argument of a mod", argument, "an int of 64 bits")
        return f"value {operator.index(argument)}"  # unlike int, a constant to torch.compile
    if isinstance(argument, float):
        return "number"
    raise AttentionError("an argument of a mod", type(argument).__name__, "a tensor, a float, an int or a bool")


def _bind(modifier: Modifier, signature: tuple[str, ...]) -> tuple[str, tuple[Tensor, ...]]:
    """The key of the program, and the tensors that it reads from outside. The function is traced once for each value of
    what it depends on: its code, and the values of its names."""
    functions = [f for f in (modifier.function, modifier.grad) if f is not None]
    known = modifier.known.get(signature)
    if known is not None and all(map(is_unchanged, functions, known[1])):
        return known[0], ()
    found: dict[int, Tensor] = {}
    file = modifier.function.__code__.co_filename  # named in errors
    state = modifier.kind, signature, file, *(snapshot(f, found) for f in functions)
    tensors = tuple(found.values())
    for x in tensors:
        kind_of(x)  # raises for layouts and dtypes that no mod reads; layouts are not in the snapshot
    key = _programs.get(state)
    if key is None:
        try:
            key = _read(modifier, signature, tensors)
        except AttentionError as error:
            key = tuple(map(str, error.args))
        if len(_programs) >= LIMIT:
            _programs.clear()
        _programs[state] = key
    if isinstance(key, tuple):
        what, value, expected = key
        raise AttentionError(what, value, expected)
    reads = [closed(f) for f in functions]
    if None not in reads and len(modifier.known) < LIMIT:
        modifier.known[signature] = key, [x for x in reads if x is not None]
    return key, tensors


@constant
def _reads(modifier: str) -> tuple[tuple[int, Path], ...]:
    """The paths to what a mod's function (0), and its `grad` (1), read from outside."""
    functions = _modifiers[modifier].function, _modifiers[modifier].grad
    return tuple((n, path) for n, f in enumerate(functions) if f is not None for path in paths(f))


@constant
def _compiled(modifier: str, signature: tuple[str, ...], reads: tuple[Any, ...]) -> str:
    """The key of the program; empty if it reads tensors from outside, or if there is none. `reads`: what it reads else;
    torch.compile calls this again if that has changed."""
    try:
        key, tensors = _bind(_modifiers[modifier], signature)
    except AttentionError:
        return ""
    return "" if tensors else key


def _read(modifier: Modifier, signature: tuple[str, ...], tensors: tuple[Tensor, ...]) -> str:
    """The key of the program that tracing the function gives. `tensors`: those that it reads from outside."""
    names = modifier.parameters
    if len(names) != len(signature):
        raise AttentionError(
            f"arguments of the mod {modifier.__name__!r}", len(signature), f"{len(names)}: {', '.join(names)}"
        )
    values: list[Expr | Captured] = [*([expr.SCORE] if modifier.kind == "score" else []), *PAIR]
    ranks: list[int] = []
    numbers = 0
    for name, kind in zip(names, signature, strict=True):
        match kind.split():
            case ["value", value]:
                values.append(expr.const(int(value)))
            case ["number"]:
                values.append(expr.number(numbers))
                numbers += 1
            case [kind, rank]:
                values.append(Captured(len(ranks), name, int(rank), kind))
                ranks.append(int(rank))
    outside = {}
    for x in tensors:
        outside[id(x)] = Captured(len(ranks), f"tensor {tuple(x.shape)}", x.dim(), kind_of(x))
        ranks.append(x.dim())
    root = trace.read(modifier.function, values, outside)
    root = expr.as_float(root) if modifier.kind == "score" else expr.as_bool(root)
    derivative = None if modifier.grad is None else expr.as_float(trace.read(modifier.grad, values, outside))
    return register(Program(root, tuple(ranks), numbers, derivative))
