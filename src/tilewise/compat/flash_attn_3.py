"""FlashAttention-3's functions (`flash_attn_interface`), same names and arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..errors import AttentionError
from ..integrations.kv_steps import Plans
from ..merge import merge
from ..mods.dropout import is_whole
from ..mods.modifier import mask_mod
from ..validation.arguments import tensor
from .flash_arguments import BOTH_WAYS, Window, options_of, over_cache, with_qv
from .segments import used


@mask_mod
def same_chunk(b, h, q_idx, kv_idx, chunk, *, q_len, kv_len):  # type: ignore[no-untyped-def]
    """Each query sees the keys of its own chunk; the last query is at the last key."""
    return (q_idx + (kv_len - q_len)) // chunk == kv_idx // chunk


@mask_mod
def same_chunk_since(b, h, q_idx, kv_idx, chunk, starts, *, q_len, kv_len):  # type: ignore[no-untyped-def]
    """The same for sequences padded on the left: chunks count from the first valid key."""
    first = starts[b]
    return (q_idx + (kv_len - q_len) - first) // chunk == (kv_idx - first) // chunk


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    attention_chunk: int,
    softcap: float,
    deterministic: bool,
    starts: Tensor | None = None,
    **descales: Tensor | None,
) -> dict[str, Any]:
    for name, x in descales.items():
        if x is not None:
            raise AttentionError(name, "a tensor", "None: FP8 descale factors are not supported")
    if not is_whole(attention_chunk) or attention_chunk < 0:
        raise AttentionError("attention_chunk", repr(attention_chunk), "an int >= 0 (0: no chunks)")
    options = options_of(softmax_scale, causal, window_size, softcap, deterministic=deterministic)
    if not attention_chunk:
        return options | {"mask_mod": None}
    if starts is None:
        return options | {"mask_mod": same_chunk(attention_chunk)}
    return options | {"mask_mod": same_chunk_since(attention_chunk, tensor("cache_leftpad", starts))}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = BOTH_WAYS,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) -> (B, Sq, H, Dv), or (out, lse) with return_attn_probs.

    >>> q = torch.randn(1, 5, 4, 16)
    >>> out, lse = flash_attn_func(q, q, q, causal=True, attention_chunk=2, return_attn_probs=True)
    >>> out.shape, lse.shape
    (torch.Size([1, 5, 4, 16]), torch.Size([1, 4, 5]))

    num_splits, pack_gqa and sm_margin do not change the result, and are ignored.
    """
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    options = _options(softmax_scale, causal, window_size, attention_chunk, softcap, deterministic, **scales)
    q, k = with_qv(q, k, v, qv)
    out, lse = attention(q, k, v, layout="bshd", **options)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = BOTH_WAYS,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """qkv (B, S, 3, H, D), or (B, S, heads of q, k and v, D) with num_heads_q."""
    if tensor("qkv", qkv).dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q is not None and num_heads_q in range(qkv.shape[2] % 2, qkv.shape[2], 2):
        shared = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, shared, shared], 2)
    else:
        raise AttentionError("shape of qkv", tuple(qkv.shape), "(B, S, 3, H, D), or 4 axes with num_heads_q")
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    options = _options(softmax_scale, causal, window_size, attention_chunk, softcap, deterministic, **scales)
    out, lse = attention(q, k, v, layout="bshd", **options)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = BOTH_WAYS,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """q (T, H, D), k (Tk, Hk, D), v (Tk, Hk, Dv). seqused: the number of tokens each sequence uses; its other
    queries give 0."""
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    options = _options(softmax_scale, causal, window_size, attention_chunk, softcap, deterministic, **scales)
    q, k = with_qv(q, k, v, qv)
    if seqused_q is not None or seqused_k is not None:
        cu_seqlens_q, cu_seqlens_k = used(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    return (out, lse) if return_attn_probs else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over all keys from that over parts of them: (parts, B, S, H, D) and (parts, B, S, H). Where lse_partial
    is -inf the part has no visible key: out_partial counts as 0 there, as in flash-attn."""
    if tensor("lse_partial", lse_partial).shape != tensor("out_partial", out_partial).shape[:-1]:
        raise AttentionError("shape of lse_partial", tuple(lse_partial.shape), f"{tuple(out_partial.shape[:-1])}")
    if out is not None and tensor("out", out).shape != out_partial.shape[1:]:
        raise AttentionError("shape of out", tuple(out.shape), f"{tuple(out_partial.shape[1:])}")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise AttentionError("out_dtype", repr(out_dtype), "a torch.dtype")
    out_partial = out_partial.masked_fill((lse_partial == -torch.inf)[..., None], 0.0)
    found, lse = merge(*((o, l.mT) for o, l in zip(out_partial, lse_partial, strict=True)), layout="bshd")
    if out is not None:
        found = out.copy_(found)
    elif out_dtype is not None:
        found = found.to(out_dtype)
    return found, lse.mT


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = BOTH_WAYS,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a KV cache: see `tilewise.attention_kv`, and flash-attn 2's. scheduler_metadata is one of
    `get_scheduler_metadata`. With a page table, cache_batch_idx selects its rows. With `qv` the scores are q.k + qv.v,
    of head dims that are at most 512 together; both caches are copied at every call unless k_cache and v_cache are
    adjacent parts of one tensor."""
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    options = _options(softmax_scale, causal, window_size, attention_chunk, softcap, False, cache_leftpad, **scales)
    if page_table is not None and cache_batch_idx is not None:
        rows = tensor("cache_batch_idx", cache_batch_idx).long().clamp(0, tensor("page_table", page_table).shape[0] - 1)
        page_table, cache_batch_idx = page_table[rows], None
    options |= {
        "cache_rows": cache_batch_idx,
        "starts": cache_leftpad,
        "page_table": page_table,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_new": cu_seqlens_k_new,
        "max_seqlen_q": max_seqlen_q,
        "split": 0 if num_splits == 1 else None,
    }
    rotary = {"cos": rotary_cos, "sin": rotary_sin, "interleaved": rotary_interleaved}
    more: dict[str, Any] = {"rotary_lengths": rotary_seqlens, "qv": qv, "plans": scheduler_metadata}
    out, lse = over_cache(q, k_cache, v_cache, cache_seqlens, options, new=(k, v), rotary=rotary, **more)
    return (out, lse) if return_softmax_lse else out


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = BOTH_WAYS,
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Plans:
    """Plans (`tilewise.plan_kv`) to pass to all layers of one step. The first layer's call makes them. They are not a
    tensor, and cannot be copied into one."""
    return Plans()
