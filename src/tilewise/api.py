"""The public functions: docstrings, validation, defaults. All is checked here, before anything is launched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .spec import MAX_HEAD_DIM, AttentionError, Spec

Window = tuple[int | None, int | None]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Any:
    """Exact attention, softmax(scale * q k^T) v, computed tile by tile in O(S) memory.

    >>> q, k, v = (torch.randn(2, 128, 8, 64) for _ in range(3))
    >>> attention(q, k, v, causal=True).shape
    torch.Size([2, 128, 8, 64])

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), with H a multiple of Hk; any strides; D and Dv from 1 to 512.
    Returns out (B, Sq, H, Dv) in q's dtype, and with `return_lse` also the logsumexp of the scores, (B, H, Sq) in
    float32; gradients flow through both.

    causal, window: query i sits at key position i + Sk - Sq; `window=(left, right)` lets it see so many keys to either
        side, None meaning all; `causal` is right = 0. A query that sees no key gets out = 0 and lse = -inf.
    scale: 1/sqrt(D) unless given.
    deterministic: every backend is bitwise reproducible today, so both True and False are met.
    backend: "reference" (torch, any device), "triton" (GPU), "hopper", or "auto".
    """
    q, k, v = _autocast(q, k, v)
    _check_tensors(q, k, v, rank=4, axes="(batch, tokens, heads, dim)")
    if q.shape[0] != k.shape[0]:
        raise AttentionError("batch of k", k.shape[0], f"q's {q.shape[0]}")
    spec = Spec.of(head_dim=q.shape[-1], causal=causal, window=window, scale=scale, backend=backend)
    out, lse = ops.attend(q, k, v, None, None, spec)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Any:
    """`attention` over sequences packed one after the other, without padding and without a host sync.

    >>> q, k, v = (torch.randn(10, 4, 32) for _ in range(3))
    >>> cu = torch.tensor([0, 3, 3, 10], dtype=torch.int32)  # lengths 3, 0 and 7
    >>> out, lse = attention_varlen(q, k, v, cu, cu, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([10, 4, 32]), torch.Size([4, 10]))

    q (T, H, D), k (Tk, Hk, D), v (Tk, Hk, Dv); cu_seqlens are int32 of length B + 1, from 0 to T. The maximal lengths
    are accepted for the sake of other libraries' callers and not needed.
    """
    q, k, v = _autocast(q, k, v)
    _check_tensors(q, k, v, rank=3, axes="(tokens, heads, dim)")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu.dim() != 1 or cu.shape[0] < 1:
            raise AttentionError(f"shape of {name}", tuple(cu.shape), "(B + 1,), starting with 0")
        if cu.dtype != torch.int32:
            raise AttentionError(f"dtype of {name}", cu.dtype, "torch.int32")
        if cu.device != q.device:
            raise AttentionError(f"device of {name}", cu.device, f"q's {q.device}")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise AttentionError("length of cu_seqlens_k", cu_seqlens_k.shape[0], f"cu_seqlens_q's {cu_seqlens_q.shape[0]}")
    spec = Spec.of(head_dim=q.shape[-1], causal=causal, window=window, scale=scale, backend=backend)
    out, lse = ops.attend(q, k, v, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), spec)
    return (out, lse) if return_lse else out


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, *, rank: int, axes: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != rank:
            raise AttentionError(f"shape of {name}", tuple(x.shape), f"{rank} axes {axes}")
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise AttentionError(f"head dim of {name}", x.shape[-1], f"1 to {MAX_HEAD_DIM}")
        if x.dtype not in DTYPES:
            raise AttentionError(f"dtype of {name}", x.dtype, " or ".join(map(str, DTYPES)))
        if x.dtype != q.dtype:
            raise AttentionError(f"dtype of {name}", x.dtype, f"q's {q.dtype}")
        if x.device != q.device:
            raise AttentionError(f"device of {name}", x.device, f"q's {q.device}")
    if k.shape[-1] != q.shape[-1]:
        raise AttentionError("head dim of k", k.shape[-1], f"q's {q.shape[-1]}")
    if k.shape[:-1] != v.shape[:-1]:
        raise AttentionError("shape of v", tuple(v.shape), f"k's {axes}, {tuple(k.shape)}, up to the head dim")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise AttentionError("heads of q", heads, f"a multiple of k's {kv_heads} (each KV head serves a group)")


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v
