"""Portable kernels in Triton: any GPU that it compiles for, and its interpreter on a CPU."""

from __future__ import annotations

from typing import Any

from ...request import BackwardInputs, Request
from ..common.gpu import Gpu
from ..common.kv import DecodeKernels
from ..kernel_backend import KernelBackend
from ..protocol import KvBackend, Runner
from . import support


class TritonBackend(KernelBackend):
    name = "triton"
    reason = "portable kernels"
    kv: KvBackend | None = DecodeKernels()

    def unsupported(self, request: Any, gpu: Gpu | None) -> str | None:
        return support.unsupported(request, gpu)

    def declines(self, request: Any, gpu: Gpu | None) -> str | None:
        return support.declines(request, gpu)

    def forward(self, request: Request) -> Runner:
        from ..common.kernel_call import KernelCall
        from .launches import build_forward

        return KernelCall(build_forward(request.spec), request.tensors(), request.q.device)

    def has_backward(self, request: Request) -> bool:
        return True

    def backward(self, request: Request, bwd_inputs: BackwardInputs) -> Runner:
        from ..common.kernel_call import KernelCall
        from .backward_launches import build_backward

        return KernelCall(build_backward(request.spec), (*request.tensors(), *bwd_inputs), request.q.device)

    def launches(self, request: Request, gpu: Gpu, backward: bool) -> dict[str, Any]:
        from .launches import offline_launches

        return offline_launches(request, gpu, backward)
