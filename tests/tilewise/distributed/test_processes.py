"""The same over torch.distributed, in 2 and 4 processes (gloo)."""

from __future__ import annotations

import pytest

from tests.tilewise.distributed.workers import JOBS, spawn

SLOW = ("all_ways",)
QUICK = [name for name in JOBS if name not in SLOW]


@pytest.fixture(scope="module", params=[2, 4])
def quick(request, tmp_path_factory):
    return spawn(request.param, QUICK, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", QUICK)
def test_quick(quick, name):
    assert not quick[name]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_strategy_layout_and_feature(ranks, tmp_path):
    assert spawn(ranks, ["all_ways"], tmp_path) == {"all_ways": []}
