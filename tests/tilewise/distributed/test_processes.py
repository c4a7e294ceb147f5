"""The same over torch.distributed, in 2 and 4 processes (gloo)."""

from __future__ import annotations

import pytest

from tests.tilewise.distributed.workers import JOBS, spawn

SLOW = ("all_ways", "odd_sizes", "compiled")
QUICK = [name for name in JOBS if name not in SLOW]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return spawn(2, QUICK, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", QUICK)
def test_two_processes(two, name):
    assert not two[name]


@pytest.fixture(scope="module", params=[2, 4])
def all_jobs(request, tmp_path_factory):
    return spawn(request.param, list(JOBS), tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_everything_in_two_and_four_processes(all_jobs, name):
    assert not all_jobs[name]
