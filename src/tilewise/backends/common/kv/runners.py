"""Runners of calls with a KV cache: append, schedule, attend and combine as one sequence of launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ....kv_formats import head_dim, shares_memory
from ....kv_request import AppendRequest, KvCall, KvRequest, PlannedTile, structure_of
from ..clear import clear_max_logit
from ..kernel_call import KernelCall, new_max_logit
from ..launch import Built, Launch, Memory, Target
from . import launches as decode
from .append_launches import append_launch


class KvLaunches(Protocol):
    """A module that makes the launches of requests."""

    def schedule_sizes(self, request: KvRequest, target: Target | None = None) -> tuple[int, int]:
        """int64 numbers of a schedule, and float32 numbers of the workspace that it needs."""
        ...

    def schedule_launches(self, request: KvRequest, schedule: Tensor, target: Target) -> list[Launch]: ...

    def planned(self, request: KvRequest, schedule: Tensor) -> list[PlannedTile]:
        """The work items of a schedule, read back."""
        ...

    def attend_launches(self, call: KvCall, target: Target, memory: Memory, shared: bool) -> list[Launch]:
        """`shared`: the values are the first columns of the keys (MLA). Placeholders have no address that says so."""
        ...


def append_runner(request: AppendRequest) -> KernelCall:
    """The runner of an append. It returns the rotated queries, if there are any."""
    tensors, structure = structure_of(request)

    def build(placeholders: Sequence[Any], target: Target, memory: Memory) -> Built:
        append = with_rotated(structure(placeholders), memory)
        return Built([] if append.rotated is None else [append.rotated], [append_launch(append, target.gpu)])

    return KernelCall(build, tensors, request.k.device)


def with_rotated(request: AppendRequest, memory: Memory) -> AppendRequest:
    """The request with memory for the rotated queries, if it has queries."""
    q = request.q
    if q is None or request.rotated is not None:
        return request
    return request._replace(rotated=memory.empty(q.shape, q.dtype))


def schedule_runner(request: KvRequest, schedule: Tensor, module: KvLaunches) -> KernelCall:
    """The runner of a schedule. Its tensors are those of the request, then the schedule. It returns nothing."""
    tensors, structure = structure_of((request, schedule))

    def build(placeholders: Sequence[Any], target: Target, memory: Memory) -> Built:
        given, written = structure(placeholders)
        return Built([], module.schedule_launches(given, written, target))

    return KernelCall(build, tensors, request.q.device)


def attend_runner(call: KvCall, module: KvLaunches) -> KernelCall:
    """The runner of `attention_kv`. It returns out and lse, and the largest score of each head if spec.max_logit."""
    tensors, structure = structure_of(call)
    shared = shares_memory(call.request.k, call.request.v)
    decode_writes = module is decode and decode.writes_new_tokens(call)

    def build(placeholders: Sequence[Any], target: Target, memory: Memory) -> Built:
        given: KvCall = structure(placeholders)
        request, append, schedule, workspace = given[:4]
        max_logit = new_max_logit(request.dense, memory) if given.max_logit is None else given.max_logit
        launches = clear_max_logit(max_logit)
        if append is not None and not decode_writes:
            append = with_rotated(append, memory)
            launches.append(append_launch(append, target.gpu))
            if append.rotated is not None:
                request = request._replace(dense=request.dense._replace(q=append.rotated))
        if schedule is None:
            numbers, floats = module.schedule_sizes(request, target)
            schedule, workspace = memory.empty((numbers,), torch.int64), memory.empty((floats,), torch.float32)
            launches += module.schedule_launches(request, schedule, target)
        out, lse = results_of(given, memory)
        if request.q.shape[:-1].numel():
            every = KvCall(request, append if decode_writes else None, schedule, workspace, out, lse, max_logit)
            launches += module.attend_launches(every, target, memory, shared)
        return Built((out, lse) if max_logit is None else (out, lse, max_logit), launches)

    return KernelCall(build, tensors, call.request.q.device)


def results_of(call: KvCall, memory: Memory) -> tuple[Tensor, Tensor]:
    """The out and lse of the call, or new ones."""
    q, v = call.request.q, call.request.v
    out = memory.empty((*q.shape[:-1], head_dim(v)), q.dtype) if call.out is None else call.out
    lse = memory.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.float32) if call.lse is None else call.lse
    return out, lse
