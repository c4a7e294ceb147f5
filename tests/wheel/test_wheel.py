from __future__ import annotations

from pathlib import Path

import pytest

from tests.wheel.install import check, install, torch_alone
from tests.wheel.torches import claimed


def test_torch_brings_no_extras():
    assert "torch" in torch_alone()
    assert not torch_alone() & {"rich", "pytest", "tilewise", "matplotlib", "hypothesis"}


def test_the_torches_that_are_tested_are_those_that_the_documents_name():
    told = Path(__file__).parents[2].joinpath("docs", "compatibility.md").read_text()
    oldest, newest = claimed()
    assert [oldest, newest] == sorted([oldest, newest], key=lambda x: [*map(int, x.split("."))])
    assert f"| {oldest} and {newest} (" in told


@pytest.mark.slow
def test_the_wheel_works_beside_torch_alone(tmp_path):
    check(install(tmp_path))
