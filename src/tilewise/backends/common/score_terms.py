"""The score terms of a request as kernels take them: tensors and numbers, functions, and factors folded into them."""

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ...errors import AttentionError
from ...mods.dropout import kept_factor, threshold
from ...request import Gpu, Request
from . import mod_source as mods
from .device import structs as device
from .launch import INTERPRETED

LARGEST = 55.0  # exp(55) is 2^79; float32 reaches 2^127, so values and their sums may be as large as 2^48


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
        rescale=kept_factor(spec.dropout_p) if drops else None,
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
    return {"SCORE_MOD": plain, "FOLD": spec.is_linear(request.bias is not None)}, spec.scale, spec.scale


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
