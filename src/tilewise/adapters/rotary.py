"""flash_attn.layers.rotary: rotary embeddings in plain torch, with gradients, on any device.

Angles and products are computed in float32 and rounded to the dtype of the input. Positions past the tables are not
rotated, as in flash-attn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import AttentionError


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second of each pair of dims."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second


def _joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Each pair of dims (first, second) becomes (-second, first).

    Args:
        x: any tensor whose last axis has an even length.
        interleaved: if True, neighbouring dims form a pair; if False, d and d + D / 2 do.

    Returns:
        A tensor of the same shape.

    >>> x = torch.tensor([1, 2, 3, 4])
    >>> rotate_half(x), rotate_half(x, interleaved=True)
    (tensor([-3, -4,  1,  2]), tensor([-2,  1, -4,  3]))
    """
    first, second = _pairs(x, interleaved)
    return _joined(-second, first, interleaved)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates the first dims of x, in the dtype that torch promotes to.

    Args:
        x: (B, S, H, D).
        cos: (S, width / 2) or (B, S, width / 2).
        sin: as cos.
        interleaved: as in `rotate_half`.

    Returns:
        (B, S, H, D): the first `width` dims rotated.
    """
    width = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = _pairs(x[..., :width], interleaved)
    rotated = _joined(first * cos - second * sin, second * cos + first * sin, interleaved)
    return torch.cat((rotated, x[..., width:]), -1)


def _positions(x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The position of each token: (S,) or (B, S), packed (T,)."""
    tokens = torch.arange(x.shape[-3], device=x.device)
    offsets = seqlen_offsets.to(x.device) if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    if cu_seqlens is None:
        return tokens + (offsets[:, None] if isinstance(offsets, Tensor) else offsets)
    cu = cu_seqlens.to(x.device)
    sequence = torch.searchsorted(cu[1:].contiguous(), tokens, right=True).clamp_max(cu.shape[0] - 2)
    return tokens - cu[sequence] + (offsets[sequence] if isinstance(offsets, Tensor) else offsets)


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """flash_attn.ops.triton.rotary.apply_rotary: rotates each token by the angle of its position.

    Args:
        x: (B, S, H, D), or (T, H, D) with cu_seqlens.
        cos: (positions, width / 2), width <= D.
        sin: as cos.
        seqlen_offsets: an int or (B,): the position of the first token of each sequence.
        cu_seqlens: (B + 1,): where packed sequences begin and end.
        max_seqlen: ignored.
        interleaved: as in `rotate_half`.
        inplace: if True, the result is written into x.
        conjugate: if True, rotates in the other direction.

    Returns:
        A tensor of the shape and dtype of x; x itself if inplace.

    Raises:
        AttentionError: the tables are wider than x, or have different shapes.
    """
    if cos.shape != sin.shape or cos.dim() != 2 or 2 * cos.shape[-1] > x.shape[-1]:
        found = f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        raise AttentionError("rotary tables", found, f"two of (positions, width / 2), width at most {x.shape[-1]}")
    at = _positions(x, seqlen_offsets, cu_seqlens)
    inside = ((at >= 0) & (at < cos.shape[0])).unsqueeze(-1)
    at = at.clamp(0, cos.shape[0] - 1)
    cos, sin = cos[at].float(), sin[at].float()
    cos, sin = torch.where(inside, cos, 1.0), torch.where(inside, -sin if conjugate else sin, 0.0)
    out = apply_rotary_emb_torch(x.float(), cos, sin, interleaved).to(x.dtype)
    return x.copy_(out) if inplace else out


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """`apply_rotary` with a gradient for x.

    Args:
        x: (B, S, H, D), or (T, H, D) with cu_seqlens.
        cos: (positions, width / 2), width <= D.
        sin: as cos.
        interleaved: as in `rotate_half`.
        inplace: if True, the result is written into x.
        seqlen_offsets: an int or (B,): the position of the first token of each sequence.
        cu_seqlens: (B + 1,): where packed sequences begin and end.
        max_seqlen: ignored.

    Returns:
        A tensor of the shape and dtype of x; x itself if inplace.
    """
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates Q and K in place.

    Args:
        qkv: (B, S, 3, H, D), or (B, S, Hq + 2 Hk, D) with num_heads_q.
        cos: (positions, width / 2).
        sin: as cos.
        cos_k: cos for K, if it differs (XPos). Default: cos.
        sin_k: sin for K, if it differs. Default: sin.
        interleaved: as in `rotate_half`.
        seqlen_offsets: as in `apply_rotary`.
        num_heads_q: the number Hq of query heads, for a qkv with four axes.

    Returns:
        qkv.

    Raises:
        AttentionError: qkv does not have one of these shapes.
    """
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k, _ = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q is not None and (rest := qkv.shape[2] - num_heads_q) > 0 and rest % 2 == 0:
        q, k, _ = qkv.split((num_heads_q, rest // 2, rest // 2), 2)
    else:
        raise AttentionError(
            "shape of qkv", tuple(qkv.shape), "(B, S, 3, H, D), or (B, S, Hq + 2 Hk, D) and num_heads_q"
        )
    of_keys = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    rotated = [
        apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=seqlen_offsets),
        apply_rotary_emb(k, *of_keys, interleaved, seqlen_offsets=seqlen_offsets),
    ]
    if qkv.dim() == 5:
        qkv[:, :, :2] = torch.stack(rotated, 2)
    else:
        qkv[:, :, : q.shape[2] + k.shape[2]] = torch.cat(rotated, 2)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates K in place.

    Args:
        kv: (B, S, 2, H, D).
        cos: (positions, width / 2).
        sin: as cos.
        interleaved: as in `rotate_half`.
        seqlen_offsets: as in `apply_rotary`.

    Returns:
        kv.
    """
    kv[:, :, 0] = apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, seqlen_offsets=seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotary position embedding of Q and K, in place.

    Args:
        dim: dims of a head that are rotated.
        base: base of the frequencies base^(-2 i / dim).
        interleaved: as in `rotate_half`.
        scale_base: XPos if given: at position t of n, queries are multiplied by s_i^((t - n // 2) / scale_base) and
            keys by the reciprocal, with s_i = (2 i + 0.4 dim) / (1.4 dim).
        pos_idx_in_fp32: not used; positions are always in float32.
        device: device of the frequencies.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        pos_idx_in_fp32: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self._tables: tuple[Tensor, ...] | None = None

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        return self.base ** (-torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _tables_of(self, n: int, like: Tensor) -> tuple[Tensor, ...]:
        """cos and sin of queries and of keys for at least n positions, kept from call to call: for this module."""
        known = self._tables
        if known is not None and (known[0].device, known[0].dtype) == (like.device, like.dtype):
            usable = not (self.training and known[0].is_inference())
            if usable and known[0].shape[0] >= n:
                return known
        t = torch.arange(n, device=like.device, dtype=torch.float32)
        angles = torch.outer(t, self._frequencies(like.device))  # the buffer may have been cast to 16 bits
        scale: Tensor | float = 1.0
        if self.scale_base is not None:
            even = torch.arange(0, self.dim, 2, device=like.device, dtype=torch.float32)
            scale = ((even + 0.4 * self.dim) / (1.4 * self.dim)) ** ((t - n // 2) / self.scale_base)[:, None]
        made = angles.cos() * scale, angles.sin() * scale, angles.cos() / scale, angles.sin() / scale
        self._tables = tuple(x.to(like.dtype) for x in made)
        return self._tables

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates in place.

        Args:
            qkv: as in `apply_rotary_emb_qkv_`; with kv, Q alone, (B, S, H, D).
            kv: (B, S, 2, H, D).
            seqlen_offset: as seqlen_offsets in `apply_rotary`.
            max_seqlen: positions of the tables. Required with a tensor of offsets, unless an earlier call made tables.
            num_heads_q: as in `apply_rotary_emb_qkv_`.

        Returns:
            qkv, or (q, kv).

        Raises:
            AttentionError: offsets are a tensor, max_seqlen is None and no earlier call made tables.
        """
        n = max_seqlen
        if n is None and isinstance(seqlen_offset, int):
            n = qkv.shape[1] + seqlen_offset
        if n is None and self._tables is None:
            raise AttentionError("max_seqlen", None, "an int, where seqlen_offset is a tensor")
        if n is None and self._tables is not None:
            n = self._tables[0].shape[0]
        cos, sin, cos_k, sin_k = self._tables_of(n or 0, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
