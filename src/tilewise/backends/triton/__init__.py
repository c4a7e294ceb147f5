"""Portable kernels in Triton: any GPU that it compiles for, and its interpreter on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...request import Gpu, Request, Spec
from ..common.kv import KvKernels, portable_launches
from ..kernels import KernelBackend
from ..protocol import KvBackend
from . import support

if TYPE_CHECKING:
    from ..common.launch import Build, Launch


class TritonBackend(KernelBackend):
    name = "triton"
    reason = "portable kernels"
    kv: KvBackend | None = KvKernels(portable_launches)

    def unsupported(self, request: Any, gpu: Gpu | None) -> str | None:
        return support.unsupported(request, gpu)

    def declines(self, request: Any, gpu: Gpu | None) -> str | None:
        return support.declines(request, gpu)

    def has_backward(self, request: Request) -> bool:
        return support.has_backward(request)

    def forward_build(self, spec: Spec) -> Build:
        from .launches import build_forward

        return build_forward(spec)

    def backward_build(self, spec: Spec) -> Build:
        from ..common.kernel_call import build_backward
        from .backward_launches import named_launches

        return build_backward(named_launches, spec)

    def launches(self, request: Request, gpu: Gpu, backward: bool) -> dict[str, Launch]:
        from .offline import offline_launches

        return offline_launches(request, gpu, backward)
