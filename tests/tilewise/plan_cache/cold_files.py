"""Run by test_call_path, in a process whose Triton is the compiler's: the files of the library whose functions run in
the first call of its kind on a Hopper GPU, up to its first launch, forward and backward. Prints JSON.

CPU tensors stand for CUDA tensors, and a driver that does nothing launches (bench/host.py). Nothing is compiled: a
kernel without parameters stands for each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

import tilewise
from bench import host
from tilewise.backends import registry
from tilewise.backends.common import kernel_call
from tilewise.request import Gpu

LIBRARY = Path(tilewise.__file__).parent
BACKENDS = registry.BACKENDS
OFFLINE = "backends/common/offline.py"  # compiles for a GPU that is not here: no call on a GPU passes through it


def compiled(kernel: Any, *_: Any, grid: Any, num_warps: int = 4, **__: Any) -> Any:
    metadata = SimpleNamespace(name=kernel.__name__, num_warps=num_warps, shared=0, tensordesc_meta=None)
    signature = {parameter.name: "constexpr" for parameter in kernel.params}
    return SimpleNamespace(metadata=metadata, src=SimpleNamespace(signature=signature), hash="0", asm={"cubin": b""})


def launched(*_: Any) -> Any:
    sys.setprofile(None)
    return host.SUCCESS


def files_of(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What the call returns, and the files up to its first launch."""
    files: set[str] = set()

    def count(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(LIBRARY):
            files.add(path.relative_to(LIBRARY).as_posix())

    sys.setprofile(count)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, sorted(files - {OFFLINE})


def main() -> None:
    for package in ("tilewise.backends.common", "tilewise.backends.hopper"):  # importing a module counts as no call
        for module in iter_modules(import_module(package).__path__, f"{package}."):
            import_module(module.name)
    with ExitStack() as stack:
        host.install(stack)
        device, on_device = torch.device("cuda:0"), kernel_call.KernelCall
        replaced = [
            (registry, "BACKENDS", BACKENDS),
            (registry, "gpu_of", lambda device: Gpu("cuda", 90)),
            (kernel_call, "KernelCall", lambda build, tensors, _: on_device(build, tensors, device)),
            (JITFunction, "warmup", compiled),
            (host.Driver, "cuLaunchKernelEx", staticmethod(launched)),
        ]
        for where, name, value in replaced:
            stack.enter_context(patch.object(where, name, value))
        q, k, v = (torch.randn(host.SHAPE, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        out, forward = files_of(lambda: tilewise.attention(q, k, v, causal=True))
        _, backward = files_of(lambda: torch.autograd.grad(out, (q, k, v), torch.randn_like(out)))
    print(json.dumps({"forward": forward, "backward": backward}))


if __name__ == "__main__":
    main()
