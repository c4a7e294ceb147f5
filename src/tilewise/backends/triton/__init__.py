"""Portable kernels in Triton: any GPU that it compiles for, and its interpreter on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...request import BackwardInputs, Gpu, Request
from ..common.kv import KvKernels, portable_launches
from ..kernels import KernelBackend
from ..protocol import KvBackend, Runner
from . import support

if TYPE_CHECKING:
    from ..common.launch import Launch


class TritonBackend(KernelBackend):
    name = "triton"
    reason = "portable kernels"
    kv: KvBackend | None = KvKernels(portable_launches)

    unsupported = staticmethod(support.unsupported)
    declines = staticmethod(support.declines)
    has_backward = staticmethod(support.has_backward)

    def forward_runner(self, request: Request, needs_lse: bool = True) -> Runner:
        from ..common.kernel_call import KernelCall
        from .launches import build_forward

        return KernelCall(build_forward(request.spec), request.tensors(), request.q.device)

    def backward_runner(self, request: Request, bwd_inputs: BackwardInputs) -> Runner:
        from ..common.kernel_call import KernelCall, build_backward
        from .backward_launches import named_launches

        build = build_backward(named_launches, request.spec)
        return KernelCall(build, (*request.tensors(), *bwd_inputs), request.q.device)

    def launches(self, request: Request, gpu: Gpu, backward: bool) -> dict[str, Launch]:
        from .offline import offline_launches

        return offline_launches(request, gpu, backward)
