"""Attention over a KV cache: the schedule of keys, decode, combine, and the append of new tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ....kv_latent import is_latent, shares_memory
from ....kv_request import AppendRequest, KvCall, KvRequest, PlannedTile


class DecodeKernels:
    """A `KvBackend` of Triton kernels, which are imported when a runner is made."""

    def schedule_sizes(self, request: KvRequest) -> tuple[int, int]:
        from .launches import schedule_sizes

        return schedule_sizes(request)

    def schedule(self, request: KvRequest, schedule: Tensor) -> Any:
        from .launches import schedule_launch
        from .runners import schedule_runner

        return schedule_runner(request, schedule, schedule_launch)

    def planned(self, request: KvRequest, schedule: Tensor) -> list[PlannedTile]:
        from .launches import planned

        return planned(request, schedule)

    def attend(self, call: KvCall) -> Any:
        from .launches import attend_launches, schedule_launch, schedule_sizes
        from .mla_launches import mla_launches
        from .runners import attend_runner

        if not is_latent(call.request):
            return attend_runner(call, schedule_sizes, schedule_launch, attend_launches)
        # launches are made of placeholders, which have no address
        shared = shares_memory(call.request.k, call.request.v)
        return attend_runner(call, schedule_sizes, schedule_launch, partial(mla_launches, shared=shared))

    def append(self, request: AppendRequest) -> Any:
        from .runners import append_runner

        return append_runner(request)
