"""How the kernels are given a cache: as a view, of words where it is quantised, with its scale, and what they are
compiled for."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kv_formats import format_of, has_token_scales, has_words
from ....kv_request import Scale
from ..device.structs import View
from ..gpu import Gpu
from ..kernel_config import precision
from ..launch import INTERPRETED
from ..shapes import view
from . import formats

NO_VIEW = View(None, (0, 0, 0, 0, None))
E4M3_CAPABILITY = 89  # from which on PTX converts e4m3


def words_of(cache: Tensor) -> Tensor:
    """A quantised cache as words, or bytes where they cannot be read so; others as they are."""
    if format_of(cache) is None:
        return cache
    return cache.view(torch.int16) if has_words(cache) else cache.view(torch.uint8)


def bytes_of(cache: Tensor) -> Tensor:
    """A quantised cache as bytes, for the append kernel."""
    return cache if format_of(cache) is None else cache.view(torch.uint8)


def stored_of(cache: Tensor, q: Tensor, scale: Scale, gpu: Gpu) -> formats.Stored:
    """What the decode kernel is compiled for. Products are computed in the dtype of q and the cache if they agree; in
    float16, which holds all quantised numbers, where q is a 16-bit float; in float32 otherwise."""
    found = format_of(cache)
    operand = q.dtype
    if q.element_size() == 2 and (found is not None or cache.dtype != q.dtype):
        operand = torch.float32 if cache.dtype == torch.bfloat16 else torch.float16
    accuracy = precision(q, gpu)
    if operand == torch.float32 and q.element_size() == 2 and gpu.kind != "hip":
        accuracy = "tf32"  # holds float16 and bfloat16
    name = str(operand).removeprefix("torch.")
    narrows = operand == torch.float16 and q.dtype == torch.bfloat16
    if found is None:
        return formats.Stored(None, 1, name, accuracy, None, 1, narrows, False)
    kind = None if scale is None else "token" if has_token_scales(scale) else "head"
    groups = 2 if isinstance(scale, Tensor) and scale.dim() == 4 else 1
    parts = 16 // found.bits if has_words(cache) else 8 // found.bits
    pairs = parts > 1 and gpu.kind == "cuda" and not INTERPRETED
    if found.name == "e4m3" and gpu.capability < E4M3_CAPABILITY:
        pairs = False
    return formats.Stored(found.name, parts, name, accuracy, kind, groups, narrows or kind == "head", pairs)


def scale_of(scale: Scale) -> formats.Scale:
    """A scale as an argument of a kernel."""
    if not isinstance(scale, Tensor):
        return formats.Scale(NO_VIEW, 1.0 if scale is None else scale)
    if has_token_scales(scale):
        return formats.Scale(view(scale if scale.dim() == 4 else scale[..., None]), 1.0)
    steps = [0 if n == 1 else step for n, step in zip(scale.shape, scale.stride(), strict=True)]
    return formats.Scale(View(scale, (*[0] * (2 - len(steps)), *steps, 0, 0, None)), 1.0)
