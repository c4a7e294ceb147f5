"""Compiles kernels for a GPU that is not here, as a launch on it would. Imports Triton when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ...request import Gpu


def target_of(arch: int | str) -> Any:
    """Triton's target for 90 (sm_90) or "gfx942"."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, lanes(arch))


def lanes(arch: str) -> int:
    """Threads of an AMD warp: 64 up to gfx9.., 32 from gfx10.. on."""
    return 64 if len(arch) == len("gfx942") else 32


class OfflineDriver:
    """A Triton driver that knows only its target. Triton caches kernels by device, so that is the target too."""

    def __init__(self, arch: int | str) -> None:
        self.arch = arch

    def get_current_device(self) -> str:
        return f"offline {self.arch}"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        return target_of(self.arch)


@contextmanager
def compiling_for(arch: int | str) -> Iterator[None]:
    """Within it, Triton compiles for an architecture instead of the GPU that is here, in the whole process."""
    from triton.runtime import driver

    before: Any = None
    with suppress(RuntimeError):  # no GPU here: Triton has no driver until one is asked for
        before = driver.active
    driver.set_active(OfflineDriver(arch))
    try:
        yield
    finally:
        driver.set_active(before)


def specialised(arch: int | str, launch: Any, binders: dict[int, Any] | None = None) -> str:
    """Everything in a launch that another compilation would depend on. `binders` keeps what is made once a kernel."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    binders = {} if binders is None else binders
    bind = binders.get(id(launch.kernel))
    if bind is None:
        backend = make_backend(target_of(arch))
        bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
        binders[id(launch.kernel)] = bind
    _, specialization, _ = bind(*launch.args, **launch.options)
    return f"{launch.kernel.fn.__qualname__} {specialization} {launch.options}"


def binary_for(arch: int | str, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The compiled kernel, kept in Triton's cache where the launch will find it. Tensors may be meta tensors."""
    from .launch import Launch, compile_options, compute_cache_keys

    launch = Launch(kernel, 1, args, options)
    compute_cache_keys(launch)
    with compiling_for(arch):
        return kernel.warmup(*args, grid=(1,), **compile_options(launch))


def gpu_named(name: str) -> Gpu:
    """The GPU of an architecture's name.

    >>> gpu_named("sm_90"), gpu_named("gfx942")
    (Gpu(kind='cuda', arch=90), Gpu(kind='hip', arch='gfx942'))
    """
    from ...errors import AttentionError

    name = str(name)
    if name.startswith("sm_") and name[3:].rstrip("a").isdigit():
        return Gpu("cuda", int(name[3:].rstrip("a")))
    if name.startswith("gfx"):
        return Gpu("hip", name)
    raise AttentionError("gpu", repr(name), "an architecture: 'sm_90', 'sm_100', 'gfx942'")
