"""Runners of calls with a KV cache: append, schedule, attend and combine as one sequence of launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....kv_formats import head_dim
from ....kv_request import AppendRequest, KvCall, KvRequest, structure_of
from ..clear import clear_max_logit
from ..kernel_call import KernelCall
from ..launch import Built, Launch, Memory, Target
from ..shapes import new_max_logit
from .launches import append_launch

Schedule = Callable[[KvRequest, Tensor, Target], list[Launch]]
Sizes = Callable[[KvRequest, Target], tuple[int, int]]
Attend = Callable[[KvCall, Target, Memory], list[Launch]]


def append_runner(request: AppendRequest) -> KernelCall:
    """The runner of an append. It returns the rotated queries, if there are any."""
    tensors, structure = structure_of(request)

    def build(tensors: Sequence[Any], target: Target, memory: Memory) -> Built:
        request = with_rotated(structure(tensors), memory)
        return Built([] if request.rotated is None else [request.rotated], [append_launch(request, target.gpu)])

    return KernelCall(build, tensors, request.k.device)


def with_rotated(request: AppendRequest, memory: Memory) -> AppendRequest:
    """The request with memory for the rotated queries, if it has queries."""
    q = request.q
    if q is None or request.rotated is not None:
        return request
    return request._replace(rotated=memory.empty(q.shape, q.dtype))


def schedule_runner(request: KvRequest, schedule: Tensor, launches: Schedule) -> KernelCall:
    """The runner of a schedule. Its tensors are those of the request, then the schedule. It returns nothing."""
    tensors, structure = structure_of((request, schedule))

    def build(tensors: Sequence[Any], target: Target, memory: Memory) -> Built:
        request, schedule = structure(tensors)
        return Built([], launches(request, schedule, target))

    return KernelCall(build, tensors, request.q.device)


def attend_runner(call: KvCall, sizes: Sizes, schedule: Schedule, attend: Attend) -> KernelCall:
    """The runner of `attention_kv`. It returns out and lse, and the largest score of each head if spec.max_logit."""
    tensors, structure = structure_of(call)

    def build(tensors: Sequence[Any], target: Target, memory: Memory) -> Built:
        call: KvCall = structure(tensors)
        request = call.request
        max_logit = new_max_logit(request.dense, memory) if call.max_logit is None else call.max_logit
        launches = clear_max_logit(max_logit)
        if call.append is not None:
            append = with_rotated(call.append, memory)
            launches.append(append_launch(append, target.gpu))
            if append.rotated is not None:
                request = request._replace(dense=request.dense._replace(q=append.rotated))
        if call.schedule is None:
            numbers, floats = sizes(request, target)
            call = call._replace(
                schedule=memory.empty((numbers,), torch.int64), workspace=memory.empty((floats,), torch.float32)
            )
            assert call.schedule is not None
            launches += schedule(request, call.schedule, target)
        out, lse = results_of(call, memory)
        if request.q.shape[:-1].numel():
            launches += attend(call._replace(request=request, out=out, lse=lse, max_logit=max_logit), target, memory)
        return Built((out, lse) if max_logit is None else (out, lse, max_logit), launches)

    return KernelCall(build, tensors, call.request.q.device)


def results_of(call: KvCall, memory: Memory) -> tuple[Tensor, Tensor]:
    """The out and lse of the call, or new ones."""
    q, v = call.request.q, call.request.v
    out = memory.empty((*q.shape[:-1], head_dim(v)), q.dtype) if call.out is None else call.out
    lse = memory.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.float32) if call.lse is None else call.lse
    return out, lse
