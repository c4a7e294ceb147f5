"""FlashMLA's functions (deepseek-ai/FlashMLA): the same names and arguments, on any GPU and on a CPU.

    from tilewise.compat.flash_mla import (
        flash_mla_sparse_fwd,
        flash_mla_with_kvcache,
        get_mla_metadata,
    )

Beyond FlashMLA: any page size, 1 to 128 heads, float16 and float32, the fp8 cache without indices and indices without
fp8. As there, the lse of a query without keys is +inf, and `attn_sink` does not change lse. Not supported: the cache of
448 + 64 numbers, and the dense prefill functions (use tilewise.attention).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call.options import BackendName
from ..errors import AttentionError
from ..kv_cache import attention_kv, plan_kv
from ..kv_formats import BYTES, LATENT
from ..kv_request import KvPlan
from ..merging import merge
from ..mla import MlaArguments, by_query, mla_arguments
from ..validation.dense import tensor

SAME = "the arguments of the first call with this metadata; call get_mla_metadata for others"


@dataclass
class FlashMLASchedMeta:
    """What `get_mla_metadata` returns: the first call stores its plan here, calls with the same shapes and lengths use
    it."""

    config: tuple[Any, ...] | None = None
    plan: KvPlan | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Metadata for calls of `flash_mla_with_kvcache` with the same shapes and lengths, such as the layers of one step.

    Args:
        args: not used, as in FlashMLA.
        kwargs: not used.

    Returns:
        (metadata, None).
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """MLA over a paged cache, dense or over the tokens that `indices` names.

    Args:
        q: (B, Sq, H, 576).
        k_cache: (blocks, block size, 1, 576), or (blocks, block size, 1, 656) bytes with is_fp8_kvcache.
        block_table: int32 (B, blocks): the blocks of each sequence. Not used with indices.
        cache_seqlens: int32 (B,): tokens of each sequence in the cache. Not used with indices.
        head_dim_v: must be 512.
        tile_scheduler_metadata: the first result of `get_mla_metadata`.
        num_splits: must be None, the second result of `get_mla_metadata`.
        softmax_scale: factor of q.k. Default 1 / sqrt(576).
        causal: whether a query sees only the keys up to its own; the last query is at the last key.
        is_fp8_kvcache: whether k_cache has DeepSeek's fp8 format.
        indices: int32 (B, Sq, topk): block * block size + offset, -1 for none.
        attn_sink: float32 (H,): out is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)).
        extra_k_cache: a second cache, with indices only.
        extra_indices_in_kvcache: the tokens of extra_k_cache that are attended to as well.
        topk_length: int32 (B,): how many indices of a query count.
        extra_topk_length: the same for extra_indices_in_kvcache.

    Returns:
        (out, lse): (B, Sq, H, 512) and (B, H, Sq).

    Raises:
        AttentionError: an argument is not as above.
    """
    meta = tile_scheduler_metadata
    if not isinstance(meta, FlashMLASchedMeta):
        raise AttentionError("tile_scheduler_metadata", type(meta).__name__, "the first result of get_mla_metadata()")
    if num_splits is not None:
        raise AttentionError("num_splits", type(num_splits).__name__, "None, the second result of get_mla_metadata()")
    _check(head_dim_v, k_cache, is_fp8_kvcache)
    _check_extra(extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    options: dict[str, Any] = {"scale": softmax_scale}
    if indices is None:
        of_indices = attn_sink, topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length
        _check_dense(block_table, cache_seqlens, *of_indices)
        call = mla_arguments(q, k_cache, cache_seqlens, None)
        options |= {"page_table": block_table, "causal": causal}
    else:
        if causal is not False:
            raise AttentionError(
                "causal",
                type(causal).__name__ if not isinstance(causal, bool) else True,
                "False with indices, which say what a query sees",
            )
        call = mla_arguments(q, k_cache, topk_length, indices)
        options |= {"causal": False}
    _plan(meta, call, options, (q.shape, k_cache.shape[1:], k_cache.dtype, causal, indices is None))
    exact = attn_sink is not None or extra_k_cache is not None  # rounded once, at the end
    out, lse = _attend(call, options | {"plan": meta.plan}, q, exact)
    if extra_k_cache is not None:
        _check(head_dim_v, extra_k_cache, is_fp8_kvcache, "extra_k_cache")
        extra = mla_arguments(q, extra_k_cache, extra_topk_length, extra_indices_in_kvcache)
        out, lse = merge((out, lse), _attend(extra, options, q, exact), layout="bshd")
    return _with_sink(out, lse, attn_sink).to(q.dtype), lse.masked_fill(lse == -torch.inf, torch.inf)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """MLA of each query over the tokens that it names (prefill).

    Args:
        q: (Sq, H, 576).
        kv: (Skv, 1, 576).
        indices: int32 (Sq, 1, topk): the tokens of each query. An index outside [0, Skv) is ignored.
        sm_scale: factor of q.k.
        d_v: must be 512.
        attn_sink: float32 (H,), as in `flash_mla_with_kvcache`.
        topk_length: int32 (Sq,): how many indices of a query count.

    Returns:
        (out, max_logits, lse): (Sq, H, 512), (Sq, H), (Sq, H). max_logits and lse are in natural units (base e),
        without the sink.

    Raises:
        AttentionError: an argument is not as above.
    """
    if not isinstance(q, Tensor) or q.dim() != 3 or not isinstance(kv, Tensor) or kv.dim() != 3 or kv.shape[1] != 1:
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in (q, kv)]
        raise AttentionError("shapes of q and kv", shapes, "(Sq, H, 576) and (Skv, 1, 576)")
    if not isinstance(indices, Tensor) or indices.dim() != 3 or indices.shape[:2] != (q.shape[0], 1):
        found = tuple(indices.shape) if isinstance(indices, Tensor) else type(indices).__name__
        raise AttentionError("shape of indices", found, f"({q.shape[0]}, 1, topk)")
    if kv.shape[-1] == BYTES:
        expected = f"floats (Skv, 1, 576); the {BYTES} bytes of DeepSeek's fp8 format: flash_mla_with_kvcache"
        raise AttentionError("kv", f"{kv.dtype} {tuple(kv.shape)}", expected)
    _check_value_dim("d_v", d_v)
    call = mla_arguments(q[:, None], kv[None], topk_length, indices)
    backend: BackendName = "triton" if q.is_cuda and q.dtype != torch.float64 else "auto"
    out, lse, most = attention_kv(
        *call[:4],
        **call.options,
        causal=False,
        scale=sm_scale,
        return_lse=True,
        return_max_logit=True,
        backend=backend,
        out=None if attn_sink is None else _exact_out(call),
    )
    lse = lse[..., 0]
    out = _with_sink(out, lse[..., None], attn_sink)[:, 0].to(q.dtype)
    return out, most, lse.masked_fill(lse == -torch.inf, torch.inf)


def _check_value_dim(name: str, dim: Any) -> None:
    if not isinstance(dim, int) or dim != LATENT:
        raise AttentionError(name, dim if isinstance(dim, int) else type(dim), str(LATENT))


def _check_extra(cache: Any, indices: Any, counts: Any) -> None:
    """Raises AttentionError if the arguments of the second cache are incomplete."""
    given = {"extra_k_cache": cache, "extra_indices_in_kvcache": indices}
    alone = [name for name, x in (*given.items(), ("extra_topk_length", counts)) if x is not None]
    missing = [name for name, x in given.items() if x is None]
    if alone and missing:
        raise AttentionError(alone[0], f"given without {' and '.join(missing)}", f"{' and '.join(given)}, or neither")


def _check(head_dim_v: int, cache: Tensor, is_fp8: bool, name: str = "k_cache") -> None:
    _check_value_dim("head_dim_v", head_dim_v)
    if not isinstance(is_fp8, bool):
        raise AttentionError("is_fp8_kvcache", type(is_fp8).__name__, "True or False")
    if not isinstance(cache, Tensor) or cache.dim() != 4 or (cache.shape[-1] == BYTES) != is_fp8 or cache.shape[2] != 1:
        found = f"{cache.dtype} {tuple(cache.shape)}" if isinstance(cache, Tensor) else type(cache).__name__
        expected = f"(blocks, block size, 1, {BYTES}) bytes with is_fp8_kvcache=True, (.., 576) without"
        raise AttentionError(name, found, expected)


def _check_dense(table: Any, lengths: Any, *of_indices: Any) -> None:
    if any(x is not None for x in of_indices):
        names = "attn_sink, topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length"
        raise AttentionError(f"one of {names}", "given without indices", "None")
    for name, x in (("block_table", table), ("cache_seqlens", lengths)):
        if x is None:
            raise AttentionError(name, "None", "an int32 tensor, unless indices are given")


def _plan(meta: FlashMLASchedMeta, call: MlaArguments, options: dict[str, Any], config: tuple[Any, ...]) -> None:
    """Makes the plan at the first call."""
    if meta.config is None:
        meta.plan = plan_kv(call.q, call.k, call.v, call.lengths, **call.options, **options)
        meta.config = config
    elif meta.config != config:
        raise AttentionError("shapes, dtype and causal", config, f"{meta.config}: {SAME}")


def _exact_out(call: MlaArguments) -> Tensor:
    """Memory for a result that is not rounded to a 16-bit dtype."""
    return call.q.new_empty((*call.q.shape[:-1], LATENT), dtype=torch.promote_types(call.q.dtype, torch.float32))


def _attend(call: MlaArguments, options: dict[str, Any], q: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    out = _exact_out(call) if exact else None
    out, lse = attention_kv(call.q, call.k, call.v, call.lengths, **call.options, **options, return_lse=True, out=out)
    return (out.view(*q.shape[:3], LATENT), by_query(lse, q)) if call.options else (out, lse)


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """out (B, Sq, H, 512) times exp(lse) / (exp(lse) + exp(sink)); a query without keys keeps 0."""
    if sink is None:
        return out
    if tuple(tensor("attn_sink", sink).shape) != (out.shape[2],):
        raise AttentionError("shape of attn_sink", tuple(sink.shape), f"({out.shape[2]},), one for each head")
    factor = torch.sigmoid((lse - sink[:, None]).nan_to_num(0.0, torch.inf, -torch.inf)).transpose(1, 2)[..., None]
    return out * factor
