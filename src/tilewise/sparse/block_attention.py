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

from ..autograd import for_each_batched_gradient, is_higher_order
from ..ops.dense import registered
from ..request import Gpu, Request, Spec, arguments, gpu_of
from .block_ops import combined
from .masked import attend_masked_packed, attend_masked_rows, gradients_of
from .packed import PackedBlocks

FUSED = "auto", "triton"  # backends whose small blocks have kernels of their own


class Sorted(NamedTuple):
    """The choices of blocks, sorted by KV head and block: the packed sequences that the queries and the blocks are.

    A line is a token and one of the C choosers of a token: its heads, or its KV heads.
    lines: the line of each choice, (count,);
    positions: the choices of each line, (T C, most), `count` where there is none; cu_q, cu_k.
    """

    lines: Tensor
    positions: Tensor
    cu_q: Tensor
    cu_k: Tensor

    def rows(self, x: Tensor) -> Tensor:
        """(T, H, D) -> (choices, G, D): the heads of each chooser."""
        choosers = self.positions.shape[0] // x.shape[0]
        lines = x.reshape(x.shape[0] * choosers, -1, x.shape[-1])
        found: Tensor = torch.ops.tilewise_sparse.gather(lines, self.lines)
        return found


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


class Sizes(NamedTuple):
    """block_size: the largest size of a block, and that of all if `even`; choices: their number, if known; batch: rows
    of equal lengths, if `even`."""

    spec: Spec
    block_size: int
    even: bool
    choices: int | None
    batch: int = 1


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
    tokens, sizes = (x.flatten(0, 1) for x in (q, k, v)), Sizes(spec, block_size, True, count, batch)
    out: Tensor = BlockAttention.apply(*tokens, chosen, starts, None, None, sizes)  # type: ignore[no-untyped-call]
    found: Tensor = out.unflatten(0, (batch, n))
    return found


def attend_packed(
    inputs: tuple[Tensor, ...],
    chosen: Tensor | None,
    offsets: tuple[Tensor, PackedBlocks],
    block_size: int,
    spec: Spec,
) -> Tensor:
    """out (T, H, Dv) of packed sequences. `chosen` (T, C, most), counted through all sequences; `offsets`: cu_seqlens
    and the blocks."""
    cu_seqlens, blocks = offsets
    ends, sizes = (cu_seqlens, blocks.cu_blocks), Sizes(spec, block_size, False, None)
    out: Tensor = BlockAttention.apply(*inputs, chosen, blocks.starts, *ends, sizes)  # type: ignore[no-untyped-call]
    return out


class BlockAttention(torch.autograd.Function):
    """out (T, H, Dv) over a query's own block and the chosen ones.

    The backward has no pass for the merge: with out and lse of the union, the backward of each part gives its share of
    the gradients, because p = exp(s - lse) and rowsum(dO * O) are those of the union. If torch may differentiate it
    again, it is that of dense attention with a mask.

    Arguments: q, k, v; the choices or None; the first token of each block; of packed sequences cu_seqlens and the first
    block of each, else None; sizes.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chosen: Any, starts: Tensor, *rest: Any) -> Tensor:
        *ends, sizes = rest
        lists: Any = ()
        chosen = chosen if q.shape[0] else None
        if chosen is not None and _is_fused(q, v, chosen.shape[1], sizes):
            lists = _with_own(chosen, k, starts, sizes)
            numbers = _choices_of(q, lists, starts, sizes)
            part, part_lse = torch.ops.tilewise_sparse.block_parts(q, k, v, *numbers)
            out, lse = combined(None, None, part, part_lse, lists.positions, q.dtype)
        else:
            out, lse = registered("forward")(*arguments(_own_blocks(q, k, v, starts, sizes, sizes.spec)))
            lse = lse.transpose(-1, -2)
            if chosen is not None:
                lists = sorted_choices(chosen, k.shape[1], starts, sizes.choices)
                part, part_lse = registered("forward")(*arguments(_other_blocks(q, k, v, lists, sizes.spec)))
                base = out.reshape(len(lists.positions), -1, v.shape[2])
                out, lse = combined(base, lse.reshape(base.shape[:2]), part, part_lse, lists.positions, q.dtype)
        out, lse = out.reshape(*q.shape[:2], v.shape[2]), lse.reshape(q.shape[:2])
        ctx.save_for_backward(q, k, v, out, lse, starts, chosen, *ends, *lists)
        ctx.sizes = sizes
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, starts, chosen, cu_seqlens, cu_blocks, *lists = ctx.saved_tensors
        choices = Sorted(*lists) if lists else None

        def masked(*inputs: Tensor) -> Tensor:
            spec, block_size, even, _, batch = ctx.sizes
            numbers = block_size, len(starts) - 1
            options = {"causal": True, "scale": spec.scale, "backend": spec.backend}
            if even:
                return attend_masked_rows(inputs, chosen, batch, numbers, options)
            return attend_masked_packed(inputs, chosen, (cu_seqlens, cu_blocks), numbers, options)

        def gradients(dout: Tensor) -> tuple[Tensor | None, ...]:
            if not torch.compiler.is_compiling() and is_higher_order(q, k, v, dout):
                return gradients_of(masked, (q, k, v), dout)
            with torch.no_grad():
                return _gradients((q, k, v), (out, lse, dout.contiguous()), choices, starts, ctx.sizes)

        return *for_each_batched_gradient(gradients, dout), *(None,) * 5


def _gradients(
    inputs: tuple[Tensor, ...], saved: tuple[Tensor, ...], choices: Sorted | None, starts: Tensor, sizes: Sizes
) -> tuple[Tensor, ...]:
    """dq, dk and dv. `saved`: out, lse and dout."""
    q, k, v = inputs
    out, lse, dout = saved
    if choices is not None and _is_fused(q, v, choices.positions.shape[0] // q.shape[0], sizes):
        rows = [dout, lse, torch.ops.tilewise_sparse.row_dots(out, dout)]
        numbers = _choices_of(q, choices, starts, sizes)
        part, dk, dv = torch.ops.tilewise_sparse.block_parts_backward(rows, q, k, v, *numbers)
        dq = combined(None, None, part, None, choices.positions, q.dtype)[0].reshape(q.shape)
        return dq, dk, dv
    scatters = choices is not None and _is_scattered(q, v, choices, sizes.spec)
    own = _own_blocks(q, k, v, starts, sizes, sizes.spec if scatters else sizes.spec._replace(partial=True))
    own_out, own_lse, own_dout = (_by_block(x, sizes) for x in saved)
    grads = registered("backward")(own_out, own_lse.transpose(-1, -2).contiguous(), own_dout, None, *arguments(own))
    dq, dk, dv = (g.reshape(x.shape) for g, x in zip(grads, inputs, strict=True))
    if choices is not None:
        part, *others = _part_gradients(inputs, saved, choices, sizes, scatters)
        if scatters:
            dq = torch.ops.tilewise_sparse.add_sums(dq, part, sizes.spec.scale)
        else:
            base = dq.reshape(len(choices.positions), -1, q.shape[2])
            dq = combined(base, None, part, None, choices.positions, q.dtype)[0].reshape(q.shape)
        by_head = _transposed(k.shape[1], k.shape[0], k.device).int()[:, None]
        dk, dv = (
            combined(a.reshape(-1, 1, a.shape[2]), None, b, None, by_head, x.dtype)[0].reshape(x.shape)
            for a, b, x in zip((dk, dv), others, (k, v), strict=True)
        )
    return tuple(g.to(x.dtype) for g, x in zip((dq, dk, dv), inputs, strict=True))


def _with_own(chosen: Tensor, k: Tensor, starts: Tensor, sizes: Sizes) -> Sorted:
    """The choices, and the block of each token as one more."""
    tokens, choosers, _ = chosen.shape
    own = torch.searchsorted(starts, torch.arange(tokens, device=k.device, dtype=starts.dtype), right=True) - 1
    own = torch.where(own < len(starts) - 1, own, -1)[:, None, None].expand(tokens, choosers, 1)
    count = None if sizes.choices is None else sizes.choices + tokens * choosers
    return sorted_choices(torch.cat([own, chosen], 2), k.shape[1], starts, count)


def _part_gradients(
    inputs: tuple[Tensor, ...], saved: tuple[Tensor, ...], lists: Sorted, sizes: Sizes, scatters: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq of the choices, or if it `scatters` their sums for `add_sums`; dk and dv by KV head, (Hk T, 1, D). `saved`:
    out, lse and dout."""
    q, k, v = inputs
    out, lse, dout = saved
    delta = torch.ops.tilewise_sparse.row_dots(out, dout)
    rows_lse, rows_delta = (lists.rows(x[..., None])[:, :, 0].mT.contiguous() for x in (lse, -delta))
    rows_dout = lists.rows(dout)
    if scatters:
        rows = *_other_blocks(q, k, v, lists, sizes.spec)[:3], rows_dout, rows_lse, rows_delta
        numbers = q.shape[0] * q.shape[1], sizes.even, sizes.spec.scale
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.tilewise_sparse.scattered_backward(
            rows, lists.lines.int(), lists.cu_q, lists.cu_k, *numbers
        )
        return found
    nothing = out.new_zeros(1).expand_as(rows_dout)  # rowsum(dO * O) is given as a gradient of lse
    request = _other_blocks(q, k, v, lists, sizes.spec)
    dq, dk, dv = registered("backward")(nothing, rows_lse, rows_dout, rows_delta, *arguments(request))
    return dq, dk, dv


def _is_fused(q: Tensor, v: Tensor, choosers: int, sizes: Sizes) -> bool:
    """Whether the kernels of small blocks run the choices."""
    group = q.shape[1] // choosers
    small = sizes.block_size <= 128 and max(q.shape[2], v.shape[2]) <= 128 and group <= 64
    halves = q.dtype in (torch.float16, torch.bfloat16)
    return small and halves and sizes.spec.backend in FUSED and gpu_of(q.device) == Gpu("cuda", 90)


def _is_scattered(q: Tensor, v: Tensor, lists: Sorted, spec: Spec) -> bool:
    """Whether the Hopper backward adds dq of the choices to the rows of their queries: without `deterministic`, and for
    the head dims of which a row is some power of two of columns in registers."""
    d, dv = q.shape[2], v.shape[2]
    fits = d in (64, 128) and dv <= 128 and dv % 8 == 0 and lists.lines.shape[0] > 0
    halves = q.dtype in (torch.float16, torch.bfloat16)
    able = spec.backend not in ("triton", "reference") and gpu_of(q.device) == Gpu("cuda", 90)
    return fits and halves and able and not spec.deterministic


def _choices_of(q: Tensor, lists: Sorted, starts: Tensor, sizes: Sizes) -> tuple[Any, ...]:
    choosers = lists.positions.shape[0] // q.shape[0]
    return lists.lines, lists.cu_q, starts, choosers, sizes.block_size, sizes.spec.scale


def _by_block(x: Tensor, sizes: Sizes) -> Tensor:
    """(T, ...) -> (blocks, block_size, ...), if blocks have equal sizes."""
    return x.reshape(-1, sizes.block_size, *x.shape[1:]) if sizes.even else x


def _own_blocks(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, sizes: Sizes, spec: Spec) -> Request:
    """Every block is a batch row, or a packed sequence if their sizes differ."""
    cu = None if sizes.even else starts
    return Request(_by_block(q, sizes), _by_block(k, sizes), _by_block(v, sizes), spec, cu_q=cu, cu_k=cu)


def _other_blocks(q: Tensor, k: Tensor, v: Tensor, lists: Sorted, spec: Spec) -> Request:
    """The request of the packed sequences."""
    lines = _transposed(k.shape[0], k.shape[1], k.device)
    keys, values = (torch.ops.tilewise_sparse.gather(x.reshape(-1, 1, x.shape[2]), lines) for x in (k, v))
    return Request(lists.rows(q), keys, values, spec._replace(after=None), cu_q=lists.cu_q, cu_k=lists.cu_k)


def _transposed(rows: int, columns: int, device: torch.device) -> Tensor:
    """The lines of a (rows, columns) matrix in the order of its columns. A gather by them copies at the memory's rate,
    torch at a third of it."""
    return torch.arange(rows * columns, device=device).view(rows, columns).T.flatten()
