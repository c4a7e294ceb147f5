"""Which launches may begin before the one ahead of them has ended."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tilewise.backends.common import launch
from tilewise.request import Gpu


@pytest.mark.parametrize(
    ("gpu", "overlaps"), [(Gpu("cuda", 90), True), (Gpu("cuda", 80), False), (Gpu("hip", "gfx942"), False)], ids=str
)
def test_on_gpus_that_can(gpu: Gpu, overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "OVERLAP", True)
    assert launch.can_overlap(gpu) is overlaps
    monkeypatch.setattr(launch, "OVERLAP", False)
    assert not launch.can_overlap(gpu)
