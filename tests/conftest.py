"""Where the kernels run: on the GPU where tests/gpu is asked for and there is one, else in Triton's interpreter.

Triton and CUDA decide once per process, so the tests of tests/gpu are a run of their own (`./run test` makes both), and
the others see no GPU. Triton is imported here, before any test. Offline compiles need a process of their own
(tests/tilewise/backends/test_compile.py).
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

ON_GPU = "TILEWISE_TEST_GPU"  # how pytest-xdist's workers know what was asked
if os.environ.setdefault(ON_GPU, str(int(any("tests/gpu" in arg for arg in sys.argv[1:])))) == "0":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if os.environ[ON_GPU] == "0":
    collect_ignore = ["gpu"]
HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and DEVICE == "cpu"

if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
    try:  # gluon asserts that the variable is what it was when triton was imported
        for module in (
            "tilewise.backends.common.hvp_launches",
            "tilewise.backends.common.jvp_launches",
            "tilewise.backends.common.kv.runners",
            "tilewise.backends.common.kv.prefix_launches",
            "tilewise.backends.common.term_gradients",
            "tilewise.backends.triton.offline",
            "tilewise.backends.hopper.offline",
            "tilewise.backends.hopper.kv_launches",
            "tilewise.backends.hopper.hvp_launches",
            "tilewise.backends.hopper.topk",
            "tilewise.backends.common.best_blocks",
            "tilewise.backends.common.merge_kernel",
            "tilewise.backends.common.topk",
            "tilewise.backends.common.block_parts",
            "tilewise.backends.common.combine_parts",
            "tilewise.backends.common.nsa",
            "tests.tilewise.backends.probes",
            "triton.experimental.gluon.language",
        ):
            if find_spec(module) is not None:
                import_module(module)
        interpreter = import_module("tilewise_lab.interpreter")
        interpreter.teach_bfloat16()
        interpreter.patch_once_per_launch()
    finally:
        del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """A test that changes a variable of ours, or Triton's, for those after it fails: kernels, and checks on a CPU,
    depend on them. (torch.compile sets variables of its own.)"""

    def ours() -> dict[str, str]:
        return {name: x for name, x in os.environ.items() if name.startswith("TILEWISE_") or name == "TRITON_INTERPRET"}

    before = ours()
    yield
    after = ours()
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    assert after == before, "the test left other environment variables behind"
    if torch.compiler.is_compiling():  # torch's flag of the process: the calls of later tests would check nothing
        vars(torch.compiler)["_is_compiling_flag"] = False
        warnings.warn("the test left torch.compiler.is_compiling() true", stacklevel=1)


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def triton_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """backend="triton" works within the test, on whatever device is here."""
    if not HAS_TRITON:
        pytest.skip("no triton here: it comes with a CUDA build of torch, or on Linux from PyPI")
    with ExitStack() as stack:
        if INTERPRETED:
            monkeypatch.setenv("TRITON_INTERPRET", "1")
            # The interpreter computes with NumPy, which warns of every infinity and NaN, as no GPU does.
            stack.enter_context(import_module("numpy").errstate(all="ignore"))
        yield


@pytest.fixture(params=["triton", "auto"] if DEVICE == "cuda" else ["reference", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that computes attention here: on a GPU the portable kernels and those that are chosen."""
    if request.param == "triton":
        request.getfixturevalue("triton_runs")
    return request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked full (`covering.cases`), unless there is --all or the name of a test."""
    if config.getoption("--all") or any("::" in arg for arg in config.args):
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
    items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the parameters that are marked full, too")
    parser.addoption("--all-tiles", action="store_true", help="compile every row of the tile tables in every variant")
