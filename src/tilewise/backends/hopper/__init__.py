"""Kernels for Hopper (sm_90) in Gluon: TMA, mbarriers, asynchronous wgmma, specialised warps."""

from __future__ import annotations

from typing import Any

from ...kv_request import KvRequest
from ..common.kv import KvKernels
from . import support as support


def _kv_launches(request: KvRequest) -> Any:
    from . import kv_launches

    return kv_launches


KV = KvKernels(_kv_launches)
