"""Mixture of block attention (MoBA): causal attention over a query's own block of keys and the best blocks before it.

The queries that chose a block become one packed sequence, whose keys are the block. Packed attention gives (out, lse)
of every query over each of its blocks, and the results of a query merge by their lse (as in `tilewise.merge`): exact
attention over the union of the blocks. The products are in proportion to the chosen blocks, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import AttentionError
from ..ops.dense import registered
from ..options import Options
from ..request import Request, Spec, arguments
from ..validation.dense import checked_request

Gate = Callable[[Tensor, Tensor, int], Tensor]


def mean_key_gate(q: Tensor, k: Tensor, block_size: int) -> Tensor:
    """How much a query wants a block: q . mean(the block's keys).

    Args:
        q: queries (B, S, H, D).
        k: keys (B, S, Hk, D).
        block_size: int, the number of keys of a block. It divides S.

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

    >>> q, k, v = (torch.randn(1, 64, heads, 16) for heads in (4, 2, 2))
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
    _check(q, k, v, block_size, top_k)
    blocks = q.shape[1] // block_size
    chosen = None
    if min(top_k, blocks) > 1:
        with torch.no_grad():
            wanted = (gate or mean_key_gate)(q, k, block_size)
            _check_gate(wanted, (*q.shape[:3], blocks))
            chosen = best_before(wanted, block_size, min(top_k, blocks) - 1)
    options: Options = {"causal": True, "scale": scale, "backend": backend}
    q_blocks, k_blocks, v_blocks = (_by_block(x, block_size) for x in (q, k, v))
    spec = checked_request(q_blocks, k_blocks, v_blocks, (), (), options).spec
    out: Tensor = BlockAttention.apply(q, k, v, chosen, block_size, spec)  # type: ignore[no-untyped-call]
    return out


def best_before(wanted: Tensor, block_size: int, most: int) -> Tensor:
    """(B, S, H, most) int64: the blocks with the largest numbers in `wanted`, (B, S, H, blocks), among those wholly
    before the query; -1 where there are fewer."""
    own = torch.arange(wanted.shape[1], device=wanted.device) // block_size
    block = torch.arange(wanted.shape[3], device=wanted.device)
    before = (block < own[:, None])[None, :, None, :]
    found = wanted.masked_fill(~before, -torch.inf).topk(most, -1).indices
    return torch.where(found < own[:, None, None], found, -1)


class Sorted(NamedTuple):
    """The queries that chose blocks, sorted by KV head and block: the packed sequences that they and the blocks are.

    order: the number of each, (query of a head) * most + slot; positions: where each slot of each query of a head is
    among them, (B S H, most), or past the end; cu_q, cu_k.
    """

    order: Tensor
    positions: Tensor
    cu_q: Tensor
    cu_k: Tensor

    def rows(self, x: Tensor) -> Tensor:
        """(B, S, H, D) -> (queries, 1, D), a row for each."""
        most = self.positions.shape[1]
        return x.reshape(-1, x.shape[-1]).index_select(0, torch.div(self.order, most, rounding_mode="floor"))[:, None]

    def sums(self, total: Tensor, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """total (B S H, D) + the sum of the rows (queries, 1, D) of each query, times weights (B S H, most). In a fixed
        order, without atomics."""
        padded = torch.cat([rows[:, 0], rows.new_zeros(1, rows.shape[2])])
        for slot in range(self.positions.shape[1]):
            part = padded.index_select(0, self.positions[:, slot]).to(total.dtype)
            total = total + (part if weights is None else part * weights[:, slot, None])
        return total


def _sorted(chosen: Tensor, kv_heads: int, block_size: int) -> Sorted:
    batch, n, heads, most = chosen.shape
    blocks, device = n // block_size, chosen.device
    line = torch.arange(batch, device=device)[:, None] * kv_heads
    line = line + torch.arange(heads, device=device) // (heads // kv_heads)
    sequences = batch * kv_heads * blocks
    sequence = torch.where(chosen < 0, sequences, line[:, None, :, None] * blocks + chosen).flatten()
    ordered, order = sequence.sort(stable=True)
    # a query in block b has min(b, most) others: how many there are in all is known without reading them
    count = batch * heads * block_size * sum(min(b, most) for b in range(blocks))
    ends = torch.arange(sequences + 1, device=device)
    numbers = torch.arange(count, device=device)
    positions = torch.full_like(order, count).index_copy(0, order[:count], numbers)
    cu_q, cu_k = torch.searchsorted(ordered, ends).int(), (ends * block_size).int()
    return Sorted(order[:count], positions.view(-1, most), cu_q, cu_k)


def _by_block(x: Tensor, block_size: int) -> Tensor:
    """(B, S, H, D) -> (B blocks, block_size, H, D)"""
    return x.reshape(-1, block_size, *x.shape[2:])


def _own_blocks(q: Tensor, k: Tensor, v: Tensor, block_size: int, spec: Spec) -> Request:
    """The request of every block as a batch row."""
    return Request(_by_block(q, block_size), _by_block(k, block_size), _by_block(v, block_size), spec)


def _keys(x: Tensor) -> Tensor:
    """(B, S, Hk, D) -> (B Hk S, 1, D)"""
    return x.transpose(1, 2).reshape(-1, 1, x.shape[-1])


class BlockAttention(torch.autograd.Function):
    """out (B, S, H, Dv) over a query's own block and the chosen ones.

    The backward has no pass for the merge: with out and lse of the union, the backward of each part gives its share of
    the gradients, because p = exp(s - lse) and rowsum(dO * O) are those of the union.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chosen: Any, block_size: int, spec: Spec) -> Tensor:
        run, shape = registered("forward"), (*q.shape[:3], v.shape[3])
        out, lse = run(*arguments(_own_blocks(q, k, v, block_size, spec)))
        out, lse = out.reshape(shape), lse.mT.reshape(-1)  # by query and head
        if chosen is not None:
            by_block = _sorted(chosen, k.shape[2], block_size)
            request = _other_blocks(q, k, v, by_block, spec)
            part, part_lse = run(*arguments(request))
            nothing = part_lse.new_full((1,), -torch.inf)
            logs = torch.cat([part_lse[0], nothing])[by_block.positions]  # (B S H, most)
            total = torch.logsumexp(torch.cat([lse[:, None], logs], 1), 1)
            merged = out.reshape(-1, v.shape[3]).to(lse.dtype) * torch.exp(lse - total)[:, None]
            merged = by_block.sums(merged, part, torch.exp(logs - total[:, None]))
            out, lse = merged.to(q.dtype).reshape(shape), total
        ctx.save_for_backward(q, k, v, chosen, out, lse)
        ctx.block_size, ctx.spec = block_size, spec
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, chosen, out, lse = ctx.saved_tensors
        block_size, run = ctx.block_size, registered("backward")
        dout = dout.contiguous()
        own = _own_blocks(q, k, v, block_size, ctx.spec._replace(partial=True))
        own_out, own_dout = _by_block(out, block_size), _by_block(dout, block_size)
        own_lse = lse.view(-1, block_size, q.shape[2]).mT.contiguous()
        dq, dk, dv = run(own_out, own_lse, own_dout, None, *arguments(own))
        dq, dk, dv = (g.reshape(x.shape) for g, x in zip((dq, dk, dv), (q, k, v), strict=True))
        if chosen is not None:
            by_block = _sorted(chosen, k.shape[2], block_size)
            request = _other_blocks(q, k, v, by_block, ctx.spec._replace(partial=True))
            rows_lse = by_block.rows(lse.view(*q.shape[:3], 1))[:, :, 0].mT.contiguous()
            part = run(by_block.rows(out), rows_lse, by_block.rows(dout), None, *arguments(request))
            dq = by_block.sums(dq.reshape(-1, q.shape[3]), part[0]).view(q.shape)
            heads_first = k.shape[0], k.shape[2], k.shape[1], -1
            dk, dv = (g + p.view(heads_first).transpose(1, 2) for g, p in zip((dk, dv), part[1:], strict=True))
        return *(g.to(x.dtype) for g, x in zip((dq, dk, dv), (q, k, v), strict=True)), None, None, None


def _other_blocks(q: Tensor, k: Tensor, v: Tensor, by_block: Sorted, spec: Spec) -> Request:
    """The request of the packed sequences."""
    spec = spec._replace(after=None)
    return Request(by_block.rows(q), _keys(k), _keys(v), spec, cu_q=by_block.cu_q, cu_k=by_block.cu_k)


def _check(q: Tensor, k: Tensor, v: Tensor, block_size: int, top_k: int) -> None:
    for name, number in (("block_size", block_size), ("top_k", top_k)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise AttentionError(f"{name} of moba", repr(number), "an int, at least 1")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise AttentionError(f"shape of {name} of moba", found, "4 axes (batch, tokens, heads, dim)")
        if x.shape[:2] != q.shape[:2]:
            raise AttentionError(f"batch and tokens of {name} of moba", tuple(x.shape[:2]), f"q's {tuple(q.shape[:2])}")
    if q.shape[1] % block_size:
        raise AttentionError("block_size of moba", block_size, f"a number that divides the {q.shape[1]} tokens")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise AttentionError("heads of q of moba", q.shape[2], f"a multiple of k's {k.shape[2]}")


def _check_gate(wanted: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(wanted, Tensor) or tuple(wanted.shape) != shape:
        found = tuple(wanted.shape) if isinstance(wanted, Tensor) else type(wanted).__name__
        raise AttentionError("what the gate of moba returned", found, f"a tensor (B, S, H, blocks), {shape}")
