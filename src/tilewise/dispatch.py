"""Which backend runs a call, and why. `auto` chooses; a named backend runs or says what it lacks."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from .spec import AttentionError, Spec


class Choice(NamedTuple):
    backend: str
    reason: str


def choose(q: Tensor, k: Tensor, v: Tensor, spec: Spec, capability: int | None = None) -> Choice:
    """The backend of a call; with `capability`, of the same call on a GPU of that kind (90: sm_90).

    >>> q = torch.zeros(1, 8, 2, 64)
    >>> choose(q, q, q, Spec(scale=1.0))
    Choice(backend='reference', reason='triton: the tensors are on the cpu')
    """
    if spec.backend == "auto":
        obstacle = triton_obstacle(q.device, q.dtype, capability)
        if obstacle is None and (q.is_cuda or capability is not None):
            return Choice("triton", "portable kernels")
        return Choice("reference", f"triton: {obstacle or 'the interpreter runs only when it is asked for by name'}")
    if spec.backend == "triton":
        obstacle = triton_obstacle(q.device, q.dtype, capability)
    elif spec.backend == "hopper":
        obstacle = "its kernels are not part of this version"
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


@cache
def capability_of(device: torch.device) -> int:
    """90 for sm_90. Asking torch takes longer than a launch."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None
