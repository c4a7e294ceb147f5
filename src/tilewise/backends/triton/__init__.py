"""Portable kernels in Triton: any GPU that it compiles for, and its interpreter on a CPU."""

from __future__ import annotations

from ..common.kv import KvKernels, portable_launches
from ..kernel_backend import KernelBackend, Support
from ..protocol import KvBackend
from . import support


class TritonBackend(KernelBackend):
    name = "triton"
    reason = "portable kernels"
    support: Support = support
    kv: KvBackend | None = KvKernels(portable_launches)
