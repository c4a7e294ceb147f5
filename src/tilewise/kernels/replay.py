"""Eager calls with the same shapes run the same launches: bind their arguments once, replay them with new tensors.

Triton binds and specialises a launch's arguments in Python, which takes longer than a small kernel runs. What it looks
at (dtypes, strides, alignment, integers) is the key under which a call's launches are kept; only the tensors change.
"""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any, NamedTuple

from torch import Tensor

from .tile import View

LIMIT = 4096  # calls that are remembered: a new length may bring new strides


class Step(NamedTuple):
    """A compiled kernel and its arguments, with the places where the call's tensors go."""

    binary: Any
    grid: tuple[int, int, int]
    args: list[Any]
    views: list[tuple[int, int, View]]
    tensors: list[tuple[int, int]]
    descriptors: list[tuple[int, int, Any]]

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        args = self.args.copy()
        for place, slot, (_, strides, wide) in self.views:
            args[place] = View(tensors[slot], strides, wide)
        for place, slot in self.tensors:
            args[place] = tensors[slot]
        for place, slot, like in self.descriptors:  # checked when it was made; only the tensor is another
            args[place] = descriptor = object.__new__(type(like))
            descriptor.__dict__.update(like.__dict__, base=tensors[slot])
        self.binary[self.grid](*args)


_calls: dict[Hashable, list[Step]] = {}


def launch(key: Hashable, tensors: Sequence[Tensor | None], build: Callable[[], Sequence[Any]]) -> None:
    """Run the launches that `build` makes of these tensors, or those it made for the same key."""
    steps = _calls.get(key)
    if steps is not None:
        for step in steps:
            step(tensors)
        return
    launches = [made for made in build() if made.programs]
    steps = [_step(made, made(), tensors) for made in launches]
    if len(_calls) >= LIMIT:
        _calls.clear()
    _calls[key] = steps


def signature(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors)


def shares(tensors: Sequence[Tensor | None]) -> bool:
    """Whether one tensor stands in two places, q for k say; a recording of it could not tell the places apart."""
    given = [id(x) for x in tensors if x is not None]
    return len({*given}) < len(given)


def _step(made: Any, binary: Any, tensors: Sequence[Tensor | None]) -> Step:
    slots = {id(x): slot for slot, x in enumerate(tensors) if x is not None}
    args = [*made.args, *(made.options[p.name] for p in made.kernel.params if p.is_constexpr)]
    views, plain, descriptors = [], [], []
    for place, x in enumerate(args):
        if isinstance(x, View) and x.ptr is not None:
            views.append((place, slots[id(x.ptr)], x._replace(ptr=None)))
        elif isinstance(x, Tensor):
            plain.append((place, slots[id(x)]))
        elif hasattr(x, "block_shape"):
            like = copy(x)
            like.base = None
            descriptors.append((place, slots[id(x.base)], like))
    for place, *_ in (*views, *plain, *descriptors):
        args[place] = None  # the cache must not keep a call's memory alive
    return Step(binary, (made.programs, 1, 1), args, views, plain, descriptors)
