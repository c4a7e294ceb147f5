"""Which backend runs a call, and why; and how calls run that look alike, of which memory.py is the memory.

A backend is a folder with a module `limits` (what keeps a call from it; imports torch alone), a module `profile` (its
kernels, as the model of times sees them) and a module that has its functions, imported when first needed:
forward(request, recordings), backward(request, upstream, recordings), term_gradients(request, upstream, wanted,
recordings) and jvp(request, out, lse, tangents). Nothing but the table below, and the folder, knows its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from ..kernels.gpu import Gpu, gpu_of
from ..kernels.hopper import limits as hopper
from ..kernels.hopper import profile as hopper_profile
from ..kernels.portable import kv_profile
from ..kernels.portable import limits as portable
from ..kernels.portable import profile as portable_profile
from ..kernels.profile import Profile, Shapes
from ..spec import AttentionError, Request, Spec, differentiable, spec_of
from ..torch_private import is_watched
from .memory import Look, keep, places_of, recent, remembered, signature


def _nothing(call: Shapes, gpu: Gpu) -> list[Profile]:
    return []


class Backend(NamedTuple):
    """`obstacle` says what keeps a call from it, `yields` why `auto` gives it to the next in line all the same;
    `forward` and `backward` what it launches."""

    name: str
    module: str
    obstacle: Callable[[Request, Gpu | None], str | None]
    yields: Callable[[Request, Gpu | None], str | None]
    reason: str  # why `auto` takes it
    forward: Callable[[Shapes, Gpu], list[Profile]] = _nothing
    backward: Callable[[Shapes, Gpu], list[Profile]] = _nothing
    cache: str = ""  # the module that serves KV caches: plan(request, ..), attend(request, ..), append(request)
    kv: Any = None  # how it deals their keys to programs: deal(request, gpu, processors), ranges(dealt, ..)

    def load(self) -> Any:
        return import_module(self.module)


def _never(request: Request, gpu: Gpu | None) -> None:
    return None


BACKENDS = (  # in the order in which `auto` asks them
    Backend(
        "hopper", "tilewise.kernels.hopper.launch", hopper.obstacle, hopper.yields, "kernels for this GPU",
        hopper_profile.forward, hopper_profile.backward, "tilewise.kernels.hopper.kv_launch",
    ),
    Backend(
        "triton", "tilewise.kernels.portable.launch", portable.obstacle, portable.yields, "portable kernels",
        portable_profile.forward, portable_profile.backward, "tilewise.kernels.portable.kv_launch",
        kv_profile,
    ),
    Backend(
        "reference", "tilewise.reference", _never, _never, "torch, on any device", cache="tilewise.reference.kv"
    ),
)  # fmt: skip
NAMES = ("auto", *(row.name for row in reversed(BACKENDS)))


class Choice(NamedTuple):
    backend: Backend
    reason: str


def choose(request: Any, gpu: Gpu | None = None) -> Choice:
    """The backend of a Request, or of a call with a KV cache; with `gpu`, of the same call on a GPU of that kind.

    >>> import torch
    >>> q = torch.zeros(1, 8, 2, 64)
    >>> from tilewise.spec import Spec
    >>> chosen = choose(Request(q, q, q, Spec(scale=1.0)))
    >>> chosen.backend.name, chosen.reason
    ('reference', 'torch, on any device; triton: the tensors are on the cpu')
    """
    name = request.spec.backend
    if gpu is None:
        gpu = gpu_of(request.q.device)
    able = BACKENDS if isinstance(request, Request) else [row for row in BACKENDS if row.cache]
    if name == "auto":
        last = ""
        for row in able:
            missing = row.obstacle(request, gpu) or row.yields(request, gpu)
            if missing is None:
                return Choice(row, row.reason + last)
            last = f"; {row.name}: {missing}"
    for row in BACKENDS:
        if row.name == name:
            missing = row.obstacle(request, gpu) if row in able else "a KV cache, which it does not serve"
            if missing is not None:
                raise AttentionError(f"backend={name!r}", missing, "backend='auto' or 'reference', which run here")
            return Choice(row, "asked for by name")
    raise AttentionError("backend", repr(name), " or ".join(map(repr, NAMES)))


def backend(name: str) -> Backend:
    return next(row for row in BACKENDS if row.name == name)


@cache
def named(name: str) -> Any:
    """The module of a backend."""
    return backend(name).load()


@cache
def serving(name: str) -> Any:
    """The module of a backend that serves KV caches."""
    return import_module(backend(name).cache)


class Call:
    """How calls that look alike run: what was asked, the backend's module and the launches it made, by its own keys."""

    __slots__ = ("backend", "bare", "layout", "recordings", "spec")

    def __init__(self, request: Request) -> None:
        self.spec = request.spec
        self.bare = request.is_plain and request.cu_q is None and request.origin is None  # no tensors but q, k and v
        self.layout = _layout(request) if request.is_plain else False  # nobody watches over the strides of terms
        self.recordings: dict[Any, Any] | None = {} if request.q.is_cuda else None
        self.backend = named(choose(request).backend.name)

    def tensors(self, request: Request) -> tuple[Tensor | None, ...]:
        """Those of such a request that it runs with."""
        return request[:3] if self.bare else request.tensors()

    def run(self, what: str, addresses: list[int]) -> list[Tensor] | None:
        """The results of "forward" or "backward" as they were recorded, of tensors that look alike, at these addresses;
        None where there is no such recording."""
        recording = self._recorded(what)
        found: list[Tensor] | None = None if recording is None else recording.run(addresses)
        return found

    def again(self, what: str, *tensors: Tensor | None) -> list[Tensor] | None:
        """The same of the tensors."""
        recording = self._recorded(what)
        if recording is None:
            return None
        found: list[Tensor] = recording.run([x.data_ptr() for x in tensors if x is not None])
        return found

    def if_alike(self, what: str, *tensors: Tensor | None) -> list[Tensor] | None:
        """The same of tensors of which it is not known; None too where they look or lie otherwise than then."""
        recording = self._recorded(what)
        there = None if recording is None else recording.where([x for x in tensors if x is not None])
        found: list[Tensor] | None = None if there is None else recording.run(there)
        return found

    def _recorded(self, what: str) -> Any:
        return self.recordings.get(what) if self.recordings else None

    def fits(self, request: Request) -> bool:
        """Whether a request that is one of these calls surely still looks so: what autograd has saved may come back
        with other strides, from a hook."""
        return bool(self.layout == _layout(request))


def _layout(request: Request) -> Any:
    q, k, v, *_ = request
    if not q.is_cuda:
        return None
    return q.stride(), k.stride(), v.stride(), q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16


def call_of(request: Request) -> Call:
    """The call that a request is one of: they are told apart by their Spec and all their tensors. Off the GPU none is
    remembered."""
    if not request.q.is_cuda:
        return Call(request)
    call: Call = remembered(("attention", request.spec, *signature(*request.tensors())), lambda: Call(request))
    return call


def latest(scalars: Any, q: Tensor, others: Sequence[Tensor | None]) -> Call | None:
    """The last call that an op was asked for with these words and numbers, and terms in these places: mostly the next
    one looks like it, which `if_alike` finds out sooner than `call_of` finds a call. Off the GPU there is none."""
    call: Call | None = recent(_of_op(spec_of(scalars), others)) if q.is_cuda else None
    return call


def called(request: Request, others: Sequence[Tensor | None]) -> Call:
    """`call_of` an op, whose `latest` it is."""
    call = call_of(request)
    if request.q.is_cuda:
        recent(_of_op(request.spec, others), call)
    return call


def _of_op(spec: Spec, others: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return ("op", spec, *[x is None for x in others])


def learned(request: Request, look: Look | None) -> Call | None:
    """The same of a request that a user's call was made into, remembered by the look of that, together with which of
    its tensors are whose, unless one was made for the request (a seed, say), and whether one requires a gradient.
    None where somebody watches, who must see the registered op."""
    if is_watched(*request[:3]):
        return None
    call = call_of(request)
    tensors = call.tensors(request)
    places = None if look is None else places_of(tensors, look)
    if look is not None and places is not None:
        given = tensors[: differentiable(request.spec)]
        keep(look, (call, places, any(x is not None and x.requires_grad for x in given)))
    return call
