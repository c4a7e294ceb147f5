"""The formats of a quantised KV cache: what a stored number means, and how a number is stored. Imports torch alone.

    float8_e4m3fn, float8_e5m2    stored = round(clamp(x / scale, -largest, largest)), to the nearest float8
    int8                          stored = clamp(round(x / scale), -128, 127)
    uint8 (int4)                  stored = clamp(round(x / scale), -8, 7), two in a byte

x / scale is computed in float32 and rounded to nearest, ties to even. Byte i of a head in int4 holds dims i (low four
bits) and i + D / 2 (high four bits), in two's complement. A number read from the cache is stored * scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .torch_internals import has_address


class Format(NamedTuple):
    """`bits` of a number; the scale of a token is its largest magnitude / `largest`, so that nothing saturates."""

    name: str
    bits: int
    largest: float
    is_integer: bool


FORMATS = {
    torch.float8_e4m3fn: Format("e4m3", 8, 448.0, False),
    torch.float8_e5m2: Format("e5m2", 8, 57344.0, False),
    torch.int8: Format("int8", 8, 127.0, True),
    torch.uint8: Format("int4", 4, 7.0, True),
}


def format_of(cache: Tensor) -> Format | None:
    """The format of a quantised cache, or None for a floating-point dtype that attention computes in."""
    return FORMATS.get(cache.dtype)


def head_dim(cache: Tensor) -> int:
    """The head dim of a cache: a byte of an int4 cache holds two dims."""
    return cache.shape[-1] * 2 if cache.dtype == torch.uint8 else cache.shape[-1]


def has_words(cache: Tensor) -> bool:
    """Whether the bytes of a token can be read as words of 16 bits."""
    address = cache.data_ptr() if has_address(cache) and not cache.is_meta else cache.storage_offset()
    return (
        cache.shape[-1] % 2 == 0 and cache.stride(-1) == 1 and all(x % 2 == 0 for x in (*cache.stride()[:-1], address))
    )


def has_token_scales(scale: Tensor | float | None) -> bool:
    """Whether there is a scale for each token and head (and group of dims), which an append computes and writes."""
    return isinstance(scale, Tensor) and scale.dim() >= 3


def token_scales(x: Tensor, dtype: torch.dtype, groups: int = 1) -> Tensor:
    """The scales (.., heads, groups) of new tokens x (.., heads, dim) in a cache of a dtype: the largest magnitude of a
    group of dims / `largest`, in float32; 1 where that is 0."""
    most = x.float().unflatten(-1, (groups, -1)).abs().amax(-1)
    scale = most / torch.full_like(most, FORMATS[dtype].largest)  # torch multiplies by the reciprocal of a number
    return torch.where(scale == 0, 1.0, scale)


def quantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x (.., heads, dim) as stored in a cache of a dtype. `scale`: (.., heads, groups), which may broadcast. As an
    integer, nan is 0."""
    found = FORMATS[dtype]
    y: Tensor = (x.float().unflatten(-1, (scale.shape[-1], -1)) / scale[..., None]).flatten(-2)
    if not found.is_integer:
        return y.clamp(-found.largest, found.largest).to(dtype)
    n = y.round().nan_to_num(0.0).clamp(-found.largest - 1, found.largest).to(torch.int8)
    if found.bits == 8:
        return n
    low, high = n.view(torch.uint8).chunk(2, -1)
    return (low & 15) | (high << 4)


def dequantise(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers (.., heads, dim) that a cache holds, in a dtype. `scale` as in `quantise`."""
    if FORMATS[stored.dtype].bits == 4:
        stored = torch.cat([stored & 15, stored >> 4], -1).to(torch.int8)
        stored = torch.where(stored > 7, stored - 16, stored)
    x: Tensor = stored.to(dtype).unflatten(-1, (scale.shape[-1], -1)) * scale[..., None].to(dtype)
    return x.flatten(-2)
