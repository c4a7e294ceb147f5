"""Portable kernels in Triton: any GPU that it compiles for, and its interpreter on a CPU."""

from __future__ import annotations

from ..common.kv import KvKernels, portable_launches
from . import support as support

KV = KvKernels(portable_launches)
