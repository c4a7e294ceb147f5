"""From a request with an MLA cache to launches: the Hopper kernel, the portable repair if rows of a tile see different
keys, combine."""

from __future__ import annotations

import math

from torch import Tensor

from ...kv_formats import is_deepseek_fp8
from ...kv_request import KvCall
from ..common.device.structs import View
from ..common.kernel_call import view
from ..common.kv.launches import buffers_of, checked_partition, combine_launch
from ..common.kv.mla_launches import cache_views, mla_launch, repair_launch
from ..common.launch import Launch, Target, overlaps, pdl_option
from ..common.score_terms import device_terms
from .launches import packed_descriptor
from .mla import HopperLatentConfig, PackedViews, hopper_mla_kernel
from .support import MLA_TILE

BLOCK = MLA_TILE[0]  # rows of a tile, and keys


def hopper_mla_launches(call: KvCall, target: Target) -> list[Launch]:
    request, schedule, workspace = call.request, call.schedule, call.workspace
    assert schedule is not None
    assert workspace is not None
    dense, places, spec = request.dense, request.places, request.spec
    q, k, v = dense[:3]
    partition = checked_partition(request, target, schedule, workspace)
    assert partition.tile[:2] == MLA_TILE
    terms = device_terms(dense, target.gpu)
    rows_differ = request.max_seqlen_q != 1
    box = BLOCK if places.table is None else math.gcd(k.shape[1], BLOCK)
    packed = packed_views(k) if is_deepseek_fp8(k) else None
    config = HopperLatentConfig(
        GROUP=q.shape[-2] // k.shape[-2],
        D=q.shape[-1],
        DV=v.shape[-1],
        BLOCK_M=BLOCK,
        BOX=box,
        PAGE_SIZE=None if places.table is None else k.shape[1],
        KV_HEADS=k.shape[-2],
        FLAG_NAN=rows_differ,
        PACKED=packed is not None,
    )
    args = (
        view(q),
        None if packed else packed_descriptor(k, box, 256),
        None if packed else packed_descriptor(k, box, 64),
        packed,
        (places.table, places.indptr, places.rows),
        buffers_of(call),
        *(spec.after, spec.scale),
        *(partition.items, partition.num_splits, partition.chunk_size),
        *(partition.slots, partition.whole_slots, partition.num_slots, partition.rows, partition.wanted_splits),
        *(0 if places.table is None else places.table.stride(0), k.shape[0], page_stride(k), places.batch),
        terms.sinks,
    )
    options = {"CONFIG": config, "num_warps": 4, **pdl_option(overlaps())}
    launches = [Launch(hopper_mla_kernel, partition.programs, args, options)]
    if rows_differ:
        launches.append(repair_launch(mla_launch(call, partition, target)))
    return [*launches, combine_launch(call, terms, partition, target)]


def packed_views(k: Tensor) -> PackedViews:
    """The e4m3 numbers of a cache in DeepSeek's fp8 format, the bfloat16 ones, the scales."""
    stored, rest, _v, scale = cache_views(k, k, True)
    return PackedViews(View(k, stored.strides), rest, scale.x)


def page_stride(x: Tensor) -> int:
    """Tokens from a page, or row, of a cache to the next one."""
    return 0 if x.shape[0] == 1 else x.stride(0) // x.stride(1)
