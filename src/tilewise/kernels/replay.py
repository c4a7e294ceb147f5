"""Calls that look alike run the same launches: bind their arguments once, replay them with new tensors.

Triton binds and specialises a launch's arguments in Python, which takes longer than a small kernel runs. What it looks
at (dtypes, strides, alignment, integers) is the same for these calls; only the addresses change.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..torch_private import current_stream
from .triton_private import Launcher, is_hooked, launcher_of, tma_descriptor

Addresses = Sequence[int | None]

PLACES = 256  # addresses for which a TMA descriptor is kept


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


class Direct(NamedTuple):
    """A step for the C launcher: its arguments in a row, the stream fourth, and where addresses go among them: by
    themselves, at the head of a view, or into what is made of them all."""

    call: Callable[..., None]
    args: tuple[Any, ...]
    pointers: tuple[tuple[int, int, int], ...]
    views: tuple[tuple[int, int, int, tuple[Any, ...]], ...]
    others: tuple[tuple[int, Callable[[Addresses], Any]], ...]


class Recording(NamedTuple):
    """The launches of a call; and, where all their launchers are known, the same for these."""

    steps: list[Step]
    direct: list[Direct] | None


def layout_of(tensors: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """What a launch depends on in tensors beside those of the request: the results of a forward and their gradients.
    One that is two of a call's tensors at once is told apart from two."""
    found: list[Any] = []
    seen = set(map(id, others))
    for x in tensors:
        if x is None:
            found.append(None)
        else:
            found += x.stride(), x.data_ptr() % 16, x.dtype
            if id(x) in seen:
                found.append([y is x for y in (*others, *tensors)].index(True))
            seen.add(id(x))
    return tuple(found)


def launch(
    key: Hashable, tensors: Sequence[Tensor | None], build: Callable[[], Sequence[Any]],
    recordings: dict[Hashable, Recording] | None,
) -> None:  # fmt: skip
    """Run the launches that `build` makes of these tensors, or those it made for the same key of `recordings`."""
    recording = None if recordings is None else recordings.get(key)
    if recording is None:
        launches = [made for made in build() if made.programs]
        binaries = [made() for made in launches]
        if recordings is not None and None not in binaries:  # as they are in the interpreter
            steps = [_step(made, binary, tensors) for made, binary in zip(launches, binaries, strict=True)]
            recordings[key] = Recording(steps, _direct(steps))
        return
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    if recording.direct is None or is_hooked():
        for step in recording.steps:
            step.binary[step.grid](*(_filled(x, addresses) for x in step.args))
        return
    first: Any = tensors[0]
    stream = current_stream(first.get_device())
    for call, template, pointers, views, others in recording.direct:
        args = list(template)
        args[3] = stream
        for at, n, offset in pointers:
            args[at] = addresses[n] + offset
        for at, n, offset, rest in views:
            args[at] = (addresses[n] + offset, *rest)
        for at, make in others:
            args[at] = make(addresses)
        call(*args)


def _step(made: Any, binary: Any, tensors: Sequence[Tensor | None]) -> Step:
    args = [*made.args, *(made.options[p.name] for p in made.kernel.params if p.is_constexpr)]
    template = tuple(_template(x, tensors) for x in args)  # the memory must not keep a call's tensors alive
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


def _direct(steps: list[Step]) -> list[Direct] | None:
    launchers = [launcher_of(step.binary) for step in steps]
    return [_for_launcher(step, found) for step, found in zip(steps, launchers, strict=True) if found] if all(
        launchers
    ) else None  # fmt: skip


def _for_launcher(step: Step, launcher: Launcher) -> Direct:
    args: list[Any] = [*step.grid, None, *launcher.fixed]
    pointers, views, others = [], [], []
    descriptors = iter(launcher.descriptors)
    for x in step.args:
        at = len(args)
        if hasattr(x, "block_shape"):
            others.append((at, Maps(x, next(descriptors))))
            args += None, *x.shape, *x.strides
            continue
        args.append(None if _has_slots(x) else x)
        if isinstance(x, Slot):
            pointers.append((at, *x))
        elif _has_slots(x):
            first, *rest = x
            if isinstance(first, Slot) and not any(map(_has_slots, rest)):  # a view: a pointer, its strides
                views.append((at, *first, tuple(rest)))
            else:
                others.append((at, _maker(x)))
    return Direct(launcher.call, tuple(args), tuple(pointers), tuple(views), tuple(others))


def _has_slots(x: Any) -> bool:
    return isinstance(x, Slot) or (isinstance(x, tuple) and any(map(_has_slots, x)))


def _maker(x: Any) -> Callable[[Addresses], Any]:
    """What makes an argument with slots of the addresses."""
    if isinstance(x, Slot):
        return lambda addresses: _address(x, addresses)
    first, *rest = x
    if isinstance(first, Slot) and not any(map(_has_slots, rest)):
        n, offset = first
        return lambda addresses: (addresses[n] + offset, *rest)
    parts = [(_maker(y), None) if _has_slots(y) else (None, y) for y in x]
    return lambda addresses: tuple([y if make is None else make(addresses) for make, y in parts])


class Maps(dict[int, Any]):
    """TMA descriptors by address: a step of training sees its addresses again, if not always in the same company."""

    def __init__(self, descriptor: Any, metadata: Any) -> None:
        self.descriptor, self.metadata = descriptor, metadata
        self.n, self.offset = descriptor.base

    def __call__(self, addresses: Addresses) -> Any:
        return self[addresses[self.n] + self.offset]

    def __missing__(self, address: int) -> Any:
        if len(self) >= PLACES:
            self.clear()
        found = tma_descriptor(_based(self.descriptor, Address(address)), self.metadata)
        self[address] = found
        return found
