"""The launches of a call with a KV cache: schedule, decode, combine. Kernels are given a cache as a view, of
words where it is quantised, with its scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ....errors import AttentionError
from ....kv_formats import format_of, has_token_scales, has_words, head_dim, scale_groups
from ....kv_request import UNDIVIDED, KvCall, KvRequest, PlannedTile, Scale
from ....request import Gpu, padded
from ..device.structs import View
from ..kernel_call import view
from ..kernel_config import precision
from ..launch import INTERPRETED, Launch, Memory, Target, can_overlap, pdl_option, target_of
from ..score_terms import device_terms, folded, is_bounded, mask_mod
from . import formats
from . import partition as partitions
from .cache_tiles import KvCacheView
from .combine import Buffers, CombineConfig, combine_kernel
from .decode import DecodeConfig, NewTokens, decode_kernel
from .partition import ITEM, KvTile, Partition
from .schedule import ScheduleConfig, Sequences, schedule_kernel

NO_VIEW = View(None, (0, 0, 0, 0, None, None))

# Few sizes, so that an engine's batches share their kernels.
BLOCK_ITEMS = (128, 256)  # work items that the schedule kernel computes at once: one for each thread, or two
BLOCK_PARTIALS = (8, 32, 128)  # partial results of a row that `combine_kernel` loads at once
FUSED = 8192  # elements that the last program of a work item combines at once
MAX_FUSED = 4  # partial results that it combines: of 2 it saves 7 us, of 16 it takes 3 us more (H200)
MIN_ROWS = 16  # of a tile
COMBINED = 4096  # elements that a program of `combine_kernel` combines at once


def row_view(x: Tensor) -> View:
    """(batch, token, head) strides of an lse (batch, head, token) or (head, token)."""
    *batch, head, token = x.stride()
    return View(x, (batch[0] if batch else 0, token, head))


def words_of(cache: Tensor) -> Tensor:
    """A quantised cache as words, or bytes where they cannot be read so; others as they are."""
    if format_of(cache) is None:
        return cache
    return cache.view(torch.int16) if has_words(cache) else cache.view(torch.uint8)


def stored_of(cache: Tensor, q: Tensor, scale: Scale, gpu: Gpu) -> formats.Stored:
    """What the decode kernel is compiled for. Products are computed in the dtype of q and the cache if they agree; in
    float16, which holds all quantised numbers, where q is a 16-bit float; in float32 otherwise."""
    found = format_of(cache)
    operand = q.dtype
    if q.element_size() == 2 and (found is not None or cache.dtype != q.dtype):
        operand = torch.float32 if cache.dtype == torch.bfloat16 else torch.float16
    accuracy = precision(q, gpu)
    if operand == torch.float32 and q.element_size() == 2 and gpu.kind != "hip":
        accuracy = "tf32"  # holds float16 and bfloat16
    name = str(operand).removeprefix("torch.")
    narrows = operand == torch.float16 and q.dtype == torch.bfloat16
    if found is None:
        return formats.Stored(None, False, 1, name, accuracy, None, 1, 1, 1, narrows, False)
    kind = scale_kind(scale)
    groups, blocks = max(1, scale_groups(scale)), partitions.blocks_of(scale)
    parts = 16 // found.bits if has_words(cache) else 8 // found.bits
    pairs = parts > 1 and gpu.kind == "cuda" and not INTERPRETED
    if found.name == "e4m3" and not gpu.has_e4m3:
        pairs = False
    factor = narrows or kind == "head"
    grouping = groups, blocks, triton.next_power_of_2(blocks)
    return formats.Stored(found.name, found.is_integer, parts, name, accuracy, kind, *grouping, factor, pairs)


def scale_kind(scale: Scale) -> str | None:
    """What kernels are compiled for: SCALE of `Stored`."""
    return None if scale is None else "token" if has_token_scales(scale) else "head"


def bytes_of(cache: Tensor) -> Tensor:
    """A quantised cache as bytes."""
    return cache if format_of(cache) is None else cache.view(torch.uint8)


def scale_of(scale: Scale) -> formats.Scale:
    """A scale as an argument of a kernel."""
    if not isinstance(scale, Tensor):
        return formats.Scale(NO_VIEW, 1.0 if scale is None else scale)
    if has_token_scales(scale):
        return formats.Scale(view(scale if scale.dim() == 4 else scale[..., None]), 1.0)
    steps = [0 if n == 1 else step for n, step in zip(scale.shape, scale.stride(), strict=True)]
    return formats.Scale(View(scale, (*[0] * (2 - len(steps)), *steps, 0, 0, None)), 1.0)


def partition_of(request: KvRequest, target: Target, tile: KvTile | None = None) -> Partition:
    """The partition of a request, with the tile of the tables unless one is given."""
    if INTERPRETED:
        return partitions.partition(request, target.gpu, partitions.INTERPRETED_PROCESSORS, partitions.INTERPRETER)
    return partitions.partition(request, target.gpu, target.num_sms, tile)


def checked_partition(
    request: KvRequest, target: Target, schedule: Tensor, workspace: Tensor | None = None
) -> Partition:
    """The partition of a request. Raises AttentionError if the tensors of a plan have other sizes than it needs."""
    partition = partition_of(request, target)
    found = [schedule.numel()] if workspace is None else [schedule.numel(), workspace.numel()]
    expected = [partition.schedule_numel, partition.workspace_numel(head_dim(request.v))][: len(found)]
    if found != expected:
        raise AttentionError("sizes of the plan", found, f"{expected}: call plan_kv on this device, in this process")
    return partition


def schedule_sizes(request: KvRequest, target: Target | None = None) -> tuple[int, int]:
    """The number of int64 elements of the schedule, and of float32 elements of the workspace."""
    partition = partition_of(request, target_of(request.q.device) if target is None else target)
    return partition.schedule_numel, partition.workspace_numel(head_dim(request.v))


def planned(request: KvRequest, schedule: Tensor) -> list[PlannedTile]:
    """The work items of a schedule, read back (its layout is in schedule.py): those with keys are in front, those
    without at the end."""
    return planned_tiles(checked_partition(request, target_of(request.q.device), schedule), schedule)


def planned_tiles(partition: Partition, schedule: Tensor) -> list[PlannedTile]:
    """The work items of a schedule with this partition."""
    numbers: list[int] = schedule.tolist()
    without, with_keys = numbers[1:3]
    table = numbers[len(numbers) - ITEM * partition.items :]
    items = [PlannedTile(*table[ITEM * n : ITEM * n + ITEM]) for n in range(partition.items)]
    used = [n for n in range(partition.items) if n < with_keys or n >= partition.items - without]
    return sorted(items[n] for n in used)


def schedule_launches(request: KvRequest, schedule: Tensor, target: Target) -> list[Launch]:
    return [partition_launch(request, schedule, checked_partition(request, target, schedule), target)]


def partition_launch(
    request: KvRequest,
    schedule: Tensor,
    partition: Partition,
    target: Target,
    max_queries: int | None = None,
    skip_empty: bool = False,
) -> Launch:
    """Computes the schedule of a partition, of sequences with at most `max_queries` queries, or of all. `skip_empty`:
    work items without keys are left out."""
    q, k, places = request.q, request.k, request.places
    sequences = Sequences(places.lengths, request.dense.cu_q, places.cu_new, places.starts, places.indptr)
    config = ScheduleConfig(
        GROUP=q.shape[-2] // k.shape[-2],
        KV_HEADS=k.shape[-2],
        BLOCK_M=partition.tile.block_m,
        ITEM_COST=partition.item_cost,
        BLOCK_ITEMS=fitting(partition.items, BLOCK_ITEMS),
        BLOCK_SPLITS=fitting(partition.num_splits, BLOCK_ITEMS),
        OVERLAP=can_overlap(target.gpu),
        SKIP_EMPTY=skip_empty,
    )
    sizes = (q.shape[-3], places.new, min(places.capacity(k), UNDIVIDED), k.shape[1], places.batch)
    cut = (
        partition.num_splits,
        *(partition.wanted_splits, partition.resident, partition.least),
        request.spec.before,
        request.spec.after,
        partition.chunk_size,
        partition.min_chunks,
        max_queries,
        None if request.dense.cu_q is None else partition.rows,
    )
    return Launch(
        schedule_kernel,
        1,
        (schedule, sequences, *sizes, partition.tiles, partition.items, *cut),
        kernel_options(config),
    )


def kernel_options(config: Any, **options: Any) -> dict[str, Any]:
    """The options of a launch: the kernel's configuration, 4 warps unless given, programmatic dependent launch."""
    return {"CONFIG": config, "num_warps": 4, **options} | pdl_option(config.OVERLAP)


class Part(NamedTuple):
    """What the launches of `decode_launches` compute. `concurrent`: they may run together with the launch before them.
    `queries`: of prefixes, whose request has packed queries, q as it is. `prefix`: out and lse over prefixes, with
    which results are merged, or None."""

    concurrent: bool = False
    queries: Tensor | None = None
    prefix: tuple[Tensor, Tensor] | None = None


def attend_launches(call: KvCall, target: Target, memory: Memory, shared: bool = False) -> list[Launch]:
    assert call.schedule is not None
    partition = checked_partition(call.request, target, call.schedule, call.workspace)
    return decode_launches(call, partition, target, Part())


def decode_launches(call: KvCall, partition: Partition, target: Target, part: Part) -> list[Launch]:
    """Attend, and combine unless the decode kernel does so itself."""
    request = call.request
    dense, places, spec = request.dense, request.places, request.spec
    q, k, v = dense[:3]
    scoring, scale, _ = folded(dense, target.gpu, derivative=False)
    terms = device_terms(dense, target.gpu)
    stored_k, stored_v = (
        stored_of(x, q, scale, target.gpu) for x, scale in ((k, request.k_scale), (v, request.v_scale))
    )
    k_words, v_words, dim_v = words_of(k), words_of(v), head_dim(v)
    block_r = triton.next_power_of_2(partition.rows)
    config = DecodeConfig(
        GROUP=q.shape[-2] // k.shape[-2],
        D=q.shape[-1],
        DV=dim_v,
        BLOCK_M=partition.tile.block_m,
        BLOCK_N=partition.tile.block_n,
        BLOCK_D=stored_k.BLOCKS * padded(q.shape[-1] // stored_k.BLOCKS, 16 * stored_k.PARTS),
        BLOCK_DV=stored_v.JOINED * padded(dim_v // stored_v.BLOCKS, 16 * stored_v.PARTS),
        FOLD=scoring["FOLD"],
        PRECISION=precision(q, target.gpu),
        BOUNDED=scoring["FOLD"] and is_bounded(dense, scale) and stored_v.OPERAND == "bfloat16",
        LARGE_SCORES=terms.large_scores is not None,
        OVERLAP=can_overlap(target.gpu),
        PAGE_SIZE=None if places.table is None else k.shape[1],
        KV_HEADS=k.shape[-2],
        K=stored_k,
        V=stored_v,
        FIXED_SPLIT=request.split is not None,
        PREFETCH_PAGES=partition.tile.prefetch_pages != 0,
        SAME_STRIDES=view(k_words)[1:] == view(v_words)[1:],
        HAS_STARTS=places.starts is not None and part.prefix is None,  # prefixes end with a chunk
        CONCURRENT=part.concurrent,
        NAN_SAFE=part.queries is None and rows_differ(request),
        MAX_LOGIT=call.max_logit is not None,
        FUSED=request.split is None and is_fused(partition),
        BLOCK_R=block_r,
        BLOCK_C=max(1, FUSED // (block_r * padded(dim_v))),
        OF_PREFIX=part.queries is not None,
        MERGE_PREFIX=part.prefix is not None,
        APPEND=call.append is not None,
    )
    table_stride = 0 if places.table is None else places.table.stride(0)
    queries = q if part.queries is None else part.queries
    n_q = queries.shape[-3] if config.OF_PREFIX or dense.cu_q is None else 0
    words = 0 if request.tree is None else request.tree.shape[1]
    args = (
        view(queries),
        KvCacheView(
            *(view(k_words), view(v_words), places.table, places.indptr, places.rows),
            *(scale_of(request.k_scale), scale_of(request.v_scale)),
        ),
        new_tokens(call),
        buffers_of(call, part.prefix),
        request.tree,
        *(spec.before, spec.after, scale),
        *(partition.items, partition.num_splits, partition.chunk_size),
        *(partition.slots, partition.whole_slots, partition.num_slots, partition.rows, partition.wanted_splits),
        tile_height(request, partition),
        *(table_stride, k.shape[0], places.batch, n_q, words),
        min(places.capacity(k), UNDIVIDED) if config.APPEND else None,
        terms,
    )
    mods = {"SCORE_MOD": scoring["SCORE_MOD"], "MASK_MOD": mask_mod(dense)}
    # a tile of one query has no registers left for the repair that a tree needs
    if partition.tile.max_registers and (request.tree is None or request.max_seqlen_q != 1):
        mods["maxnreg"] = partition.tile.max_registers
    shape = {"num_warps": partition.tile.warps, "num_stages": partition.tile.stages}
    attend = Launch(decode_kernel, partition.programs, args, kernel_options(config, **mods, **shape))
    return [attend] if config.FUSED else [attend, combine_launch(call, terms, partition, target, part.prefix)]


def rows_differ(request: KvRequest) -> bool:
    """Whether rows of a tile may see different keys in the range that is read for all of them."""
    return request.max_seqlen_q != 1 or request.tree is not None or request.spec.mask_mod is not None


def new_tokens(call: KvCall) -> NewTokens:
    if call.append is None:
        return NewTokens()
    return NewTokens(view(call.append.k_new), view(call.append.v_new), call.append.places.lengths)


def writes_new_tokens(call: KvCall) -> bool:
    """Whether the decode kernel itself writes the new tokens of a call: one of each sequence, written as it is, with a
    query that sees it, whose heads fit into every tile: no other program reads the token. Not if queries are packed:
    only the device knows how many each sequence has."""
    request, append = call.request, call.append
    if append is None or request.dense.cu_q is not None or request.q.shape[1] != 1:
        return False
    if request.places.starts is not None:
        return False
    if request.q.shape[-2] > MIN_ROWS * request.k.shape[-2]:
        return False
    if append.slots is not None or append.rotary is not None or append.norm is not None:
        return False
    if any(format_of(x) is not None or x.dtype != new.dtype for x, new in zip(append[2:4], append[:2], strict=True)):
        return False
    return append.per_query and (request.spec.after is None or request.spec.after >= 0)


def tile_height(request: KvRequest, partition: Partition) -> int:
    """The rows of a tile without keys: packed, those past the last sequence may be more than max_seqlen_q."""
    return partition.rows if request.dense.cu_q is None else partition.tile.block_m


def is_fused(partition: Partition) -> bool:
    """Whether the last program of a work item combines its partial results: not if they are likely to be many, which
    several programs of a second launch combine in less time."""
    return partition.least <= MAX_FUSED * partition.items


def fitting(n: int, sizes: tuple[int, ...]) -> int:
    """The smallest of the sizes that n fits into, or the largest.

    >>> fitting(9, (8, 32)), fitting(99, (8, 32))
    (32, 32)
    """
    return next((size for size in sizes if n <= size), sizes[-1])


def buffers_of(call: KvCall, prefix: tuple[Tensor, Tensor] | None = None) -> Buffers:
    assert call.out is not None
    assert call.lse is not None
    found = Buffers(view(call.out), row_view(call.lse), call.workspace, call.schedule, call.max_logit)
    return found if prefix is None else found._replace(prefix_out=view(prefix[0]), prefix_lse=row_view(prefix[1]))


def combine_launch(
    call: KvCall, terms: Any, partition: Partition, target: Target, prefix: tuple[Tensor, Tensor] | None = None
) -> Launch:
    """Combines as many partial results at once as a row is likely to have, and as many rows and columns as fit beside
    them."""
    request = call.request
    q, k, dv = request.q, request.k, head_dim(request.v)
    max_programs = partitions.INTERPRETED_PROCESSORS if INTERPRETED else 8 * target.num_sms
    partials = 1 if request.split else fitting(-(-partition.wanted_splits // max(partition.items, 1)), BLOCK_PARTIALS)
    columns = min(padded(dv), COMBINED // partials)
    block_r = min(triton.next_power_of_2(partition.rows), COMBINED // (partials * columns))
    blocks = -(-partition.rows // block_r) * -(-dv // columns)
    config = CombineConfig(
        GROUP=q.shape[-2] // k.shape[-2],
        KV_HEADS=k.shape[-2],
        DV=dv,
        BLOCK_R=block_r,
        BLOCK_C=partials,
        BLOCK_DV=columns,
        FIXED_SPLIT=request.split is not None,
        OVERLAP=can_overlap(target.gpu),
        LARGE_SCORES=terms.large_scores is not None,
        MERGE_PREFIX=prefix is not None,
    )
    sizes = (
        *(partition.items, partition.num_splits, partition.slots, partition.whole_slots, partition.num_slots),
        *(partition.rows, request.places.batch, partition.wanted_splits, tile_height(request, partition)),
    )
    programs = min(max(2 * partition.wanted_splits, partition.items) * partition.kv_heads * blocks, max_programs)
    return Launch(combine_kernel, programs, (buffers_of(call, prefix), terms.sinks, *sizes), kernel_options(config))
