"""Mixture of block attention (MoBA): causal, over a query's own block of keys and the best blocks before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..call.options import BackendName, Options
from ..errors import AttentionError, shown
from ..plan_cache import is_transformed
from ..validation.dense import DTYPES, to_bshd
from .block_attention import attend_dense, attend_packed
from .checks import check_divides, check_sizes, checked_batch, checked_packed, looped, named
from .masked import attend_masked, attend_masked_packed
from .packed import best_of, block_means, packed_blocks

Gate = Callable[[Tensor, Tensor, int], Tensor]
_library = torch.library.Library("tilewise_sparse", "FRAGMENT")
_library.define("blocks_by_mean_key(Tensor q, Tensor k, SymInt block_size, SymInt most) -> Tensor")


@named
def mean_key_gate(q: Tensor, k: Tensor, block_size: int) -> Tensor:
    """How much a query wants a block: q . mean(the block's keys).

    >>> import torch
    >>> q, k = torch.randn(2, 256, 4, 16), torch.randn(2, 256, 2, 16)
    >>> mean_key_gate(q, k, 64).shape  # 4 blocks
    torch.Size([2, 256, 4, 4])

    Args:
        q: queries (B, S, H, D).
        k: keys (B, S, Hk, D).
        block_size: int, the number of keys of a block. It divides S.

    Returns:
        (B, S, H, blocks), in float32 (float64 for float64).

    Raises:
        AttentionError: block_size does not divide S.
    """
    check_sizes(block_size=block_size)
    check_divides(block_size, k.shape[1])
    dtype = torch.promote_types(q.dtype, torch.float32)
    means = k.unflatten(1, (-1, block_size)).mean(2, dtype=dtype)  # (B, blocks, Hk, D)
    grouped = q.to(dtype).unflatten(2, (k.shape[2], -1))  # (B, S, Hk, G, D)
    return torch.einsum("bshgd,bnhd->bshgn", grouped, means).flatten(2, 3)


@named
def moba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    top_k: int,
    scale: float | None = None,
    gate: Gate | None = None,
    cu_seqlens: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Causal attention of each query over its own block of keys and the top_k - 1 best blocks before it.

    >>> q, k, v = (torch.randn(1, 64, heads, 16) for heads in (4, 2, 2))
    >>> moba(q, k, v, block_size=16, top_k=2).shape
    torch.Size([1, 64, 4, 16])

    Blocks are chosen for each query head; a query with fewer blocks before it gets fewer. The choice has no gradient.

    Args:
        q: queries (B, S, H, D), or (T, H, D) of packed sequences.
        k: keys (B, S, Hk, D), or (T, Hk, D).
        v: values (B, S, Hk, Dv), or (T, Hk, Dv).
        block_size: keys of a block. S must be a multiple of it; the last block of a packed sequence may be short.
        top_k: blocks of a query, its own included.
        scale: as in `tilewise.attention`.
        gate: gate(q, k, block_size) returns how much each query wants each block, (B, S, H, blocks). Default
            `mean_key_gate`. Called without gradients. Not for packed sequences.
        cu_seqlens: (sequences + 1,) integers, the offsets of packed sequences as in `tilewise.attention_varlen`.
        backend: as in `tilewise.attention`.

    Returns:
        out (B, S, H, Dv) or (T, H, Dv) in q's dtype, differentiable.

    Raises:
        AttentionError: an argument is not as above.
    """
    q, k, v = to_bshd(q, k, v)
    check_sizes(block_size=block_size, top_k=top_k)
    options: Options = {"causal": True, "scale": scale, "backend": backend}
    if cu_seqlens is not None:
        if gate is not None:
            raise AttentionError("gate", "one with cu_seqlens", "None: packed sequences have the mean key's")
        return _packed(q, k, v, cu_seqlens, (block_size, top_k), options)
    spec = checked_batch(q, k, v, block_size, options)
    if gate is not None and not callable(gate):
        raise AttentionError("gate", shown(gate), "a function gate(q, k, block_size), or None")
    blocks = q.shape[1] // block_size
    chosen = None
    if min(top_k, blocks) > 1:
        with torch.no_grad():
            chosen = _chosen(q, k, block_size, min(top_k, blocks) - 1, gate)
    if is_transformed():
        return attend_masked(q, k, v, chosen, block_size, options)
    return attend_dense(q, k, v, chosen, block_size, spec)


def _packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, numbers: tuple[int, int], options: Options) -> Tensor:
    block_size, top_k = numbers
    spec, cu_seqlens = checked_packed(q, k, v, cu_seqlens, options)
    blocks = packed_blocks(cu_seqlens, len(q), block_size)
    chosen, most = None, min(top_k, len(blocks.starts) - 1) - 1
    if most > 0:
        with torch.no_grad():
            dtype = torch.promote_types(q.dtype, torch.float32)
            means = block_means(k.detach(), blocks, block_size)
            grouped = q.detach().to(dtype).unflatten(1, (k.shape[1], -1))
            wanted = torch.einsum("thgd,nhd->thgn", grouped, means).flatten(1, 2)
            chosen = best_of(wanted, blocks.first, blocks.own, most)
    if is_transformed():
        ends, count = (cu_seqlens, blocks.cu_blocks), len(blocks.starts) - 1
        return attend_masked_packed((q, k, v), chosen, ends, (block_size, count), options)
    return attend_packed((q, k, v), chosen, (cu_seqlens, blocks), block_size, spec)


def _chosen(q: Tensor, k: Tensor, block_size: int, most: int, gate: Gate | None) -> Tensor:
    """(B, S, H, most): the blocks of each query, -1 where there are fewer."""
    if gate is None:
        found: Tensor = torch.ops.tilewise_sparse.blocks_by_mean_key(q, k, block_size, most)
        return found
    wanted = gate(q, k, block_size)
    _check_gate(wanted, (*q.shape[:3], q.shape[1] // block_size), q.device)
    return best_before(wanted, block_size, most)


@torch.library.impl(_library, "blocks_by_mean_key", "CompositeExplicitAutograd")
def _blocks_by_mean_key(q: Tensor, k: Tensor, block_size: int, most: int) -> Tensor:
    from ..backends.common import best_blocks

    blocks = q.shape[1] // block_size
    if q.is_cuda and q.dtype == torch.bfloat16 and q.numel() and blocks <= best_blocks.MOST_GATED and q.shape[3] <= 256:
        means = k.unflatten(1, (-1, block_size)).mean(2, dtype=torch.float32)
        with torch.cuda.device_of(q):
            return best_blocks.blocks_by_mean_key(q, means, block_size, most)
    return best_before(mean_key_gate(q, k, block_size), block_size, most)


@torch.library.register_fake("tilewise_sparse::blocks_by_mean_key", lib=_library)
def _blocks_by_mean_key_fake(q: Tensor, k: Tensor, block_size: int, most: int) -> Tensor:
    return q.new_empty((*q.shape[:3], most), dtype=torch.int32)


torch.library.register_vmap(
    "tilewise_sparse::blocks_by_mean_key", looped(torch.ops.tilewise_sparse.blocks_by_mean_key), lib=_library
)


def best_before(wanted: Tensor, block_size: int, most: int) -> Tensor:
    """(B, S, H, most): the blocks with the largest numbers in `wanted`, (B, S, H, blocks), among those wholly before
    the query; -1 where there are fewer."""
    batch, n = wanted.shape[:2]
    own = torch.arange(n, device=wanted.device).div(block_size, rounding_mode="floor").repeat(batch)
    found: Tensor = best_of(wanted.flatten(0, 1), torch.zeros_like(own), own, most).unflatten(0, (batch, n))
    return found


def _check_gate(wanted: Any, shape: tuple[int, ...], device: torch.device) -> None:
    fits = isinstance(wanted, Tensor) and wanted.dtype in DTYPES and wanted.device == device
    if not fits or tuple(wanted.shape) != shape:
        raise AttentionError(
            "result of gate", shown(wanted), f"a tensor (B, S, H, blocks), {shape}, of floats on {device}"
        )
