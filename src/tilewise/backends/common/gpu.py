"""What kind of GPU a call is for. Imports torch alone."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """`kind` is "cuda" (NVIDIA), "hip" (AMD) or "interpreter" (a CPU acts as one); `arch` 90 for sm_90, or gfx942."""

    kind: str
    arch: int | str

    @property
    def capability(self) -> int:
        """90 for sm_90, 0 where there is none: what AMD's report under that name means something else."""
        return self.arch if isinstance(self.arch, int) else 0

    def __str__(self) -> str:
        return f"sm_{self.arch}" if self.kind == "cuda" else str(self.arch)


INTERPRETER = Gpu("interpreter", 0)


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU that a tensor lives on; of a CPU the interpreter, where Triton's is on; None elsewhere."""
    if device.type == "cuda":
        return _gpu(device)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1" and has_triton():
        return INTERPRETER
    return None


@cache
def _gpu(device: torch.device) -> Gpu:
    """Asking torch takes longer than a launch."""
    if torch.version.hip is not None:
        return Gpu("hip", torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return Gpu("cuda", 10 * major + minor)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def triton_version() -> tuple[int, int]:
    """(3, 6) of 3.6.0; (0, 0) where there is none."""
    if not has_triton():
        return 0, 0
    major, minor, *_ = version("triton").split(".")
    return int(major), int(minor)
