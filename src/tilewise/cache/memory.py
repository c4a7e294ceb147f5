"""Calls with a KV cache that look alike run alike: what was launched for one is launched again, with other tensors.

An eager step calls every layer, and checks, requests and keys of launches take the host longer than a small kernel
takes the GPU. So a call is remembered by all that they depend on: its options as they were said, the shape of its plan,
and of each tensor its type, shape, strides, dtype, device, whether it requires a gradient, its address modulo 16 and
whether it is one of those before it. What is remembered is which launches ran and, for each of their tensors, which of
the call's it was; never a tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import Memory
from ..torch_private import PLAIN, alike, is_watched
from .request import KvPlan, Rotary

SIMPLE = frozenset((bool, int, float, str, type(None)))  # kinds of options that say all there is to know of them
SAME_WORDS = 16  # calls kept that differ in their tensors alone
WORD = "a tensor"

address: Callable[[Tensor], int] = Tensor.data_ptr


Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides and dtype of what a call allocates


class Ran(NamedTuple):
    """A launch that was recorded, and its tensors. `join` makes one recording of several, `again` runs it with tensors
    at other addresses, and those it allocates behind them; the first tensor tells the device."""

    join: Callable[[Sequence[tuple[Any, Sequence[int | None]]], int, int], Any]
    again: Callable[[Any, Sequence[int], Sequence[Made], Tensor], list[Tensor]]
    recording: Any
    tensors: Sequence[Tensor | None]


class Look(NamedTuple):
    """What a call looks like: what was said, its tensors in that order, and its plan."""

    words: Any
    tensors: list[Tensor]
    plan: KvPlan | None

    def pool(self) -> list[Tensor]:
        """All tensors that are there before it runs."""
        return [*self.tensors] if self.plan is None else [*self.tensors, *self.plan[:3]]


class Remembered(NamedTuple):
    """`looks` is of those tensors that are none of those before them, `firsts`, if some (`twins`) are. `made`: what the
    call allocates; `finish` returns what it returns, of those of them all that `results` says."""

    looks: Callable[..., bool]
    firsts: tuple[int, ...]
    twins: tuple[tuple[int, int], ...]
    plan: tuple[Any, ...] | None
    low: Any
    recording: Any
    again: Callable[[Any, Sequence[int], Sequence[Made], Tensor], list[Tensor]]
    made: tuple[Made, ...]
    results: tuple[int, ...]
    finish: Callable[..., Any]

    def fits(self, look: Look) -> bool:
        if look.plan is not None and look.plan.shape != self.plan:
            return False
        tensors = look.tensors
        if not self.twins:
            return self.looks(*tensors)
        return all(tensors[a] is tensors[b] for a, b in self.twins) and self.looks(*[tensors[n] for n in self.firsts])


_calls: Memory[list[Remembered]] = Memory()


def runs_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def look_of(name: str, tensors: list[Tensor], options: Mapping[str, Any]) -> Look | None:
    """None where a call is not remembered: traced, off the GPU, or with mods and words of unusual kinds. `tensors` are
    those that are always there; the others join them."""
    if torch.compiler.is_compiling() or not PLAIN.issuperset(map(type, tensors)) or not runs_on_gpu(tensors[0]):
        return None
    words: list[Any] = [name, tensors[0].shape]
    plan = None
    for word, x in options.items():
        kind = type(x)
        words.append(word)
        if kind in PLAIN:
            tensors.append(x)
        elif kind in SIMPLE:
            words += kind, x
        elif kind is KvPlan:
            plan = x
        elif kind is tuple or kind is Rotary:
            for part in x:
                if type(part) in PLAIN:
                    tensors.append(part)
                    words.append(WORD)
                elif type(part) in SIMPLE:
                    words += type(part), part
                else:
                    return None
        else:
            return None
    if plan is None:
        words.append(os.environ.get("TILEWISE_KV_TILE"))  # which a plan has heard of
    words.append(len(tensors))
    return Look(tuple(words), tensors, plan)


UNKNOWN: Any = object()


def repeated(look: Look | None) -> Any:
    """What a call returns that looks like one that is remembered; or UNKNOWN, and nothing was run."""
    if look is None:
        return UNKNOWN
    for known in _calls.get(look.words, ()):
        if known.fits(look):
            pool = look.pool()
            addresses = [*map(address, pool)]
            if known.low == _low(addresses):
                pool += known.again(known.recording, addresses, known.made, pool[0])
                return known.finish(*[pool[n] for n in known.results])
    return UNKNOWN


def learn(
    look: Look | None, ran: Sequence[Ran | None], made: Sequence[Tensor | None], results: Sequence[Tensor],
    finish: Callable[..., Any],
) -> None:  # fmt: skip
    """Remember what ran, if all of it was recorded and took no other tensors than the call's and those it made (`made`
    may name some of its own); but no call that somebody watched, or whose first tensors require gradients, which may
    have to be refused next time, or are float32, whose products depend on torch's settings."""
    if look is None or not ran or None in ran:
        return
    tensors, pool = look.tensors, look.pool()
    if is_watched(*tensors) or any(x.requires_grad for x in tensors[:3]) or tensors[0].dtype.itemsize != 2:
        return
    there = len(pool)
    pool += [x for x in made if x is not None and not any(x is y for y in pool)]
    places = {id(x): n for n, x in reversed([*enumerate(pool)])}
    needed = [*results, *(x for one in ran if one is not None for x in one.tensors if x is not None)]
    if any(id(x) not in places for x in needed):
        return
    parts = [(one.recording, [None if x is None else places[id(x)] for x in one.tensors]) for one in ran if one]
    firsts = tuple(n for n, x in enumerate(tensors) if places[id(x)] == n)
    known = Remembered(
        alike(*(tensors[n] for n in firsts)),
        firsts,
        tuple((places[id(x)], n) for n, x in enumerate(tensors) if places[id(x)] != n),
        None if look.plan is None else look.plan.shape,
        _low([address(x) for x in pool[:there]]),
        ran[0].join(parts, len(pool), tensors[0].get_device()),  # type: ignore[union-attr]
        ran[0].again,  # type: ignore[union-attr]
        tuple((tuple(x.shape), x.stride(), x.dtype) for x in pool[there:]),
        tuple(places[id(x)] for x in results),
        finish,
    )
    kept = _calls.keep(look.words, [])
    kept.insert(0, known)
    del kept[SAME_WORDS:]


def _low(addresses: Sequence[int]) -> Any:
    """Addresses modulo 16: of aligned ones 0."""
    low = reduce(or_, addresses) & 15
    return low and [x & 15 for x in addresses]
