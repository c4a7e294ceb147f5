"""Eager calls with the same shapes run the same launches: bind their arguments once, replay them with new tensors.

Triton binds and specialises a launch's arguments in Python, which takes longer than a small kernel runs. What it looks
at (dtypes, strides, alignment, integers) is the key under which a call's launches are kept; only the tensors change.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia

from ..spec import LIMIT
from ..spec import signature as signature

PLACES = 256  # sets of addresses for which a recording is ready
LAUNCHER = "iiiKKppOOOOOO"  # what Triton 3.6's C launcher takes first; kernels of other versions go through its Python
STREAM = 3


class Slot(NamedTuple):
    """Where the call's n-th tensor goes."""

    n: int


class Address(NamedTuple):
    address: int

    def data_ptr(self) -> int:
        return self.address


class Bound(NamedTuple):
    """A C launcher and what it takes, in a row: the call fills in the stream and, by their places, its addresses; with
    more of a view behind them, deep in a tuple, or as TMA descriptors.
    """

    launch: Callable[..., None]
    args: list[Any]
    plain: list[tuple[int, int]]
    views: list[tuple[int, int, tuple[Any, ...]]]
    nested: list[tuple[int, tuple[Any, ...]]]
    maps: list[tuple[int, int, Callable[[int], Any]]]

    def filled(self, stream: int, addresses: Sequence[Any]) -> list[Any]:
        args = self.args.copy()
        args[STREAM] = stream
        for place, slot in self.plain:
            args[place] = addresses[slot]
        for place, slot, rest in self.views:
            args[place] = (addresses[slot], *rest)
        for place, template in self.nested:
            args[place] = _filled(template, addresses)
        for place, slot, make in self.maps:
            args[place] = make(addresses[slot])
        return args


class Step(NamedTuple):
    """A compiled kernel and its arguments, with slots for the call's tensors; bound, where its launcher is known."""

    binary: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    bound: Bound | None


class Recording(NamedTuple):
    """The launches of a call. `ready`: where all are bound, what their launchers take, by stream and addresses: those
    of a model's tensors come back with its next step.
    """

    steps: list[Step]
    ready: dict[tuple[Any, ...], list[tuple[Callable[..., None], list[Any]]]] | None


_calls: dict[Hashable, Recording] = {}


def launch(
    key: Hashable, tensors: Sequence[Tensor | None], build: Callable[[], Sequence[Any]],
    calls: dict[Hashable, Recording] | None = None,
) -> None:  # fmt: skip
    """Run the launches that `build` makes of these tensors, or those it made for the same key."""
    calls = _calls if calls is None else calls
    recording = calls.get(key)
    if recording is None:
        launches = [made for made in build() if made.programs]
        steps = [_step(made, made(), tensors) for made in launches]
        if len(calls) >= LIMIT:
            calls.clear()
        calls[key] = Recording(steps, {} if all(step.bound for step in steps) else None)
    elif recording.ready is None or _is_hooked():
        for step in recording.steps:
            step.binary[step.grid](*(_filled(x, tensors) for x in step.args))
    else:
        first: Any = tensors[0]
        stream = torch._C._cuda_getCurrentRawStream(first.get_device())
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        for launcher, args in _ready(recording, stream, addresses):
            launcher(*args)


def _ready(recording: Recording, stream: int, addresses: list[int | None]) -> list[tuple[Any, list[Any]]]:
    ready: Any = recording.ready
    found = ready.get((stream, *addresses))
    if found is None:
        if len(ready) >= PLACES:
            ready.clear()
        bound: list[Any] = [step.bound for step in recording.steps]
        found = ready[(stream, *addresses)] = [(x.launch, x.filled(stream, addresses)) for x in bound]
    return found


def _is_hooked() -> bool:
    """Whether somebody, a profiler say, wants to hear of launches: then Triton makes them."""
    runtime = triton.knobs.runtime
    return bool(_listeners(runtime.launch_enter_hook) or _listeners(runtime.launch_exit_hook))


def _listeners(hook: Any) -> Any:
    return hook is not None and getattr(hook, "calls", True)


def _step(made: Any, binary: Any, tensors: Sequence[Tensor | None]) -> Step:
    slots = {id(x): Slot(n) for n, x in enumerate(tensors) if x is not None}
    args = [*made.args, *(made.options[p.name] for p in made.kernel.params if p.is_constexpr)]
    template = tuple(_template(x, slots) for x in args)  # the cache must not keep a call's memory alive
    grid = made.programs, 1, 1
    return Step(binary, grid, template, _bound(binary, grid, template))


def _template(x: Any, slots: dict[int, Slot]) -> Any:
    if isinstance(x, Tensor):
        return slots[id(x)]
    if isinstance(x, tuple):
        return _like(x, [_template(item, slots) for item in x])
    if hasattr(x, "block_shape"):
        return _based(x, slots[id(x.base)])
    return x


def _filled(x: Any, values: Sequence[Any]) -> Any:
    if isinstance(x, Slot):
        return values[x.n]
    if isinstance(x, tuple):
        return _like(x, [_filled(item, values) for item in x])
    if hasattr(x, "block_shape"):
        return _based(x, values[x.base.n])
    return x


def _like(x: tuple[Any, ...], items: list[Any]) -> Any:
    return type(x)(*items) if hasattr(x, "_fields") else tuple(items)


def _based(descriptor: Any, base: Any) -> Any:
    """The same TMA descriptor of another tensor. It was checked when it was made."""
    other = copy(descriptor)
    other.base = base
    return other


def _has_slots(x: Any) -> bool:
    return isinstance(x, Slot) or (isinstance(x, tuple) and any(map(_has_slots, x)))


def _bound(binary: Any, grid: tuple[int, int, int], template: tuple[Any, ...]) -> Bound | None:
    run = getattr(binary, "run", None)
    if getattr(nvidia, "_BASE_ARGS_FORMAT", None) != LAUNCHER or not isinstance(run, nvidia.CudaLauncher):
        return None
    wrapped = inspect.isfunction(run.launch)  # by what makes TMA descriptors
    if run.global_scratch_size or run.profile_scratch_size or (wrapped and not binary.metadata.tensordesc_meta):
        return None
    bound = Bound(
        inspect.getclosurevars(run.launch).nonlocals["launcher"] if wrapped else run.launch,
        [
            *grid, 0, binary.function, run.launch_cooperative_grid, run.launch_pdl, None, None, binary.packed_metadata,
            None, None, None,
        ],
        [], [], [], [],
    )  # fmt: skip
    metadata = iter(binary.metadata.tensordesc_meta if wrapped else ())
    for x in template:
        place = len(bound.args)
        bound.args.append(x)
        if isinstance(x, Slot):
            bound.plain.append((place, x.n))
        elif hasattr(x, "block_shape"):
            bound.maps.append((place, x.base.n, _map_maker(x, next(metadata))))
            bound.args[place:] = [None, *x.shape, *x.strides]
        elif _has_slots(x):
            if isinstance(x[0], Slot) and not _has_slots(x[1:]):
                bound.views.append((place, x[0].n, tuple(x[1:])))
            else:
                bound.nested.append((place, x))
    return bound


def _map_maker(descriptor: Any, metadata: Any) -> Callable[[int], Any]:
    """TMA descriptors by address: a step of training sees its addresses again, if not always in the same company."""
    made: dict[int, Any] = {}

    def make(address: int) -> Any:
        found = made.get(address)
        if found is None:
            if len(made) >= PLACES:
                made.clear()
            found = made[address] = nvidia.make_tensordesc_arg(_based(descriptor, Address(address)), metadata)[0]
        return found

    return make
