"""What keeps a call from the portable kernels. Imports torch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kv_formats import (
    format_of,
    has_words,
    head_dim,
    is_deepseek_fp8,
    is_latent,
    is_one_scale,
    scale_groups,
    shares_memory,
)
from ...request import MAX_HEAD_DIM, Gpu, Request, has_address, has_triton

AMD = ("gfx942", "gfx950")
MAX_SCALE_GROUPS = 32  # of dims of a head: a pair of groups is a tile of its own, of at least 64 columns


def unsupported(request: Request, gpu: Gpu | None) -> str | None:
    if gpu is None:
        if not has_triton():
            return "no triton installed (it comes with a CUDA build of torch)"
        return f"the tensors are on {'the ' if request.q.device.type == 'cpu' else ''}{request.q.device.type}"
    if gpu.kind == "cuda" and gpu.capability < 80:
        return "the GPU is older than Ampere (compute capability 8.0)"
    if gpu.kind == "hip" and gpu.arch not in AMD:
        return f"the GPU is a {gpu.arch}; {' and '.join(AMD)} are supported"
    if request.q.dtype == torch.float64:
        return "float64, which only the reference computes"
    if request.k.shape[-2] == 0:
        return "no heads"
    if isinstance(request, Request) and request.spec.token_boxes:
        return "tokens in boxes"
    if isinstance(request, Request):
        return None if request.spec.precision is None else unsupported_fp8(request, gpu)
    return unsupported_cache(request)


def unsupported_fp8(request: Request, gpu: Gpu) -> str | None:
    """Returns why a call with precision="fp8" is not supported, or None."""
    if gpu.kind != "interpreter" and not gpu.has_e4m3:
        return "precision='fp8' on a GPU without float8_e4m3fn (of NVIDIA, compute capability 8.9 and later)"
    if request.seed is not None:
        return "dropout with precision='fp8'"
    if request.q.numel() == 0 or request.k.numel() == 0:
        return "no queries or no keys, with precision='fp8'"
    return None


def unsupported_cache(request: Any) -> str | None:
    """Returns why a cache is not supported, or None. An append has no places."""
    places = getattr(request, "places", None)
    if places is not None and is_latent(request):
        return unsupported_latent(request.k, request.v, request.k_scale, request.v_scale)
    if places is not None and places.by_token:
        return f"token_table= with head dim {request.q.shape[-1]}; more than {MAX_HEAD_DIM} (MLA) are supported"
    if is_deepseek_fp8(request.k):  # an append
        return unsupported_latent(request.k, request.v)
    for name, x in (("k_cache", request.k), ("v_cache", request.v)):
        found = format_of(x)
        if found is not None and found.bits == 4 and not has_words(x):
            return f"{name} in int4 whose bytes are not contiguous pairs: head dims are multiples of 4 with stride 1"
        groups = 0 if places is None else scale_groups(getattr(request, f"{name[0]}_scale"))
        if groups > MAX_SCALE_GROUPS or (groups > 2 and head_dim(x) // groups % 2):
            dims = f"{groups} groups of {head_dim(x) // groups} dims"
            return f"{name} with {dims}; at most {MAX_SCALE_GROUPS} groups of an even number of dims are supported"
    return None


def unsupported_latent(k: Tensor, v: Tensor, k_scale: Any = None, v_scale: Any = None) -> str | None:
    """Returns why a cache of MLA is not supported, or None."""
    if is_deepseek_fp8(k):
        aligned = k.stride(-1) == 1 and all(x % 4 == 0 for x in (*k.stride()[:-1], k.storage_offset()))
        return None if aligned else "tokens of 656 bytes that are not contiguous at multiples of 4 bytes"
    found = format_of(k)
    if k.dtype != v.dtype or (found is not None and found.bits < 8):
        return f"a cache of {k.dtype} and {v.dtype} with a head dim above {MAX_HEAD_DIM}"
    if found is None:
        return None
    if has_address(k) and not shares_memory(k, v):
        return f"v of {v.dtype} that is not the first columns of k, with a head dim above {MAX_HEAD_DIM}"
    return None if is_one_scale(k_scale, v_scale) else "k_scale and v_scale that differ: in MLA v is part of k"


def declines(request: Any, gpu: Gpu | None) -> str | None:
    if gpu is not None and gpu.kind == "interpreter":
        return "the interpreter runs only when it is asked for by name"
    return None


def has_backward(request: Request) -> bool:
    return True
