"""flash-attn 2.8's functions. What their arguments mean: https://github.com/Dao-AILab/flash-attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import AttentionError
from ..validation.dense import tensor
from .arguments import used
from .flash import BOTH_WAYS, Window, call, call_cache, unpacks


def _check_probs(probs: bool, dropout_p: float) -> None:
    if probs and dropout_p:
        raise AttentionError(
            "return_attn_probs", "True with dropout_p", "one of them; tilewise.dropout_mask returns what is dropped"
        )


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = BOTH_WAYS,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Dense attention with flash-attn's arguments: `tilewise.attention`.

    >>> import torch
    >>> q = torch.randn(1, 5, 4, 16)
    >>> flash_attn_func(q, q, q, causal=True, window_size=(2, -1)).shape
    torch.Size([1, 5, 4, 16])

    Args:
        q: queries (B, Sq, H, D).
        k: keys (B, Sk, Hk, D). H is a multiple of Hk.
        v: values (B, Sk, Hk, Dv).
        dropout_p: probability that a softmax weight is dropped. Default 0.
        softmax_scale: factor of q.k. Default: 1 / sqrt(D).
        causal: if True, query i sees no key after position i + Sk - Sq (bottom-right alignment).
        window_size: (left, right), -1 for unbounded. Default: no window.
        softcap: if above 0, a score s becomes softcap * tanh(s / softcap). Default 0.
        alibi_slopes: (H,) or (B, H) float32. Default: none.
        deterministic: if True, the gradients have the same bits in every run.
        return_attn_probs: if True, lse is returned too. Not with dropout_p.

    Returns:
        out (B, Sq, H, Dv). With return_attn_probs (out, lse, None), lse (B, H, Sq): the weights are None, as in
        flash-attn without dropout.

    Raises:
        AttentionError: an argument is not as above.
    """
    _check_probs(return_attn_probs, dropout_p)
    theirs: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
    }
    theirs |= {"dropout_p": dropout_p, "alibi_slopes": alibi_slopes, "deterministic": deterministic}
    found = call(q, k, v, **theirs, return_attn_probs=return_attn_probs)
    return (*found, None) if return_attn_probs else found


@unpacks("q kv", flash_attn_func, slice(3, None))
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` with keys and values in one tensor.

    Args:
        q: queries (B, Sq, H, D).
        kv: keys and values (B, Sk, 2, Hk, D).
        others: as in `flash_attn_func`.

    Returns:
        As `flash_attn_func`.

    Raises:
        AttentionError: an argument is not as above.
    """
    return flash_attn_func(q, *_parts(kv, "kv", 2, 2), *args, **options)


@unpacks("qkv", flash_attn_func, slice(3, None))
def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` with queries, keys and values in one tensor.

    Args:
        qkv: (B, S, 3, H, D).
        others: as in `flash_attn_func`.

    Returns:
        As `flash_attn_func`.

    Raises:
        AttentionError: an argument is not as above.
    """
    return flash_attn_func(*_parts(qkv, "qkv", 2, 3), *args, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = BOTH_WAYS,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of packed sequences with flash-attn's arguments: `tilewise.attention_varlen`.

    >>> import torch
    >>> q, cu = torch.randn(7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, causal=True).shape
    torch.Size([7, 4, 16])

    With block_table, k and v are pages. They are gathered first if a gradient is needed.

    Args:
        q: queries of all sequences (T, H, D).
        k: keys of all sequences (Tk, Hk, D). With block_table (pages, tokens of a page, Hk, D).
        v: values (Tk, Hk, Dv), or pages as k.
        cu_seqlens_q: (B + 1,) int32: sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
        cu_seqlens_k: (B + 1,) int32: the same for keys.
        max_seqlen_q: the largest number of queries of a sequence. Not needed: ignored.
        max_seqlen_k: the largest number of keys of a sequence. Not needed: ignored.
        block_table: (B, pages of a sequence) int32. Default: k and v are not paged. Not with dropout_p.
        others: as in `flash_attn_func`.

    Returns:
        out (T, H, Dv). With return_attn_probs (out, lse, None), lse (H, T).

    Raises:
        AttentionError: an argument is not as above.
    """
    _check_probs(return_attn_probs, dropout_p)
    theirs: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
    }
    theirs |= {"alibi_slopes": alibi_slopes, "return_attn_probs": return_attn_probs}
    if block_table is None:
        theirs |= {"dropout_p": dropout_p, "deterministic": deterministic}
        found = call(q, k, v, (cu_seqlens_q, cu_seqlens_k), **theirs)
    elif dropout_p:
        raise AttentionError("dropout_p", f"{dropout_p} with block_table", "0: a paged cache has no dropout")
    else:
        lengths = tensor("cu_seqlens_k", cu_seqlens_k).diff()
        if torch.is_grad_enabled() and any(tensor(name, x).requires_grad for name, x in (("q", q), ("k", k), ("v", v))):
            k, v, offsets = _gathered(q, k, v, cu_seqlens_q, lengths, block_table)  # three sequences for each
            if alibi_slopes is not None and tensor("alibi_slopes", alibi_slopes).dim() == 2:
                theirs["alibi_slopes"] = alibi_slopes.repeat_interleave(3, 0)
            found = call(q, k, v, offsets, **theirs, deterministic=deterministic)
        else:
            found = call_cache(q, k, v, lengths, block_table=block_table, cu_seqlens_q=cu_seqlens_q, **theirs)
    return (*found, None) if return_attn_probs else found


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, lengths: Tensor, table: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The tokens of each sequence's pages, and offsets that use the first `lengths` of them."""
    if tensor("block_table", table).dim() != 2 or table.is_floating_point() or table.shape[0] != lengths.shape[0]:
        raise AttentionError(
            "block_table", f"{table.dtype} {tuple(table.shape)}", f"ints ({lengths.shape[0]}, pages of a sequence)"
        )
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4:
            raise AttentionError(f"shape of {name}", tuple(x.shape), "(pages, tokens, heads, dim), with block_table")
    pages = table.long().clamp(0, max(k.shape[0] - 1, 0))
    capacity = table.shape[1] * k.shape[1]
    cu_k = torch.arange(table.shape[0] + 1, dtype=torch.int32, device=q.device) * capacity
    return k[pages].flatten(0, 2), v[pages].flatten(0, 2), used(cu_q, cu_k, None, lengths)


@unpacks("q kv", flash_attn_varlen_func, slice(3, -1))
def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_varlen_func` with keys and values in one tensor.

    Args:
        q: queries of all sequences (T, H, D).
        kv: keys and values (Tk, 2, Hk, D).
        others: as in `flash_attn_varlen_func`.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        AttentionError: an argument is not as above.
    """
    return flash_attn_varlen_func(q, *_parts(kv, "kv", 1, 2), *args, **options)


@unpacks("qkv cu_seqlens max_seqlen", flash_attn_varlen_func, slice(7, -1))
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """`flash_attn_varlen_func` with queries, keys and values in one tensor.

    Args:
        qkv: (T, 3, H, D).
        cu_seqlens: (B + 1,) int32: the offsets of the sequences.
        max_seqlen: the largest length. Not needed: ignored.
        others: as in `flash_attn_varlen_func`.

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        AttentionError: an argument is not as above.
    """
    q, k, v = _parts(qkv, "qkv", 1, 3)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = BOTH_WAYS,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Writes new keys and values into a KV cache and attends over it: `tilewise.attention_kv`. There is a gradient only
    if none of k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad and block_table is given.

    >>> import torch
    >>> cache, q = torch.zeros(2, 2, 32, 2, 16), torch.randn(2, 1, 4, 16)
    >>> new, lengths = torch.randn(2, 1, 2, 16), torch.tensor([5, 20]).int()
    >>> flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=lengths).shape
    torch.Size([2, 1, 4, 16])

    Args:
        q: queries (B, Sq, H, D).
        k_cache: (rows, tokens, Hk, D), or with block_table (pages, tokens of a page, Hk, D). Written if k is given.
        v_cache: as k_cache, with head dim Dv.
        k: new keys (B, new, Hk, D). Default: none.
        v: new values (B, new, Hk, Dv). Required if k is given.
        rotary_cos: (positions, width / 2): rotates the new keys and the queries. Default: no rotation.
        rotary_sin: as rotary_cos.
        cache_seqlens: tokens in the cache before the call: an int or (B,) int32. Default: the cache is full.
        cache_batch_idx: (B,) int32: the row of the cache of each sequence. Default: its number.
        cache_leftpad: (B,) int32: the first valid token of each sequence. Default: 0.
        block_table: (B, pages of a sequence) int32. Default: the cache is not paged.
        rotary_interleaved: if True, dims 2 d and 2 d + 1 are rotated together; if False, d and d + width / 2.
        num_splits: 1: the keys of a sequence are never split. Other values are ignored.
        return_softmax_lse: if True, (out, lse) is returned.
        others: as in `flash_attn_func`.

    Returns:
        out (B, Sq, H, Dv), or (out, lse) with lse (B, H, Sq).

    Raises:
        AttentionError: an argument is not as above.
    """
    theirs: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
    }
    theirs |= {"alibi_slopes": alibi_slopes, "return_softmax_lse": return_softmax_lse}
    places = {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "block_table": block_table}
    if all(x is None for x in (k, v, rotary_cos, rotary_sin, cache_seqlens, *places.values())):  # with a gradient
        return call(q, k_cache, v_cache, **theirs)
    rotary = rotary_cos, rotary_sin, rotary_interleaved
    theirs |= places
    return call_cache(q, k_cache, v_cache, cache_seqlens, new=(k, v), rotary=rotary, num_splits=num_splits, **theirs)


def _parts(packed: Tensor, name: str, axis: int, n: int) -> Any:
    if tensor(name, packed).dim() != axis + 3 or packed.shape[axis] != n:
        raise AttentionError(f"shape of {name}", tuple(packed.shape), f"{axis + 3} axes, {n} along axis {axis}")
    return packed.unbind(axis)
