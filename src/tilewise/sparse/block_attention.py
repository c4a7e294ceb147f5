"""Causal attention of each query over its own block of keys and over chosen blocks before it.

The queries that chose a block become one packed sequence, whose keys are the block. Packed attention gives (out, lse)
of every query over each of its blocks, and the results of a query merge by their lse (as in `tilewise.merge`): exact
attention over the union of the blocks. The products are in proportion to the chosen blocks, forward and backward.

Tokens are packed here, (T, heads, dim), and blocks are numbered through all sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.common.gpu import gpu_of
from ..ops.dense import registered
from ..request import Request, Spec, arguments

_library = torch.library.Library("tilewise_sparse", "FRAGMENT")
_library.define(
    "combine(Tensor base, Tensor? lse, Tensor parts, Tensor? part_lse, Tensor positions, ScalarType dtype)"
    " -> (Tensor, Tensor)"
)


class Sorted(NamedTuple):
    """The choices of blocks, sorted by KV head and block: the packed sequences that the queries and the blocks are.

    A line is a token and one of the C choosers of a token: its heads, or its KV heads. lines: of each choice, (count,);
    positions: the choices of each line, (T C, most), `count` where there is none; cu_q, cu_k.
    """

    lines: Tensor
    positions: Tensor
    cu_q: Tensor
    cu_k: Tensor

    def rows(self, x: Tensor) -> Tensor:
        """(T, H, D) -> (choices, G, D): the heads of each chooser."""
        choosers = self.positions.shape[0] // x.shape[0]
        return x.reshape(x.shape[0] * choosers, -1, x.shape[-1]).index_select(0, self.lines)


def sorted_choices(chosen: Tensor, kv_heads: int, starts: Tensor, count: int | None) -> Sorted:
    """`chosen` (T, C, most), blocks or -1; `starts` (blocks + 1,); `count`: how many are not -1, if it is known."""
    tokens, choosers, most = chosen.shape
    blocks, device = len(starts) - 1, chosen.device
    sequences = blocks * kv_heads
    dtype = torch.int16 if sequences < 2**15 else torch.int32  # a radix sort takes time by the bytes of its keys
    head = torch.arange(choosers, device=device) // (choosers // kv_heads)
    sequence = torch.where(chosen < 0, sequences, head[:, None] * blocks + chosen).to(dtype).flatten()
    ordered, order = sequence.sort(stable=True)
    count = len(order) if count is None else count
    order = order[:count]
    positions = torch.full(sequence.shape, count, dtype=torch.int32, device=device)
    positions[order] = torch.arange(count, dtype=torch.int32, device=device)
    positions = positions.masked_fill_(sequence == sequences, count)
    ends = torch.arange(sequences + 1, device=device)
    cu_q = torch.searchsorted(ordered, ends.to(dtype)).int()
    first = torch.arange(kv_heads, device=device)[:, None] * tokens + starts[:-1]
    cu_k = torch.cat([first.flatten(), first.new_full((1,), kv_heads * tokens)]).int()
    return Sorted(torch.div(order, most, rounding_mode="floor"), positions.view(-1, most), cu_q, cu_k)


def attend_dense(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, block_size: int, spec: Spec) -> Tensor:
    """out (B, S, H, Dv); S is a multiple of block_size. `chosen` (B, S, C, most): for each head or KV head of a query
    the blocks before its own, counted in its batch row: as many as there are, up to `most`, and -1."""
    batch, n, *_ = q.shape
    blocks, count = n // block_size, 0
    if chosen is not None:
        most = chosen.shape[3]
        count = batch * chosen.shape[2] * block_size * sum(min(b, most) for b in range(blocks))
        row = torch.arange(batch, device=q.device).view(-1, 1, 1, 1) * blocks
        chosen = torch.where(chosen < 0, -1, chosen + row).flatten(0, 1)
    starts = torch.arange(0, batch * n + 1, block_size, dtype=torch.int32, device=q.device)
    tokens = (x.flatten(0, 1) for x in (q, k, v))
    out: Tensor = BlockAttention.apply(*tokens, chosen, starts, (spec, block_size, count))  # type: ignore[no-untyped-call]
    return out.unflatten(0, (batch, n))


class BlockAttention(torch.autograd.Function):
    """out (T, H, Dv) over a query's own block and the chosen ones.

    The backward has no pass for the merge: with out and lse of the union, the backward of each part gives its share of
    the gradients, because p = exp(s - lse) and rowsum(dO * O) are those of the union.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chosen: Any, starts: Any, sizes: Any) -> Tensor:
        """`sizes`: the spec, block_size if all blocks have as many tokens, and the number of choices if known."""
        spec, block_size, count = sizes
        run, lists = registered("forward"), None
        out, lse = run(*arguments(_own_blocks(q, k, v, starts, block_size, spec)))
        out, lse = out.reshape(*q.shape[:2], v.shape[2]), lse.transpose(-1, -2).reshape(q.shape[:2])
        if chosen is not None:
            lists = sorted_choices(chosen, k.shape[1], starts, count)
            part, part_lse = run(*arguments(_other_blocks(q, k, v, lists, spec)))
            base = out.reshape(len(lists.positions), -1, v.shape[2])
            base, base_lse = combined(base, lse.reshape(base.shape[:2]), part, part_lse, lists.positions, q.dtype)
            out, lse = base.reshape(out.shape), base_lse.reshape(lse.shape)
        ctx.save_for_backward(q, k, v, out, lse, starts, *(lists or ()))
        ctx.sizes = sizes
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse, starts, *lists = ctx.saved_tensors
        spec, block_size, _ = ctx.sizes
        run, spec = registered("backward"), spec._replace(partial=True)
        dout = dout.contiguous()
        own = _own_blocks(q, k, v, starts, block_size, spec)
        of_blocks = [_by_block(x, block_size) for x in (out, lse, dout)]
        of_blocks[1] = of_blocks[1].transpose(-1, -2).contiguous()
        grads = run(*of_blocks, None, *arguments(own))
        dq, dk, dv = (g.reshape(x.shape) for g, x in zip(grads, (q, k, v), strict=True))
        if lists:
            by_block = Sorted(*lists)
            wide = lse.dtype
            delta = (out.to(wide) * dout.to(wide)).sum(-1, keepdim=True)
            rows_lse, rows_delta = (by_block.rows(x)[:, :, 0].mT.contiguous() for x in (lse[..., None], -delta))
            nothing = out.new_zeros(1).expand(len(by_block.lines), q.shape[1] * len(q) // len(by_block.positions), v.shape[2])
            request = _other_blocks(q, k, v, by_block, spec)
            part = run(nothing, rows_lse, by_block.rows(dout), rows_delta, *arguments(request))
            base = dq.reshape(len(by_block.positions), -1, q.shape[2])
            dq = combined(base, None, part[0], None, by_block.positions, q.dtype)[0].reshape(q.shape)
            dk, dv = (g + p.view(k.shape[1], len(k), -1).transpose(0, 1) for g, p in zip((dk, dv), part[1:], strict=True))
        return *(g.to(x.dtype) for g, x in zip((dq, dk, dv), (q, k, v), strict=True)), None, None, None


def _by_block(x: Tensor, block_size: int | None) -> Tensor:
    """(T, ...) -> (blocks, block_size, ...), if blocks have equal sizes."""
    return x if block_size is None else x.reshape(-1, block_size, *x.shape[1:])


def _own_blocks(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, block_size: int | None, spec: Spec) -> Request:
    """Every block is a batch row, or a packed sequence if their sizes differ."""
    cu = starts if block_size is None else None
    return Request(*(_by_block(x, block_size) for x in (q, k, v)), spec, cu_q=cu, cu_k=cu)


def _other_blocks(q: Tensor, k: Tensor, v: Tensor, lists: Sorted, spec: Spec) -> Request:
    """The request of the packed sequences."""
    keys, values = (x.transpose(0, 1).reshape(-1, 1, x.shape[2]) for x in (k, v))
    return Request(lists.rows(q), keys, values, spec._replace(after=None), cu_q=lists.cu_q, cu_k=lists.cu_k)


def combined(
    base: Tensor, lse: Tensor | None, parts: Tensor, part_lse: Tensor | None, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """base (lines, G, D) and the parts (count, G, D) of each line, merged by their lse (lines, G) and (G, count), or
    added. Returns (out in `dtype`, lse)."""
    found: tuple[Tensor, Tensor] = torch.ops.tilewise_sparse.combine(base, lse, parts, part_lse, positions, dtype)
    return found


@torch.library.impl(_library, "combine", "CompositeExplicitAutograd")
def _combine(
    base: Tensor, lse: Tensor | None, parts: Tensor, part_lse: Tensor | None, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if base.is_cuda and gpu_of(base.device) is not None and base.dtype != torch.float64:
        from ..backends.common import combine_parts

        tensors = (None if x is None else x.contiguous() for x in (base, lse, parts, part_lse, positions))
        with torch.cuda.device_of(base):
            return combine_parts.combine(*tensors, dtype)  # type: ignore[arg-type]
    wide = torch.promote_types(base.dtype, torch.float32)
    total, padded = base.to(wide), torch.cat([parts, parts.new_zeros(1, *parts.shape[1:])])
    if lse is None or part_lse is None:
        for slot in range(positions.shape[1]):
            total = total + padded.index_select(0, positions[:, slot]).to(wide)
        return total.to(dtype), total.new_empty(0)
    logs = torch.cat([part_lse.mT, part_lse.new_full((1, len(part_lse)), -torch.inf)])[positions.long()]
    logs = torch.cat([lse[:, None], logs], 1)  # (lines, 1 + most, G)
    merged = torch.logsumexp(logs, 1)
    weights = torch.exp(logs - merged.masked_fill(merged == -torch.inf, 0.0)[:, None])[..., None]
    total = total * weights[:, 0]
    for slot in range(positions.shape[1]):
        total = total + padded.index_select(0, positions[:, slot]).to(wide) * weights[:, 1 + slot]
    return total.to(dtype), merged


@torch.library.register_fake("tilewise_sparse::combine", lib=_library)
def _combine_fake(base: Tensor, lse: Tensor | None, parts: Any, part_lse: Any, positions: Any, dtype: Any) -> Any:
    return torch.empty_like(base, dtype=dtype), base.new_empty(0) if lse is None else torch.empty_like(lse)
