"""Kernels run in Triton's interpreter where there is no GPU; unwritten memory is NaN."""

from __future__ import annotations

from tests.tilewise.backends.conftest import kernels_run, unwritten_memory_is_nan

__all__ = ["kernels_run", "unwritten_memory_is_nan"]
