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
from functools import partial
from itertools import count
from types import CodeType, FunctionType
from typing import Any, Generic, NamedTuple, Protocol, TypeVarTuple, overload
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..bounded import Bounded
from ..errors import AttentionError, shown
from ..request import LIMIT
from ..torch_internals import constant
from . import expr, trace
from .expr import Expr
from .functions import Captured
from .outside import Path, Reads, compiled_value, name_of, states, values_at
from .program import Mod, Program, kind_of, register

PAIR = (expr.B, expr.H, expr.I, expr.J)

# What a mod's function captures: the arguments of a call. Each decorator has three overloads: functions that need no
# argument, functions with arguments, and functions with keyword-only lengths, whose arguments cannot be typed. (mypy
# does not distinguish the first two, and yet chooses the right one.)
Captures = TypeVarTuple("Captures")

_modifiers: WeakValueDictionary[str, UntypedModifier] = WeakValueDictionary()
# The paths of traces, by the code of the functions and what is compiled in. The key of the program or the args of the
# error, by these, the paths and the states of the values there.
_paths: Bounded[Any, tuple[tuple[Path, ...], ...]] = Bounded(LIMIT)
_programs: Bounded[Any, str | tuple[str, ...]] = Bounded(LIMIT)
MAX_PATHS = 16  # of one function: a name that means one helper and then another makes new ones
MAX_KNOWN = 256
COMPARED = (bool, int, float, CodeType)
_numbers = count()


class Modifier(Generic[*Captures]):
    """A decorated function; calling it with its tensors and numbers gives a `Mod`."""

    def __init__(self, function: Callable[..., Any], kind: str, grad: Callable[..., Any] | None = None) -> None:
        if not hasattr(function, "__code__"):
            raise AttentionError(f"{kind}_mod", shown(function), "a plain function")
        self.function, self.kind, self.grad = function, kind, grad
        self.functions = (function,) if grad is None else (function, grad)
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
        self.known: Bounded[tuple[str, ...], tuple[Bound, list[Any]]] = Bounded(MAX_KNOWN)
        self.id = f"{function.__name__}-{next(_numbers)}"
        _modifiers[self.id] = self

    def __call__(self, *captured: *Captures) -> Mod:
        args: tuple[Any, ...] = captured
        missing = len(self.parameters) - len(args)
        if 0 < missing <= len(self.defaults):
            args = (*args, *self.defaults[-missing:])
        tensors = tuple(a for a in args if isinstance(a, Tensor))
        numbers = tuple(a for a in args if isinstance(a, float))
        signature = tuple(_signature(a) for a in args)
        if torch.compiler.is_dynamo_compiling():
            reads = tuple([compiled_value(self.functions, path) for path in _reads(self.id, signature)])
            key = _compiled(self.id, signature, reads)
            if not key:
                found = "tensors from outside, or what cannot be compiled"
                expected = (
                    "a mod that works outside of it, whose tensors are its arguments, and whose source is in a file"
                )
                raise AttentionError(f"the mod {self.__name__!r} in torch.compile", found, expected)
            return Mod(self.kind, key, tensors, numbers, self.__name__)
        key, more, _ = _bind(self, signature)
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


UntypedModifier = Modifier[*tuple[Any, ...]]
ScoreMod = Mod | UntypedModifier | Callable[..., Tensor | float]  # what is accepted as score_mod
MaskMod = Mod | UntypedModifier | Callable[..., Tensor | bool]


class ScoreDecorator(Protocol):
    """`score_mod` with a `grad`."""

    @overload
    def __call__(self, function: Callable[[Any, Any, Any, Any, Any], Any], /) -> UntypedModifier: ...
    @overload
    def __call__(  # type: ignore[overload-cannot-match]
        self, function: Callable[[Any, Any, Any, Any, Any, *Captures], Any], /
    ) -> Modifier[*Captures]: ...
    @overload
    def __call__(self, function: Callable[..., Any], /) -> UntypedModifier: ...  # type: ignore[overload-cannot-match]


@overload
def score_mod(
    function: Callable[[Any, Any, Any, Any, Any], Any], *, grad: Callable[..., Any] | None = None
) -> UntypedModifier: ...


@overload
def score_mod(  # type: ignore[overload-cannot-match]
    function: Callable[[Any, Any, Any, Any, Any, *Captures], Any], *, grad: Callable[..., Any] | None = None
) -> Modifier[*Captures]: ...


@overload
def score_mod(  # type: ignore[overload-cannot-match]
    function: Callable[..., Any], *, grad: Callable[..., Any] | None = None
) -> UntypedModifier: ...


@overload
def score_mod(function: None = None, *, grad: Callable[..., Any] | None = None) -> ScoreDecorator: ...


def score_mod(
    function: Callable[..., Any] | None = None, *, grad: Callable[..., Any] | None = None
) -> UntypedModifier | ScoreDecorator:
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
        return partial(Modifier, kind="score", grad=grad)
    return Modifier(function, "score", grad)


@overload
def mask_mod(function: Callable[[Any, Any, Any, Any], Any]) -> UntypedModifier: ...


@overload
def mask_mod(  # type: ignore[overload-cannot-match]
    function: Callable[[Any, Any, Any, Any, *Captures], Any],
) -> Modifier[*Captures]: ...


@overload
def mask_mod(function: Callable[..., Any]) -> UntypedModifier: ...  # type: ignore[overload-cannot-match]


def mask_mod(function: Callable[..., Any]) -> UntypedModifier:
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


class Bound(NamedTuple):
    """The key of a program, the tensors that it reads from outside, and the paths to all that its functions read; None
    if that is not known."""

    key: str
    tensors: tuple[Tensor, ...]
    paths: tuple[Path, ...] | None


def _bind(modifier: Modifier, signature: tuple[str, ...]) -> Bound:
    """The functions are traced unless they were with the same values of all that they read."""
    functions = modifier.functions
    known = modifier.known.get(signature)
    if known is not None and all(map(operator.is_, values_at(functions, known[0].paths or ()), known[1])):
        return known[0]
    codes = [f.__code__ for f in functions]
    head = modifier.kind, signature, codes[0].co_filename, *codes  # equal code may be in two files, named in errors
    paths: tuple[Path, ...] | None
    for paths in _paths.get(head, ()):
        values = values_at(functions, paths)
        key = _programs.get((head, paths, states(values)))
        if key is not None:
            tensors = tuple({id(x): x for x in values if isinstance(x, Tensor)}.values())
            break
    else:
        key, reads = _traced(modifier, signature)
        paths, values = tuple(reads.values), list(reads.values.values())
        tensors = tuple(x for x, _ in reads.tensors.values())
        if reads.complete:
            others = [x for x in _paths.get(head, ()) if x != paths]
            _paths[head] = (*others[1 - MAX_PATHS :], paths)
            _programs[head, paths, states(values)] = key
        else:
            paths = None
    if isinstance(key, tuple):
        what, found, expected = key
        raise AttentionError(what, found, expected)
    bound = Bound(key, tensors, paths)
    if paths is not None and not tensors:
        modifier.known[signature] = bound, values
    return bound


@constant
def _reads(modifier: str, signature: tuple[str, ...]) -> tuple[Path, ...]:
    """The paths to what torch.compile compares: numbers, and functions, which have code."""
    functions = _modifiers[modifier].functions
    try:
        paths = _bind(_modifiers[modifier], signature).paths or ()
    except AttentionError:
        return ()
    values = zip(paths, values_at(functions, paths), strict=True)
    found = [(path[:-1] if isinstance(x, CodeType) else path) for path, x in values if isinstance(x, COMPARED)]
    return tuple(found)


@constant
def _compiled(modifier: str, signature: tuple[str, ...], reads: tuple[Any, ...]) -> str:
    """The key of the program; empty if it reads tensors from outside, if what it reads is not known, or if there is
    none. `reads`: what it reads else; torch.compile calls this again if that has changed."""
    try:
        key, tensors, paths = _bind(_modifiers[modifier], signature)
    except AttentionError:
        return ""
    return "" if tensors or paths is None else key


def _traced(modifier: Modifier, signature: tuple[str, ...]) -> tuple[str | tuple[str, ...], Reads]:
    """The key of the program that tracing the functions gives, or the args of the error; and what they read."""
    reads = Reads(first=sum(not x.startswith(("value", "number")) for x in signature))
    try:
        return _read(modifier, signature, reads), reads
    except AttentionError as error:
        return tuple(map(str, error.args)), reads


def _read(modifier: Modifier, signature: tuple[str, ...], reads: Reads) -> str:
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
    found = [trace.trace(f, values, reads, (("item", n),)) for n, f in enumerate(modifier.functions)]
    root, *slopes = [result(modifier.kind, x, name_of(f)) for x, f in zip(found, modifier.functions, strict=True)]
    ranks += [x.dim() for x, _ in reads.tensors.values()]
    return register(Program(root, tuple(ranks), numbers, *slopes))


def result(kind: str, root: Expr, name: str) -> Expr:
    """The value of a mod: of a score mod a float, of a mask mod a bool. Raises for a mask mod that returns a number."""
    if kind == "score":
        return expr.as_float(root)
    if root.kind != "bool":
        raise AttentionError(
            f"value of the mask mod {name!r}", f"a number ({root.kind})", "a bool: compare it, as in != 0"
        )
    return root
