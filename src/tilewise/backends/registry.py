"""The backends, and which of them runs a call. Importing them imports torch alone."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..errors import AttentionError, shown
from ..request import BackwardInputs, Gpu, Request, gpu_of, has_triton
from . import hopper, triton
from .protocol import Backend, KvBackend, Runner
from .reference import ReferenceBackend
from .torch_fused import TorchBackend


class Support(Protocol):
    """The module `support` of a backend: which calls its kernels run."""

    def unsupported(self, request: Any, gpu: Gpu | None) -> str | None: ...

    def declines(self, request: Any, gpu: Gpu | None) -> str | None: ...

    def has_backward(self, request: Request) -> bool: ...


class KernelBackend:
    """A backend whose folder, called as `name`, has the modules `support`, `launches`, `backward_launches` and
    `offline`, and may have the modules in OPTIONAL. Its kernels are imported when a runner is made. Terms' gradients
    and other derivatives are computed by common kernels from any backend's out and lse."""

    OPTIONAL = ("hvp_launches", "mask_words")

    def __init__(self, name: str, reason: str, support: Support, kv: KvBackend, optional: Sequence[str] = ()) -> None:
        assert set(optional) <= set(self.OPTIONAL)
        self.name, self.reason, self.support, self.optional = name, reason, support, optional
        self.kv: KvBackend | None = kv

    def unsupported(self, request: Any, gpu: Gpu | None) -> str | None:
        if gpu is None and has_triton():
            device = request.q.device.type
            return f"the tensors are on {'the ' if device == 'cpu' else ''}{device}"
        return self.support.unsupported(request, gpu)

    def declines(self, request: Any, gpu: Gpu | None) -> str | None:
        return self.support.declines(request, gpu)

    def has_backward(self, request: Request) -> bool:
        return self.support.has_backward(request)

    def forward_runner(self, request: Request, needs_lse: bool = True) -> Runner:
        from .common.kernel_call import KernelCall

        build = self._module("launches").build_forward(request.spec)
        return KernelCall(build, request.tensors(), request.q.device)

    def backward_runner(self, request: Request, bwd_inputs: BackwardInputs) -> Runner:
        from .common.kernel_call import KernelCall, build_backward

        build = build_backward(self._module("backward_launches").named_launches, request.spec)
        return KernelCall(build, (*request.tensors(), *bwd_inputs), request.q.device)

    def launches(self, request: Request, gpu: Gpu, backward: bool) -> dict[str, Any]:
        found: dict[str, Any] = self._module("offline").offline_launches(request, gpu, backward)
        return found

    def evaluated_mask(self, request: Request) -> tuple[Tensor, ...]:
        if "mask_words" not in self.optional:
            return ()
        found: tuple[Tensor, ...] = self._module("mask_words").evaluated_words(request)
        return found

    def _module(self, name: str) -> Any:
        return import_module(f"{__package__}.{self.name}.{name}")

    def term_gradients_runner(self, request: Request, bwd_inputs: BackwardInputs, wanted: Sequence[bool]) -> Runner:
        from .common.term_gradients import term_gradients

        return term_gradients(request, bwd_inputs, wanted)

    def lacks_jvp(self, request: Request) -> str | None:
        from .common.score_terms import lacks_jvp

        return lacks_jvp(request)

    def jvp(self, request: Request, out: Tensor, lse: Tensor, tangents: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        from .common.jvp_launches import jvp

        return jvp(request, out, lse, tangents)

    def lacks_hvp(self, request: Request) -> str | None:
        from .common.score_terms import lacks_hvp

        return lacks_hvp(request)

    def hvp_runner(self, request: Request, bwd_inputs: BackwardInputs, tangents: Sequence[Tensor]) -> Runner:
        from .common.hvp_launches import build_hvp
        from .common.kernel_call import KernelCall

        one_pass = self._module("hvp_launches").ONE_PASS if "hvp_launches" in self.optional else None
        tensors = *request.tensors(), *bwd_inputs, *tangents
        return KernelCall(build_hvp(request.spec, one_pass), tensors, request.q.device)


BACKENDS: tuple[Backend, ...] = (  # in the order of "auto"
    KernelBackend("hopper", "kernels for this GPU", hopper.support, hopper.KV, KernelBackend.OPTIONAL),
    KernelBackend("triton", "portable kernels", triton.support, triton.KV),
    TorchBackend(),
    ReferenceBackend(),
)
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
            missing = backend.unsupported(request, gpu) or backend.declines(request, gpu)
            if missing is None:
                return Choice(backend, backend.reason + rejected)
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
