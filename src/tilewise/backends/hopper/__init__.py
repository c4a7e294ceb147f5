"""Kernels for Hopper (sm_90) in Gluon: TMA, mbarriers, asynchronous wgmma, specialised warps."""

from __future__ import annotations

from typing import Any

from ...request import BackwardInputs, Request
from ..common.gpu import Gpu
from ..kernel_backend import KernelBackend
from ..protocol import KvBackend, Runner
from . import support
from .prefill import PrefillKernels


class HopperBackend(KernelBackend):
    name = "hopper"
    reason = "kernels for this GPU"
    kv: KvBackend | None = PrefillKernels()

    def unsupported(self, request: Any, gpu: Gpu | None) -> str | None:
        return support.unsupported(request, gpu)

    def declines(self, request: Any, gpu: Gpu | None) -> str | None:
        return support.declines(request, gpu)

    def forward(self, request: Request) -> Runner:
        from ..common.kernel_call import KernelCall
        from .launches import build_forward

        return KernelCall(build_forward(request.spec), request.tensors(), request.q.device)

    def has_backward(self, request: Request) -> bool:
        return support.has_backward(request)

    def backward(self, request: Request, bwd_inputs: BackwardInputs) -> Runner:
        from ..common.kernel_call import KernelCall
        from .backward_launches import build_backward

        return KernelCall(build_backward(request.spec), (*request.tensors(), *bwd_inputs), request.q.device)

    def launches(self, request: Request, gpu: Gpu, backward: bool) -> dict[str, Any]:
        from .launches import offline_launches

        return offline_launches(request, gpu, backward)
