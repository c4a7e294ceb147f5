"""What a backend is. `registry` lists the backends and chooses one for a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..kv_request import AppendRequest, KvCall, KvRequest, PlannedTile
from ..request import BackwardInputs, Gpu, Request

# Runs a call: takes its tensors and returns its results. A method `..._runner` of a backend compiles what a call needs
# and returns a runner, for any tensors of the same layouts. It computes nothing.
Runner = Callable[[Sequence[Tensor | None]], Sequence[Tensor]]


class KvBackend(Protocol):
    """Attention over a KV cache. A runner takes the `tensors()` of a request or call."""

    def schedule_sizes(self, request: KvRequest) -> tuple[int, int]:
        """int64 numbers of a schedule, and float32 numbers of the workspace that it needs."""
        ...

    def schedule_runner(self, request: KvRequest, schedule: Tensor) -> Runner:
        """Writes the schedule. Tensors: those of the request, then the schedule."""
        ...

    def planned(self, request: KvRequest, schedule: Tensor) -> list[PlannedTile]:
        """The tiles of a schedule, read back from the device."""
        ...

    def attend_runner(self, call: KvCall) -> Runner:
        """Writes new tokens if there are some, then returns (out, lse)."""
        ...

    def append_runner(self, request: AppendRequest) -> Runner:
        """Writes new tokens into the cache."""
        ...


class Backend(Protocol):
    """A way to compute attention. Nothing is imported beyond torch until a runner is made."""

    name: str
    reason: str  # why "auto" takes it
    kv: KvBackend | None

    def __hash__(self) -> int: ...

    def unsupported(self, request: Any, gpu: Gpu | None) -> str | None:
        """What prevents this backend from running a call, or None."""
        ...

    def declines(self, request: Any, gpu: Gpu | None) -> str | None:
        """Why "auto" gives a supported call to the next backend, or None."""
        ...

    def forward_runner(self, request: Request, needs_lse: bool = True) -> Runner:
        """Tensors: `request.tensors()`. Results: out, lse, and the largest score of each head if spec.max_logit. If
        lse is not needed, neither by the caller nor by a backward, it may be wrong."""
        ...

    def has_backward(self, request: Request) -> bool:
        """Whether it computes the gradients of q, k and v of a supported call. If not, the next backend does."""
        ...

    def backward_runner(self, request: Request, bwd_inputs: BackwardInputs) -> Runner:
        """Tensors: `request.tensors()`, then out, lse, dout and dlse. Results: dq, dk, dv."""
        ...

    def term_gradients_runner(self, request: Request, bwd_inputs: BackwardInputs, wanted: Sequence[bool]) -> Runner:
        """Tensors as in `backward`. Results: the gradients of the wanted ones among bias, sinks and the score mod's
        tensors, in this order."""
        ...

    def lacks_jvp(self, request: Request) -> str | None:
        """Why it has no `jvp` of a supported call, or None."""
        ...

    def jvp(self, request: Request, out: Tensor, lse: Tensor, tangents: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The tangents of out and lse for tangents of q, k and v."""
        ...

    def lacks_hvp(self, request: Request) -> str | None:
        """Why it has no second derivatives of a supported call, or None."""
        ...

    def hvp_runner(self, request: Request, bwd_inputs: BackwardInputs, tangents: Sequence[Tensor]) -> Runner:
        """Tensors as in `backward`, then tangents of q, k and v. Results: the tangents of out, lse, dq, dk and dv, with
        dout and dlse constant."""
        ...

    def evaluated_mask(self, request: Request) -> tuple[Tensor, ...]:
        """What the kernels compute of a call's block mask before the others, to be kept for all calls with this mask:
        they take it after the lists, in `request.blocks`. () if there is nothing to keep. It launches kernels."""
        ...

    def launches(self, request: Request, gpu: Gpu, backward: bool) -> dict[str, Any]:
        """The launches of a forward or backward by name, for offline compilation. The tensors may be meta tensors."""
        ...
