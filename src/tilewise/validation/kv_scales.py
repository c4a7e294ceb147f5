"""Validates what turns new tokens into the numbers of a cache: dtypes, scales, the weights of qk-norm."""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..errors import AttentionError, shown
from ..kv_formats import (
    BYTES,
    FORMATS,
    LATENT,
    WIDTH,
    format_of,
    head_dim,
    is_deepseek_fp8,
    shares_memory,
)
from ..kv_request import QkNorm, Scale
from ..request import has_address
from .dense import DTYPES, resolved, tensor

HALVES = (torch.float16, torch.bfloat16)


def check_cache_dtype(name: str, cache: Tensor, dtype: torch.dtype, whose: str) -> None:
    """Raises AttentionError if a cache cannot hold tokens of a dtype."""
    if cache.dtype not in (dtype, *HALVES, *FORMATS):
        expected = f"{whose} {dtype}, or one of {', '.join(str(x) for x in (*HALVES, *FORMATS))} (uint8: int4, packed)"
        raise AttentionError(f"dtype of {name}", cache.dtype, expected)


def checked_scale(name: str, scale: Any, cache: Tensor, batch: int) -> Scale:
    """k_scale or v_scale of a cache."""
    found = format_of(cache)
    cache_name = name[0] + "_cache"
    if found is None:
        if scale is not None:
            expected = f"None: {cache_name} has {cache.dtype}, which needs no scale"
            raise AttentionError(name, shown(scale), expected)
        return None
    if scale is None:
        if found.is_integer:
            expected = f"a number or a float32 tensor: an {found.name} cache holds x / {name}, rounded"
            raise AttentionError(name, "None", expected)
        return None
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        if not isfinite(scale) or scale == 0:
            raise AttentionError(name, scale, "a finite number other than 0")
        return float(scale)
    scale = resolved(tensor(name, scale))
    if scale.dtype != torch.float32:
        raise AttentionError(f"dtype of {name}", scale.dtype, "torch.float32")
    if scale.device != cache.device:
        raise AttentionError(f"device of {name}", scale.device, f"{cache.device}, as the cache; or a Python float")
    if scale.requires_grad and torch.is_grad_enabled():
        raise AttentionError("requires_grad", f"True for {name}", "torch.no_grad() or .detach()")
    heads = cache.shape[2]
    shapes = [(), (heads,), (batch, heads), tuple(cache.shape[:3])]
    names = ["()", f"({heads},) by head", f"({batch}, {heads}) by sequence and head", f"{shapes[3]} by token and head"]
    by_group = False
    if found.bits == 4:
        dim, (*axes, groups) = head_dim(cache), scale.shape or (0,)
        by_group = tuple(axes) == shapes[3] and groups > 0 and groups % 2 == 0 and dim % groups == 0
        named = ", ".join(map(str, shapes[3]))
        names.append(f"({named}, G) by token, head and group of dims, of an even number G that divides {dim}")
    if not by_group and not any(scale.shape == shape for shape in shapes):
        raise AttentionError(f"shape of {name}", tuple(scale.shape), " or ".join(names))
    found_scale: Scale = scale
    return found_scale


def check_deepseek_fp8(k: Tensor, v: Tensor, k_scale: Any, v_scale: Any) -> None:
    """Raises AttentionError if the values of a cache in DeepSeek's fp8 format are not its latent vectors, or if it is
    given with scales."""
    elsewhere = not torch.compiler.is_compiling() and has_address(k) and not shares_memory(k, v)
    if v.shape[-1] != LATENT or v.dtype != k.dtype or elsewhere:
        expected = f"k_cache[..., :{LATENT}]: the values of a cache with {BYTES} bytes a token are part of its keys"
        raise AttentionError("v_cache", f"{v.dtype} {tuple(v.shape)}", expected)
    if k_scale is not None or v_scale is not None:
        raise AttentionError("k_scale and v_scale", "given", f"None: the {BYTES} bytes of a token have its scales")


def check_new_dtype(name: str, x: Tensor, cache: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise AttentionError(f"dtype of {name}", x.dtype, " or ".join(map(str, DTYPES)))
    check_cache_dtype(name[0] + "_cache", cache, x.dtype, f"{name}'s")
    if x.device != cache.device:
        raise AttentionError(f"device of {name}", x.device, f"{cache.device}, as the other tensors")
    if cache.shape[-1] == BYTES and cache.dtype == torch.uint8:
        expected = f"its .view({torch.float8_e4m3fn}), which is DeepSeek's fp8 format: uint8 is int4 here"
        raise AttentionError(f"{name[0]}_cache", f"torch.uint8 with {BYTES} bytes a token", expected)
    dim = WIDTH if is_deepseek_fp8(cache) else head_dim(cache)
    if x.shape[-2:] != (cache.shape[-2], dim):
        expected = f"the cache's {(cache.shape[-2], dim)}"
        raise AttentionError(f"heads and dim of {name}", tuple(x.shape[-2:]), expected)


def checked_norm(norm: Any, k_new: Tensor) -> QkNorm | None:
    if norm is None:
        return None
    if not isinstance(norm, QkNorm):
        raise AttentionError("qk_norm", type(norm).__name__, "tilewise.QkNorm(q_weight, k_weight)")
    weights = [resolved(norm.q_weight), resolved(norm.k_weight)]
    for name, x in zip(("q_weight", "k_weight"), weights, strict=True):
        if tuple(tensor(f"qk_norm {name}", x).shape) != (k_new.shape[-1],) or not x.is_floating_point():
            expected = f"floats ({k_new.shape[-1]},), one for each dim of a head"
            raise AttentionError(f"qk_norm {name}", f"{x.dtype} {tuple(x.shape)}", expected)
        if x.device != k_new.device:
            raise AttentionError(f"device of qk_norm {name}", x.device, f"{k_new.device}, as the other tensors")
    for name, number in (("eps", norm.eps), ("offset", norm.offset)):
        if not isinstance(number, (int, float)) or not isfinite(number) or (name == "eps" and number < 0):
            raise AttentionError(f"qk_norm {name}", shown(number), "a finite number" + (" >= 0" * (name == "eps")))
    # detach() makes another tensor, with which the call has no signature
    q_weight, k_weight = ((x.detach() if x.requires_grad else x).contiguous() for x in weights)
    return QkNorm(q_weight, k_weight, float(norm.eps), float(norm.offset))
