"""Programs: what mods compute; and `Mod`, a program with its tensors and floats.

The key of a program is its text (see `text`): a saved graph, a pickled model and a worker process need nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..bounded import Bounded
from ..errors import AttentionError
from ..request import LIMIT
from ..torch_internals import constant
from . import expr, text
from .bounds import only_difference
from .derivative import derivative
from .expr import Expr, Place

KINDS = {"score": "float", "mask": "bool"}
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Program:
    """What a mod computes.

    Attributes:
        root: the expression.
        ranks: the number of axes of each of its tensors.
        numbers: how many floats it reads.
        given_slope: d root / d score, if the caller gave it with grad=. Otherwise None: it is derived.
    """

    root: Expr
    ranks: tuple[int, ...]  # of its tensors
    numbers: int
    given_slope: Expr | None = None

    @cached_property
    def key(self) -> str:
        """The program as text, by which it is known."""
        return text.write(text.Parts(self.root, self.ranks, self.numbers, self.given_slope))

    @cached_property
    def derivative(self) -> Expr:
        """d root / d score."""
        return self.given_slope or derivative(self.root, expr.SCORE)

    @cached_property
    def sites(self) -> list[tuple[Expr, Expr]]:
        """Every load of a float tensor, with the derivative of the program with respect to it."""
        loads = [x for x in expr.nodes(self.root) if x.op == "load" and x.kind == "float"]
        return [(x, derivative(self.root, x)) for x in loads]

    def after(self, first: Program) -> Program:
        """This program applied to the result of another; for masks, the pairs that both show.

        Args:
            first: the program that is applied before this one.

        Returns:
            One program for both. Its tensors are those of `first` and then its own.
        """

        def move(x: Expr, args: tuple[Expr, ...]) -> Expr | None:
            return first.root if x is expr.SCORE else _behind(first, x, args)

        if self.root.kind == "bool":
            root = expr.logic("and", first.root, expr.substitute(self.root, move))
            return Program(root, first.ranks + self.ranks, first.numbers + self.numbers)
        derivative = None
        if self.given_slope is not None or first.given_slope is not None:
            derivative = expr.arithmetic("mul", expr.substitute(self.derivative, move), first.derivative)
        root = expr.substitute(self.root, move)
        return Program(root, first.ranks + self.ranks, first.numbers + self.numbers, derivative)


def _behind(first: Program, x: Expr, args: tuple[Expr, ...]) -> Expr | None:
    """The node x with its tensor or number counted after those of `first`; None if it reads none."""
    if x.op in expr.REDUCTIONS:
        n, axis = x.value
        return expr.node(x.op, *args, value=(n + len(first.ranks), axis), kind=x.kind)
    if x.op not in ("load", "number"):
        return None
    shift = len(first.ranks) if x.op == "load" else first.numbers
    return expr.node(x.op, *args, value=x.value + shift, kind=x.kind)


class Programs(Bounded[str, Program]):
    """Programs by their keys. A missing one is read from its key."""

    def __missing__(self, key: str) -> Program:
        return self[register(Program(*text.read(key)))]


PROGRAMS = Programs(LIMIT)


def register(program: Program) -> str:
    """The key of the program, which is added to PROGRAMS."""
    return PROGRAMS.setdefault(program.key, program).key


class Mod(NamedTuple):
    """A mod with its arguments, for the options score_mod and mask_mod of `attention`. Made by calling a function that
    `tilewise.score_mod` or `tilewise.mask_mod` decorates.

    Attributes:
        kind: "score" or "mask".
        key: the key of its `Program`, by which the kernels are cached.
        tensors: the tensors that it reads.
        numbers: the floats that it reads.
        name: the name of the function, for messages.
    """

    kind: str
    key: str
    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    name: str = "mod"

    @property
    def program(self) -> Program:
        """What it computes."""
        return PROGRAMS[self.key]

    def __call__(self, *place: Any, q_len: Any = None, kv_len: Any = None) -> Any:
        """The value of the mod, computed in torch: to look at, and for tests.

        Args:
            place: (score, b, h, q_idx, kv_idx) of a score mod, (b, h, q_idx, kv_idx) of a mask mod: numbers or tensors,
                which broadcast.
            q_len: number of queries. Default, for a mod that reads q_pos and no length: as many as keys.
            kv_len: number of keys.

        Returns:
            A tensor of scores, or of bools.

        Raises:
            AttentionError: the mod reads a length that is not given.
        """
        score = place[0] if self.kind == "score" else None
        b, h, i, j = place[-4:]
        dtype = torch.float32 if score is None else score.dtype
        root = self.program.root
        if q_len is None or kv_len is None:
            if not only_difference([root], expr.N_Q, expr.N_K):
                raise AttentionError(f"a call of {self.name!r} in torch", "no q_len=, kv_len=", "both: it reads them")
            q_len = kv_len = 0
        (value,) = expr.evaluate([root], Place(b, h, i, j, q_len, kv_len), score, self.tensors, self.numbers, dtype)
        return value

    def __eq__(self, other: object) -> bool:
        """Whether the other is the same program with the same tensors (the objects, not their contents) and numbers."""
        return isinstance(other, Mod) and self._identity() == other._identity()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        return self.kind, self.key, *map(id, self.tensors), *(x.hex() for x in self.numbers)

    def __repr__(self) -> str:
        tensors = (f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in self.tensors)
        return f"{self.kind}_mod {self.name}({', '.join((*tensors, *map(repr, self.numbers)))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return restored_mod, tuple(self)

    def to(self, device: torch.device | str) -> Mod:
        """The mod with its tensors on another device.

        Args:
            device: a torch.device or its name.

        Returns:
            A new mod.
        """
        return self._replace(tensors=tuple(x.to(device) for x in self.tensors))


def restored_mod(kind: str, key: str, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], name: str) -> Mod:
    """A mod from its pickled fields, checked to fit each other."""
    program = PROGRAMS[key]
    loads = [x for x in expr.nodes(program.root) if x.op == "load"]
    fits = (
        KINDS.get(kind) == program.root.kind
        and tuple(x.dim() for x in tensors) == program.ranks
        and all(x.kind == kind_of(tensors[x.value]) for x in loads)
        and len(numbers) == program.numbers
        and all(isinstance(x, float) for x in numbers)
        and isinstance(name, str)
    )
    if not fits:
        raise AttentionError(
            "a saved mod", f"{kind} {name!r} whose parts do not fit its program", "one as it was saved"
        )
    return Mod(kind, key, tuple(tensors), tuple(numbers), name)


def kind_of(x: Tensor) -> str:
    """float, int or bool: the kind of a tensor's elements in a mod. Raises for other dtypes and layouts."""
    kind = "bool" if x.dtype == torch.bool else "int" if x.dtype in INTEGERS else "float" if x.dtype in FLOATS else ""
    if not kind or x.layout != torch.strided:
        names = ", ".join(str(x).removeprefix("torch.") for x in (torch.bool, *INTEGERS, *FLOATS))
        raise AttentionError("a tensor of a mod", f"{x.dtype}, {x.layout}", f"a dense one of {names}")
    return kind


def check_filled(mod: Mod) -> None:
    """Raises for a tensor without elements. (Calls without batch rows, heads or tokens read none, and may have one.)"""
    for x in mod.tensors:
        if x.numel() == 0:
            raise AttentionError(
                f"shape of a tensor of the {mod.kind} mod {mod.name!r}", tuple(x.shape), "at least 1 along every axis"
            )


@constant
def indexed(key: str) -> tuple[tuple[int, int, str], ...]:
    """(tensor, axis, index) of every axis that a program indexes by b, h, i or j itself; j also stands for `q_pos`.

    >>> from tilewise.mods import alibi
    >>> indexed(alibi(torch.ones(4)).key)
    ((0, 0, 'h'),)
    """
    return _indexed(key)


@lru_cache(LIMIT)
def _indexed(key: str) -> tuple[tuple[int, int, str], ...]:
    names = {expr.B: "b", expr.H: "h", expr.I: "i", expr.J: "j", expr.Q_POS: "j"}
    loads = [x for x in expr.nodes(PROGRAMS[key].root) if x.op == "load"]
    return tuple({(x.value, n, names[place]): None for x in loads for n, place in enumerate(x.args) if place in names})


@constant
def rows(key: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each sum over a row, the (tensor, axis) pairs along which it reads: they must have one length."""
    return _rows(key)


@lru_cache(LIMIT)
def _rows(key: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    sums = [x for x in expr.nodes(PROGRAMS[key].root) if x.op in expr.REDUCTIONS]
    return tuple(tuple({x.value: None} | dict.fromkeys(expr.lengths(x.args[0]))) for x in sums)


@constant
def chain(keys: tuple[str, ...]) -> str:
    """The key of one program that applies the given ones in order; for masks, that shows the pairs that all show."""
    return _chain(keys)


@lru_cache(LIMIT)
def _chain(keys: tuple[str, ...]) -> str:
    first, *rest = (PROGRAMS[key] for key in keys)
    for program in rest:
        first = program.after(first)
    return register(first)


def bound(mods: Sequence[Mod]) -> Mod | None:
    """One mod that applies the given ones in order; for masks, one that shows the pairs that all show."""
    if not mods:
        return None
    if len(mods) == 1:
        return mods[0]
    tensors = tuple(t for m in mods for t in m.tensors)
    numbers = tuple(x for m in mods for x in m.numbers)
    name = ", ".join([m.name for m in mods])
    return Mod(mods[0].kind, chain(tuple(m.key for m in mods)), tensors, numbers, name)


def combine_masks(op: str, mods: Sequence[Mod]) -> Mod:
    """One mask mod: the "and" or the "or" of the given ones."""
    first, *rest = mods
    for mod in rest:
        a, b = first.program, mod.program
        root = expr.logic(op, a.root, expr.substitute(b.root, partial(_behind, a)))
        key = register(Program(root, a.ranks + b.ranks, a.numbers + b.numbers))
        first = Mod(
            "mask", key, first.tensors + mod.tensors, first.numbers + mod.numbers, f"{first.name} {op} {mod.name}"
        )
    return first


def check_tables(mod: Mod, sizes: Sequence[int | None]) -> None:
    """Raises unless a tensor that a mod indexes by b, h, q_idx or kv_idx has an element for each of its values: as many
    as batch rows or heads, at least as many as queries or keys (a cache has room for more). Offsets of
    sequences, of one axis, have an element more than there are sequences."""
    for n, axis, index in indexed(mod.key):
        size, found = sizes["bhij".index(index)], mod.tensors[n].shape[axis]
        most = size if size is None or index == "h" or mod.tensors[n].dim() > 1 else size + 1
        if size and most and (1 < found < size or (found > most and index in "bh")):
            name = ("batch row", "head", "query", "key")["bhij".index(index)]
            raise AttentionError(
                f"axis {axis} of tensor {n} of the {mod.kind} mod {mod.name!r}",
                found,
                f"one for each {name}, {size}, or 1",
            )
    for places in rows(mod.key):
        lengths = [mod.tensors[n].shape[axis] for n, axis in places]
        if any(length != lengths[0] for length in lengths):
            raise AttentionError(
                f"rows that the {mod.kind} mod {mod.name!r} reads together",
                f"lengths of {', '.join(map(str, lengths))}",
                "equal lengths: rows are combined element by element",
            )
