"""Kernels for Hopper (sm_90) in Gluon: TMA, mbarriers, asynchronous wgmma, specialised warps."""

from __future__ import annotations

from ..kernel_backend import KernelBackend, Support
from ..protocol import KvBackend
from . import support
from .prefill import PrefillKernels


class HopperBackend(KernelBackend):
    name = "hopper"
    reason = "kernels for this GPU"
    support: Support = support
    kv: KvBackend | None = PrefillKernels()
