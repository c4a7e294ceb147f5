"""Kernels for Hopper (sm_90) in Gluon: TMA, mbarriers, asynchronous wgmma, specialised warps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...kv_request import KvRequest
from ...request import BackwardInputs, Gpu, Request, Spec
from ..common.kv import KvKernels
from ..kernels import KernelBackend
from ..protocol import KvBackend, Runner
from . import support

if TYPE_CHECKING:
    from ..common.kv.runners import KvLaunches
    from ..common.launch import Build, Launch


def _kv_launches(request: KvRequest) -> KvLaunches:
    from . import kv_launches

    return kv_launches


class HopperBackend(KernelBackend):
    name = "hopper"
    reason = "kernels for this GPU"
    kv: KvBackend | None = KvKernels(_kv_launches)

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

    def hvp_build(self, spec: Spec) -> Build:
        from ..common.hvp_launches import build_hvp
        from .hvp_launches import ONE_PASS

        return build_hvp(spec, ONE_PASS)

    def evaluated_mask(self, request: Request) -> tuple[Tensor, ...]:
        from .mask_words import evaluated_words

        return evaluated_words(request)

    def launches(self, request: Request, gpu: Gpu, backward: bool) -> dict[str, Launch]:
        from .offline import offline_launches

        return offline_launches(request, gpu, backward)
