"""How many files a call passes through before its kernels are launched: a warm one, and the first of its kind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tilewise
from tests.forks import python
from tests.tilewise.backends.fake_driver import FakeDriver
from tests.tilewise.backends.test_kernel_call import CUDA, Kernel, driver  # noqa: F401 - a fixture
from tests.tilewise.plan_cache.cases import StubBackend
from tests.tilewise.plan_cache.conftest import insert
from tilewise.backends.common.kernel_call import KernelCall
from tilewise.backends.common.launch import Built, Launch
from tilewise.plan_cache import PlanCache
from tilewise.request import BackwardInputs, Request

LIBRARY = Path(tilewise.__file__).parent
MOST_FILES = 5
MOST_COLD_FILES = {"forward": 14, "backward": 14}


def build(count: int) -> Any:
    """One kernel with counters; its `count` results have the layouts of the first tensors."""

    def built(tensors: Sequence[Any], target: Any, memory: Any) -> Built:
        results = [memory.empty(x.shape, x.dtype) for x in tensors[:count]]
        q, k = tensors[:2]
        return Built(results, [Launch(Kernel(), 1, (q, (k, results[0]), memory.counters(), 3), {"BLOCK": 1})])

    return built


class LaunchingBackend(StubBackend):
    """Launches one kernel in a forward, and one in a backward."""

    def forward_runner(self, request: Request, needs_lse: bool = True) -> Any:
        return KernelCall(build(2), request.tensors(), CUDA)

    def backward_runner(self, request: Request, bwd_inputs: BackwardInputs) -> Any:
        return KernelCall(build(3), (*request.tensors(), *bwd_inputs), CUDA)


@pytest.fixture
def launching(driver: FakeDriver, kept: PlanCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:  # noqa: F811
    insert(LaunchingBackend(), monkeypatch)  # type: ignore[arg-type]
    return driver


def files_before_the_launch(call: Callable[[], Any], driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> set[str]:  # noqa: F811
    """The files of the library whose functions run in a call up to its first launch."""
    files: set[str] = set()
    launch = driver.cuLaunchKernelEx

    def count(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(LIBRARY):
            files.add(path.relative_to(LIBRARY).as_posix())

    def launched(*x: Any) -> Any:
        sys.setprofile(None)
        return launch(*x)

    before = len(driver.launches)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "cuLaunchKernelEx", launched)
        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(None)
    assert len(driver.launches) == before + 1
    return files


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (2, 0), "return_lse": True}], ids=["plain", "lse"])
def test_a_warm_call_passes_through_few_files(
    options: dict[str, Any],
    launching: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = (torch.zeros(1, 4, 2, 8, dtype=torch.float16, requires_grad=True) for _ in range(3))

    def call() -> Any:
        found = tilewise.attention(q, k, v, **options)
        return found[0] if options.get("return_lse") else found

    dout = torch.zeros_like(q)
    torch.autograd.grad(call(), (q, k, v), dout)  # makes the plan
    launched = call()
    with torch.no_grad():
        without_gradients = files_before_the_launch(call, launching, monkeypatch)
    forward = files_before_the_launch(call, launching, monkeypatch)
    backward = files_before_the_launch(lambda: torch.autograd.grad(launched, (q, k, v), dout), launching, monkeypatch)
    assert {"api.py", "plan_cache.py", "backends/common/kernel_call.py"} <= without_gradients <= forward
    for files in (without_gradients, forward, backward):
        assert len(files) <= MOST_FILES, sorted(files)


def test_the_first_call_of_its_kind_passes_through_few_files() -> None:
    """From `attention` to the launch: the call and its checks, the plan, the choice of a backend, and the launches of
    the Hopper kernels. They are counted in a process of its own: this one's Triton is the interpreter's."""
    done = python("-m", "tests.tilewise.plan_cache.cold_files")
    assert done.returncode == 0, done.stderr
    for name, files in json.loads(done.stdout).items():
        assert "backends/common/kernel_call.py" in files
        assert len(files) <= MOST_COLD_FILES[name], files
