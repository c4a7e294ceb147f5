"""Calls that look alike run the same launches: bind their arguments once, replay them with new tensors.

Triton binds and specialises a launch's arguments in Python, which takes longer than a small kernel runs. What it looks
at (dtypes, strides, alignment, integers) is the same for these calls; only the addresses change.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia

Addresses = Sequence[int | None]

PLACES = 256  # sets of addresses for which a recording is ready
LAUNCHER = "iiiKKppOOOOOO"  # what Triton 3.6's C launcher takes first; kernels of other versions go through its Python
STREAM = 3


class Slot(NamedTuple):
    """Where the address of the call's n-th tensor goes, or of what begins so many bytes behind it."""

    n: int
    offset: int = 0


class Address(NamedTuple):
    address: int

    def data_ptr(self) -> int:
        return self.address


class Bound(NamedTuple):
    """A C launcher and what it takes, in a row: the call fills in the stream and, by their places, what has addresses:
    pointers, views and TMA descriptors.
    """

    launch: Callable[..., None]
    args: list[Any]
    fills: list[tuple[int, Callable[[Addresses], Any]]]

    def filled(self, stream: int, addresses: Addresses) -> list[Any]:
        args = self.args.copy()
        args[STREAM] = stream
        for place, fill in self.fills:
            args[place] = fill(addresses)
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


def launch(
    key: Hashable, tensors: Sequence[Tensor | None], build: Callable[[], Sequence[Any]],
    calls: dict[Hashable, Recording] | None,
) -> None:  # fmt: skip
    """Run the launches that `build` makes of these tensors, or those it made for the same key of `calls`."""
    recording = None if calls is None else calls.get(key)
    if recording is None:
        launches = [made for made in build() if made.programs]
        binaries = [made() for made in launches]
        if calls is not None and None not in binaries:  # as they are in the interpreter
            steps = [_step(made, binary, tensors) for made, binary in zip(launches, binaries, strict=True)]
            calls[key] = Recording(steps, {} if all(step.bound for step in steps) else None)
        return
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    if recording.ready is None or _is_hooked():
        for step in recording.steps:
            step.binary[step.grid](*(_filled(x, addresses) for x in step.args))
    else:
        first: Any = tensors[0]
        stream = torch._C._cuda_getCurrentRawStream(first.get_device())
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
    args = [*made.args, *(made.options[p.name] for p in made.kernel.params if p.is_constexpr)]
    template = tuple(_template(x, tensors) for x in args)  # the cache must not keep a call's memory alive
    grid = made.programs, 1, 1
    return Step(binary, grid, template, _bound(binary, grid, template))


def _template(x: Any, tensors: Sequence[Tensor | None]) -> Any:
    if isinstance(x, Tensor):
        return _slot(x, tensors)
    if isinstance(x, tuple):
        return _like(x, [_template(item, tensors) for item in x])
    if hasattr(x, "block_shape"):
        return _based(x, _slot(x.base, tensors))
    return x


def _slot(x: Tensor, tensors: Sequence[Tensor | None]) -> Slot:
    """Of the tensor itself or, where it is a part of a call's workspace, of that."""
    for n, other in enumerate(tensors):
        if x is other:
            return Slot(n)
    memory = x.untyped_storage()
    for n, other in enumerate(tensors):
        if other is not None and other.data_ptr() == memory.data_ptr() and other.nbytes == memory.nbytes():
            return Slot(n, x.data_ptr() - other.data_ptr())
    raise KeyError("a launch takes a tensor that is not the call's")


def _filled(x: Any, addresses: Addresses) -> Any:
    if isinstance(x, Slot):
        return _address(x, addresses)
    if isinstance(x, tuple):
        return _like(x, [_filled(item, addresses) for item in x])
    if hasattr(x, "block_shape"):
        return _based(x, Address(_address(x.base, addresses)))
    return x


def _address(slot: Slot, addresses: Addresses) -> int:
    base = addresses[slot.n]
    assert base is not None
    return base + slot.offset


def _like(x: tuple[Any, ...], items: list[Any]) -> Any:
    return type(x)(*items) if hasattr(x, "_fields") else tuple(items)


def _based(descriptor: Any, base: Any) -> Any:
    """The same TMA descriptor of another tensor. It was checked when it was made."""
    other = object.__new__(type(descriptor))
    other.__dict__ = descriptor.__dict__ | {"base": base}
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
        [],
    )  # fmt: skip
    metadata = iter(binary.metadata.tensordesc_meta if wrapped else ())
    for x in template:
        place = len(bound.args)
        bound.args.append(x)
        if hasattr(x, "block_shape"):
            bound.fills.append((place, _map_maker(x, next(metadata))))
            bound.args[place:] = [None, *x.shape, *x.strides]
        elif _has_slots(x):
            bound.fills.append((place, _filler(x)))
    return bound


def _filler(x: Any) -> Callable[[Addresses], Any]:
    """`_filled` of these addresses; quick for a pointer, and for a view that begins with one."""
    if isinstance(x, Slot):
        return partial(_address, x)
    first, *rest = x
    if isinstance(first, Slot) and not _has_slots(tuple(rest)):
        return lambda addresses: (_address(first, addresses), *rest)
    return partial(_filled, x)


def _map_maker(descriptor: Any, metadata: Any) -> Callable[[Addresses], Any]:
    """TMA descriptors by address: a step of training sees its addresses again, if not always in the same company."""
    made: dict[int, Any] = {}

    def make(addresses: Addresses) -> Any:
        address = _address(descriptor.base, addresses)
        found = made.get(address)
        if found is None:
            if len(made) >= PLACES:
                made.clear()
            found = made[address] = nvidia.make_tensordesc_arg(_based(descriptor, Address(address)), metadata)[0]
        return found

    return make
