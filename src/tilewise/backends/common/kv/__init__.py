"""Attention over a KV cache: the schedule of keys, decode, combine, and the append of new tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ....kv_latent import is_latent, shares_memory
from ....kv_request import AppendRequest, KvCall, KvRequest, PlannedTile
from .shared import shares_prefix


def _launches(request: KvRequest) -> Any:
    """The module that makes the launches of a request."""
    if shares_prefix(request):
        from . import prefix_launches

        return prefix_launches
    from . import launches

    return launches


class DecodeKernels:
    """A `KvBackend` of Triton kernels, which are imported when a runner is made."""

    def schedule_sizes(self, request: KvRequest) -> tuple[int, int]:
        numbers, floats = _launches(request).schedule_sizes(request)
        return numbers, floats

    def schedule(self, request: KvRequest, schedule: Tensor) -> Any:
        from .runners import schedule_runner

        return schedule_runner(request, schedule, _launches(request).schedule_launches)

    def planned(self, request: KvRequest, schedule: Tensor) -> list[PlannedTile]:
        found: list[PlannedTile] = _launches(request).planned(request, schedule)
        return found

    def attend(self, call: KvCall) -> Any:
        from .mla_launches import mla_launches
        from .runners import attend_runner

        of = _launches(call.request)
        if not is_latent(call.request):
            return attend_runner(call, of.schedule_sizes, of.schedule_launches, of.attend_launches)
        # launches are made of placeholders, which have no address
        shared = shares_memory(call.request.k, call.request.v)
        attend = partial(mla_launches, shared=shared)
        return attend_runner(call, of.schedule_sizes, of.schedule_launches, attend)

    def append(self, request: AppendRequest) -> Any:
        from .runners import append_runner

        return append_runner(request)
