"""What keeps a call from the Hopper kernels. Imports torch alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ...spec import Request
from ...torch_private import has_address
from ..gpu import Gpu, triton_version
from ..portable.tiles import FEW_QUERIES, MANY_KEYS

GPU = Gpu("cuda", 90)
MAX_HEAD_DIM = 256


def obstacle(request: Request, gpu: Gpu | None) -> str | None:
    """TMA wants rows of whole 16 bytes, at addresses that are, too."""
    q, k, v, *_ = request
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
    if k.shape[-2] == 0:
        return "no heads"
    if request.seed is not None or request.blocks:
        return "a block mask" if request.blocks else "dropout"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return f"head dim {max(q.shape[-1], v.shape[-1])}, of at most {MAX_HEAD_DIM}"
    if v.shape[-1] % 8:
        return f"head dim {v.shape[-1]} of v, of multiples of 8"
    for x in (q, k, v):
        *outer, inner = x.stride()
        if inner != 1 or any(stride % 8 or stride == 0 for stride in outer) or not is_aligned(x):
            return "strides that are not multiples of 16 bytes, or a last dim that is not contiguous"
    return None


def yields(request: Request, gpu: Gpu | None) -> str | None:
    """A dense call that reads keys more than it computes, as in decoding."""
    q, k = request.q, request.k
    if q.dim() == 4 and q.shape[1] <= FEW_QUERIES and k.shape[1] >= MANY_KEYS:
        return "few queries, whose keys the portable kernels divide among programs"
    return None


def has_backward(d: int, dv: int) -> bool:
    """Whether the Hopper backward takes these head dims; the portable one takes the others."""
    return max(d, dv) <= MAX_HEAD_DIM and d % 8 == 0


def is_aligned(x: Tensor) -> bool:
    """To 16 bytes, as far as that can be known."""
    return (x.data_ptr() if has_address(x) else x.storage_offset() * x.element_size()) % 16 == 0
