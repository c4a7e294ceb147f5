"""The one memory of calls: what was found out for a call serves all that look like it.

An eager step calls every layer, and checks, requests and keys of launches take the host longer than a small kernel
takes the GPU. So a call is known again by all that they depend on: its options as they were said and, of each of its
tensors, its type, shape, strides, dtype, device, whether it requires a gradient, its address modulo 16 and whether it
is one of those before it (q and k, say, whose places a recorded launch could not tell apart).

Words and the first tensor's shape find, in a dict, the few calls that were said alike; among them torch itself compares
tensors, as it does for compiled programs. Values, addresses, streams and threads are none of it: what is remembered is
the same for all of them, and holds no memory of the caller's. Nothing is remembered of calls off the GPU, nor of those
that somebody watches (torch.compile, modes, torch.func), who must see the registered op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from ..spec import LIMIT
from ..torch_private import PLAIN, alike, is_watched

SIMPLE = frozenset((bool, int, float, str, type(None)))  # kinds of options that say all there is to know of them
SAME_WORDS = 16  # calls kept that differ in their tensors alone
WORD = "a tensor"

address: Callable[[Tensor], int] = Tensor.data_ptr


class Memory(dict[Any, Any]):
    """A full one begins anew. Threads share it: its reads and writes are single operations, and of two that learn the
    same thing one is kept."""

    def keep(self, key: Any, found: Any) -> Any:
        if len(self) >= LIMIT:
            self.clear()
        return self.setdefault(key, found)


_calls = Memory()


# What a call looks like: what was said, its tensors in that order; and what is compared and not hashed.
Look = tuple[tuple[Any, ...], list[Tensor], list[Any]]


def runs_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def look_of(name: str, tensors: list[Tensor], options: Mapping[str, Any], *more: Any) -> Look | None:
    """None where a call is not remembered: traced, off the GPU, or with words of unusual kinds. `tensors` are those
    that are always there; the options' join them. `more`: what else counts."""
    if torch.compiler.is_compiling() or not PLAIN.issuperset(map(type, tensors)) or not runs_on_gpu(tensors[0]):
        return None
    words: list[Any] = [name, tensors[0].shape, *more]
    beside: list[Any] = []
    for word, x in options.items():
        kind = type(x)
        words.append(word)
        if kind in SIMPLE:
            words += kind, x  # 1 equals True, and 2.0 equals 2, but only in Python
        elif kind in PLAIN:
            tensors.append(x)
        elif not isinstance(x, tuple) or not _parts(x, words, tensors, beside):
            return None
    words.append(len(tensors))
    return tuple(words), tensors, beside


def _parts(x: tuple[Any, ...], words: list[Any], tensors: list[Tensor], beside: list[Any]) -> bool:
    """Of a window, a plan, a mod, a block mask; False where there is something unusual in it."""
    words.append(type(x))
    for part in x:
        kind = type(part)
        if kind in SIMPLE:
            words += kind, part
        elif kind in PLAIN:
            tensors.append(part)
            words.append(WORD)
        elif kind is tuple and not (part and type(part[0]) in PLAIN):  # what a plan was made for, a mod's numbers
            beside.append(part)
        elif not isinstance(part, tuple) or not _parts(part, words, tensors, beside):
            return False
    words.append(len(x))
    return True


def recall(look: Look | None) -> tuple[Any, list[int]]:
    """What is known of a call that looks like this, or None; and the addresses of its tensors. torch.compile, whose
    calls have no look, must not see the dict: it would compile again whenever an eager call has made it longer."""
    if look is not None:
        words, tensors, beside = look
        for are_alike, others, low, found in _calls.get(words, ()):
            if are_alike(*tensors) and others == beside:
                addresses = [*map(address, tensors)]
                if low == low_bits(addresses):
                    return found, addresses
    return None, []


def keep(look: Look, found: Any) -> None:
    """Remember what was found out for a call; but for none that is watched, or has a tensor that was not looked at."""
    words, tensors, beside = look
    if not is_watched(*tensors) and not any(isinstance(x, Tensor) for part in beside for x in part):
        known = _calls.keep(words, [])
        known.insert(0, (_alike(tensors), beside, low_bits([*map(address, tensors)]), found))
        del known[SAME_WORDS:]


def _alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """`alike` of tensors of which one may be two."""
    places = first_places(tensors)
    firsts = [n for n, x in enumerate(tensors) if places[id(x)] == n]
    twins = [(places[id(x)], n) for n, x in enumerate(tensors) if places[id(x)] != n]
    look = alike(*(tensors[n] for n in firsts))
    if not twins:
        return look
    return lambda *others: all(others[a] is others[b] for a, b in twins) and look(*[others[n] for n in firsts])


def first_places(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Where each of them stands, by its id; of one that is there twice, where it first does."""
    return {id(x): n for n, x in reversed([*enumerate(tensors)])}


def places_of(tensors: Sequence[Tensor | None], look: Look) -> list[int | None] | None:
    """Which of a call's tensors these are; None where one is none of them."""
    places = first_places(look[1]) | {id(None): None}
    found = [places.get(id(x), -1) for x in tensors]
    return None if -1 in found else found


def remembered(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What was made for this key: of calls that come as requests, whose key is all they hold and `signature`."""
    found = _calls.get(key)
    return _calls.keep(key, make()) if found is None else found


def recent(key: tuple[Any, ...], found: Any = None) -> Any:
    """What was last found for this key; or this is, from now on."""
    if found is None:
        return _calls.get(key)
    _calls.pop(key, None)
    return _calls.keep(key, found)


def signature(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What a choice of kernels and its compilation depend on in tensors, as a key."""
    found: list[Any] = []
    for x in tensors:
        if x is None:
            found.append(None)
        else:
            found += x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16
    names = [*map(id, tensors)]
    if len(set(names)) < len(names):
        found += map(names.index, names)
    return tuple(found)


def low_bits(addresses: Sequence[int]) -> Any:
    """Addresses modulo 16: of aligned ones 0."""
    return reduce(or_, addresses) & 15 and [x & 15 for x in addresses]
