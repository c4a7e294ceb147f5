"""Mods: plain Python functions of one score (or one pair) that every backend understands.

    @score_mod
    def relative(score, b, h, q_idx, kv_idx, slopes):
        return score + slopes[h] * (kv_idx - q_idx)

    attention(q, k, v, score_mod=relative(slopes))

Calling the decorated function binds it: tensors are read (and get gradients) where the mod indexes them, floats are
passed to the kernel when it runs, ints and bools are compiled in. What comes back is a `Mod`: the key of a program,
and its tensors and floats. A program is known by what it says, never by its name.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.mods import expr, parse
from tilewise.mods.expr import Expr, Place
from tilewise.spec import AttentionError

PAIR = (expr.B, expr.H, expr.I, expr.J)


@dataclass(frozen=True, eq=False)
class Program:
    """What a mod computes: an expression, the number of its tensors and floats, and d expression / d score if given."""

    name: str
    root: Expr
    ranks: tuple[int, ...]  # of its tensors
    numbers: int
    given_slope: Expr | None = None

    @cached_property
    def key(self) -> str:
        slope = "" if self.given_slope is None else f" slope {text(self.given_slope)}"
        return hashlib.sha256(f"{text(self.root)}{slope} {self.ranks} {self.numbers}".encode()).hexdigest()[:16]

    @cached_property
    def slope(self) -> Expr:
        """d root / d score."""
        return self.given_slope or expr.derivative(self.root, expr.SCORE)

    @cached_property
    def sites(self) -> list[tuple[Expr, Expr]]:
        """Every place where a tensor of floats is read, with the derivative of the program by it."""
        loads = [x for x in expr.nodes(self.root) if x.op == "load" and x.kind == "float"]
        return [(x, expr.derivative(self.root, x)) for x in loads]

    def after(self, first: Program) -> Program:
        """This program applied to what `first` returns."""

        def move(x: Expr, args: tuple[Expr, ...]) -> Expr | None:
            if x is expr.SCORE:
                return first.root
            if x.op in ("load", "number"):
                shift = len(first.ranks) if x.op == "load" else first.numbers
                return expr.node(x.op, *args, value=x.value + shift, kind=x.kind)
            return None

        slope = None
        if self.given_slope is not None or first.given_slope is not None:
            slope = expr.arithmetic("mul", expr.substitute(self.slope, move), first.slope)
        root = expr.substitute(self.root, move)
        name = f"{first.name}, {self.name}"
        return Program(name, root, first.ranks + self.ranks, first.numbers + self.numbers, slope)


def text(root: Expr) -> str:
    """A canonical spelling, one line for every distinct node."""
    names: dict[Expr, int] = {}
    lines = []
    for n, x in enumerate(expr.nodes(root)):
        names[x] = n
        lines.append(f"{x.op} {' '.join(str(names[a]) for a in x.args)} {x.value!r} {x.kind}")
    return "\n".join(lines)


PROGRAMS: dict[str, Program] = {}
_functions: dict[str, Modifier] = {}


def register(program: Program) -> str:
    PROGRAMS.setdefault(program.key, program)
    return program.key


class Mod(NamedTuple):
    """A mod with its arguments: `kind` is score or mask, `key` names its program."""

    kind: str
    key: str
    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]

    @property
    def program(self) -> Program:
        return PROGRAMS[self.key]

    def __call__(self, *place: Any) -> Any:
        """The value in torch, at (score, b, h, q_idx, kv_idx) or (b, h, q_idx, kv_idx), which broadcast."""
        score = place[0] if self.kind == "score" else None
        b, h, i, j = place[-4:]
        dtype = torch.float32 if score is None else score.dtype
        root = self.program.root
        if root.deps & {"n_q", "n_k"}:
            raise AttentionError(f"a call of {self.program.name!r} in torch", "q_len or kv_len in it", "neither")
        (value,) = expr.evaluate([root], Place(b, h, i, j, 0, 0), score, self.tensors, self.numbers, dtype)
        return value


class Modifier:
    """A decorated function; calling it with its tensors and numbers gives a `Mod`."""

    def __init__(self, function: Callable[..., Any], kind: str, grad: Callable[..., Any] | None = None) -> None:
        self.function, self.kind, self.grad = function, kind, grad
        self.__doc__, self.__name__, self.__wrapped__ = function.__doc__, function.__name__, function
        self.id = f"{function.__name__}-{len(_functions)}"
        _functions[self.id] = self

    def __call__(self, *args: Any) -> Mod:
        tensors = tuple(a for a in args if isinstance(a, Tensor))
        numbers = tuple(a for a in args if isinstance(a, float))
        return Mod(self.kind, _bind(self.id, tuple(_signature(a) for a in args)), tensors, numbers)


def score_mod(function: Callable[..., Any] | None = None, *, grad: Callable[..., Any] | None = None) -> Any:
    """Decorate `f(score, b, h, q_idx, kv_idx, *captured) -> score`, a function of one pair in plain Python.

    >>> @score_mod
    ... def softcapped(score, b, h, q_idx, kv_idx, cap):
    ...     return cap * torch.tanh(score / cap)
    >>> softcapped(2.0)(torch.tensor([0.0, 100.0]), 0, 0, 0, 0)
    tensor([0., 2.])

    Its derivative by the score is derived; `grad=` gives it instead, a function of the same parameters. Indices count
    from 0 within the sequence; the lengths are there for the asking, as keyword-only parameters q_len and kv_len.
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
    """
    return Modifier(function, "mask")


def _constant(function: Callable[..., str]) -> Callable[..., str]:
    """Let torch.compile call the function while it traces. torch.compiler.assume_constant_result does no more than
    this, and imports all of the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _signature(argument: Any) -> str:
    """How an argument is compiled in: a tensor's kind and rank, the value of an int, nothing of a float."""
    if isinstance(argument, Tensor):
        kind = "float" if argument.is_floating_point() else "bool" if argument.dtype == torch.bool else "int"
        return f"{kind} {argument.dim()}"
    if isinstance(argument, (bool, int)):
        return f"value {int(argument)}"
    if isinstance(argument, float):
        return "number"
    raise AttentionError("an argument of a mod", type(argument).__name__, "a tensor, a float, an int or a bool")


_bindings: dict[tuple[str, tuple[str, ...]], str] = {}


@_constant
def _bind(function: str, signature: tuple[str, ...]) -> str:
    """The key of the program; read again by every call where the function's meaning may have changed since."""
    key = _bindings.get((function, signature))
    if key is None:
        key = _read(_functions[function], signature)
        if _is_closed(_functions[function]):
            _bindings[function, signature] = key
    return key


def _is_closed(modifier: Modifier) -> bool:
    """Whether the function reads nothing from outside but modules and builtins."""
    outside = [inspect.getclosurevars(f) for f in (modifier.function, modifier.grad) if f is not None]
    return all(isinstance(x, ModuleType) for o in outside for x in (*o.globals.values(), *o.nonlocals.values()))


def _read(modifier: Modifier, signature: tuple[str, ...]) -> str:
    names = list(modifier.function.__code__.co_varnames[: modifier.function.__code__.co_argcount])
    leading = len(PAIR) + (modifier.kind == "score")
    if len(names) != leading + len(signature):
        expected = f"{max(0, len(names) - leading)}: {', '.join(names[leading:])}"
        raise AttentionError(f"arguments of the mod {modifier.__name__!r}", len(signature), expected)
    values: list[Expr | parse.Captured] = [*([expr.SCORE] if modifier.kind == "score" else []), *PAIR]
    ranks: list[int] = []
    numbers = 0
    for name, kind in zip(names[leading:], signature, strict=True):
        match kind.split():
            case ["value", value]:
                values.append(expr.const(int(value)))
            case ["number"]:
                values.append(expr.number(numbers))
                numbers += 1
            case [kind, rank]:
                values.append(parse.Captured(len(ranks), name, int(rank), kind))
                ranks.append(int(rank))
    root = parse.read(modifier.function, values)
    root = expr.as_float(root) if modifier.kind == "score" else expr.as_bool(root)
    slope = None if modifier.grad is None else expr.as_float(parse.read(modifier.grad, values))
    return register(Program(modifier.__name__, root, tuple(ranks), numbers, slope))


@_constant
def chain(keys: tuple[str, ...]) -> str:
    """The key of one program that applies the given ones in order."""
    first, *rest = (PROGRAMS[key] for key in keys)
    for program in rest:
        first = program.after(first)
    return register(first)


def bound(mods: Sequence[Mod]) -> Mod | None:
    """One mod that applies the given ones in order."""
    if not mods:
        return None
    if len(mods) == 1:
        return mods[0]
    tensors = tuple(t for m in mods for t in m.tensors)
    numbers = tuple(x for m in mods for x in m.numbers)
    return Mod(mods[0].kind, chain(tuple(m.key for m in mods)), tensors, numbers)
