"""Programmatic dependent launch: kernels that start before the previous launch has ended (`OVERLAP` in a KernelConfig).

After every program has called `gdc_launch_dependents` or ended, the next launch may start. `gdc_wait` waits until the
previous launch has ended and its results can be read. Every kernel that may start early calls `gdc_wait`, first or
last, so that waiting for one launch is waiting for all before it.
"""

import triton

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton without NVIDIA's part, where nothing overlaps

    @triton.jit
    def gdc_launch_dependents(): ...

    @triton.jit
    def gdc_wait(): ...


__all__ = ["gdc_launch_dependents", "gdc_wait"]
