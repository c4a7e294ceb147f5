"""moba and nsa within torch.func and forward mode: `attention` with a mask of the chosen blocks.

torch differentiates and batches it to every order that `attention` supports. The pairs are the same; the time is that
of dense attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..mods import mask_mod
from .packed import PackedBlocks


@mask_mod
def _own_and_chosen(b, h, q_idx, kv_idx, chosen, block_size, group):  # type: ignore[no-untyped-def]
    block = kv_idx // block_size
    return (block == q_idx // block_size) | chosen[b, q_idx, h // group, block]


@mask_mod
def _own_and_chosen_packed(b, h, q_idx, kv_idx, chosen, start, first, block_size, group):  # type: ignore[no-untyped-def]
    block = kv_idx // block_size
    return (block == q_idx // block_size) | chosen[start[b] + q_idx, h // group, first[b] + block]


@mask_mod
def _own(b, h, q_idx, kv_idx, block_size):  # type: ignore[no-untyped-def]
    return kv_idx // block_size == q_idx // block_size


def attend_masked(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, block_size: int, options: Any) -> Tensor:
    """`block_attention.attend_dense` by a mask. `options`: those of `attention`, causal among them."""
    mask = _own(block_size)
    if chosen is not None and q.numel():
        table = _is_chosen(chosen, q.shape[1] // block_size)
        mask = _own_and_chosen(table, block_size, q.shape[2] // chosen.shape[2])
    out: Tensor = attention(q, k, v, mask_mod=mask, **options)
    return out


def attend_masked_packed(
    inputs: tuple[Tensor, ...],
    chosen: Tensor | None,
    offsets: tuple[Tensor, PackedBlocks],
    block_size: int,
    options: Any,
) -> Tensor:
    """`attend_masked` of packed sequences, whose blocks are numbered through all sequences. `offsets`: cu_seqlens and
    the blocks."""
    q, k, v = inputs
    cu_seqlens, blocks = offsets
    mask: Any = _own(block_size)
    if chosen is not None and q.numel():
        table, group = _is_chosen(chosen, len(blocks.starts) - 1), q.shape[1] // chosen.shape[1]
        mask = _own_and_chosen_packed(table, cu_seqlens, blocks.cu_blocks, block_size, group)
    out: Tensor = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, mask_mod=mask, **options)
    return out


def _is_chosen(chosen: Tensor, blocks: int) -> Tensor:
    """(.., most) blocks or -1 -> (.., blocks) bools."""
    at = torch.where(chosen < 0, blocks, chosen).long()
    table = at.new_zeros((*at.shape[:-1], blocks + 1), dtype=torch.bool)
    return table.scatter(-1, at, torch.ones_like(at, dtype=torch.bool))[..., :blocks]
