"""What all kernel backends share: common kernels compute these derivatives from any backend's out and lse."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..request import BackwardInputs, Request
from .protocol import Runner


class KernelBackend:
    """Kernels are imported when a runner is made: importing a backend imports torch alone."""

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
