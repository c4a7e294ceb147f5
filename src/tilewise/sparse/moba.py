"""Mixture of block attention (MoBA): causal attention over a query's own block of keys and the best blocks before it.

The queries that chose a block become one packed sequence, whose keys are the block. Packed attention gives (out, lse)
of every query over each of its blocks, and the results of a query merge by their lse (as in `tilewise.merge`): exact
attention over the union of the blocks. The products are in proportion to the chosen blocks, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..errors import AttentionError

Gate = Callable[[Tensor, Tensor, int], Tensor]


def mean_key_gate(q: Tensor, k: Tensor, block_size: int) -> Tensor:
    """How much a query wants a block: q . mean(the block's keys).

    Args:
        q: queries (B, S, H, D).
        k: keys (B, S, Hk, D).
        block_size: keys of a block.

    Returns:
        (B, S, H, blocks), in float32 (float64 for float64).
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    means = k.to(dtype).unflatten(1, (-1, block_size)).mean(2)  # (B, blocks, Hk, D)
    grouped = q.to(dtype).unflatten(2, (k.shape[2], -1))  # (B, S, Hk, G, D)
    return torch.einsum("bshgd,bnhd->bshgn", grouped, means).flatten(2, 3)


def moba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    top_k: int,
    scale: float | None = None,
    gate: Gate | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention of each query over its own block of keys and the top_k - 1 best blocks before it.

    >>> q, k, v = torch.randn(1, 64, 4, 16), torch.randn(1, 64, 2, 16), torch.randn(1, 64, 2, 16)
    >>> moba(q, k, v, block_size=16, top_k=2).shape
    torch.Size([1, 64, 4, 16])

    Blocks are chosen for each query head, with fewer where fewer are before a query. The choice has no gradient.

    Args:
        q: queries (B, S, H, D).
        k: keys (B, S, Hk, D).
        v: values (B, S, Hk, Dv).
        block_size: keys of a block. S must be a multiple of it.
        top_k: blocks of a query, its own included.
        scale: as in `tilewise.attention`.
        gate: gate(q, k, block_size) returns how much each query wants each block, (B, S, H, blocks). Default
            `mean_key_gate`. Called without gradients.
        backend: as in `tilewise.attention`.

    Returns:
        out (B, S, H, Dv) in q's dtype, differentiable.

    Raises:
        AttentionError: an argument is not as above.
    """
    _check(q, k, block_size, top_k)
    batch, n, heads, _ = q.shape
    blocks = n // block_size
    options: Any = {"scale": scale, "return_lse": True, "backend": backend}
    parts = [x.reshape(batch * blocks, block_size, *x.shape[2:]) for x in (q, k, v)]
    own, own_lse = attention(*parts, causal=True, **options)
    own = own.reshape(batch * n * heads, 1, v.shape[-1])  # a row for each query of each head
    own_lse = own_lse.mT.reshape(batch * n * heads, 1)
    others = min(top_k, blocks) - 1
    if others > 0:
        with torch.no_grad():
            wanted = (gate or mean_key_gate)(q, k, block_size)
            _check_gate(wanted, (batch, n, heads, blocks))
            chosen = best_before(wanted, block_size, others)
        out, lse = _over_blocks(q, k, v, chosen, block_size, options)
        own, own_lse = torch.cat([own, out], 1), torch.cat([own_lse, lse], 1)
    # o = sum of exp(lse_n - lse) o_n: the weights are the softmax of the lse of a query's parts
    weights = torch.softmax(own_lse, 1)
    merged: Tensor = (own.to(weights.dtype) * weights[..., None]).sum(1).to(q.dtype).view(batch, n, heads, v.shape[-1])
    return merged


def best_before(wanted: Tensor, block_size: int, most: int) -> Tensor:
    """(B, S, H, most) int64: the blocks with the largest numbers in `wanted`, (B, S, H, blocks), among those wholly
    before the query; -1 where there are fewer."""
    own = torch.arange(wanted.shape[1], device=wanted.device) // block_size
    block = torch.arange(wanted.shape[3], device=wanted.device)
    before = (block < own[:, None])[None, :, None, :]
    found = wanted.masked_fill(~before, -torch.inf).topk(most, -1).indices
    return torch.where(found < own[:, None, None], found, -1)


def _over_blocks(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block_size: int, options: Any
) -> tuple[Tensor, Tensor]:
    """out (B S H, most, Dv) and lse (B S H, most) of every query over each of its chosen blocks; lse is -inf where
    there is none."""
    (batch, n, heads, _), kv_heads, most = q.shape, k.shape[2], chosen.shape[3]
    blocks = n // block_size
    group = heads // kv_heads
    line = torch.arange(batch, device=q.device)[:, None] * kv_heads + torch.arange(heads, device=q.device) // group
    sequences = batch * kv_heads * blocks
    sequence = torch.where(chosen < 0, sequences, line[:, None, :, None] * blocks + chosen).flatten()
    ordered, order = sequence.sort(stable=True)
    # a query in block b has min(b, most) others: how many there are in all is known without reading them
    count = batch * heads * block_size * sum(min(b, most) for b in range(blocks))
    ends = torch.arange(sequences + 1, device=q.device)
    cu_q = torch.searchsorted(ordered, ends).int()
    order = order[:count]
    cu_k = (ends * block_size).int()
    keys, values = (x.transpose(1, 2).reshape(-1, 1, x.shape[-1]) for x in (k, v))  # (B Hk S, 1, D)
    rows = Repeated.apply(q.reshape(-1, q.shape[-1]), order, most)  # type: ignore[no-untyped-call]
    out, lse = attention_varlen(rows[:, None], keys, values, cu_q, cu_k, **options)
    all_out = out.new_zeros(chosen.numel(), v.shape[-1]).index_copy(0, order, out[:, 0])
    all_lse = lse.new_full((chosen.numel(),), -torch.inf).index_copy(0, order, lse[0])
    return all_out.view(-1, most, v.shape[-1]), all_lse.view(-1, most)


class Repeated(torch.autograd.Function):
    """Row order[n] // times of x for each n. `order` has no number twice, so the gradient is written without atomics
    and then summed: the same bits in every run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.rows, ctx.times = x.shape[0], times
        return x.index_select(0, torch.div(order, times, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        every = grad.new_zeros(ctx.rows * ctx.times, grad.shape[1]).index_copy(0, order, grad)
        return every.view(ctx.rows, ctx.times, -1).sum(1), None, None


def _check(q: Tensor, k: Tensor, block_size: int, top_k: int) -> None:
    for name, number in (("block_size", block_size), ("top_k", top_k)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise AttentionError(f"{name} of moba", repr(number), "an int, at least 1")
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise AttentionError(f"shape of {name} of moba", found, "4 axes (batch, tokens, heads, dim)")
    if q.shape[:2] != k.shape[:2]:
        raise AttentionError("batch and tokens of k of moba", tuple(k.shape[:2]), f"q's {tuple(q.shape[:2])}")
    if q.shape[1] % block_size:
        raise AttentionError("block_size of moba", block_size, f"a number that divides the {q.shape[1]} tokens")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise AttentionError("heads of q of moba", q.shape[2], f"a multiple of k's {k.shape[2]}")


def _check_gate(wanted: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(wanted, Tensor) or tuple(wanted.shape) != shape:
        found = tuple(wanted.shape) if isinstance(wanted, Tensor) else type(wanted).__name__
        raise AttentionError("what the gate of moba returned", found, f"a tensor (B, S, H, blocks), {shape}")
