"""What all kernel backends share. Their kernels are imported when a runner is made: importing a backend imports torch
alone."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from ..request import BackwardInputs, Request
from .common.gpu import Gpu
from .protocol import KvBackend, Runner


class Support(Protocol):
    """The module `support` of a backend: which calls its kernels run."""

    def unsupported(self, request: Any, gpu: Gpu | None) -> str | None: ...

    def declines(self, request: Any, gpu: Gpu | None) -> str | None: ...

    def has_backward(self, request: Request) -> bool: ...


class KernelBackend:
    """A backend whose folder, called as `name`, has the modules `support`, `launches`, `backward_launches` and
    `offline`. Terms' gradients and other derivatives are computed by common kernels from any backend's out and lse."""

    name: str
    reason: str
    support: Support
    kv: KvBackend | None

    def unsupported(self, request: Any, gpu: Gpu | None) -> str | None:
        return self.support.unsupported(request, gpu)

    def declines(self, request: Any, gpu: Gpu | None) -> str | None:
        return self.support.declines(request, gpu)

    def has_backward(self, request: Request) -> bool:
        return self.support.has_backward(request)

    def forward(self, request: Request) -> Runner:
        from .common.kernel_call import KernelCall

        build = self._module("launches").build_forward(request.spec)
        return KernelCall(build, request.tensors(), request.q.device)

    def backward(self, request: Request, bwd_inputs: BackwardInputs) -> Runner:
        from .common.kernel_call import KernelCall

        build = self._module("backward_launches").build_backward(request.spec)
        return KernelCall(build, (*request.tensors(), *bwd_inputs), request.q.device)

    def launches(self, request: Request, gpu: Gpu, backward: bool) -> dict[str, Any]:
        found: dict[str, Any] = self._module("offline").offline_launches(request, gpu, backward)
        return found

    def _module(self, name: str) -> Any:
        return import_module(f"{__package__}.{self.name}.{name}")

    def term_gradients(self, request: Request, bwd_inputs: BackwardInputs, wanted: Sequence[bool]) -> Runner:
        from .common.term_gradients import term_gradients

        return term_gradients(request, bwd_inputs, wanted)

    def jvp(self, request: Request, out: Tensor, lse: Tensor, tangents: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        from .common.jvp_launches import jvp

        return jvp(request, out, lse, tangents)

    def lacks_hvp(self, request: Request) -> str | None:
        from .common.score_terms import lacks_hvp

        return lacks_hvp(request)

    def hvp(self, request: Request, bwd_inputs: BackwardInputs, tangents: Sequence[Tensor]) -> Runner:
        from .common.hvp_launches import build_hvp
        from .common.kernel_call import KernelCall

        tensors = *request.tensors(), *bwd_inputs, *tangents
        return KernelCall(build_hvp(request.spec), tensors, request.q.device)
