"""Kernels that start before the one ahead of them has ended, on GPUs that can: `OVERLAP` in a Plan.

`launch_dependents` lets the next launch start once every program has said so or ended; `wait` waits until the launch
before has ended and all that it wrote, and all that it waited for, can be read. A kernel that was
placed early waits itself, first or last: whoever waits for it then waits for all before it.
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
