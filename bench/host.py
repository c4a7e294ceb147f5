"""The Python time of warm calls, without a GPU: `PYTHONPATH=src:. python bench/host.py [--profile]`.

CPU tensors stand for CUDA tensors. The kernels are those of the Hopper backend, compiled for sm_90; a driver that does
nothing launches them. Compare two commits on one machine: a GPU's host has other times, and its driver adds its own.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import inf
from time import thread_time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import tilewise
from tests.tilewise.backends.fake_driver import CUresult, FakeDriver
from tests.tilewise.plan_cache.cases import StubBackend
from tilewise.backends import registry
from tilewise.backends.common import kernel_call
from tilewise.backends.common import launch as launcher
from tilewise.backends.common.kernel_call import KernelCall, all_arguments, build_backward
from tilewise.backends.common.launch import Launch, Target
from tilewise.backends.common.offline import compiling_for
from tilewise.backends.hopper.backward_launches import named_launches
from tilewise.backends.hopper.launches import build_forward
from tilewise.request import BackwardInputs, Gpu, Request

CALLS, BURST = 5000, 25
SHAPE = 1, 64, 1, 64
SUCCESS = (CUresult.CUDA_SUCCESS,)


class Driver(FakeDriver):
    """Launches cost one call of a Python function."""

    @staticmethod
    def cuLaunchKernelEx(config: Any, function: Any, params: int, extra: int) -> Any:  # noqa: N802
        return SUCCESS


class HopperCalls(StubBackend):
    """The launches of the Hopper backend, for tensors of the CPU."""

    def forward_runner(self, request: Request, needs_lse: bool = True) -> Any:
        return KernelCall(build_forward(request.spec), request.tensors(), torch.device("cuda:0"))

    def backward_runner(self, request: Request, bwd_inputs: BackwardInputs) -> Any:
        return KernelCall(
            build_backward(named_launches, request.spec), (*request.tensors(), *bwd_inputs), torch.device("cuda:0")
        )


def install(stack: ExitStack) -> None:
    """A GPU that launches nothing, until `stack` is closed."""
    driver = Driver()

    def compiled(launches: Sequence[Launch]) -> list[Any]:
        with compiling_for(90):
            found = launcher.compile_launches(launches)
        for launch, binary in zip(launches, found, strict=True):
            driver.sizes[binary.metadata.name] = [*launcher.sizes_of(binary, all_arguments(launch))]
        return found

    replaced = [
        (launcher, "driver", driver),
        (kernel_call, "compile_launches", compiled),
        (kernel_call, "target_of", lambda device: Target(Gpu("cuda", 90), 132)),
        (kernel_call, "current_stream", lambda device: 5),
        (kernel_call, "empty_strided_cuda", lambda *x: torch.empty_strided(*x[:2], dtype=x[2])),
        (torch.cuda, "device", lambda device: ExitStack()),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (registry, "BACKENDS", (HopperCalls(), *registry.BACKENDS)),
    ]
    for where, name, value in replaced:
        stack.enter_context(patch.object(where, name, value))
    stack.enter_context(patch.object(torch.Tensor, "is_cuda", property(id), create=True))  # true, in the least time


class Empty(torch.autograd.Function):
    """What torch itself does in forward + backward: a Function that saves 5 tensors and allocates what ours does."""

    @staticmethod
    def forward(ctx: Any, spec: Any, plan: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = allocate((q.shape, q.stride(), q.dtype)), allocate(((1, 1, 64), (64, 64, 1), torch.float32))
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        grads = [allocate((x.shape, x.stride(), x.dtype)) for x in (q, k, v)]
        allocate(((4096,), (1,), torch.float32))
        return None, None, *grads


def allocate(layout: Any) -> Tensor:
    return kernel_call.empty_strided_cuda(*layout)


def microseconds(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """The processor time of each call, the least of many bursts. They are timed in turns."""
    least = dict.fromkeys(calls, inf)
    for _ in range(CALLS // BURST):
        for name, call in calls.items():
            began = thread_time()
            for _ in range(BURST):
                call()
            least[name] = min(least[name], (thread_time() - began) / BURST * 1e6)
    return least


def calls() -> dict[str, Callable[[], Any]]:
    q, k, v = (torch.randn(SHAPE, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    dout = torch.randn(SHAPE, dtype=torch.bfloat16)

    def forward() -> Any:
        return tilewise.attention(q, k, v, causal=True)

    def both() -> Any:
        return torch.autograd.grad(forward(), (q, k, v), dout)

    def without_gradients() -> Any:
        with torch.no_grad():
            return forward()

    def torch_alone() -> Any:
        return torch.autograd.grad(Empty.apply(None, None, q, k, v), (q, k, v), dout)  # type: ignore[no-untyped-call]

    return {
        "no_grad": without_gradients,
        "forward": forward,
        "forward + backward": both,
        "torch alone: forward": lambda: Empty.apply(None, None, q, k, v),  # type: ignore[no-untyped-call]
        "torch alone: forward + backward": torch_alone,
    }


def main() -> None:
    with ExitStack() as stack:
        install(stack)
        measured = calls()
        for call in measured.values():
            for _ in range(10):
                call()
        if "--profile" in sys.argv:
            profile = cProfile.Profile()
            profile.runcall(lambda: [measured["forward + backward"]() for _ in range(CALLS)])
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
            return
        for name, time in microseconds(measured).items():
            print(f"{name:32} {time:7.2f} us")


if __name__ == "__main__":
    main()
