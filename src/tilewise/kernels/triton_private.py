"""Every name of Triton that is not public and that host code uses, in one place. Gluon's moving names, which kernels
use, are in `hopper.compat`.

Tested with Triton 3.6.0, whose C launcher is called directly; kernels of other versions go through Triton's Python, to
the same effect for 20 us more a launch.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import triton

try:
    from triton.backends.nvidia import driver as nvidia
except ImportError:
    nvidia = None

LAUNCHER = "iiiKKppOOOOOO"  # what Triton 3.6's C launcher takes first


class Launcher(NamedTuple):
    """Triton's C launcher of one compiled kernel: `call(x, y, z, stream, *fixed, *args)`, and what its TMA descriptors
    need to know, in their order."""

    call: Callable[..., None]
    fixed: tuple[Any, ...]
    descriptors: tuple[Any, ...]


def launcher_of(binary: Any) -> Launcher | None:
    """The launcher of a compiled kernel; None where this Triton has another, or the kernel wants scratch memory."""
    run = getattr(binary, "run", None)
    if getattr(nvidia, "_BASE_ARGS_FORMAT", None) != LAUNCHER or not isinstance(run, nvidia.CudaLauncher):
        return None
    wrapped = inspect.isfunction(run.launch)  # by what makes TMA descriptors
    if run.global_scratch_size or run.profile_scratch_size or (wrapped and not binary.metadata.tensordesc_meta):
        return None
    call = inspect.getclosurevars(run.launch).nonlocals["launcher"] if wrapped else run.launch
    hooks = scratch = (None, None)
    fixed = (
        binary.function, run.launch_cooperative_grid, run.launch_pdl, *scratch, binary.packed_metadata, None, *hooks
    )  # fmt: skip
    return Launcher(call, fixed, tuple(binary.metadata.tensordesc_meta) if wrapped else ())


def tma_descriptor(descriptor: Any, metadata: Any) -> Any:
    """What the C launcher takes for a TensorDescriptor."""
    return nvidia.make_tensordesc_arg(descriptor, metadata)[0]


def is_hooked() -> bool:
    """Whether somebody, a profiler say, wants to hear of launches: then Triton makes them."""
    runtime = triton.knobs.runtime
    return bool(_listeners(runtime.launch_enter_hook) or _listeners(runtime.launch_exit_hook))


def _listeners(hook: Any) -> Any:
    return hook is not None and getattr(hook, "calls", True)
