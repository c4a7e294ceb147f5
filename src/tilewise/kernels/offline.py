"""Compilation as a launch would have it done, for any GPU, without one. Imports Triton when it is used."""

from __future__ import annotations

from typing import Any

from .gpu import Gpu


def target_of(arch: int | str) -> Any:
    """Of 90 (sm_90) or "gfx942", in Triton's words."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, lanes(arch))


def lanes(arch: str) -> int:
    """Threads of an AMD warp: 64 up to gfx9.., 32 from gfx10.. on."""
    return 64 if len(arch) == len("gfx942") else 32


def _bound(arch: int | str, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(target_of(arch))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return backend, *bind(*args, **options)


def specialised(arch: int | str, made: Any) -> str:
    """What of a launch another compilation would depend on."""
    _, _, specialization, _ = _bound(arch, made.kernel, made.args, made.options)
    return f"{made.kernel.fn.__qualname__} {specialization} {made.options}"


def all_options(kernel: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Of a launch, as kernels are compiled here and where they are launched. Triton checks sums for overflow when it is
    told to debug; it would write the checks down anyway, an eighth of what it takes to build a kernel, and leave them
    out later. Of Gluon's kernels, whose PTX is known to be the same."""
    from triton import knobs

    return options | ({"sanitize_overflow": bool(knobs.runtime.debug)} if kernel.is_gluon() else {})


def binary_for(arch: int | str, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The compiled kernel, kept in Triton's cache where the launch will find it. Tensors may be meta."""
    import triton
    from triton.compiler import ASTSource

    options = all_options(kernel, options)
    backend, bound, specialization, launch_options = _bound(arch, kernel, args, options)
    packed = kernel._pack_args(backend, dict(options), bound, specialization, launch_options)
    source: Any = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource
    return triton.compile(source(kernel, *packed[1:]), target=target_of(arch), options=packed[0].__dict__)


def gpu_named(name: str) -> Gpu:
    """The GPU of an architecture's name.

    >>> gpu_named("sm_90"), gpu_named("gfx942")
    (Gpu(kind='cuda', arch=90), Gpu(kind='hip', arch='gfx942'))
    """
    from ..spec import AttentionError

    name = str(name)
    if name.startswith("sm_") and name[3:].rstrip("a").isdigit():
        return Gpu("cuda", int(name[3:].rstrip("a")))
    if name.startswith("gfx"):
        return Gpu("hip", name)
    raise AttentionError("gpu", repr(name), "an architecture: 'sm_90', 'sm_100', 'gfx942'")
