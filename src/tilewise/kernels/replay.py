"""Calls that look alike run the same launches: bind their arguments once, replay them with new tensors.

Triton binds and specialises a launch's arguments in Python, which takes longer than a small kernel runs. What it looks
at (dtypes, strides, alignment, integers) is the same for these calls; only the addresses change.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia

Addresses = Sequence[int | None]

PLACES = 256  # addresses for which a TMA descriptor is kept
LAUNCHER = "iiiKKppOOOOOO"  # what Triton 3.6's C launcher takes first; kernels of other versions go through its Python


class Slot(NamedTuple):
    """Where the address of the call's n-th tensor goes, or of what begins so many bytes behind it."""

    n: int
    offset: int = 0


class Address(NamedTuple):
    address: int

    def data_ptr(self) -> int:
        return self.address


class Step(NamedTuple):
    """A compiled kernel and its arguments, with slots for the call's tensors."""

    binary: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]


class Recording(NamedTuple):
    """The launches of a call and, where their launchers are known, a function that makes them all."""

    steps: list[Step]
    run: Callable[..., None] | None


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
            calls[key] = Recording(steps, _written(steps, len(tensors)))
        return
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    if recording.run is None or _is_hooked():
        for step in recording.steps:
            step.binary[step.grid](*(_filled(x, addresses) for x in step.args))
    else:
        first: Any = tensors[0]
        stream = torch._C._cuda_getCurrentRawStream(first.get_device())
        recording.run(stream, *addresses)


def _is_hooked() -> bool:
    """Whether somebody, a profiler say, wants to hear of launches: then Triton makes them."""
    runtime = triton.knobs.runtime
    return bool(_listeners(runtime.launch_enter_hook) or _listeners(runtime.launch_exit_hook))


def _listeners(hook: Any) -> Any:
    return hook is not None and getattr(hook, "calls", True)


def _step(made: Any, binary: Any, tensors: Sequence[Tensor | None]) -> Step:
    args = [*made.args, *(made.options[p.name] for p in made.kernel.params if p.is_constexpr)]
    template = tuple(_template(x, tensors) for x in args)  # the cache must not keep a call's memory alive
    return Step(binary, (made.programs, 1, 1), template)


def _template(x: Any, tensors: Sequence[Tensor | None]) -> Any:
    if isinstance(x, Tensor):
        return _slot(x, tensors)
    if isinstance(x, tuple):
        return _like(x, [_template(item, tensors) for item in x])
    if hasattr(x, "block_shape"):
        return _based(x, _slot(x.base, tensors))
    return x


def _slot(x: Tensor, tensors: Sequence[Tensor | None]) -> Slot:
    """Of the tensor itself or, where it is a view of one or a part of a call's workspace, of that."""
    for n, other in enumerate(tensors):
        if x is other:
            return Slot(n)
    memory = x.untyped_storage()
    for n, other in enumerate(tensors):
        if other is not None and other.untyped_storage().data_ptr() == memory.data_ptr():
            if x.data_ptr() == other.data_ptr():
                return Slot(n)
            if other.nbytes == memory.nbytes():
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


def _written(steps: list[Step], tensors: int) -> Callable[..., None] | None:
    """The launches as one function, in which nothing is left to do but to call C with the call's addresses:

    def run(stream, a0, a1, a2):
        x2(132, 1, 1, stream, 93, False, True, None, None, x0, None, None, None, x1[a0], 4096, 64, (a1 + 512, 64), a2)
    """
    objects: dict[str, Any] = {}

    def name(x: Any) -> str:
        found = f"x{len(objects)}"
        objects[found] = x
        return found

    def text(x: Any) -> str:
        if isinstance(x, Slot):
            return f"a{x.n} + {x.offset}" if x.offset else f"a{x.n}"
        if isinstance(x, tuple) and _has_slots(x):
            return f"({''.join(f'{text(item)}, ' for item in x)})"
        return repr(x) if x is None or type(x) in (int, bool) else name(x)

    lines = []
    for binary, grid, template in steps:
        run = getattr(binary, "run", None)
        if getattr(nvidia, "_BASE_ARGS_FORMAT", None) != LAUNCHER or not isinstance(run, nvidia.CudaLauncher):
            return None
        wrapped = inspect.isfunction(run.launch)  # by what makes TMA descriptors
        if run.global_scratch_size or run.profile_scratch_size or (wrapped and not binary.metadata.tensordesc_meta):
            return None
        launcher = inspect.getclosurevars(run.launch).nonlocals["launcher"] if wrapped else run.launch
        metadata = iter(binary.metadata.tensordesc_meta if wrapped else ())
        args = [*map(text, grid), "stream", text(binary.function)]
        args += map(text, (run.launch_cooperative_grid, run.launch_pdl, None, None, binary.packed_metadata))
        args += map(text, (None, None, None))
        for x in template:
            if hasattr(x, "block_shape"):
                args += f"{name(Maps(x, next(metadata)))}[{text(x.base)}]", *map(text, (*x.shape, *x.strides))
            else:
                args.append(text(x))
        lines.append(f"    {name(launcher)}({', '.join(args)})")
    exec(
        "\n".join([f"def run({', '.join(['stream', *(f'a{n}' for n in range(tensors))])}):", *lines, "    return"]),
        objects,
    )
    function: Callable[..., None] = objects["run"]
    return function


class Maps(dict[int, Any]):
    """TMA descriptors by address: a step of training sees its addresses again, if not always in the same company."""

    def __init__(self, descriptor: Any, metadata: Any) -> None:
        self.descriptor, self.metadata = descriptor, metadata

    def __missing__(self, address: int) -> Any:
        if len(self) >= PLACES:
            self.clear()
        found = nvidia.make_tensordesc_arg(_based(self.descriptor, Address(address)), self.metadata)[0]
        self[address] = found
        return found
