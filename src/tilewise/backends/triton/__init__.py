"""Portable kernels in Triton: any GPU that it compiles for, and its interpreter on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...request import BackwardInputs, Request
from ..common.gpu import Gpu
from ..common.kv import DecodeKernels
from ..protocol import KvBackend, Runner
from . import support


class TritonBackend:
    """Kernels are imported when a runner is made: importing this imports torch alone."""

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

    def term_gradients(self, request: Request, bwd_inputs: BackwardInputs, wanted: Sequence[bool]) -> Runner:
        from ..common.term_gradients import term_gradients

        return term_gradients(request, bwd_inputs, wanted)

    def jvp(self, request: Request, out: Tensor, lse: Tensor, tangents: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        from ..common.jvp_launches import jvp

        return jvp(request, out, lse, tangents)

    def lacks_hvp(self, request: Request) -> str | None:
        from ..common.score_terms import lacks_hvp

        return lacks_hvp(request)

    def hvp(self, request: Request, bwd_inputs: BackwardInputs, tangents: Sequence[Tensor]) -> Runner:
        from ..common.hvp_launches import build_hvp
        from ..common.kernel_call import KernelCall

        tensors = *request.tensors(), *bwd_inputs, *tangents
        return KernelCall(build_hvp(request.spec), tensors, request.q.device)

    def launches(self, request: Request, gpu: Gpu, backward: bool) -> dict[str, Any]:
        from .launches import offline_launches

        return offline_launches(request, gpu, backward)
