"""The launches of a call with an MLA cache: attend, repair if rows of a tile see different keys, combine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kv_formats import LATENT, format_of, is_deepseek_fp8, packed_parts
from ....kv_request import KvCall, Scale
from ....request import Gpu
from ..device.structs import View
from ..kernel_call import view
from ..kernel_config import precision
from ..launch import INTERPRETED, Launch, Memory, Target, can_overlap
from ..score_terms import device_terms, folded, mask_mod
from .launches import (
    NO_VIEW,
    buffers_of,
    bytes_of,
    checked_partition,
    combine_launch,
    kernel_options,
    planned,
    rows_differ,
    scale_kind,
    scale_of,
    schedule_launches,
    schedule_sizes,
)
from .mla import LatentCache, LatentConfig, mla_kernel
from .partition import Partition

__all__ = ["attend_launches", "planned", "schedule_launches", "schedule_sizes"]  # a module `KvLaunches`


def cache_views(k: Tensor, v: Tensor, shared: bool, scale: Scale = None) -> tuple[View, View, View, Any]:
    """The latent numbers, the rest of the key, the values if they are not the former, and the scale."""
    if is_deepseek_fp8(k):
        latent, scales, rest = packed_parts(k)
        return view(latent), view(rest), NO_VIEW, scale_of(scales)
    k = bytes_of(k)
    return view(k[..., :LATENT]), view(k[..., LATENT:]), NO_VIEW if shared else view(v), scale_of(scale)


def operand_of(q: Tensor, k: Tensor, gpu: Gpu) -> tuple[str | None, str]:
    """(OPERAND, PRECISION): float32 if q and the cache, or in DeepSeek's format its bfloat16 part, differ. Other
    quantised numbers become operands in the dtype of the queries' tiles."""
    dtype = torch.bfloat16 if is_deepseek_fp8(k) else k.dtype
    if q.dtype == dtype or (format_of(k) is not None and not is_deepseek_fp8(k)):
        return None, precision(q, gpu)
    return "float32", "tf32" if q.element_size() == 2 and gpu.kind != "hip" else precision(q, gpu)


def attend_launches(call: KvCall, target: Target, memory: Memory, shared: bool = True) -> list[Launch]:
    assert call.schedule is not None
    partition = checked_partition(call.request, target, call.schedule, call.workspace)
    attend = mla_launch(call, partition, target, shared)
    launches = [attend, repair_launch(attend)] if attend.options["CONFIG"].FLAG_NAN else [attend]
    return [*launches, combine_launch(call, device_terms(call.request.dense, target.gpu), partition, target)]


def mla_launch(call: KvCall, partition: Partition, target: Target, shared: bool = True) -> Launch:
    """`shared`: the values are the first columns of the keys."""
    request = call.request
    dense, places, spec = request.dense, request.places, request.spec
    q, k, v = dense[:3]
    scoring, scale, _ = folded(dense, target.gpu, derivative=False)
    terms = device_terms(dense, target.gpu)
    operand, accuracy = operand_of(q, k, target.gpu)
    block_n, stages = partition.tile.block_n, partition.tile.stages
    found = format_of(k)
    native = target.gpu.has_e4m3 and not INTERPRETED
    if not shared:  # shared memory holds values too
        block_n, stages = min(block_n, 32), 1
    config = LatentConfig(
        GROUP=q.shape[-2] // k.shape[-2],
        D=q.shape[-1],
        DV=v.shape[-1],
        BLOCK_M=partition.tile.block_m,
        BLOCK_N=block_n,
        FORMAT=None if found is None else found.name,
        SCALE="group" if is_deepseek_fp8(k) else scale_kind(request.k_scale),
        NATIVE_FP8=native and found is not None and found.name == "e4m3",
        SHARED=shared,
        OPERAND=operand,
        PRECISION=accuracy,
        FOLD=scoring["FOLD"],
        LARGE_SCORES=terms.large_scores is not None,
        OVERLAP=can_overlap(target.gpu),
        PAGE_SIZE=None if places.table is None else 1 if places.by_token else k.shape[1],
        BY_TOKEN=places.by_token,
        KV_HEADS=k.shape[-2],
        FIXED_SPLIT=request.split is not None,
        HAS_STARTS=places.starts is not None,
        FLAG_NAN=rows_differ(request) and not (places.by_token and spec.mask_mod is None),
        REPAIR=False,
        MAX_LOGIT=call.max_logit is not None,
    )
    args = (
        view(q),
        LatentCache(*cache_views(k, v, shared, request.k_scale), places.table, places.indptr, places.rows),
        buffers_of(call),
        request.tree,
        *(spec.before, spec.after, scale),
        *(partition.items, partition.num_splits, partition.chunk_size),
        *(partition.slots, partition.whole_slots, partition.num_slots, partition.rows, partition.wanted_splits),
        *(0 if places.table is None else places.table.stride(0), k.shape[0], k.shape[1]),
        *(
            places.batch,
            0 if dense.cu_q is not None else q.shape[1],
            0 if request.tree is None else request.tree.shape[1],
        ),
        terms,
    )
    mods = {"SCORE_MOD": scoring["SCORE_MOD"], "MASK_MOD": mask_mod(dense)}
    if partition.tile.max_registers:
        mods["maxnreg"] = partition.tile.max_registers
    shape = {"num_warps": partition.tile.warps, "num_stages": stages}
    return Launch(mla_kernel, partition.programs, args, kernel_options(config, **mods, **shape))


def repair_launch(attend: Launch) -> Launch:
    """Computes again the tiles in which keys that some rows do not see have nan or inf."""
    config = attend.options["CONFIG"]._replace(REPAIR=True, MAX_LOGIT=False)
    return attend._replace(options=attend.options | {"CONFIG": config, "num_stages": 1})
