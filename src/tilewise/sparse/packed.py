"""Blocks of packed sequences: they are counted from the first token of each sequence, whose last one may be short.

How many there are is not read from the device: tables have as many entries as there can be, and the blocks past the
last one are empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import looped

_library = torch.library.Library("tilewise_sparse", "FRAGMENT")
_library.define("best_blocks(Tensor weight, Tensor first, Tensor own, SymInt most) -> Tensor")


class PackedBlocks(NamedTuple):
    """starts (N + 1,) int32: the first token of each block; cu_blocks (sequences + 1,) int32: the first block of each
    sequence; own (T,): the block of each token; first (T,): the first block of its sequence."""

    starts: Tensor
    cu_blocks: Tensor
    own: Tensor
    first: Tensor


def packed_blocks(cu_seqlens: Tensor, tokens: int, block_size: int) -> PackedBlocks:
    """The blocks of sequences with these offsets. Tokens past the last sequence have own = first: no block before."""
    cu, device = cu_seqlens.long(), cu_seqlens.device
    sequences = len(cu) - 1
    each = torch.div(cu.diff() + block_size - 1, block_size, rounding_mode="floor")
    cu_blocks = torch.cat([cu.new_zeros(1), each.cumsum(0)])
    number = torch.arange(tokens // block_size + sequences + 1, device=device)
    at = torch.searchsorted(cu_blocks[1:], number, right=True).clamp(max=max(0, sequences - 1))
    starts = torch.minimum(cu[at] + (number - cu_blocks[at]) * block_size, cu[-1])
    token = torch.arange(tokens, device=device)
    of = torch.searchsorted(cu[1:].contiguous(), token, right=True).clamp(max=max(0, sequences - 1))
    first = cu_blocks[of]
    own = first + torch.div(token - cu[of], block_size, rounding_mode="floor")
    return PackedBlocks(starts.int(), cu_blocks.int(), torch.where(token < cu[-1], own, first), first)


def block_means(x: Tensor, blocks: PackedBlocks, block_size: int) -> Tensor:
    """(T, H, D) -> (N, H, D): the means of the blocks' tokens, summed in float32; 0 for empty blocks."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    at = blocks.starts[:-1, None].long() + torch.arange(block_size, device=x.device)
    inside = at < blocks.starts[1:, None]
    if x.shape[0] == 0:  # there is no row 0 to read
        return x.new_zeros((len(at), *x.shape[1:]), dtype=dtype)
    rows = x[torch.where(inside, at, 0)].to(dtype).masked_fill(~inside[..., None, None], 0.0)
    return rows.sum(1) / inside.sum(1).clamp(min=1)[:, None, None]


def best_of(weight: Tensor, first: Tensor, own: Tensor, most: int) -> Tensor:
    """(T, C, most): the blocks with the largest weights, (T, C, N), among the blocks first[t] to own[t] - 1 of a token;
    -1 where there are fewer."""
    found: Tensor = torch.ops.tilewise_sparse.best_blocks(weight, first, own, most)
    return found


@torch.library.impl(_library, "best_blocks", "CompositeExplicitAutograd")
def _best_blocks(weight: Tensor, first: Tensor, own: Tensor, most: int) -> Tensor:
    if weight.is_cuda and weight.dtype == torch.float32 and weight.numel():
        from ..backends.common import best_blocks

        if weight.shape[2] <= best_blocks.MOST_BLOCKS:
            with torch.cuda.device_of(weight):
                return best_blocks.best_blocks(weight.contiguous(), first.contiguous(), own.contiguous(), most)
    number = torch.arange(weight.shape[2], device=weight.device)
    before = (number >= first[:, None]) & (number < own[:, None])
    least = torch.finfo(weight.dtype).min  # of a block before the token; others are below
    found = weight.clamp(min=least).masked_fill(~before[:, None], -torch.inf).topk(most, -1).indices
    is_before = (found >= first[:, None, None]) & (found < own[:, None, None])
    return torch.where(is_before, found, -1).int()


@torch.library.register_fake("tilewise_sparse::best_blocks", lib=_library)
def _best_blocks_fake(weight: Tensor, first: Tensor, own: Tensor, most: int) -> Tensor:
    return weight.new_empty((*weight.shape[:2], most), dtype=torch.int32)


torch.library.register_vmap("tilewise_sparse::best_blocks", looped(torch.ops.tilewise_sparse.best_blocks), lib=_library)
