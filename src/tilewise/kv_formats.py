"""The formats of a KV cache: what a stored number means, and how a number is stored. Imports torch alone.

    float8_e4m3fn, float8_e5m2    stored = round(clamp(x / scale, -largest, largest)), to the nearest float8
    int8                          stored = clamp(round(x / scale), -128, 127)
    uint8 (int4)                  stored = clamp(round(x / scale), -8, 7), two in a byte

x / scale is computed in float32 and rounded to nearest, ties to even. Byte i of a head in int4 holds dims i (low four
bits) and i + D / 2 (high four bits), in two's complement. A number read from the cache is stored * scale. A token and
head may have a scale for each of G groups of D / G dims, for int4 of an even number: no group has dims of both halves.

The cache of multi-head latent attention (MLA) in absorbed form has one row of 512 + 64 numbers for each token. The
first 512, the latent vector, are also the token's value. DeepSeek's fp8 format has 656 bytes for each token:

    512 bytes   the latent vector in float8_e4m3fn, divided by its scales
     16 bytes   4 float32 scales, one for each 128 numbers
    128 bytes   the 64 numbers with rotary embedding, in bfloat16
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import AttentionError
from .request import MAX_HEAD_DIM, has_address

LATENT, ROPE = 512, 64  # numbers of a token of MLA
WIDTH = LATENT + ROPE
GROUPS = 4  # of the latent vector, each with a scale
BYTES = LATENT + 4 * GROUPS + 2 * ROPE  # of a token in the fp8 format


class Format(NamedTuple):
    """`bits` of a number; the scale of a token is its largest magnitude / `largest`, so that nothing saturates."""

    name: str
    bits: int
    largest: float
    is_integer: bool


FORMATS = {
    torch.float8_e4m3fn: Format("e4m3", 8, torch.finfo(torch.float8_e4m3fn).max, False),
    torch.float8_e5m2: Format("e5m2", 8, torch.finfo(torch.float8_e5m2).max, False),
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


def scale_groups(scale: Tensor | float | None) -> int:
    """The groups of dims of a token and head that have a scale each; 0 if there is no scale for each token."""
    if not isinstance(scale, Tensor) or scale.dim() < 3:
        return 0
    return int(scale.shape[3]) if scale.dim() == 4 else 1


def is_one_scale(k_scale: Tensor | float | None, v_scale: Tensor | float | None) -> bool:
    """Whether keys and values have the same scale: one tensor for both, or equal numbers."""
    if isinstance(k_scale, Tensor) or isinstance(v_scale, Tensor):
        return k_scale is v_scale
    return k_scale == v_scale


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


def is_latent(request: Any) -> bool:
    """Whether the head dim of a `KvRequest` is that of MLA: more than attention otherwise supports."""
    return bool(request.dense.q.shape[-1] > MAX_HEAD_DIM)


def is_deepseek_fp8(cache: Tensor) -> bool:
    """Whether a cache has DeepSeek's fp8 format."""
    return cache.dtype == torch.float8_e4m3fn and cache.shape[-1] == BYTES


def shares_memory(k: Any, v: Any) -> bool:
    """Whether the values are the first columns of the keys of MLA, so that they are read once."""
    if not isinstance(k, Tensor) or not isinstance(v, Tensor) or k.dim() != 4 or k.shape[-1] <= MAX_HEAD_DIM:
        return False
    if k.stride() != v.stride() or k.dtype != v.dtype or not (has_address(k) and has_address(v)):
        return False
    return k.data_ptr() == v.data_ptr()


def shared_columns(k: Any, v: Any) -> tuple[int, int]:
    """The columns [first, end) of the keys whose memory the values of the same token have: (0, 512) for MLA, (0, 0) if
    there are none. A trace has no addresses: its ops ask again when they run.

    >>> cache = torch.zeros(8, 64, 1, 576)
    >>> shared_columns(cache, cache[..., :512]), shared_columns(cache, cache.clone())
    ((0, 512), (0, 0))
    """
    if not isinstance(k, Tensor) or not isinstance(v, Tensor) or k.dim() != 4 or v.dim() != 4:
        return 0, 0
    if torch.compiler.is_compiling():
        return 0, 0
    step = k.stride(-1) * k.element_size()
    if k.stride() != v.stride() or k.dtype != v.dtype or not step or not (has_address(k) and has_address(v)):
        return 0, 0
    first, rest = divmod(v.data_ptr() - k.data_ptr(), step)
    lo, hi = max(first, 0), min(first + v.shape[-1], k.shape[-1])
    return (lo, hi) if rest == 0 and lo < hi and k.data_ptr() else (0, 0)


def pack_mla(kv: Tensor, *, power_of_two: bool = False) -> Tensor:
    """A cache of MLA in DeepSeek's fp8 format, 656 bytes for each token.

    >>> pack_mla(torch.randn(8, 64, 1, 576)).shape
    torch.Size([8, 64, 1, 656])

    Args:
        kv: (.., 576) floats: 512 latent numbers and 64 with rotary embedding.
        power_of_two: if True, scales are rounded up to powers of two, as DeepSeek's own quantisation does.

    Returns:
        uint8 (.., 656): the latent numbers / scale, rounded to the nearest float8_e4m3fn; the scales, the largest
        magnitude of 128 numbers / 448 (1 where that is 0); the rest in bfloat16. `attention_mla` reads it as it is;
        `attention_kv` and `append_kv`, where uint8 is int4, its `.view(torch.float8_e4m3fn)`.

    Raises:
        AttentionError: kv does not have 576 columns of floats.
    """
    if not isinstance(kv, Tensor) or kv.dim() < 1 or kv.shape[-1] != WIDTH or not kv.is_floating_point():
        found = f"{kv.dtype} {tuple(kv.shape)}" if isinstance(kv, Tensor) else type(kv).__name__
        raise AttentionError("kv of pack_mla", found, f"floats (.., {WIDTH})")
    if not isinstance(power_of_two, bool):
        raise AttentionError("power_of_two", type(power_of_two).__name__, "True or False")
    latent, rope = kv.float().split((LATENT, ROPE), -1)
    scale = token_scales(latent, torch.float8_e4m3fn, GROUPS)
    if power_of_two:
        scale = torch.exp2(scale.log2().ceil())
    stored = quantise(latent, scale, torch.float8_e4m3fn)
    parts = stored, scale, rope.to(torch.bfloat16)
    return torch.cat([x.contiguous().view(torch.uint8) for x in parts], -1)


def packed_parts(cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a cache in DeepSeek's fp8 format: the bytes of the latent numbers, their scales, the rest. Tokens lie at
    multiples of 4 bytes."""
    stored, scale, rope = cache.view(torch.uint8).split((LATENT, 4 * GROUPS, 2 * ROPE), -1)
    return stored, scale.view(torch.float32), rope.view(torch.bfloat16)


def unpack_latent(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers (.., 576) of tokens in DeepSeek's fp8 format."""
    stored, scale, rope = tokens.view(torch.uint8).split((LATENT, 4 * GROUPS, 2 * ROPE), -1)
    scale = scale.contiguous().view(torch.float32)
    latent = dequantise(stored.contiguous().view(torch.float8_e4m3fn), scale, dtype)
    return torch.cat([latent, rope.contiguous().view(torch.bfloat16).to(dtype)], -1)
