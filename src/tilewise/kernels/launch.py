"""A launch of a kernel, and where it goes."""

from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..torch_private import current_device
from .gpu import INTERPRETER, Gpu, gpu_of

INTERPRETED = triton.knobs.runtime.interpret


class Launch(NamedTuple):
    """A kernel, its grid, its arguments and its compile-time options: launched here, compiled offline by the tests."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> Any:
        """The compiled kernel, launched; None where there was nothing to launch or it was interpreted."""
        return self.kernel[(self.programs,)](*self.args, **self.options) if self.programs else None


def gpu_for(q: Tensor) -> Gpu:
    """The GPU that a launch for this tensor runs on."""
    return gpu_of(q.device) or INTERPRETER


def runs_on_gpu(x: Tensor) -> bool:
    """And is not interpreted."""
    return x.is_cuda and not INTERPRETED


def can_overlap(gpu: Gpu) -> bool:
    """Whether a kernel may start before the one ahead of it has ended."""
    return gpu.kind == "cuda" and gpu.capability >= 90 and not INTERPRETED


def overlapped(overlap: bool) -> dict[str, bool]:
    """The options of a launch that may; AMD's launches know nothing of it."""
    return {"OVERLAP": overlap} | ({"launch_pdl": True} if overlap else {})


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_ALREADY_THERE = nullcontext()


def on(q: Tensor) -> Any:
    """Triton launches on the current device; changing it costs more than asking."""
    if q.is_cuda and q.get_device() != current_device():
        return torch.cuda.device(q.device)
    return _ALREADY_THERE
