"""The launches of a call whose sequences may share prefixes: schedules of the prefixes and of the other keys, attend to
the prefixes, attend to the other keys and merge.

The schedule of a plan holds both schedules and the numbers of `prefix.Groups`; its workspace the partial results of
both, and out and lse over prefixes in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....errors import AttentionError
from ....kv_formats import head_dim
from ....kv_request import UNDIVIDED, CachePlaces, KvCall, KvRequest, PlannedTile
from ..launch import INTERPRETED, Launch, Memory, Target, can_overlap, target_of
from . import partition as partitions
from .launches import Part, decode_launches, fitting, kernel_options, partition_launch, partition_of, planned_tiles
from .partition import KvTile, Partition, bytes_of_key
from .prefix import CommonConfig, GroupConfig, Groups, common_kernel, groups_kernel
from .schedule import Sequences

# The tile of the launch for prefixes; None for that of the decode kernel with many rows.
PREFIX_TILE: KvTile | None = None
BLOCK_PAGES = 1024  # that are compared at once
BATCHES = (128, 512, partitions.MAX_BATCH)  # few sizes, so that an engine's batches share their kernels
ALIGN = 16  # elements; Triton compiles another kernel for addresses that are not multiples of 16 bytes


class Parts(NamedTuple):
    """The parts of a plan: schedules of the prefixes and of the other keys, and the groups; if it was given, those of
    the workspace: partial results of both, and the results over the prefixes, (tokens, heads, dim) and (tokens,
    heads)."""

    prefix_schedule: Tensor
    schedule: Tensor
    groups: Groups
    prefix_workspace: Tensor | None = None
    workspace: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None


class Plan(NamedTuple):
    """The requests and partitions of both passes."""

    prefix_request: KvRequest
    prefix: Partition
    request: KvRequest
    own: Partition


def plan_of(request: KvRequest, target: Target, groups: Groups | None = None) -> Plan:
    """Both passes of a request. Without `groups` only their sizes count."""
    dense, places = request.dense, request.places
    q, tokens = dense.q, dense.q.shape[:-2].numel()
    lengths = places.lengths if groups is None else groups.lengths
    cu_q = torch.empty(places.batch + 1, device="meta", dtype=torch.int32) if groups is None else groups.cu_q
    starts = places.lengths if groups is None else groups.starts
    # Rows of the prefix pass are found by `query_pointers`: of these queries only the shape counts.
    packed = q.as_strided((tokens, *q.shape[-2:]), (0, *q.stride()[-2:]))
    spec = dense.spec._replace(before=None, after=None)
    prefix_request = request._replace(
        dense=dense._replace(q=packed, cu_q=cu_q, sinks=None, spec=spec),
        places=CachePlaces(lengths, places.table, places.indptr),
        tree=None,
        max_seqlen_q=0,
    )
    own = request._replace(places=places._replace(starts=starts))
    prefix = partition_of(prefix_request, target, PREFIX_TILE)
    # a group with a prefix has two sequences or more, and at most one tile of rows that is not full
    most_items = tokens * (q.shape[-2] // dense.k.shape[-2]) // prefix.tile.block_m + places.batch // 2
    prefix = prefix._replace(most_splits=most_items + prefix.wanted_splits)
    return Plan(prefix_request, prefix, own, partition_of(own, target))


def aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def number_sizes(plan: Plan, batch: int) -> list[int]:
    """int64 elements of both schedules, and int32 elements of each of the groups' arrays."""
    schedules = [aligned(plan.prefix.schedule_numel), aligned(plan.own.schedule_numel)]
    return [*schedules, *[aligned(batch + 1)] * len(Groups._fields)]


def float_sizes(plan: Plan, request: KvRequest) -> list[int]:
    """Elements of both workspaces, and of out and lse over prefixes."""
    rows, dim_v = request.q.shape[:-1].numel(), head_dim(request.v)
    spaces = [aligned(x.workspace_numel(dim_v)) for x in (plan.prefix, plan.own)]
    return [*spaces, aligned(rows * dim_v), aligned(rows)]


def schedule_sizes(request: KvRequest, target: Target | None = None) -> tuple[int, int]:
    """The number of int64 elements of the schedule, and of float32 elements of the workspace."""
    plan = plan_of(request, target_of(request.q.device) if target is None else target)
    prefix, own, *arrays = number_sizes(plan, request.places.batch)
    return prefix + own + sum(arrays) // 2, sum(float_sizes(plan, request))


def parts_of(request: KvRequest, target: Target, schedule: Tensor, workspace: Tensor | None = None) -> Parts:
    """The parts of a plan. Raises AttentionError if its tensors have other sizes than the request needs."""
    plan = plan_of(request, target)
    expected = schedule_sizes(request, target)
    found = (schedule.numel(), expected[1] if workspace is None else workspace.numel())
    if found != expected:
        raise AttentionError("sizes of the plan", found, f"{expected}: call plan_kv on this device, in this process")
    batch = request.places.batch
    prefix, own, *arrays = number_sizes(plan, batch)
    ends = schedule[prefix + own :].view(torch.int32).split(arrays)
    groups = Groups(*(x[: batch + 1] for x in ends))
    schedules = schedule[: plan.prefix.schedule_numel], schedule[prefix:][: plan.own.schedule_numel]
    groups = groups._replace(lengths=groups.lengths[:batch], starts=groups.starts[:batch])
    if workspace is None:
        return Parts(*schedules, groups)
    prefix_space, own_space, out, lse = workspace.split(float_sizes(plan, request))
    tokens, heads, dim_v = request.q.shape[:-2].numel(), request.q.shape[-2], head_dim(request.v)
    return Parts(
        *schedules,
        groups,
        prefix_space[: plan.prefix.workspace_numel(dim_v)],
        own_space[: plan.own.workspace_numel(dim_v)],
        out[: tokens * heads * dim_v].view(tokens, heads, dim_v),
        lse[: tokens * heads].view(tokens, heads),
    )


def schedule_launches(request: KvRequest, schedule: Tensor, target: Target) -> list[Launch]:
    """Find the groups of sequences, and compute both schedules."""
    parts = parts_of(request, target, schedule)
    plan = plan_of(request, target, parts.groups)
    q, k, places = request.q, request.k, request.places
    overlap = can_overlap(target.gpu)
    sequences = Sequences(places.lengths, request.dense.cu_q, places.cu_new, None, places.indptr)
    assert places.table is not None
    given = request.shared_prefix if isinstance(request.shared_prefix, Tensor) else None
    stride = places.table.stride(0)
    sizes = (q.shape[-3], places.new, min(places.capacity(k), UNDIVIDED), k.shape[1], stride, places.batch)
    common = Launch(
        common_kernel,
        places.batch,
        (parts.groups, sequences, places.table, given, *sizes),
        kernel_options(CommonConfig(64 if INTERPRETED else BLOCK_PAGES, overlap)),
    )
    least = (partitions.MIN_SHARED, -(-partitions.MIN_SAVED // bytes_of_key(request))) if given is None else (0, 0)
    chunk = plan.own.chunk_size
    limits = (max(least[0], chunk), least[1])
    groups = Launch(
        groups_kernel,
        1,
        (parts.groups, request.dense.cu_q, q.shape[-3], places.batch, chunk, *limits),
        kernel_options(GroupConfig(fitting(places.batch, (16, *BATCHES) if INTERPRETED else BATCHES), overlap)),
    )
    return [
        *(common, groups),
        partition_launch(plan.prefix_request, parts.prefix_schedule, plan.prefix, target, skip_empty=True),
        partition_launch(plan.request, parts.schedule, plan.own, target),
    ]


def attend_launches(call: KvCall, target: Target, memory: Memory, shared: bool = False) -> list[Launch]:
    """Attend to the prefixes, then to the other keys of each sequence, and merge."""
    request = call.request
    assert call.schedule is not None
    parts = parts_of(request, target, call.schedule, call.workspace)
    assert parts.out is not None
    assert parts.lse is not None
    plan = plan_of(request, target, parts.groups)
    prefix = KvCall(plan.prefix_request, None, parts.prefix_schedule, parts.prefix_workspace, parts.out, parts.lse.mT)
    out, lse = parts.out, parts.lse
    if request.dense.cu_q is None:
        out, lse = (x.unflatten(0, request.q.shape[:2]) for x in (out, lse))
    own = call._replace(request=plan.request, schedule=parts.schedule, workspace=parts.workspace)
    return [
        *decode_launches(prefix, plan.prefix, target, Part(queries=request.q)),
        *decode_launches(own, plan.own, target, Part(concurrent=True, prefix=(out, lse.mT))),
    ]


def planned(request: KvRequest, schedule: Tensor) -> list[PlannedTile]:
    """The work items of the schedule, with those of prefixes first."""
    target = target_of(request.q.device)
    parts = parts_of(request, target, schedule)
    plan = plan_of(request, target, parts.groups)
    return [
        *planned_tiles(plan.prefix, parts.prefix_schedule),
        *planned_tiles(plan.own, parts.schedule),
    ]
