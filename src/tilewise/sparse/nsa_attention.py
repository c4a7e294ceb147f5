"""Native sparse attention (NSA): three causal branches, added with the weights of their gates.

- compressed: over one key and one value for each block of keys that ends at or before the query
- selected: over the tokens of the query's own block and of the blocks with the most weight in the first branch
- window: over the last tokens

The selection is by query and KV head, so all query heads of a group read the same keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..autograd import for_each_batched_gradient, is_higher_order
from ..call.options import BackendName
from ..errors import AttentionError, shown
from ..mods import mask_mod
from ..plan_cache import is_transformed
from ..request import gpu_of
from ..validation.dense import DTYPES, to_bshd
from .block_attention import attend_dense, attend_packed
from .checks import (
    check_indices,
    check_sizes,
    checked_batch,
    checked_packed,
    looped,
    named,
)
from .masked import attend_masked, attend_masked_packed
from .packed import best_of, block_means, packed_blocks
from .topk_attention import topk

_library = torch.library.Library("tilewise_sparse", "FRAGMENT")
_library.define("block_weights(Tensor q, Tensor keys, Tensor lse, SymInt block_size, float scale) -> Tensor")
_library.define("block_tokens(Tensor blocks, SymInt block_size) -> Tensor")
_library.define("gated_sum(Tensor[] outs, Tensor[] gates) -> Tensor")
_library.define("gated_sum_backward(Tensor dout, Tensor[] outs, Tensor[] gates) -> Tensor[]")
CHUNK = 1 << 24  # weights of the compressed branch that are computed at a time to select blocks


@mask_mod
def _ended_blocks(b, h, q_idx, kv_idx, block_size):  # type: ignore[no-untyped-def]
    return (kv_idx + 1) * block_size <= q_idx + 1


@named
def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Sequence[Tensor],
    *,
    block_size: int = 64,
    num_blocks: int = 16,
    window: int = 512,
    compressed: tuple[Tensor, Tensor] | None = None,
    blocks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Native sparse attention: gates[0] * compressed + gates[1] * selected + gates[2] * window, all causal.

    >>> q, k, v = (torch.randn(1, 64, heads, 16) for heads in (4, 1, 1))
    >>> gates = tuple(torch.rand(1, 64, 4) for _ in range(3))
    >>> nsa(q, k, v, gates, block_size=16, num_blocks=2, window=8).shape
    torch.Size([1, 64, 4, 16])

    A query sees a compressed block, and can select it, once the block ends at or before the query. The query's own
    block is always selected, up to the query. A query before the end of the first block gets 0 from the compressed
    branch.

    Args:
        q: queries (B, S, H, D), or (T, H, D) of packed sequences.
        k: keys (B, S, Hk, D), or (T, Hk, D).
        v: values (B, S, Hk, Dv), or (T, Hk, Dv).
        gates: the gates of the compressed, the selected and the window branch, (B, S, H) or (T, H) each, after their
            activation.
        block_size: keys of a block. S must be a multiple of it; the last block of a packed sequence may be short.
        num_blocks: selected blocks of a query, its own included.
        window: tokens of the window branch, the query included.
        compressed: the keys (B, S / block_size, Hk, D) and values of the blocks. Default: the means of their keys and
            values.
        blocks: (B, S, Hk, n) int32 or int64: the selected blocks of each query up to its own, -1 for none, no block
            twice. On a GPU that is not checked (TILEWISE_CHECK=1 does), and a later block counts as none. Default
            `selected_blocks`.
        scale: as in `tilewise.attention`.
        cu_seqlens: (sequences + 1,) integers, the offsets of packed sequences as in `tilewise.attention_varlen`. Only
            the default compression and selection are supported: `compressed` and `blocks` must be None.
        backend: as in `tilewise.attention`; if a backend is named, it must be "reference" or "triton".

    Returns:
        out (B, S, H, Dv) or (T, H, Dv) in q's dtype, differentiable with respect to q, k, v, gates and compressed. The
        selection has no gradient.

    Raises:
        AttentionError: an argument is not as above.
    """
    q, k, v = to_bshd(q, k, v)
    check_sizes(block_size=block_size, num_blocks=num_blocks, window=window)
    options: Any = {"scale": scale, "backend": backend}
    if cu_seqlens is not None:
        if compressed is not None or blocks is not None:
            raise AttentionError("compressed and blocks", "given with cu_seqlens", "None for packed sequences")
        return _packed((q, k, v), gates, cu_seqlens, (block_size, num_blocks, window), options)
    spec = checked_batch(q, k, v, block_size, options | {"causal": True})
    _check_gates(gates, q)
    keys, values = _block_keys(compressed, k, v, block_size)
    near = attention(q, k, v, causal=True, window=(window - 1, 0), **options)
    coarse, lse = attention(q, keys, values, mask_mod=_ended_blocks(block_size), return_lse=True, **options)
    chosen: Any
    if blocks is None:
        blocks = selected_blocks(q, keys, lse, block_size=block_size, num_blocks=num_blocks, scale=scale)
        others = blocks[..., 1:] if blocks.shape[3] > 1 else None
        if is_transformed():
            chosen = attend_masked(q, k, v, others, block_size, options | {"causal": True})
        else:
            chosen = attend_dense(q, k, v, others, block_size, spec)
    else:
        _check_blocks(blocks, q, k)
        chosen = topk(q, k, v, torch.ops.tilewise_sparse.block_tokens(blocks, block_size), **options)
    return _gated(coarse, chosen, near, *gates)


def _packed(
    inputs: tuple[Tensor, ...], gates: Any, cu_seqlens: Tensor, numbers: tuple[int, int, int], options: Any
) -> Tensor:
    q, k, v = inputs
    spec, cu_seqlens = checked_packed(q, k, v, cu_seqlens, options | {"causal": True})
    _check_gates(gates, q)
    block_size, num_blocks, window = numbers
    blocks = packed_blocks(cu_seqlens, len(q), block_size)
    keys, values = (block_means(x, blocks, block_size).to(x.dtype) for x in (k, v))
    near = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True, window=(window - 1, 0), **options)
    mod = _ended_blocks(block_size)
    ends = cu_seqlens, blocks.cu_blocks
    coarse, lse = attention_varlen(q, keys, values, *ends, mask_mod=mod, return_lse=True, **options)
    most, chosen = min(num_blocks, len(keys)) - 1, None
    if most > 0:
        with torch.no_grad():
            weight = _packed_weights(q, keys, lse, spec.scale)
            chosen = best_of(weight, blocks.first, blocks.own, most)
    if is_transformed():
        sizes, causal = (block_size, len(blocks.starts) - 1), options | {"causal": True}
        selected = attend_masked_packed(inputs, chosen, (cu_seqlens, blocks.cu_blocks), sizes, causal)
    else:
        selected = attend_packed(inputs, chosen, (cu_seqlens, blocks), block_size, spec)
    return _gated(coarse, selected, near, *gates)


def _gated(*branches: Tensor) -> Tensor:
    """The three outs times their gates."""
    if is_transformed():
        return _weighted(branches[:3], branches[3:])
    found: Tensor = GatedSum.apply(*branches)  # type: ignore[no-untyped-call]
    return found


def _packed_weights(q: Tensor, keys: Tensor, lse: Tensor, scale: float) -> Tensor:
    """(T, Hk, blocks): the weights of all blocks, also those of other sequences. Some tokens at a time."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    found = []
    step = max(1, CHUNK // max(1, q.shape[1] * len(keys)))
    for rows in range(0, len(q), step):
        grouped = q[rows : rows + step].to(dtype).unflatten(1, (keys.shape[1], -1))
        sums = lse[:, rows : rows + step].mT.unflatten(1, (keys.shape[1], -1)).to(dtype)[..., None]
        scores = scale * torch.einsum("thgd,nhd->thgn", grouped, keys.to(dtype))
        found.append(torch.exp(scores - sums.masked_fill(sums == -torch.inf, torch.inf)).sum(2))
    return torch.cat(found) if found else q.new_zeros((0, keys.shape[1], len(keys)), dtype=dtype)


@named
@torch.no_grad()
def selected_blocks(
    q: Tensor, keys: Tensor, lse: Tensor, *, block_size: int, num_blocks: int, scale: float | None = None
) -> Tensor:
    """A query's own block, and the blocks before it with the most weight in the compressed branch, summed over the
    query heads of the KV head.

    >>> import torch
    >>> q, keys = torch.randn(2, 256, 4, 16), torch.randn(2, 16, 2, 16)
    >>> lse = torch.zeros(2, 4, 256)
    >>> chosen = selected_blocks(q, keys, lse, block_size=16, num_blocks=3)
    >>> chosen.shape, int(chosen[0, 40, 0, 0])  # query 40 is in block 2
    (torch.Size([2, 256, 2, 3]), 2)

    Args:
        q: queries (B, S, H, D).
        keys: compressed keys (B, blocks, Hk, D).
        lse: (B, H, S): lse of the compressed branch.
        block_size: keys of a block.
        num_blocks: selected blocks, the query's own included.
        scale: factor of q.k in the compressed branch. Default 1 / sqrt(D).

    Returns:
        (B, S, Hk, min(num_blocks, blocks)) int64, -1 where a query has fewer; its own block is first, the others in any
        order.

    Raises:
        AttentionError: block_size or num_blocks is not an int above 0.
    """
    check_sizes(block_size=block_size, num_blocks=num_blocks)
    batch, n = q.shape[:2]
    others = min(num_blocks, keys.shape[1]) - 1
    own = torch.arange(n, device=q.device).div(block_size, rounding_mode="floor")
    found = own[None, :, None, None].expand(batch, n, keys.shape[2], 1)
    if others < 1:
        return found
    scale = q.shape[3] ** -0.5 if scale is None else scale
    weight = torch.ops.tilewise_sparse.block_weights(q, keys, lse, block_size, scale)
    own = own.repeat(batch)
    best = best_of(weight.flatten(0, 1), torch.zeros_like(own), own, others)
    return torch.cat([found, best.unflatten(0, (batch, n))], -1)


@torch.library.impl(_library, "block_weights", "CompositeExplicitAutograd")
def _block_weights(q: Tensor, keys: Tensor, lse: Tensor, block_size: int, scale: float) -> Tensor:
    """(B, S, Hk, blocks): the weights of blocks before a query's own, -1 for the others."""
    gpu = gpu_of(q.device)
    if gpu is not None and q.is_cuda and q.dtype != torch.float64:
        from ..backends.common import nsa as kernels

        with torch.cuda.device_of(q):
            return kernels.block_weights(q, keys, lse.contiguous(), block_size, scale, gpu)
    batch, n, heads, _ = q.shape
    count, kv_heads = keys.shape[1], keys.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    own = torch.arange(n, device=q.device) // block_size
    step = max(1, CHUNK // max(1, batch * heads * count))
    found = []
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        grouped = q[:, rows].to(dtype).unflatten(2, (kv_heads, -1))
        scores = scale * torch.einsum("bshgd,bchd->bshgc", grouped, keys.to(dtype))
        sums = lse[:, :, rows].transpose(1, 2).unflatten(2, (kv_heads, -1)).to(dtype)[..., None]
        weight = torch.exp(scores - sums.masked_fill(sums == -torch.inf, torch.inf)).sum(3)  # (B, rows, Hk, blocks)
        before = torch.arange(count, device=q.device) < own[rows, None]  # (rows, blocks)
        found.append(weight.masked_fill(~before[None, :, None], -1.0))
    return torch.cat(found, 1).contiguous()


torch.library.register_vmap(
    "tilewise_sparse::block_weights", looped(torch.ops.tilewise_sparse.block_weights), lib=_library
)


@torch.library.register_fake("tilewise_sparse::block_weights", lib=_library)
def _block_weights_fake(q: Tensor, keys: Tensor, *_: Any) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:2], keys.shape[2], keys.shape[1]), dtype=dtype)


class GatedSum(torch.autograd.Function):
    """The sum of out * gate over three branches, in float32 before it is rounded to the dtype of out."""

    @staticmethod
    def forward(ctx: Any, *branches: Tensor) -> Tensor:
        ctx.save_for_backward(*branches)
        total: Tensor = torch.ops.tilewise_sparse.gated_sum(branches[:3], branches[3:])
        return total

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Sequence[Tensor | None]:
        saved = ctx.saved_tensors

        def gradients(dout: Tensor) -> tuple[Tensor | None, ...]:
            if not torch.compiler.is_compiling() and is_higher_order(dout, *saved):
                return tuple(_gate_gradients(dout, saved[:3], saved[3:]))
            return tuple(torch.ops.tilewise_sparse.gated_sum_backward(dout, saved[:3], saved[3:]))

        return for_each_batched_gradient(gradients, dout)


@torch.library.impl(_library, "gated_sum", "CompositeExplicitAutograd")
def _gated_sum(outs: list[Tensor], gates: list[Tensor]) -> Tensor:
    if outs[0].is_cuda and outs[0].dtype != torch.float64:
        from ..backends.common import nsa as kernels

        total = torch.empty(outs[0].shape, dtype=outs[0].dtype, device=outs[0].device)
        rows, weights = (tuple(x.contiguous() for x in some) for some in (outs, gates))
        with torch.cuda.device_of(total):
            kernels.gated_launch(kernels.GateTensors(rows, weights, None, None, total))()
        return total
    return _weighted(outs, gates).contiguous()


def _weighted(outs: Sequence[Tensor], gates: Sequence[Tensor]) -> Tensor:
    dtype = torch.promote_types(outs[0].dtype, torch.float32)
    parts = [out.to(dtype) * gate.to(dtype)[..., None] for out, gate in zip(outs, gates, strict=True)]
    return sum(parts[1:], parts[0]).to(outs[0].dtype)


@torch.library.impl(_library, "gated_sum_backward", "CompositeExplicitAutograd")
def _gated_sum_backward(dout: Tensor, outs: list[Tensor], gates: list[Tensor]) -> list[Tensor]:
    if dout.is_cuda and dout.dtype != torch.float64:
        from ..backends.common import nsa as kernels

        rows, weights = (tuple(x.contiguous() for x in some) for some in (outs, gates))
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (*rows, *weights)]
        given = dout.contiguous()
        with torch.cuda.device_of(dout):
            kernels.gated_launch(kernels.GateTensors(rows, weights, tuple(grads[:3]), tuple(grads[3:]), given))()
        return grads
    return [x.contiguous() for x in _gate_gradients(dout, outs, gates)]


def _gate_gradients(dout: Tensor, outs: Sequence[Tensor], gates: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the three outs and of their gates, in torch."""
    dtype = torch.promote_types(dout.dtype, torch.float32)
    wide = dout.to(dtype)
    douts = [(wide * gate.to(dtype)[..., None]).to(out.dtype) for out, gate in zip(outs, gates, strict=True)]
    dgates = [(wide * out.to(dtype)).sum(-1).to(gate.dtype) for out, gate in zip(outs, gates, strict=True)]
    return [*douts, *dgates]


@torch.library.register_fake("tilewise_sparse::gated_sum", lib=_library)
def _gated_sum_fake(outs: list[Tensor], gates: list[Tensor]) -> Tensor:
    return outs[0].new_empty(outs[0].shape)


@torch.library.register_fake("tilewise_sparse::gated_sum_backward", lib=_library)
def _gated_sum_backward_fake(dout: Tensor, outs: list[Tensor], gates: list[Tensor]) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*outs, *gates)]


def _check_blocks(blocks: Tensor, q: Tensor, k: Tensor) -> None:
    if not isinstance(blocks, Tensor) or blocks.dtype not in (torch.int32, torch.int64):
        raise AttentionError("blocks", shown(blocks), "(B, S, Hk, n) int32 or int64")
    if blocks.dim() != 4 or blocks.shape[:3] != (*q.shape[:2], k.shape[2]) or blocks.shape[3] == 0:
        raise AttentionError("shape of blocks", tuple(blocks.shape), f"{(*q.shape[:2], k.shape[2])} and n at least 1")
    if blocks.device != q.device:
        raise AttentionError("device of blocks", blocks.device, f"q's {q.device}")


@torch.library.impl(_library, "block_tokens", "CompositeExplicitAutograd")
def _block_tokens(blocks: Tensor, block_size: int) -> Tensor:
    """(B, S, Hk, n * block_size) int32: the tokens of the blocks up to the query, -1 for the others."""
    at = torch.arange(blocks.shape[1], device=blocks.device, dtype=torch.int32)[:, None, None]
    own = torch.div(at, block_size, rounding_mode="floor")
    check_indices("blocks", "nsa", blocks, own)
    blocks = torch.where((blocks >= 0) & (blocks <= own), blocks, -1).int()  # only now: int32 would wrap
    tokens = blocks[..., None] * block_size + torch.arange(block_size, device=blocks.device, dtype=torch.int32)
    return torch.where((blocks[..., None] >= 0) & (tokens <= at[..., None]), tokens, -1).flatten(3).contiguous()


@torch.library.register_fake("tilewise_sparse::block_tokens", lib=_library)
def _block_tokens_fake(blocks: Tensor, block_size: int) -> Tensor:
    return blocks.new_empty((*blocks.shape[:3], blocks.shape[3] * block_size), dtype=torch.int32)


torch.library.register_vmap(
    "tilewise_sparse::block_tokens", looped(torch.ops.tilewise_sparse.block_tokens), lib=_library
)


def _means(x: Tensor, block_size: int) -> Tensor:
    """Of each block, summed in float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    means: Tensor = x.unflatten(1, (-1, block_size)).mean(2, dtype=dtype).to(x.dtype)
    return means


def _block_keys(compressed: Any, k: Tensor, v: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The keys and values of the compressed branch."""
    if compressed is None:
        return _means(k, block_size), _means(v, block_size)
    expected = [(k.shape[0], k.shape[1] // block_size, *x.shape[2:]) for x in (k, v)]
    is_pair = isinstance(compressed, (tuple, list))
    if not is_pair or [tuple(x.shape) if isinstance(x, Tensor) else () for x in compressed] != expected:
        raise AttentionError("compressed", shown(compressed), f"keys and values {expected[0]} and {expected[1]}")
    keys, values, _ = to_bshd(compressed[0], compressed[1], v)
    for x in (keys, values):
        if x.dtype != k.dtype or x.device != k.device:
            raise AttentionError("dtype of compressed", f"{x.dtype} on {x.device}", f"k's {k.dtype} on {k.device}")
    return keys, values


def _check_gates(gates: Any, q: Tensor) -> None:
    shape = q.shape[:-1]
    is_three = isinstance(gates, (tuple, list)) and len(gates) == 3
    if not is_three or any(not isinstance(g, Tensor) or g.shape != shape or g.dtype not in DTYPES for g in gates):
        raise AttentionError("gates", shown(gates), f"three tensors {tuple(shape)} of floats")
    if any(g.device != q.device for g in gates):
        raise AttentionError("device of gates", tuple(str(g.device) for g in gates), f"q's {q.device}")
