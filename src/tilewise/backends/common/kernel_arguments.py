"""A request as kernels take it: its shapes, the views of its tensors, memory for the results, and its score terms
(tensors and numbers, functions, and factors folded into them)."""

from math import isfinite
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...errors import AttentionError
from ...mods.dropout import threshold
from ...request import MAX_HEAD_DIM, Gpu, Request, heads_are_queries
from . import mod_source as mods
from .device import structs as device
from .device.structs import View
from .launch import INTERPRETED, Memory

LARGEST = 55.0  # exp(55) is 2^79; float32 reaches 2^127, so values and their sums may be as large as 2^48


class CallShape(NamedTuple):
    """The shapes of one call. Packed sequences count as one batch row of `tokens`, tiled together."""

    batch: int
    n_q: int
    n_k: int
    heads: int
    kv_heads: int
    d: int
    dv: int
    packed: bool

    def tiles(self, n: int, block: int) -> int:
        return n // block + self.batch if self.packed else -(-n // block)

    def programs(self, n: int, heads: int, block: int) -> int:
        return self.tiles(n, block) * heads * (1 if self.packed else self.batch)

    def grid(self, n: int, heads: int, block: int) -> tuple[int, int, int]:
        """The arguments `tiles`, `heads` and `batch` of a kernel (structs.Grid)."""
        return self.tiles(n, block), heads, self.batch

    def in_rows(self, heads: int) -> "CallShape":
        """The same with `heads` query heads of a group as one head with more queries."""
        return self._replace(n_q=self.n_q * heads, heads=self.heads // max(heads, 1))


def call_shape(request: Request) -> CallShape:
    *_, n_q, heads, d = request.q.shape
    n_k, kv_heads, dv = request.v.shape[-3:]
    batch = request.q.shape[0] if request.cu_q is None else request.cu_q.shape[0] - 1
    return CallShape(batch, n_q, n_k, heads, kv_heads, d, dv, packed=request.cu_q is not None)


def sequences_and_window(request: Request) -> tuple[Any, ...]:
    """The arguments cu_q, cu_k, n_q, n_k, before and after of a kernel."""
    size, spec = call_shape(request), request.spec
    return request.cu_q, request.cu_k, size.n_q, size.n_k, spec.before, spec.after


def by_group(request: Request, out: Tensor, lse: Tensor) -> tuple[Request, Tensor, Tensor]:
    """The same forward with the heads of a group as queries, if `heads_are_queries`."""
    q, kv_heads = request.q, request.k.shape[-2]
    group, plain = q.shape[-2] // kv_heads, request.cu_q is None and request.is_plain
    if not plain or not heads_are_queries(q.shape[1], group, request.spec.before):
        return request, out, lse
    # (batch, 1, kv_heads * group, dim) -> (batch, group, kv_heads, dim)
    q, out = (x.unflatten(2, (kv_heads, group)).squeeze(1).transpose(1, 2) for x in (q, out))
    lse = lse.unflatten(1, (kv_heads, group)).squeeze(-1)
    return request._replace(q=q, spec=request.spec._replace(after=None)), out, lse


def view(x: Tensor) -> View:
    """The View of a (batch, token, head, dim) or packed (token, head, dim) tensor. Axes of size 1 have stride 0."""
    outer = (0 if n == 1 else stride for n, stride in zip(x.shape[:-1], x.stride(), strict=False))
    strides = (*outer, x.stride(-1)) if x.dim() == 4 else (0, *outer, x.stride(-1))
    is_large = (strides[1] + strides[3]) * MAX_HEAD_DIM >= 2**31
    remainders = {stride % 16 for stride in strides[:3]}
    return View(x, (*strides, 1 if is_large else None, 1 if not is_large and remainders in ({8}, {0, 8}) else None))


def padded(d: int, least: int = 16) -> int:
    """The power of two in which a head dim is computed."""
    return max(least, int(triton.next_power_of_2(d)))


def new_results(request: Request, memory: Memory) -> tuple[Tensor, Tensor]:
    """Memory for out and lse."""
    *outer, tokens, heads, _ = request.q.shape
    out = memory.empty((*outer, tokens, heads, request.v.shape[-1]), request.result_dtype)
    return out, memory.empty((*outer, heads, tokens), torch.float32)


def new_max_logit(request: Request, memory: Memory) -> Tensor | None:
    """Memory for the largest score of each head, (batch, heads) or packed (heads,), if the call returns it."""
    if not request.spec.max_logit:
        return None
    return memory.empty((*request.q.shape[:-3], request.q.shape[-2]), torch.float32)


def new_gradients(request: Request, memory: Memory) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients of q, k and v."""
    dq, dk, dv = (memory.empty(x.shape, request.result_dtype) for x in request[:3])
    return dq, dk, dv


def device_terms(request: Request, gpu: Gpu, tile: tuple[int, int] | None = None, by_key: bool = False) -> device.Terms:
    """The terms. For a kernel that uses the lists of a block mask, `tile` is the size of its tiles (queries, keys), and
    `by_key` is True if a program computes a tile of keys."""
    if request.is_plain:
        return device.Terms()
    spec, bias = request.spec, request.bias
    drops = request.seed is not None
    return device.Terms(
        bias=device.Bias() if bias is None else _bias(bias, request.cu_q is not None),
        sinks=device.Sinks() if request.sinks is None else device.Sinks(request.sinks, request.sinks.stride(0)),
        seed=request.seed,
        threshold=threshold(spec.dropout_p) if drops else None,
        rescale=1.0 / (1.0 - spec.dropout_p) if drops else None,
        score=mods.captured(request.score, (*spec.score_numbers, spec.scale)),
        mask=mods.captured(request.mask, spec.mask_numbers),
        blocks=_blocks(request, tile, by_key) if tile and request.blocks and lists_tiles(gpu) else device.Blocks(),
        has_derivative=1 if spec.score_mod and mods.has_derivative(spec.score_mod) else None,
        infinite_derivative=1 if spec.score_mod and mods.has_infinite_derivative(spec.score_mod) else None,
        large_scores=1 if has_large_scores(request) else None,
        position_offsets=request.position_offsets,
    )


def lists_tiles(gpu: Gpu) -> bool:
    """Whether the lists of a block mask are used. Triton cannot compile kernels with lists for AMD: there the mask mod
    is applied to every tile."""
    return gpu.kind != "hip"


def _blocks(request: Request, tile: tuple[int, int], by_key: bool) -> device.Blocks:
    block_q, block_k, batch, heads = request.spec.mask_block
    log_q, log_k = block_q.bit_length() - 1, block_k.bit_length() - 1
    if block_q % tile[0] or block_k % tile[1] or (1 << log_q, 1 << log_k) != (block_q, block_k):
        raise AttentionError("tiles of the block mask", (block_q, block_k), f"powers of two from {tile} on")
    offsets, entries = request.blocks[2:4] if by_key else request.blocks[:2]
    own, other = (log_k, log_q) if by_key else (log_q, log_k)
    rows = 16 * ((offsets.shape[0] - 1) // (batch * heads))
    head_rows = rows if heads > 1 else 0
    return device.Blocks(offsets, entries, rows * heads if batch > 1 else 0, head_rows, own, other, rows)


def _bias(x: Tensor, packed: bool) -> device.Bias:
    strides = tuple(0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True))
    rows, columns = (16 * n if packed and n > 1 else device.FAR for n in x.shape[2:])
    return device.Bias(x, rows, columns, strides)


def is_fast(q: Tensor, gpu: Gpu) -> bool:
    """Whether hardware approximations, as exact as 16-bit inputs, are used; the interpreter and AMD have none."""
    return q.element_size() == 2 and gpu.kind == "cuda" and not INTERPRETED


def score_mod(request: Request, gpu: Gpu) -> Any:
    return request.spec.score_mod and mods.value(request.spec.score_mod, is_fast(request.q, gpu))


def score_mod_with_derivative(request: Request, gpu: Gpu) -> Any:
    return request.spec.score_mod and mods.value_and_derivative(request.spec.score_mod, is_fast(request.q, gpu))


def mask_mod(request: Request) -> Any:
    return request.spec.mask_mod and mods.value(request.spec.mask_mod, False)


def folded(request: Request, gpu: Gpu, derivative: bool) -> tuple[dict[str, Any], float, float]:
    """(options, factor of the scores, factor of the gradients of q.k). The options are the score mod, with its
    derivative if `derivative`, and whether its argument is q.k instead of the score."""
    q, spec = request.q, request.spec
    if spec.score_mod and not has_large_scores(request) and q.element_size() == 2:
        numbers = *spec.score_numbers, spec.scale
        function, factor, rate = mods.folded(spec.score_mod, is_fast(q, gpu), derivative)
        scale, gradient_scale = mods.value_of(factor, numbers), spec.scale * mods.value_of(rate, numbers)
        if scale > 0 and isfinite(scale) and isfinite(gradient_scale):
            return {"SCORE_MOD": function, "FOLD": True}, scale, gradient_scale
    plain = score_mod_with_derivative(request, gpu) if derivative else score_mod(request, gpu)
    return {"SCORE_MOD": plain, "FOLD": is_linear(request)}, spec.scale, spec.scale


def is_bounded(request: Request, scale: float) -> bool:
    """Whether exp(score) and its sums always fit into float32 and bfloat16, so that no maximum is needed. False with
    dropout, which scales weights before they are rounded."""
    return (
        request.q.dtype == torch.bfloat16
        and request.spec.score_mod is not None
        and not has_large_scores(request)
        and request.sinks is None
        and request.seed is None
        and 0 < scale * mods.bound(request.spec.score_mod) <= LARGEST
    )


def has_large_scores(request: Request) -> bool:
    """Whether scores may be so large that a multiply-add rounds them by more than they differ."""
    spec = request.spec
    return request.bias is not None or (
        spec.score_mod is not None and mods.has_large_scores(spec.score_mod, spec.score_numbers)
    )


def is_linear(request: Request) -> bool:
    """Whether the score is q.k times a positive factor."""
    return request.spec.scale > 0 and request.spec.score_mod is None and request.bias is None


def lacks_jvp(request: Request) -> str | None:
    """Why the kernels of forward mode do not compute a call, or None. They recompute p from lse alone, which is too
    coarse for large scores (see `renormalise.py`)."""
    return "a bias, or a mod with large scores" if has_large_scores(request) else None


def lacks_hvp(request: Request) -> str | None:
    """Why the kernels of second derivatives do not compute a call, or None. They know no second derivative of a mod."""
    mod = request.spec.score_mod
    if mod and mods.has_derivative(mod):
        return "a softcap, or a score mod that is not a sum of the score and another term"
    return lacks_jvp(request)
