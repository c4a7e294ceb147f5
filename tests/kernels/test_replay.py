"""Replaying the launches of an earlier call: only the tensors may differ, and every tensor must."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewise.kernels import replay
from tilewise.kernels.tile import View


class Parameter(NamedTuple):
    name: str
    is_constexpr: bool


class Kernel:
    """Stands for a Triton kernel: it remembers what it was called with."""

    params = (Parameter("x", False), Parameter("y", False), Parameter("n", False), Parameter("BLOCK", True))

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.calls.append((grid, *args))


class Launch(NamedTuple):
    kernel: Kernel
    programs: int
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> Kernel:
        return self.kernel


def run(kernel: Kernel, x: torch.Tensor, y: torch.Tensor, builds: list[int]) -> None:
    def build() -> list[Launch]:
        builds.append(1)
        return [
            Launch(kernel, 7, (View(x, x.stride()), y, 5), {"BLOCK": 64, "num_warps": 4}),
            Launch(kernel, 0, (View(x, x.stride()), y, 5), {"BLOCK": 64, "num_warps": 4}),
        ]

    replay.launch((id(kernel), *replay.signature(x, y)), (x, y), build)


def test_a_second_call_takes_its_own_tensors() -> None:
    kernel, builds = Kernel(), []
    x, y, x2, y2 = torch.zeros(2, 3), torch.zeros(4), torch.ones(2, 3), torch.ones(4)
    run(kernel, x, y, builds)
    run(kernel, x2, y2, builds)
    assert builds == [1]
    [(grid, view, plain, n, block)] = kernel.calls  # the first was launched by the stand-in itself, unrecorded
    assert grid == (7, 1, 1)
    assert (n, block) == (5, 64)
    assert view.ptr is x2
    assert view.strides == (3, 1)
    assert plain is y2


def test_other_strides_are_another_call() -> None:
    kernel, builds = Kernel(), []
    y = torch.zeros(4)
    run(kernel, torch.zeros(2, 3), y, builds)
    run(kernel, torch.zeros(3, 2).T, y, builds)
    run(kernel, torch.zeros(2, 3, dtype=torch.float64), y, builds)
    run(kernel, torch.zeros(7)[1:].view(2, 3), y, builds)  # not aligned
    assert len(builds) == 4


def test_the_recording_keeps_no_tensor() -> None:
    kernel = Kernel()
    run(kernel, torch.zeros(2, 3), torch.zeros(4), [])
    [step] = next(found.steps for key, found in replay._calls.items() if key[0] == id(kernel))  # type: ignore[index]
    assert not any(isinstance(x, torch.Tensor) for x in [*step.args, *step.args[0]])


def test_one_tensor_in_two_places_is_another_call() -> None:
    kernel, builds = Kernel(), []
    x, y, both = torch.zeros(4, 1), torch.zeros(4, 1), torch.zeros(4, 1)
    run(kernel, x, y, builds)
    run(kernel, both, both, builds)
    run(kernel, y, x, builds)
    assert len(builds) == 2
    [(_, view, plain, *_)] = kernel.calls
    assert view.ptr is y
    assert plain is x
