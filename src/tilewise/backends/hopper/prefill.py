"""The KV cache on Hopper: the forward kernel for prefill, the decode kernels for short sequences of queries."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...kv_request import AppendRequest, KvCall, KvRequest, PlannedTile


class PrefillKernels:
    """A `KvBackend`. Kernels are imported when a runner is made."""

    def schedule_sizes(self, request: KvRequest) -> tuple[int, int]:
        from .kv_launches import schedule_sizes

        return schedule_sizes(request)

    def schedule(self, request: KvRequest, schedule: Tensor) -> Any:
        from ..common.kv.runners import schedule_runner
        from .kv_launches import schedule_launches

        return schedule_runner(request, schedule, schedule_launches)

    def planned(self, request: KvRequest, schedule: Tensor) -> list[PlannedTile]:
        from .kv_launches import planned

        return planned(request, schedule)

    def attend(self, call: KvCall) -> Any:
        from ..common.kv.runners import attend_runner
        from .kv_launches import attend_launches, schedule_launches, schedule_sizes

        return attend_runner(call, schedule_sizes, schedule_launches, attend_launches)

    def append(self, request: AppendRequest) -> Any:
        from ..common.kv.runners import append_runner

        return append_runner(request)
