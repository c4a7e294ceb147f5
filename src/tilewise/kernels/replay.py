"""Calls that look alike run the same launches: bind their arguments once, replay them with new tensors.

Triton binds and specialises a launch's arguments in Python, which takes longer than a small kernel runs. What it looks
at (dtypes, strides, alignment, integers) is the same for these calls; only the addresses change.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..spec import Upstream
from ..torch_private import alike, current_device, current_stream, empty_cuda
from .compiling import compiled
from .cuda import Addresses, Direct, Job, Slot, direct
from .launch import Launch, runs_on_gpu
from .triton_private import is_hooked

Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides and dtype of what a call allocates


class Address(NamedTuple):
    address: int

    def data_ptr(self) -> int:
        return self.address


def nothing(device: int) -> Sequence[Tensor]:
    return ()


class Recording(NamedTuple):
    """The launches of a call on a device, with slots for its tensors; and, where the driver can be given all of them,
    the same for it. What else there is to know of the call, so that it can `run` with nothing but addresses: whether
    tensors look like those it was given, what it allocates (first its results), and what it keeps between calls."""

    steps: list[Job]
    direct: Direct | None
    device: int
    fits: Callable[..., bool] | None = None
    made: tuple[Made, ...] = ()
    kept: Callable[[int], Sequence[Tensor]] = nothing

    def where(self, given: Sequence[Tensor]) -> list[int] | None:
        """The addresses of tensors, if they look as those of the recording did and lie on multiples of 16: what
        autograd has saved may come back otherwise, from a hook."""
        if self.fits is None or not self.fits(*given):
            return None
        found = [x.data_ptr() for x in given]
        return None if reduce(or_, found) & 15 else found

    def run(self, addresses: list[int]) -> list[Tensor]:
        """Everything again, with tensors at these addresses that look like those of the recording. Returns what it
        allocates."""
        if self.device != current_device():  # changing it costs more than asking
            with torch.cuda.device(self.device):
                return self.run(addresses)
        made = [empty_cuda(*what) for what in self.made]
        self.launch([*addresses, *[x.data_ptr() for x in made], *[x.data_ptr() for x in self.kept(self.device)]])
        return made

    def launch(self, addresses: Addresses) -> None:
        """All of it, on the current device; the address is 0 of a tensor that is not there."""
        if self.direct is None or is_hooked():
            for step in self.steps:
                step.binary[(step.programs, 1, 1)](*(_filled(x, addresses) for x in step.args))
        else:
            self.direct(addresses, current_stream(self.device))


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
    key: Hashable, tensors: Sequence[Tensor | None], build: Callable[[], Sequence[Launch]],
    recordings: dict[Hashable, Recording] | None, ahead: Callable[[], Sequence[Launch]] | None = None,
) -> Recording | None:  # fmt: skip
    """Run the launches that `build` makes of these tensors, or those it made for the same key of `recordings`. `ahead`
    are launches that will follow: where there is something to compile, they are compiled too. Returns what was
    recorded; of the interpreter nothing is."""
    recording = None if recordings is None else recordings.get(key)
    first: Any = tensors[0]
    if recording is None:
        launches = [made for made in build() if made.programs]
        if not runs_on_gpu(first):
            for made in launches:
                made()
            return None
        recording = record(launches, compiled(launches, ahead), tensors)
        if recordings is not None:
            recordings[key] = recording
    recording.launch([0 if x is None else x.data_ptr() for x in tensors])
    return recording


def of_gradients(upstream: Upstream) -> str:
    """The name of a backward: which tensors it is given."""
    return "backward" if upstream.dlse is None else "backward with that of lse"


def whole(
    name: str, given: Sequence[Tensor | None], made: Sequence[Tensor | None], build: Callable[..., Sequence[Launch]],
    recordings: dict[Hashable, Recording] | None, ahead: Callable[[], Sequence[Launch]] | None = None,
    kept: Callable[[int], Sequence[Tensor]] = nothing, key: Hashable = None,
) -> None:  # fmt: skip
    """`launch` of what `build` makes of the `kept`, in a call that may be `run` by its name next time, from the tensors
    it is given alone: by whoever knows that they look alike, or asks the recording `where` they are. Where one is
    two of them at once, or lies on an odd address, this is the only way."""
    inputs, rooms = [x for x in given if x is not None], [x for x in made if x is not None]
    others = kept(inputs[0].get_device())
    recording = launch((name, key), (*inputs, *rooms, *others), lambda: build(*others), recordings, ahead)
    if recording is None or recordings is None:
        return
    known = recordings.get(name)
    if known is not None and known.steps is recording.steps and known.where(inputs) is not None:
        return
    if len(set(map(id, inputs))) == len(inputs) and not any(x.data_ptr() % 16 for x in inputs):
        recordings[name] = recording._replace(fits=alike(*inputs), made=allocated(rooms), kept=kept)


def record(launches: Sequence[Launch], binaries: Sequence[Any], tensors: Sequence[Tensor | None]) -> Recording:
    steps = [_step(made, binary, tensors) for made, binary in zip(launches, binaries, strict=True)]
    first: Any = tensors[0]
    device = first.get_device()
    return Recording(steps, direct(steps, len(tensors), device), device)


def joined(
    parts: Sequence[tuple[Recording, Sequence[int | None]]], given: Sequence[Tensor], made: Sequence[Tensor]
) -> Recording:
    """Launches that follow each other as those of one call, which was given some tensors and makes others; beside each
    recording, which of these its own were."""
    steps = [step._replace(args=_moved(step.args, places)) for found, places in parts for step in found.steps]
    device = given[0].get_device()
    return Recording(steps, direct(steps, len(given) + len(made), device), device, made=allocated(made))


def allocated(tensors: Sequence[Tensor]) -> tuple[Made, ...]:
    return tuple((tuple(x.shape), x.stride(), x.dtype) for x in tensors)


def _step(made: Any, binary: Any, tensors: Sequence[Tensor | None]) -> Job:
    args = [*made.args, *(made.options[p.name] for p in made.kernel.params if p.is_constexpr)]
    template = tuple(_template(x, tensors) for x in args)  # the memory must not keep a call's tensors alive
    return Job(binary, made.programs, template)


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
    """A launch's argument with addresses in its slots."""
    return _mapped(x, lambda slot: addresses[slot.n] + slot.offset, Address)


def _moved(x: Any, places: Sequence[int | None]) -> Any:
    """The same with slots for the tensors of another call."""
    return _mapped(x, lambda slot: slot._replace(n=places[slot.n]), lambda slot: slot)


def _mapped(x: Any, change: Callable[[Slot], Any], base: Callable[[Any], Any]) -> Any:
    if isinstance(x, Slot):
        return change(x)
    if isinstance(x, tuple):
        return _like(x, [_mapped(item, change, base) for item in x])
    if hasattr(x, "block_shape"):
        return _based(x, base(change(x.base)))
    return x


def _like(x: tuple[Any, ...], items: list[Any]) -> Any:
    return type(x)(*items) if hasattr(x, "_fields") else tuple(items)


def _based(descriptor: Any, base: Any) -> Any:
    """The same TMA descriptor of another tensor. It was checked when it was made."""
    other = object.__new__(type(descriptor))
    other.__dict__ = descriptor.__dict__ | {"base": base}
    return other
