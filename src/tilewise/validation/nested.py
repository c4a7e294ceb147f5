"""torch's nested tensors of jagged layout are packed sequences already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import AttentionError


def unpacked(q: Any, k: Any, v: Any) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Values (T, H, D) and offsets of nested (B, j, H, D) q, k and v; nothing is copied."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_nested or x.layout is not torch.jagged:
            found = "dense" if isinstance(x, Tensor) and not x.is_nested else getattr(x, "layout", type(x).__name__)
            raise AttentionError(f"layout of {name}", found, "torch.jagged of q, k and v, or of none of them")
        if x.dim() != 4 or not isinstance(x.shape[1], torch.SymInt):  # the jagged axis has a symbolic length
            raise AttentionError(f"shape of {name}", tuple(x.shape), "(batch, tokens, heads, dim), tokens jagged")
        if x.lengths() is not None:  # type: ignore[attr-defined]
            raise AttentionError(f"layout of {name}", "jagged with holes", "none: call .contiguous()")
    if k.shape[1] != v.shape[1]:
        raise AttentionError("sequences of v", "other lengths", "k's")
    return (q.values(), k.values(), v.values()), (q.offsets().int(), k.offsets().int())


def packed(out: Tensor, lse: Tensor | None, *others: Tensor, q: Any) -> tuple[Any, ...]:
    """out (T, H, D) and lse (H, T) as nested (B, j, H, D) and (B, H, j), of the same sequences as q; the others as
    they are."""
    like: Any = torch.nested.nested_tensor_from_jagged
    stacked = None if lse is None else like(lse.mT, q.offsets()).transpose(1, 2)
    return like(out, q.offsets()), stacked, *others
