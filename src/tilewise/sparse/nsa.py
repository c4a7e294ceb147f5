"""Native sparse attention (NSA): three causal branches, added with the weights of their gates.

- compressed: over one key and one value for each block of keys that ends at or before the query
- selected: over the tokens of the query's own block and of the blocks with the most weight in the first branch
- window: over the last tokens

The selection is by query and KV head, so all query heads of a group read the same keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import attention
from ..errors import AttentionError
from ..mods import mask_mod
from .topk import topk

CHUNK = 1 << 24  # weights of the compressed branch that are computed at a time to select blocks


@mask_mod
def _ended_blocks(b, h, q_idx, kv_idx, block_size):  # type: ignore[no-untyped-def]
    return (kv_idx + 1) * block_size <= q_idx + 1


def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    *,
    block_size: int = 64,
    num_blocks: int = 16,
    window: int = 512,
    compressed: tuple[Tensor, Tensor] | None = None,
    blocks: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Native sparse attention: gates[0] * compressed + gates[1] * selected + gates[2] * window, all causal.

    >>> q, k, v = (torch.randn(1, 64, heads, 16) for heads in (4, 1, 1))
    >>> gates = tuple(torch.rand(1, 64, 4) for _ in range(3))
    >>> nsa(q, k, v, gates, block_size=16, num_blocks=2, window=8).shape
    torch.Size([1, 64, 4, 16])

    A block is compressed and can be selected once it ends at or before the query; the query's own block is always
    selected, up to the query. A query before the end of the first block gets 0 from the compressed branch.

    Args:
        q: queries (B, S, H, D).
        k: keys (B, S, Hk, D).
        v: values (B, S, Hk, Dv).
        gates: of the compressed, the selected and the window branch, (B, S, H) each, after their activation.
        block_size: keys of a block. S must be a multiple of it.
        num_blocks: selected blocks of a query, its own included.
        window: tokens of the window branch, the query included.
        compressed: the keys (B, S / block_size, Hk, D) and values of the blocks. Default: the means of their keys and
            values.
        blocks: (B, S, Hk, n) int32 or int64: the selected blocks of each query, -1 for none, no block twice. Default
            `selected_blocks`.
        scale: as in `tilewise.attention`.
        backend: as in `tilewise.attention`; "reference" or "triton" if named.

    Returns:
        out (B, S, H, Dv) in q's dtype, differentiable with respect to q, k, v, gates and compressed. The selection has
        no gradient.

    Raises:
        AttentionError: an argument is not as above.
    """
    _check(q, k, v, gates, {"block_size": block_size, "num_blocks": num_blocks, "window": window})
    if compressed is None:
        compressed = _means(k, block_size), _means(v, block_size)
    keys, values = _checked(compressed, k, v, block_size)
    options: Any = {"scale": scale, "backend": backend}
    near = attention(q, k, v, causal=True, window=(window - 1, 0), **options)
    coarse, lse = attention(q, keys, values, mask_mod=_ended_blocks(block_size), return_lse=True, **options)
    if blocks is None:
        blocks = selected_blocks(q, keys, lse, block_size=block_size, num_blocks=num_blocks, scale=scale)
    chosen = topk(q, k, v, _tokens(blocks, q, k, block_size), **options)
    dtype = torch.promote_types(q.dtype, torch.float32)
    total: Any = 0.0
    for out, gate in zip((coarse, chosen, near), gates, strict=True):
        total = total + out.to(dtype) * gate.to(dtype)[..., None]
    found: Tensor = total.to(q.dtype)
    return found


@torch.no_grad()
def selected_blocks(
    q: Tensor, keys: Tensor, lse: Tensor, *, block_size: int, num_blocks: int, scale: float | None = None
) -> Tensor:
    """A query's own block, and the blocks before it with the most weight in the compressed branch, summed over the
    query heads of the KV head.

    Args:
        q: queries (B, S, H, D).
        keys: compressed keys (B, blocks, Hk, D).
        lse: (B, H, S), of the compressed branch.
        block_size: keys of a block.
        num_blocks: selected blocks, the query's own included.
        scale: of the compressed branch. Default 1 / sqrt(D).

    Returns:
        (B, S, Hk, num_blocks or as many blocks as there are) int64, -1 where a query has fewer; its own block is first.
    """
    batch, n, heads, d = q.shape
    count, kv_heads = keys.shape[1], keys.shape[2]
    scale = d**-0.5 if scale is None else scale
    dtype = torch.promote_types(q.dtype, torch.float32)
    others = min(num_blocks, count) - 1
    own = torch.arange(n, device=q.device) // block_size
    found = [own[None, :, None, None].expand(batch, n, kv_heads, 1)]
    step = max(1, CHUNK // max(1, batch * heads * count))
    best = []
    for first in range(0, n if others > 0 else 0, step):
        rows = slice(first, min(first + step, n))
        grouped = q[:, rows].to(dtype).unflatten(2, (kv_heads, -1))
        scores = scale * torch.einsum("bshgd,bchd->bshgc", grouped, keys.to(dtype))
        sums = lse[:, :, rows].transpose(1, 2).unflatten(2, (kv_heads, -1)).to(dtype)[..., None]
        weight = torch.exp(scores - sums.masked_fill(sums == -torch.inf, torch.inf)).sum(3)  # (B, rows, Hk, blocks)
        before = torch.arange(count, device=q.device) < own[rows, None]  # (rows, blocks)
        weight = weight.masked_fill(~before[None, :, None], -1.0)
        chosen = weight.topk(others, -1).indices
        best.append(torch.where(chosen < own[rows, None, None], chosen, -1))
    return torch.cat([*found, torch.cat(best, 1)], -1) if best else found[0]


def _tokens(blocks: Tensor, q: Tensor, k: Tensor, block_size: int) -> Tensor:
    """(B, S, Hk, n * block_size) int32: the tokens of the blocks up to the query, -1 for the others."""
    if not isinstance(blocks, Tensor) or blocks.dim() != 4 or blocks.dtype not in (torch.int32, torch.int64):
        found = f"{blocks.dtype} {tuple(blocks.shape)}" if isinstance(blocks, Tensor) else type(blocks).__name__
        raise AttentionError("blocks of nsa", found, "(B, S, Hk, n) int32 or int64")
    if blocks.shape[:3] != (*q.shape[:2], k.shape[2]):
        raise AttentionError("shape of blocks of nsa", tuple(blocks.shape), f"{(*q.shape[:2], k.shape[2])} and n")
    tokens = blocks.int()[..., None] * block_size + torch.arange(block_size, device=q.device, dtype=torch.int32)
    at = torch.arange(q.shape[1], device=q.device).view(1, -1, 1, 1, 1)
    return torch.where((blocks[..., None] >= 0) & (tokens <= at), tokens, -1).flatten(3)


def _means(x: Tensor, block_size: int) -> Tensor:
    """Of each block, summed in float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    means: Tensor = x.unflatten(1, (-1, block_size)).mean(2, dtype=dtype).to(x.dtype)
    return means


def _checked(compressed: Any, k: Tensor, v: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    expected = [(k.shape[0], k.shape[1] // block_size, *x.shape[2:]) for x in (k, v)]
    if not isinstance(compressed, (tuple, list)) or [tuple(getattr(x, "shape", ())) for x in compressed] != expected:
        found = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in compressed]
        raise AttentionError("compressed of nsa", found, f"keys and values {expected[0]} and {expected[1]}")
    return compressed[0], compressed[1]


def _check(q: Tensor, k: Tensor, v: Tensor, gates: Any, numbers: dict[str, int]) -> None:
    for name, x in numbers.items():
        if isinstance(x, bool) or not isinstance(x, int) or x < 1:
            raise AttentionError(f"{name} of nsa", repr(x), "an int, at least 1")
    for name, y in (("q", q), ("k", k), ("v", v)):
        if not isinstance(y, Tensor) or y.dim() != 4 or y.shape[:2] != q.shape[:2]:
            found = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise AttentionError(f"shape of {name} of nsa", found, "(B, S, heads, dim), B and S as q's")
    if q.shape[1] % numbers["block_size"]:
        raise AttentionError(
            "block_size of nsa", numbers["block_size"], f"a number that divides the {q.shape[1]} tokens"
        )
    is_three = isinstance(gates, (tuple, list)) and len(gates) == 3
    if not is_three or any(not isinstance(g, Tensor) or g.shape != q.shape[:3] for g in gates):
        raise AttentionError("gates of nsa", type(gates).__name__, f"three tensors (B, S, H), {tuple(q.shape[:3])}")
