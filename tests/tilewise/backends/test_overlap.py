"""Which launches may begin before the one ahead of them has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

import tilewise
from tilewise.backends.common import launch
from tilewise.request import Gpu


@pytest.mark.parametrize(
    ("gpu", "overlaps"), [(Gpu("cuda", 90), True), (Gpu("cuda", 80), False), (Gpu("hip", "gfx942"), False)], ids=str
)
def test_on_gpus_that_can(gpu: Gpu, overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert launch.can_overlap(gpu) is overlaps
    monkeypatch.setenv("TILEWISE_NO_OVERLAP", "1")
    assert not launch.can_overlap(gpu)


def test_one_switch_for_all_launches() -> None:
    """`launch.pdl_option` alone sets the option, so that TILEWISE_NO_OVERLAP=1 reaches every launch."""
    sources = Path(tilewise.__file__).parent.rglob("*.py")
    assert [x.name for x in sources if '"launch_pdl":' in x.read_text()] == ["launch.py"]
