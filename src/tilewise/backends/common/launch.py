"""A launch of a kernel, and what a function that builds launches is given: the target and the memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from .gpu import INTERPRETER, Gpu, gpu_of

INTERPRETED = triton.knobs.runtime.interpret
NO_OVERLAP = os.environ.get("TILEWISE_NO_OVERLAP", "0") not in ("", "0")  # to tell a race from other faults
INTERPRETED_PROCESSORS = 16
OFFLINE_PROCESSORS = 132  # of an H100 and an H200
COUNTERS = 1024  # int32 numbers


class Launch(NamedTuple):
    """A kernel, the number of programs, its arguments and its compile-time options."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> Any:
        """Launch through Triton. Returns the compiled kernel, or None if it was interpreted or has no programs."""
        return self.kernel[(self.programs,)](*self.args, **self.options) if self.programs else None


def named(name: str, launches: Sequence[Launch]) -> dict[str, Launch]:
    """At most one launch, by its name."""
    return dict(zip((name,), launches, strict=False))


class Target(NamedTuple):
    """Where launches run: the kind of GPU and the number of its streaming multiprocessors."""

    gpu: Gpu
    num_sms: int


class Memory(Protocol):
    """What a call allocates: its results and workspaces."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor."""
        ...

    def counters(self) -> Tensor:
        """COUNTERS int32 zeros, which the launches leave at zero."""
        ...


class Built(NamedTuple):
    """What a call returns, and its launches in order."""

    results: Sequence[Tensor]
    launches: Sequence[Launch]


# (the call's tensors, where it runs, what allocates) -> results and launches. The tensors may be placeholders.
Build = Callable[[Sequence[Any], Target, Memory], Built]


class DeviceMemory(NamedTuple):
    """Allocates with torch."""

    device: torch.device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def counters(self) -> Tensor:
        return torch.zeros(COUNTERS, dtype=torch.int32, device=self.device)


def target_of(device: torch.device) -> Target:
    """Where the launches for tensors on a device run."""
    return Target(gpu_of(device) or INTERPRETER, multiprocessors(device))


def can_overlap(gpu: Gpu) -> bool:
    """Whether a kernel may start before the previous one has ended (programmatic dependent launch).
    TILEWISE_NO_OVERLAP=1 turns it off for all kernels but Hopper's."""
    return gpu.kind == "cuda" and gpu.capability >= 90 and not INTERPRETED and not NO_OVERLAP


def pdl_option(overlap: bool) -> dict[str, bool]:
    """The option of a launch that may overlap. AMD's launches do not know `launch_pdl`."""
    return {"launch_pdl": True} if overlap else {}


def overlapped(overlap: bool) -> dict[str, bool]:
    """The same, for a kernel with an argument OVERLAP."""
    return {"OVERLAP": overlap} | pdl_option(overlap)


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
