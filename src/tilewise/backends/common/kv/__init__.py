"""Attention over a KV cache: the schedule of keys, decode, combine, and the append of new tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ....kv_formats import is_latent
from ....kv_request import AppendRequest, KvCall, KvRequest, PlannedTile
from .partition import shares_prefix

if TYPE_CHECKING:
    from .runners import KvLaunches


def portable_launches(request: KvRequest) -> KvLaunches:
    """The module that makes the launches of a request in Triton."""
    if is_latent(request):
        from . import mla_launches

        return mla_launches
    if shares_prefix(request):
        from . import prefix_launches

        return prefix_launches
    from . import launches

    return launches


class KvKernels:
    """A `KvBackend` of kernels. `launches_of` imports and returns the module that makes the launches of a request, so
    nothing but torch is imported until a runner is made."""

    def __init__(self, launches_of: Callable[[KvRequest], KvLaunches]) -> None:
        self.launches_of = launches_of

    def schedule_sizes(self, request: KvRequest) -> tuple[int, int]:
        return self.launches_of(request).schedule_sizes(request)

    def schedule_runner(self, request: KvRequest, schedule: Tensor) -> Any:
        from .runners import schedule_runner

        return schedule_runner(request, schedule, self.launches_of(request))

    def planned(self, request: KvRequest, schedule: Tensor) -> list[PlannedTile]:
        return self.launches_of(request).planned(request, schedule)

    def attend_runner(self, call: KvCall) -> Any:
        from .runners import attend_runner

        return attend_runner(call, self.launches_of(call.request))

    def append_runner(self, request: AppendRequest) -> Any:
        from .runners import append_runner

        return append_runner(request)
