"""What the backends of kernels have in common. Kernels are imported when a runner is made, and so are the modules here
that import Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..request import BackwardInputs, Request, Spec
from .protocol import Runner

if TYPE_CHECKING:
    from .common.launch import Build


class KernelBackend:
    """The gradients of score terms, and other derivatives, are computed by common kernels from any backend's out and
    lse."""

    def hvp_build(self, spec: Spec) -> Build:
        """What prepares the launches of `hvp_runner`."""
        from .common.hvp_launches import build_hvp

        return build_hvp(spec)

    def hvp_runner(self, request: Request, bwd_inputs: BackwardInputs, tangents: Sequence[Tensor]) -> Runner:
        from .common.kernel_call import KernelCall

        tensors = *request.tensors(), *bwd_inputs, *tangents
        return KernelCall(self.hvp_build(request.spec), tensors, request.q.device)

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

    def evaluated_mask(self, request: Request) -> tuple[Tensor, ...]:
        return ()
