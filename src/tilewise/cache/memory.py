"""Calls with a KV cache that look alike run alike: what was launched for one is launched again, with other tensors.

An eager step calls every layer, and checks, requests and keys of launches take the host longer than a small kernel
takes the GPU. So a call with a plan is remembered by all that they depend on: its options as they were said, and of
each tensor its shape, strides, dtype, device, address modulo 16 and whether it is one of those before it. What is
remembered is which launches ran and, for each of their tensors, which of the call's it was; never a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import Memory, signature
from ..torch_private import is_watched
from .request import Rotary

SIMPLE = frozenset((bool, int, float, str, type(None)))  # kinds of options that say all there is to know of them


class Look(NamedTuple):
    """What a call looks like; its tensors in the order in which they were said, the plan's behind them; and, where
    nobody wants to see the lse, the plan's memory for it."""

    key: Any
    tensors: list[Tensor]
    lse: Tensor | None


class Ran(NamedTuple):
    """A launch that was recorded, and its tensors."""

    again: Callable[[Any, Sequence[Tensor | None]], None]
    recording: Any
    tensors: Sequence[Tensor | None]


class Stage(NamedTuple):
    again: Callable[[Any, Sequence[Tensor | None]], None]
    recording: Any
    places: tuple[int | None, ...]


class Remembered(NamedTuple):
    """Launches, and the shapes of what they write: the result (None: it was given), its lse, turned queries or None."""

    stages: tuple[Stage, ...]
    out: tuple[int, ...] | None
    lse: tuple[int, ...]
    turned: tuple[int, ...] | None

    def run(self, look: Look, out: Tensor | None) -> tuple[Tensor, Tensor]:
        new = look.tensors[0].new_empty
        lse = new(self.lse, dtype=torch.float32) if look.lse is None else look.lse
        pool: list[Tensor] = [*look.tensors, lse]
        if out is None:
            assert self.out is not None
            out = new(self.out)
            pool.append(out)
        if self.turned is not None:
            pool.append(new(self.turned))
        for again, recording, places in self.stages:
            again(recording, [None if n is None else pool[n] for n in places])
        return out, lse


_calls: Memory[Remembered] = Memory()


def runs_on_gpu(q: Tensor) -> bool:
    return q.is_cuda


def look_of(q: Tensor, k: Tensor, v: Tensor, lengths: Any, options: dict[str, Any]) -> Look | None:
    """None where a call is not remembered: off the GPU, without a plan, watched, with a gradient that must be refused,
    in float32 (whose products depend on torch's settings), or with mods and words of unusual kinds."""
    plan = options.get("plan")
    if plan is None or not isinstance(q, Tensor) or not isinstance(lengths, Tensor) or not runs_on_gpu(q):
        return None
    if is_watched(q, k, v) or q.dtype.itemsize != 2:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    tensors: list[Tensor] = [q, k, v, lengths]
    words: list[Any] = []
    for name, x in options.items():
        words.append(name)
        if type(x) in SIMPLE:
            words += type(x), x
        elif isinstance(x, Tensor):
            tensors.append(x)
        elif x is plan:
            words.append(plan.shape)  # which says all of its tensors
        elif type(x) is tuple or type(x) is Rotary:
            for part in x:
                if isinstance(part, Tensor):
                    tensors.append(part)
                    words.append("a tensor")
                elif type(part) in SIMPLE:
                    words += type(part), part
                else:
                    return None
        else:
            return None
    key = (*words, *signature(*tensors))
    return Look(key, [*tensors, plan.ledger, plan.room], None if options.get("return_lse") else plan.lse)


def recall(look: Look) -> Remembered | None:
    return _calls.get(look.key)


def learn(look: Look, ran: Sequence[Ran | None], out: Tensor, lse: Tensor, turned: Tensor | None) -> None:
    """Remember what ran, if all of it was recorded and took no other tensors than the call's and its results."""
    pool: list[Tensor] = [*look.tensors, lse]
    given = any(x is out for x in pool)
    pool += [*([] if given else [out]), *([] if turned is None else [turned])]
    places = {id(x): n for n, x in reversed([*enumerate(pool)])}
    stages = []
    for one in ran:
        if one is None or any(x is not None and id(x) not in places for x in one.tensors):
            return
        stages.append(Stage(one.again, one.recording, tuple(None if x is None else places[id(x)] for x in one.tensors)))
    shapes = None if given else tuple(out.shape), tuple(lse.shape), None if turned is None else tuple(turned.shape)
    _calls.keep(look.key, Remembered(tuple(stages), *shapes))
