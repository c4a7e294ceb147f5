"""The same over torch.distributed, in 2 and 4 processes (gloo)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.tilewise.distributed.pool import JOBS, spawn

HERE = [name for name, module in JOBS.items() if module != "hugging_face" or find_spec("transformers")]
SLOW = ("all_ways", "compiled", "models", "models_compiled")
QUICK = [name for name in HERE if name not in SLOW]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return spawn(2, QUICK, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", QUICK)
def test_two_processes(two, name):
    assert not two[name]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_everything_in_two_and_four_processes(tmp_path, ranks, request):
    """One test of each size, since its processes run all jobs or none. The long ones run in four with --all."""
    every = request.config.getoption("--all")
    names = [name for name in HERE if (ranks == 2 and name in SLOW) or (ranks == 4 and (every or name in QUICK))]
    assert not {name: found for name, found in spawn(ranks, names, tmp_path).items() if found}
