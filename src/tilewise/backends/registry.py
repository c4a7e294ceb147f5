"""The backends, and which of them runs a call. Importing them imports torch alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import AttentionError, shown
from ..request import Gpu, Request, gpu_of, has_triton
from .hopper import HopperBackend
from .kernels import KernelBackend
from .protocol import Backend, KvBackend
from .reference import ReferenceBackend
from .torch_fused import TorchBackend
from .triton import TritonBackend

# in the order of "auto"
BACKENDS: tuple[Backend, ...] = (HopperBackend(), TritonBackend(), TorchBackend(), ReferenceBackend())
NAMES = ("auto", *(backend.name for backend in reversed(BACKENDS)))


class Choice(NamedTuple):
    backend: Backend
    reason: str


def choose(request: Any, gpu: Gpu | None = None) -> Choice:
    """The backend of a Request or a KvRequest. With `gpu`, the backend of the same call on a GPU of that kind.

    >>> import torch
    >>> q = torch.zeros(1, 8, 2, 64)
    >>> from tilewise.request import Spec
    >>> chosen = choose(Request(q, q, q, Spec(scale=1.0)))
    >>> chosen.backend.name, chosen.reason
    ('torch', "torch's fused kernels for CPUs; triton: the tensors are on the cpu")

    Raises:
        AttentionError: a backend that was named does not support the call, or does not exist.
    """
    name = request.spec.backend
    if gpu is None:
        gpu = gpu_of(request.q.device)
    able = [backend for backend in BACKENDS if isinstance(request, Request) or backend.kv is not None]
    if name == "auto":
        rejected = ""
        for backend in able:
            if gpu is None and isinstance(backend, KernelBackend) and has_triton():
                device = request.q.device.type
                missing: str | None = f"the tensors are on {'the ' if device == 'cpu' else ''}{device}"
            else:
                missing = backend.unsupported(request, gpu) or backend.declines(request, gpu)
            if missing is None:
                return Choice(backend, backend.reason + rejected)
            if gpu is None or not isinstance(backend, TorchBackend):  # on a GPU, why its kernels do not run the call
                rejected = f"; {backend.name}: {missing}"
    for backend in BACKENDS:
        if backend.name == name:
            missing = backend.unsupported(request, gpu) if backend in able else "a KV cache, which is not supported"
            if missing is not None:
                raise AttentionError(f"backend={name!r}", missing, "backend='auto' or 'reference', which run here")
            return Choice(backend, "asked for by name")
    raise AttentionError("backend", shown(name), " or ".join(map(repr, NAMES)))


def supporting(request: Request, variant: Request) -> Backend | None:
    """The backend of a call if it supports a variant of it too, else None."""
    chosen = choose(request).backend
    return chosen if chosen.unsupported(variant, gpu_of(variant.q.device)) is None else None


def kv_backend(request: Any) -> KvBackend:
    """What runs a KvRequest, or the `WrittenTokens` of an append."""
    backend = choose(request).backend.kv
    assert backend is not None  # `choose` takes no backend without
    return backend


def backward_backend(request: Request, chosen: Backend, gpu: Gpu | None = None) -> Backend:
    """The backend that computes a call's gradients: the one of the forward, or the next that can."""
    if gpu is None:
        gpu = gpu_of(request.q.device)
    for backend in BACKENDS[BACKENDS.index(chosen) :]:
        if backend.unsupported(request, gpu) is None and backend.has_backward(request):
            return backend
    raise AttentionError("gradient", f"of a call on {chosen.name!r}", "a call that some backend differentiates")


def launches_of(request: Request, gpu: Gpu, backward: bool) -> dict[str, Any]:
    """The launches of a call on a GPU, with those of its gradients if `backward`, by name; for offline compilation."""
    chosen = choose(request, gpu).backend
    found = chosen.launches(request, gpu, False)
    return found | backward_backend(request, chosen, gpu).launches(request, gpu, True) if backward else found
