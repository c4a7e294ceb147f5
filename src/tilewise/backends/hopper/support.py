"""What keeps a call from the Hopper kernels. Imports torch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...mods.program import rows
from ...request import Request, Spec
from ...torch_internals import has_address
from ..common.gpu import Gpu, triton_version
from ..common.tiles import FEW_QUERIES, MANY_KEYS

GPU = Gpu("cuda", 90)
MAX_HEAD_DIM = 256
MIN_PREFILL_QUERIES = 256  # of a sequence; with fewer, reading the cache takes longer than the products
BLOCK = 128  # queries and keys of the least tile that a block mask may have
BOX = 8  # rows of a page that a copy must have, at least: as many as shared memory's pattern repeats after
FAR_TOKENS = 2**30  # that a cache may be long


def unsupported(request: Any, gpu: Gpu | None) -> str | None:
    """TMA wants rows of whole 16 bytes, at addresses that are, too."""
    q, k, v = request.q, request.k, request.v
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"{q.dtype}, of float16 and bfloat16"
    if gpu is None or gpu.kind == "interpreter":
        return f"the tensors are on {q.device.type}"
    if gpu.kind != "cuda":
        return f"the GPU is a {gpu.arch}, not NVIDIA's"
    if gpu.capability != 90:
        return f"the GPU is of compute capability {gpu.capability / 10}, not 9.0"
    if q.is_cuda and triton_version() < (3, 6):
        return "no triton >= 3.6 installed"
    if q.numel() == 0 or k.numel() == 0:
        return "no queries or no keys"
    if isinstance(request, Request) and request.seed is not None:
        return "dropout"
    if isinstance(request, Request) and request.blocks and (found := of_blocks(request)):
        return found
    spec = getattr(request, "spec", None)  # an append has none
    if spec is not None and any(key is not None and rows(key) for key in (spec.score_mod, spec.mask_mod)):
        return "a mod that sums over a row"  # whose loop would spill a thousand bytes of registers
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return f"head dim {max(q.shape[-1], v.shape[-1])}, of at most {MAX_HEAD_DIM}"
    if v.shape[-1] % 8:
        return f"head dim {v.shape[-1]} of v, of multiples of 8"
    for x in (q, k, v):
        *outer, inner = x.stride()
        if inner != 1 or any(stride % 8 or stride == 0 for stride in outer) or not is_aligned(x):
            return "strides that are not multiples of 16 bytes, or a last dim that is not contiguous"
    return None if isinstance(request, Request) else of_cache(request)


def of_blocks(request: Request) -> str | None:
    """What keeps a call with a block mask from these kernels."""
    if request.cu_q is not None:
        return "a block mask of packed sequences"
    block = request.spec.mask_block[:2]
    if any(x < BLOCK or x & (x - 1) for x in block):
        return f"a block mask with tiles of {block[0]} x {block[1]}, of powers of two from {BLOCK} on"
    return None


def of_cache(request: Any) -> str | None:
    """What keeps a call with a KV cache from these kernels; an append, which has no places, is the portable ones'."""
    places = getattr(request, "places", None)
    if places is None:
        return None
    if request.tree is not None or request.split is not None:
        return "a tree of drafts" if request.tree is not None else "a split of the keys"
    if places.starts is not None or places.indptr is not None:
        return "keys that begin later" if places.starts is not None else "a table of pages in one row"
    page = request.k.shape[1]
    if places.table is not None and page % BOX:
        return f"pages of {page} tokens, of multiples of {BOX}"
    for x in (request.k, request.v):
        if x.shape[0] > 1 and (x.stride(0) % x.stride(1) or x.stride(0) // x.stride(1) * x.shape[0] > FAR_TOKENS):
            return "pages that are not a whole number of tokens apart, or too far"
    return None


def declines(request: Any, gpu: Gpu | None) -> str | None:
    """A call that reads keys more than it computes, as in decoding."""
    q, k = request.q, request.k
    if not isinstance(request, Request):
        places = getattr(request, "places", None)
        if places is None:
            return "new tokens alone, which wait for memory"
        most = request.most or q.shape[0] // max(places.batch, 1)  # if nobody knows, an average
        return "few queries, which wait for memory" if most < MIN_PREFILL_QUERIES else None
    if q.dim() == 4 and q.shape[1] <= FEW_QUERIES and k.shape[1] >= MANY_KEYS:
        return "few queries, whose keys the portable kernels divide among programs"
    return None


def has_backward(request: Request) -> bool:
    """Whether the Hopper backward takes a call; the portable one takes the others. Of a block mask a program that sums
    for a group of heads walks one list for all of them, in any order."""
    d, dv, spec = request.q.shape[-1], request.v.shape[-1], request.spec
    if request.blocks:
        by_head = spec.mask_block[3] > 1 and request.q.shape[-2] > request.k.shape[-2]
        return takes(d, dv, listed=True, deterministic=spec.deterministic) and not by_head
    return takes(d, dv)


def takes(d: int, dv: int, *, listed: bool = False, deterministic: bool = False) -> bool:
    """Whether the Hopper backward takes these head dims; `listed`: with a block mask."""
    most = 128 if listed else MAX_HEAD_DIM
    return max(d, dv) <= most and d % 8 == 0 and not (listed and deterministic)


def is_uneven(spec: Spec) -> bool:
    """Whether some queries may see far more keys than others."""
    return spec.after is not None or bool(spec.mask_block)


def is_aligned(x: Tensor) -> bool:
    """To 16 bytes, as far as that can be known."""
    return (x.data_ptr() if has_address(x) else x.storage_offset() * x.element_size()) % 16 == 0
