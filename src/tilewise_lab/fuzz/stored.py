"""Numbers of quantised caches by definition, apart from the library: of all numbers that a format has, the nearest."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0, "uint8": 7.0}  # uint8: two int4
# of scales; group: int4 alone, with 2 groups of dims or as many as named
KINDS = ("number", "scalar", "head", "batch", "token", "group", "group 4", "group 6", "group 8", "group 10")


def groups_of(kind: str) -> int:
    """How many scales a token has in each head; 0 if the scales are not by token."""
    name, _, count = kind.partition(" ")
    return {"token": 1, "group": int(count or 2)}.get(name, 0)


@cache
def numbers(name: str) -> tuple[Tensor, Tensor]:
    """The finite numbers of a format, ascending, and their codes (bytes; int4: four bits)."""
    with torch.device("cpu"):
        if name == "uint8":
            values = torch.arange(-8, 8)
            return values.double(), values & 15
        codes = torch.arange(256, dtype=torch.uint8)
        values = codes.view(getattr(torch, name)).double()
        keep = values.isfinite() & ~((values == 0) & (codes == 128))
        values, codes = values[keep], codes[keep]
        order = values.argsort()
        return values[order], codes[order].int()


def nearest(y: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(number, code) of the format that is nearest to each of y (float32); of two, the one with an even code; beyond
    the largest, the largest."""
    values, codes = (x.to(y.device) for x in numbers(name))
    y = y.double().clamp(values[0], values[-1])
    above = torch.searchsorted(values, y.contiguous()).clamp(1, len(values) - 1)
    below = above - 1
    low, high = y - values[below], values[above] - y
    at = torch.where((high < low) | ((high == low) & (codes[above] % 2 == 0)), above, below)
    negative_zero = (values[at] == 0) & y.signbit() & name.startswith("float")
    return values[at], torch.where(negative_zero, torch.full_like(codes[at], 128), codes[at])


def pack(x: Tensor, name: str, scale: Tensor) -> Tensor:
    """The bytes of tokens x (.., heads, dim), with scales (.., heads or 1, groups)."""
    _, code = nearest(x.float() / by_dim(scale, x.shape[-1]), name)
    if name == "uint8":
        low, high = code.chunk(2, -1)
        code = low | (high << 4)
    return code.to(torch.uint8)


def unpack(stored: Tensor, name: str, scale: Tensor) -> Tensor:
    """The numbers of bytes, in float64."""
    if name == "uint8":
        values = torch.cat([stored & 15, stored >> 4], -1).double()
        values = torch.where(values > 7, values - 16, values)
    else:
        values = stored.view(getattr(torch, name)).double()
    return values * by_dim(scale, values.shape[-1]).double()


def by_dim(scale: Tensor, dim: int) -> Tensor:
    return scale.float().repeat_interleave(dim // scale.shape[-1], -1)


def token_scale(x: Tensor, name: str, groups: int = 1) -> Tensor:
    """The scales (.., heads, groups) of tokens x (.., heads, dim)."""
    most = x.float().unflatten(-1, (groups, -1)).abs().amax(-1)
    scale = most / torch.full_like(most, LARGEST[name])
    return torch.where(scale == 0, 1.0, scale)


def scale_at(scale: Any, b: int, place: tuple[int, int], device: Any) -> Tensor:
    """The scales (heads or 1, groups) of the token of sequence b at (row, offset)."""
    if not isinstance(scale, Tensor):
        return torch.full((1, 1), 1.0 if scale is None else scale, device=device)
    if scale.dim() >= 3:
        return scale[place] if scale.dim() == 4 else scale[place][:, None]
    return (scale[b] if scale.dim() == 2 else scale.reshape(-1))[:, None]


def random_bytes(shape: tuple[int, ...], name: str) -> Tensor:
    """Bytes without nan and infinity, of numbers that are not much smaller than the largest."""
    low, high = {"float8_e4m3fn": (64, 126), "float8_e5m2": (100, 123)}.get(name, (0, 255))
    found = torch.randint(low, high + 1, shape, dtype=torch.uint8)
    return found | (torch.randint(0, 2, shape, dtype=torch.uint8) << 7) if name.startswith("float") else found


def random_packed(rows: int, page: int, columns: int) -> Tensor:
    """Tokens (rows, page, 1, columns) of bytes, whose first 656 are random ones in DeepSeek's fp8 format."""
    shape = rows, page, 1
    scale = (torch.rand(*shape, 4) + 0.5) * (2.0 / 448)
    rest = torch.randn(*shape, 64).to(torch.bfloat16)
    parts = random_bytes((*shape, 512), "float8_e4m3fn"), scale.view(torch.uint8), rest.view(torch.uint8)
    return torch.cat([*parts, torch.zeros(*shape, columns - 656, dtype=torch.uint8)], -1)


def tokens(shape: tuple[int, ...], kinds: tuple[str, ...], dtype: torch.dtype) -> Tensor:
    """New tokens (.., 1, dim), each of the next kind."""
    found = torch.randn(shape).to(dtype)
    for n, x in enumerate(found.flatten(0, -3)):
        at, info = n * 37 % shape[-1], torch.finfo(dtype)
        match kinds[n % len(kinds)]:
            case "zeros":
                x.zero_()
            case "tiny":  # with numbers whose scale is 0 in float32
                x.mul_(10.0 ** -(7 if dtype == torch.float16 else 38 + n % 8))
            case "one":
                x.zero_()[:, at] = -3.0
            case "signs":
                x[:, ::2] = -0.0
            case "huge":
                x.mul_(info.max / 8 if dtype != torch.float64 else 1e37)
            case "nan":
                x[:, at] = torch.nan
            case "inf":
                x[:, at] = -torch.inf
    return found
