"""Which backend runs a call, and why. `auto` chooses; a named backend runs or says what it lacks."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from . import config
from .spec import NO_TERMS, AttentionError, Spec, Terms


class Choice(NamedTuple):
    backend: str
    reason: str


def choose(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, capability: int | None = None, terms: Terms = NO_TERMS
) -> Choice:
    """The backend of a call; with `capability`, of the same call on a GPU of that kind (90: sm_90).

    >>> q = torch.zeros(1, 8, 2, 64)
    >>> choose(q, q, q, Spec(scale=1.0))
    Choice(backend='reference', reason='triton: the tensors are on the cpu')
    """
    if spec.backend == "auto":
        obstacle = triton_obstacle(q.device, q.dtype, capability)
        if obstacle is None and (q.is_cuda or capability is not None):
            missing = hopper_obstacle(q, k, v, spec, capability, terms)
            if missing is None and has_few_queries(q, k):
                return Choice("triton", "portable kernels, which divide the keys of few queries among programs")
            if missing is None:
                return Choice("hopper", "kernels for this GPU")
            return Choice("triton", f"portable kernels; hopper: {missing}")
        return Choice("reference", f"triton: {obstacle or 'the interpreter runs only when it is asked for by name'}")
    if spec.backend == "triton":
        obstacle = triton_obstacle(q.device, q.dtype, capability)
    elif spec.backend == "hopper":
        obstacle = hopper_obstacle(q, k, v, spec, capability, terms)
    else:
        obstacle = None
    if obstacle is not None:
        raise AttentionError(f"backend={spec.backend!r}", obstacle, "backend='auto' or 'reference', which run here")
    return Choice(spec.backend, "asked for by name")


def triton_obstacle(device: torch.device, dtype: torch.dtype, capability: int | None = None) -> str | None:
    if dtype == torch.float64:
        return "float64, which only the reference computes"
    if capability is None:
        if not has_triton():
            return "no triton installed (it comes with a CUDA build of torch)"
        if device.type == "cpu":
            return None if os.environ.get("TRITON_INTERPRET") == "1" else "the tensors are on the cpu"
        if device.type != "cuda":
            return f"the tensors are on {device.type}"
        capability = capability_of(device)
    if capability < 80:
        return "the GPU is older than Ampere (compute capability 8.0)"
    return None


def hopper_obstacle(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, capability: int | None = None, terms: Terms = NO_TERMS
) -> str | None:
    """What keeps a call from the Hopper kernels. TMA wants rows of whole 16 bytes, at addresses that are, too."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"{q.dtype}, of float16 and bfloat16"
    if capability is None:
        if not has_gluon():
            return "no triton >= 3.6 installed"
        if q.device.type != "cuda":
            return f"the tensors are on {q.device.type}"
        capability = capability_of(q.device)
    if capability != 90:
        return f"the GPU is of compute capability {capability / 10}, not 9.0"
    if terms.seed is not None or terms.blocks:
        return "a block mask" if terms.blocks else "dropout"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head dim {max(q.shape[-1], v.shape[-1])}, of at most 256"
    if v.shape[-1] % 8:
        return f"head dim {v.shape[-1]} of v, of multiples of 8"
    for x in (q, k, v):
        *outer, inner = x.stride()
        if inner != 1 or any(stride % 8 or stride == 0 for stride in outer) or not is_aligned(x):
            return "strides that are not multiples of 16 bytes, or a last dim that is not contiguous"
    return None


def has_few_queries(q: Tensor, k: Tensor) -> bool:
    """Whether a dense call reads keys more than it computes, as in decoding."""
    return q.dim() == 4 and q.shape[1] <= config.FEW_QUERIES and k.shape[1] >= config.MANY_KEYS


def is_aligned(x: Tensor) -> bool:
    """To 16 bytes, as far as that can be known: a tensor that torch.compile only pretends to have, or that torch.func
    wraps, has no address."""
    real = type(x) in (Tensor, torch.nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    return (x.data_ptr() if real else x.storage_offset() * x.element_size()) % 16 == 0


@cache
def capability_of(device: torch.device) -> int:
    """90 for sm_90. Asking torch takes longer than a launch."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def has_gluon() -> bool:
    return has_triton() and tuple(map(int, version("triton").split(".")[:2])) >= (3, 6)
