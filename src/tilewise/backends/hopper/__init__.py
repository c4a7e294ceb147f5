"""Kernels for Hopper (sm_90) in Gluon: TMA, mbarriers, asynchronous wgmma, specialised warps."""

from __future__ import annotations

from typing import Any

from ...kv_request import KvRequest
from ..common.kv import KvKernels
from ..kernel_backend import KernelBackend, Support
from ..protocol import KvBackend
from . import support


def _kv_launches(request: KvRequest) -> Any:
    from . import kv_launches

    return kv_launches


class HopperBackend(KernelBackend):
    name = "hopper"
    reason = "kernels for this GPU"
    support: Support = support
    kv: KvBackend | None = KvKernels(_kv_launches)
