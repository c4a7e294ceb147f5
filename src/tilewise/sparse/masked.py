"""moba and nsa within torch.func and forward mode, and their gradients where torch may differentiate them again:
`attention` with a mask of the chosen blocks.

torch differentiates and batches it to every order that `attention` supports. The pairs are the same; the time is that
of dense attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..mods import mask_mod


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


def attend_masked_rows(
    inputs: tuple[Tensor, ...], chosen: Tensor | None, batch: int, numbers: tuple[int, int], options: Any
) -> Tensor:
    """`attend_masked` of (T, H, D), the tokens of `batch` rows, whose blocks are numbered through all rows. `numbers`:
    the size of a block, and how many blocks there are."""
    block_size, blocks = numbers
    batch = batch if inputs[0].shape[0] else 1
    q, k, v = (x.unflatten(0, (batch, -1)) for x in inputs)
    if chosen is not None:
        row = torch.arange(batch, device=chosen.device).view(-1, 1, 1, 1) * (blocks // batch)
        rows = chosen.unflatten(0, (batch, -1))
        chosen = torch.where(rows < 0, -1, rows - row)
    return attend_masked(q, k, v, chosen, block_size, options).flatten(0, 1)


def attend_masked_packed(
    inputs: tuple[Tensor, ...],
    chosen: Tensor | None,
    offsets: tuple[Tensor, Tensor],
    numbers: tuple[int, int],
    options: Any,
) -> Tensor:
    """`attend_masked` of packed sequences, whose blocks are numbered through all sequences. `offsets`: cu_seqlens, and
    the first block of each sequence; `numbers`: the size of a block, and how many blocks there are."""
    q, k, v = inputs
    cu_seqlens, cu_blocks = offsets
    block_size, blocks = numbers
    mask: Any = _own(block_size)
    if chosen is not None and q.numel():
        table, group = _is_chosen(chosen, blocks), q.shape[1] // chosen.shape[1]
        mask = _own_and_chosen_packed(table, cu_seqlens, cu_blocks, block_size, group)
    out: Tensor = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, mask_mod=mask, **options)
    return out


def gradients_of(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...], dout: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of attend(*inputs), which torch can differentiate again; None for inputs without one."""
    with torch.enable_grad(), torch.autocast(dout.device.type, enabled=False):
        own = [x.view_as(x) for x in inputs]  # one input may be computed from another
        wanted = [x for x in own if x.requires_grad]
        found = iter(torch.autograd.grad(attend(*own), wanted, dout, create_graph=True))
    return tuple(next(found) if x.requires_grad else None for x in own)


def _is_chosen(chosen: Tensor, blocks: int) -> Tensor:
    """(.., most) blocks or -1 -> (.., blocks) bools."""
    at = torch.where(chosen < 0, blocks, chosen).long()
    table = at.new_zeros((*at.shape[:-1], blocks + 1), dtype=torch.bool)
    return table.scatter(-1, at, torch.ones_like(at, dtype=torch.bool))[..., :blocks]
