"""Which backend runs a call, and why; and the one memory of calls: what was found out for a call that looks like this.

A backend is a folder with a module `limits` (what keeps a call from it; imports torch alone), a module `profile` (its
kernels, as the model of times sees them) and a module that has its functions, imported when first needed:
forward(request, recordings), backward(request, upstream, recordings), term_gradients(request, upstream, wanted) and
jvp(request, out, lse, tangents). Nothing but the table below, and the folder, knows its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .kernels.gpu import Gpu, gpu_of
from .kernels.hopper import limits as hopper
from .kernels.hopper import profile as hopper_profile
from .kernels.portable import kv_profile
from .kernels.portable import limits as portable
from .kernels.portable import profile as portable_profile
from .kernels.profile import Profile, Shapes
from .spec import LIMIT, AttentionError, Request
from .torch_private import is_watched


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

    def again(self, what: str, *tensors: Tensor) -> Any:
        """The results of "forward" or "backward" as they were recorded, of nothing but these tensors; None where there
        is no such recording, or they lie otherwise than then (of a forward the key says that they do not)."""
        recording = self.recordings.get(what) if self.bare and self.recordings else None
        if recording is None or (what != "forward" and not recording.suits(tensors)):
            return None
        return recording.run(tensors)

    def fits(self, request: Request) -> bool:
        """Whether a request that is one of these calls surely still looks so: what autograd has saved may come back
        with other strides, from a hook."""
        return bool(self.layout == _layout(request))


def _layout(request: Request) -> Any:
    q, k, v, *_ = request
    if not q.is_cuda:
        return None
    return q.stride(), k.stride(), v.stride(), q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16


T = TypeVar("T")


class Memory(dict[Any, T]):
    """What was found out for calls that look alike, by their keys. A full one begins anew. Threads share it: its reads
    and writes are single operations, and of two that learn the same thing one is kept."""

    def keep(self, key: Any, found: T) -> T:
        if len(self) >= LIMIT:
            self.clear()
        return self.setdefault(key, found)


_calls: Memory[Call] = Memory()
SIMPLE = frozenset((bool, float, str, tuple, type(None)))  # kinds of options that say all there is to know of them


def key_of(options: Mapping[str, Any], *tensors: Tensor) -> Any:
    """What the checks, the choice of a backend and its launches depend on, or None where a call is not remembered: off
    the GPU, traced or transformed, with tensors or mods among its options (whose checks look at more), with dropout, or
    with words of unusual types.

    A key holds the options as they were said, with torch's mode of determinism, and of each tensor whether it is one of
    those before it (q and k, say, whose places a recorded launch could not tell apart), its shape, strides, dtype,
    device, and its address modulo 16. Values, addresses, streams and threads are none of it: what is remembered is the
    same for all of them, and holds no memory of the caller's.
    """
    first = tensors[0]
    if not isinstance(first, Tensor) or not first.is_cuda or is_watched(*tensors):
        return None
    if not SIMPLE.issuperset(map(type, options.values())) or options.get("dropout_p"):
        return None
    window = options.get("window") or ()
    mode = torch.are_deterministic_algorithms_enabled()
    return mode, *options.items(), *map(type, window), *signature(*tensors)


def recall(key: Any) -> Call | None:
    """The call of this key, if it was remembered. torch.compile, whose calls have none, must not see the dict: it would
    compile again whenever an eager call has made it longer.
    """
    return None if key is None else _calls.get(key)


def call_of(request: Request, key: Any = None) -> Call:
    """The call that a request is one of, from now on also of this key. Requests are told apart as keys are, by their
    Spec and all their tensors; off the GPU none is remembered."""
    if not request.q.is_cuda:
        return Call(request)
    own = (request.spec, *signature(*request.tensors()))
    call = _calls.get(own) or _calls.keep(own, Call(request))
    return call if key is None else _calls.keep(key, call)


def signature(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What a choice of kernels and its compilation depend on in tensors: see `key_of`."""
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
