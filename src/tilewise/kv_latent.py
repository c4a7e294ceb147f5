"""The cache of multi-head latent attention (MLA) in absorbed form: one row of 512 + 64 numbers for each token. The
first 512, the latent vector, are also the token's value. Imports torch alone.

DeepSeek's fp8 format has 656 bytes for each token:

    512 bytes   the latent vector in float8_e4m3fn, divided by its scales
     16 bytes   4 float32 scales, one for each 128 numbers
    128 bytes   the 64 numbers with rotary embedding, in bfloat16
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import AttentionError
from .request import MAX_HEAD_DIM
from .torch_internals import has_address

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
GROUPS = 4  # of the latent vector, each with a scale
BYTES = LATENT + 4 * GROUPS + 2 * ROPE
E4M3_LARGEST = 448.0


def is_latent(request: Any) -> bool:
    """Whether the head dim of a `KvRequest` is that of MLA: more than attention otherwise supports."""
    return bool(request.call.q.shape[-1] > MAX_HEAD_DIM)


def is_packed(cache: Tensor) -> bool:
    """Whether a cache has DeepSeek's fp8 format."""
    return cache.dtype == torch.float8_e4m3fn and cache.shape[-1] == BYTES


def shares_memory(k: Any, v: Any) -> bool:
    """Whether the values are the first columns of the keys of MLA, so that they are read once."""
    if not isinstance(k, Tensor) or not isinstance(v, Tensor) or k.dim() != 4 or k.shape[-1] <= MAX_HEAD_DIM:
        return False
    if k.stride() != v.stride() or k.dtype != v.dtype or not (has_address(k) and has_address(v)):
        return False
    return k.data_ptr() == v.data_ptr()


def pack_mla(kv: Tensor, *, power_of_two: bool = False) -> Tensor:
    """A cache of MLA in DeepSeek's fp8 format, 656 bytes for each token.

    >>> pack_mla(torch.randn(8, 64, 1, 576)).shape
    torch.Size([8, 64, 1, 656])

    Args:
        kv: (.., 576) floats: 512 latent numbers and 64 with rotary embedding.
        power_of_two: if True, scales are rounded up to powers of two, as DeepSeek's own quantisation does.

    Returns:
        uint8 (.., 656): the latent numbers / scale, rounded to the nearest float8_e4m3fn; the scales, the largest
        magnitude of 128 numbers / 448 (1 where that is 0); the rest in bfloat16.

    Raises:
        AttentionError: kv does not have 576 columns of floats.
    """
    if not isinstance(kv, Tensor) or kv.dim() < 1 or kv.shape[-1] != WIDTH or not kv.is_floating_point():
        found = f"{kv.dtype} {tuple(kv.shape)}" if isinstance(kv, Tensor) else type(kv).__name__
        raise AttentionError("kv of pack_mla", found, f"floats (.., {WIDTH})")
    if not isinstance(power_of_two, bool):
        raise AttentionError("power_of_two", type(power_of_two).__name__, "True or False")
    latent, rope = kv.float().split((LATENT, ROPE), -1)
    groups = latent.unflatten(-1, (GROUPS, -1))
    most = groups.abs().amax(-1)
    scale = most / torch.full_like(most, E4M3_LARGEST)
    if power_of_two:
        scale = torch.exp2(scale.log2().ceil())
    scale = torch.where(scale == 0, 1.0, scale)
    stored = (groups / scale[..., None]).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).flatten(-2)
    parts = stored, scale, rope.to(torch.bfloat16)
    return torch.cat([x.contiguous().view(torch.uint8) for x in parts], -1)


def unpack_latent(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers (.., 576) of tokens in DeepSeek's fp8 format."""
    stored, scale, rope = tokens.view(torch.uint8).split((LATENT, 4 * GROUPS, 2 * ROPE), -1)
    latent = stored.contiguous().view(torch.float8_e4m3fn).to(dtype).unflatten(-1, (GROUPS, -1))
    latent = (latent * scale.contiguous().view(torch.float32).to(dtype)[..., None]).flatten(-2)
    return torch.cat([latent, rope.contiguous().view(torch.bfloat16).to(dtype)], -1)
