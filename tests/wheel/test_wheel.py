from __future__ import annotations

import pytest

from tests.wheel.install import check, install, torch_alone


def test_torch_brings_no_extras():
    assert "torch" in torch_alone()
    assert not torch_alone() & {"rich", "pytest", "tilewise", "matplotlib", "hypothesis"}


@pytest.mark.slow
def test_the_wheel_works_beside_torch_alone(tmp_path):
    check(install(tmp_path))
