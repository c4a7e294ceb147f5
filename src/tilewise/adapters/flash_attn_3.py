"""FlashAttention-3's functions (`flash_attn_interface`): https://github.com/Dao-AILab/flash-attention, in `hopper`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import AttentionError, shown
from ..merging import merge
from ..validation.dense import tensor
from .flash import BOTH_WAYS, Window, call, call_cache
from .steps import Plans


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
    """Dense attention with FlashAttention-3's arguments: `tilewise.attention`.

    >>> q = torch.randn(1, 5, 4, 16)
    >>> options = {"attention_chunk": 2, "return_attn_probs": True}
    >>> out, lse = flash_attn_func(q, q, q, causal=True, **options)
    >>> out.shape, lse.shape
    (torch.Size([1, 5, 4, 16]), torch.Size([1, 4, 5]))

    Args:
        qv: queries that are multiplied with the values, shaped as q but with head dim Dv: scores are q.k + qv.v. D + Dv
            is at most 512. Default: none.
        q_descale: must be None: FP8 is not supported.
        k_descale: must be None: FP8 is not supported.
        v_descale: must be None: FP8 is not supported.
        attention_chunk: if above 0, a query sees only the keys of its own chunk of this many tokens. Default 0.
        num_splits: does not change the result: ignored.
        pack_gqa: does not change the result: ignored.
        sm_margin: does not change the result: ignored.
        return_attn_probs: if True, (out, lse) is returned.
        others: as in `tilewise.compat.flash_attn.flash_attn_func`.

    Returns:
        out (B, Sq, H, Dv), or (out, lse) with lse (B, H, Sq).

    Raises:
        AttentionError: an argument is not as above.
    """
    theirs: dict[str, Any] = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    theirs |= {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    theirs |= {"attention_chunk": attention_chunk, "deterministic": deterministic}
    return call(q, k, v, qv=qv, **theirs, return_attn_probs=return_attn_probs)


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
    """`flash_attn_func` with queries, keys and values in one tensor.

    Args:
        qkv: (B, S, 3, H, D), or with num_heads_q (B, S, heads of q, k and v together, D).
        num_heads_q: number of query heads, if they differ from those of k and v. Default: None.
        others: as in `flash_attn_func`.

    Returns:
        As `flash_attn_func`.

    Raises:
        AttentionError: an argument is not as above.
    """
    if tensor("qkv", qkv).dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q is not None and num_heads_q in range(qkv.shape[2] % 2, qkv.shape[2], 2):
        shared = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, shared, shared], 2)
    else:
        raise AttentionError("shape of qkv", tuple(qkv.shape), "(B, S, 3, H, D), or 4 axes with num_heads_q")
    theirs: dict[str, Any] = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    theirs |= {"attention_chunk": attention_chunk, "softcap": softcap, "deterministic": deterministic}
    return flash_attn_func(
        q, k, v, softmax_scale, causal, window_size=window_size, **theirs, return_attn_probs=return_attn_probs
    )


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
    """Attention of packed sequences with FlashAttention-3's arguments: `tilewise.attention_varlen`.

    Args:
        k: keys of all sequences (Tk, Hk, D).
        v: values of all sequences (Tk, Hk, Dv).
        seqused_q: (B,) integers: how many of its queries each sequence uses. The others give 0. Default: all.
        seqused_k: (B,) integers: how many of its keys each sequence uses. Default: all.
        options: as in `tilewise.compat.flash_attn.flash_attn_varlen_func`.
        others: as in `flash_attn_func`.

    Returns:
        out (T, H, Dv), or (out, lse) with lse (H, T).

    Raises:
        AttentionError: an argument is not as above.
    """
    theirs: dict[str, Any] = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    theirs |= {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    theirs |= {"attention_chunk": attention_chunk, "deterministic": deterministic}
    theirs |= {"seqused": (seqused_q, seqused_k), "qv": qv, "return_attn_probs": return_attn_probs}
    return call(q, k, v, (cu_seqlens_q, cu_seqlens_k), **theirs)


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over all keys from that over parts of them: `tilewise.merge`.

    Args:
        out_partial: outputs over each part of the keys (parts, B, S, H, D).
        lse_partial: their logsumexps (parts, B, S, H). Where it is -inf the part has no visible key, and out_partial
            counts as 0, as in flash-attn.
        out: (B, S, H, D), written with the result. Default: a new tensor.
        out_dtype: dtype of the result, if `out` is None. Default: that of out_partial.

    Returns:
        out (B, S, H, D) and lse (B, S, H).

    Raises:
        AttentionError: an argument is not as above.
    """
    if tensor("lse_partial", lse_partial).shape != tensor("out_partial", out_partial).shape[:-1]:
        raise AttentionError("shape of lse_partial", tuple(lse_partial.shape), f"{tuple(out_partial.shape[:-1])}")
    if out is not None and tensor("out", out).shape != out_partial.shape[1:]:
        raise AttentionError("shape of out", tuple(out.shape), f"{tuple(out_partial.shape[1:])}")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise AttentionError("out_dtype", shown(out_dtype), "a torch.dtype")
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
    """Writes new keys and values into a KV cache and attends over it: `tilewise.attention_kv`. No gradient.

    Args:
        q: queries (B, Sq, H, D), or with cu_seqlens_q packed (T, H, D).
        k_cache: (rows, tokens, Hk, D), or with page_table (pages, tokens of a page, Hk, D). Written if k is given.
        k: new keys (B, new, Hk, D), or with cu_seqlens_k_new packed (tokens, Hk, D). Default: none.
        v: new values, as k with head dim Dv. Required if k is given.
        qv: queries that are multiplied with the values, shaped as q but with head dim Dv: scores are q.k + qv.v. D + Dv
            is at most 512. Both caches are copied at every call, unless they are adjacent parts of one tensor. Default:
            none.
        cache_batch_idx: (B,) int32: the row of the cache, or of page_table, of each sequence. Default: its number.
        page_table: (B, pages of a sequence) int32. Default: the cache is not paged.
        cu_seqlens_q: (B + 1,) int32: the offsets of packed queries. Default: q is dense.
        cu_seqlens_k_new: (B + 1,) int32: the offsets of packed new keys. Default: as cu_seqlens_q.
        max_seqlen_q: the largest number of queries of a sequence. Default: T.
        rotary_seqlens: (B,) integers: the position of each sequence's first new key. Default: cache_seqlens.
        scheduler_metadata: what `get_scheduler_metadata` returned for this step. Default: each call plans.
        options: as in `flash_attn_func`.
        others: as in `tilewise.compat.flash_attn.flash_attn_with_kvcache`.

    Returns:
        out, shaped as q but with head dim Dv, or (out, lse) with lse (B, H, Sq) or (H, T).

    Raises:
        AttentionError: an argument is not as above.
    """
    theirs: dict[str, Any] = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    theirs |= {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    theirs |= {"attention_chunk": attention_chunk, "return_softmax_lse": return_softmax_lse, "num_splits": num_splits}
    if page_table is not None and cache_batch_idx is not None:
        rows = tensor("cache_batch_idx", cache_batch_idx).long().clamp(0, tensor("page_table", page_table).shape[0] - 1)
        page_table, cache_batch_idx = page_table[rows], None
    theirs |= {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "page_table": page_table}
    theirs |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new, "max_seqlen_q": max_seqlen_q}
    theirs |= {"rotary": (rotary_cos, rotary_sin, rotary_interleaved), "rotary_lengths": rotary_seqlens}
    return call_cache(q, k_cache, v_cache, cache_seqlens, new=(k, v), qv=qv, plans=scheduler_metadata, **theirs)


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
    """Plans (`tilewise.plan_kv`) for all layers of one step. The first layer's call makes them, from its own tensors:
    every argument here is accepted, and ignored.

    Args:
        batch_size: number of sequences.
        max_seqlen_k: the largest number of keys of a sequence.
        num_heads_q: number of query heads.
        num_heads_kv: number of KV heads.
        headdim: head dim of q and k.
        qkv_dtype: dtype of q, k and v.
        headdim_v: head dim of v. Default: headdim.
        page_size: tokens of a page. Default: the cache is not paged.
        max_seqlen_k_new: the largest number of new keys of a sequence.
        has_softcap: whether the calls have a softcap.
        others: as in `flash_attn_with_kvcache`.

    Returns:
        What `flash_attn_with_kvcache` accepts as scheduler_metadata. It is not a tensor.
    """
    return Plans()
