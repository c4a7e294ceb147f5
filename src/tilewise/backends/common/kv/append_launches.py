"""The launch that appends new tokens to a KV cache."""

from __future__ import annotations

import triton
from torch import Tensor

from ....kv_formats import (
    GROUPS,
    LATENT,
    ROPE,
    format_of,
    is_deepseek_fp8,
    packed_parts,
    scale_groups,
)
from ....kv_request import AppendRequest, Scale
from ....request import Gpu, padded
from ..kernel_call import view
from ..launch import Launch, can_overlap
from .append import (
    AppendConfig,
    AppendPlaces,
    CacheFormat,
    KeyValue,
    NormWeights,
    Queries,
    RotaryTables,
    append_kernel,
)
from .launches import NO_VIEW, bytes_of, kernel_options, scale_kind, scale_of


def cache_format(cache: Tensor, scale: Scale, dim: int) -> CacheFormat:
    """What the append kernel is compiled for in K or V of head dim `dim`."""
    found = format_of(cache)
    if found is None:
        return CacheFormat(None, 1, padded(dim), None, 1.0, 0, dim, padded(dim))
    groups = max(1, scale_groups(scale))
    block = triton.next_power_of_2(dim // groups)
    return CacheFormat(found.name, groups, block, scale_kind(scale), found.largest, 0, dim, padded(dim))


def formats_of(request: AppendRequest) -> tuple[CacheFormat, CacheFormat | None]:
    """What the kernel writes: K and V, or of DeepSeek's fp8 format the latent numbers and the rest of the key."""
    if is_deepseek_fp8(request.k):
        latent = CacheFormat("e4m3", GROUPS, LATENT // GROUPS, "token", 448.0, 0, LATENT, LATENT)
        return latent, CacheFormat(None, 1, ROPE, None, 1.0, LATENT, ROPE, ROPE)
    k = cache_format(request.k, request.k_scale, request.k_new.shape[-1])
    v = None if request.keys_alone else cache_format(request.v, request.v_scale, request.v_new.shape[-1])
    return k, v


def written_views(request: AppendRequest) -> tuple[KeyValue, KeyValue]:
    """The views that `formats_of` describes, and their scales."""
    k, v = request.k, request.v
    if not is_deepseek_fp8(k):
        scales = KeyValue(scale_of(request.k_scale), scale_of(request.v_scale))
        return KeyValue(view(bytes_of(k)), view(bytes_of(v))), scales
    latent, scale, rest = packed_parts(k)
    return KeyValue(view(latent), view(rest)), KeyValue(scale_of(scale), scale_of(None))


def append_launch(request: AppendRequest, gpu: Gpu) -> Launch:
    k_new, v_new, k, _, places = request[:5]
    rotary, q, rotated, table, norm = request.rotary, request.q, request.rotated, places.table, request.norm
    tokens = k_new.shape[:-2].numel()
    queries = 0 if q is None else q.shape[:-2].numel()
    heads = 0 if q is None else q.shape[-2]
    tables, weights = RotaryTables(), NormWeights()
    if rotary is not None:
        tables = RotaryTables(rotary.cos, rotary.sin, rotary.positions, rotary.q_positions)
    if norm is not None:
        weights = NormWeights(norm.q_weight, norm.k_weight)
    dim, dim_v = k_new.shape[-1], v_new.shape[-1]
    columns = padded(max(dim, dim_v))
    format_k, format_v = formats_of(request)
    cache, scales = written_views(request)
    config = AppendConfig(
        KV_HEADS=k.shape[-2],
        HEADS=heads,
        D=dim,
        BLOCK_D=padded(dim),
        BLOCK_H=min(triton.next_power_of_2(max(k.shape[-2], heads)), max(1, 4096 // columns)),
        HALF=1 if rotary is None else rotary.cos.shape[1],
        INTERLEAVED=rotary is not None and rotary.interleaved,
        FIRST_ROTATED=request.first_rotated,
        BLOCK_BATCH=min(1024, triton.next_power_of_2(max(places.batch, 1))),
        K=format_k,
        V=format_v,
        PACKED=is_deepseek_fp8(k),
        OVERLAP=can_overlap(gpu),
    )
    table_stride, table_pages = (0, 0) if table is None else (table.stride(0), table.shape[-1])
    n_q = 0 if q is None or q.dim() == 3 else q.shape[1]
    args = (
        KeyValue(view(k_new), view(v_new)),
        cache,
        scales,
        Queries(NO_VIEW if q is None else view(q), NO_VIEW if rotated is None else view(rotated)),
        AppendPlaces(places.lengths, table, places.indptr, places.rows, places.cu_new, request.cu_q, request.slots),
        tables,
        weights,
        *((0.0, 0.0) if norm is None else (norm.eps, norm.offset)),
        *(tokens, places.new, n_q, places.batch, 1 if rotary is None else rotary.cos.shape[0]),
        *(table_stride, k.shape[0], table_pages, k.shape[1]),
    )
    return Launch(append_kernel, tokens + queries, args, kernel_options(config))
