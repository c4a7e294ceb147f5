"""What ran for a call with a KV cache runs again for the next that looks like it: see dispatch/memory.py.

What is remembered is which launches ran and, for each of their tensors, which of the call's it was; never a tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..dispatch.memory import Look, first_places, keep, look_of, recall
from ..kv_spec import Ran
from ..torch_private import is_watched


class Runs(NamedTuple):
    """How a call runs. `finish` returns what it returns, of those that `results` says: of its tensors, and what the
    recording allocates."""

    recording: Any
    results: tuple[int, ...]
    finish: Callable[..., Any]


def kv_look(name: str, tensors: list[Any], options: Mapping[str, Any]) -> Look | None:
    """As `look_of`, with what a call without a plan will ask when it makes one."""
    tile = os.environ.get("TILEWISE_KV_TILE") if options.get("plan") is None else None
    return look_of(name, tensors, options, tile)


UNKNOWN: Any = object()


def repeated(look: Look | None) -> Any:
    """What a call returns that looks like one that is remembered; or UNKNOWN, and nothing was run."""
    runs, addresses = recall(look)
    if runs is None or look is None:
        return UNKNOWN
    _, tensors, _ = look
    there = [*tensors, *runs.recording.run(addresses)]
    return runs.finish(*[there[n] for n in runs.results])


def learn(
    look: Look | None, ran: Sequence[Ran | None], made: Sequence[Tensor | None], results: Sequence[Tensor],
    finish: Callable[..., Any],
) -> None:  # fmt: skip
    """Remember what ran, if all of it was recorded and took no other tensors than the call's and those it made (`made`
    may name some of its own); but no call that somebody watched, or whose first tensors require gradients, which may
    have to be refused next time, or are float32, whose products depend on torch's settings."""
    if look is None or not ran or None in ran:
        return
    _, tensors, _ = look
    if is_watched(*tensors) or any(x.requires_grad for x in tensors[:3]) or tensors[0].dtype.itemsize != 2:
        return
    pool = [*tensors, *(x for x in made if x is not None and not any(x is y for y in tensors))]
    places = first_places(pool)
    needed = [*results, *(x for one in ran if one is not None for x in one.tensors if x is not None)]
    if any(id(x) not in places for x in needed):
        return
    parts = [(one.recording, [None if x is None else places[id(x)] for x in one.tensors]) for one in ran if one]
    first: Any = ran[0]
    recording = first.join(parts, tensors, pool[len(tensors) :])
    keep(look, Runs(recording, tuple(places[id(x)] for x in results), finish))
