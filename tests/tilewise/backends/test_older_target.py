"""TILEWISE_TARGET: kernels for an older GPU, loaded as PTX."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.forks import ROOT, environment
from tilewise import AttentionError, request
from tilewise.backends.hopper import support
from tilewise.request import Gpu, Request, Spec
from tilewise.settings import TARGET
from tilewise_lab.costs.devices import from_properties

pytest.importorskip("triton")

COMPILED = """
import json, types
import torch
from bench.tiles import Row, launch_of
from tests.tilewise.backends.fake_driver import FakeDriver
from tilewise.backends.common import launch as launcher
from tilewise.backends.common.offline import binary_for

launch = launch_of(Row("forward", 80, "bfloat16", 64, "causal"))
(binary,) = launcher.compile_launches([launch])
offline = binary_for(80, launch.kernel, launch.args, launch.options)
driver = launcher.driver = FakeDriver()
values = launcher.addresses_of(launcher.all_arguments(launch))
driver.sizes[binary.metadata.name] = [*launcher.sizes_of(binary, values), 8, 8]
torch.cuda.current_device = lambda: 0
torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=7)
launch()
(launched,) = driver.launches
print(json.dumps({
    "offline": binary.hash == offline.hash, "target": binary.metadata.target.arch, "stream": launched.stream,
    "code": [x.decode()[-40:] for x in driver.loaded], "ptx": ".target sm_80" in driver.loaded[0].decode(),
    "first": int.from_bytes(launched.read[0], "little") == launch.args[0].q.ptr.data_ptr(),
    "null": [x.hex() for x in launched.read[-2:]], "grid": launched.grid[0], "programs": launch.programs,
}))
"""


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(TARGET, "sm_80")
    request.older_target.cache_clear()
    request._gpu.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield
    request.older_target.cache_clear()
    request._gpu.cache_clear()


def test_launches_are_compiled_for_the_target_and_loaded_as_ptx() -> None:
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment() | {TARGET: "sm_80"}, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["offline"]  # what `tilewise.warmup(gpu="sm_80")` compiles is what is launched
    assert found["target"] == 80
    assert found["ptx"]
    assert all(code.endswith("\0") for code in found["code"])
    assert found["first"]
    assert found["null"] == ["00" * 8] * 2
    assert (found["grid"], found["stream"]) == (found["programs"], 7)


def test_the_gpu_is_the_target(older: None) -> None:
    assert request.gpu_of(torch.device("cuda", 0)) == Gpu("cuda", 80)


@pytest.mark.parametrize(("name", "expected"), [("sm_75", "sm_80, sm_86, sm_89"), ("80", "sm_80, sm_86, sm_89")])
def test_a_target_that_is_not_supported(name: str, expected: str, older: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TARGET, name)
    with pytest.raises(AttentionError, match=expected):
        request.gpu_of(torch.device("cuda", 0))


def test_a_target_newer_than_the_gpu(older: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(AttentionError, match="sm_75 or older"):
        request.gpu_of(torch.device("cuda", 0))


def test_hopper_kernels_are_off_and_explain_says_why(older: None) -> None:
    q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16, device="meta")
    found = support.unsupported(Request(q, q, q, Spec(scale=1.0)), Gpu("cuda", 80))
    assert found == "TILEWISE_TARGET=sm_80 asks for the code of an older GPU"


def test_explain_names_the_target(older: None) -> None:
    properties = type("P", (), {"major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 1 << 37})
    device = from_properties("NVIDIA H200", properties)
    assert device.name == "NVIDIA H200 as sm_80 (TILEWISE_TARGET)"
    assert device.gpu == Gpu("cuda", 80)
