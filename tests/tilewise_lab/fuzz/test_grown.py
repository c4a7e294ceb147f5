"""Block masks that are cut or grow: right ones pass, wrong tiles and wrong numbers are found and made small."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tilewise.mods import blocks
from tilewise_lab.fuzz.draw import Where, drawn
from tilewise_lab.fuzz.grown import TWINS, GrownCase
from tilewise_lab.fuzz.judge import judge
from tilewise_lab.fuzz.shrink import shrink


def test_right_calls_are_right() -> None:
    cases = [drawn("grown", 5, number, Where()) for number in range(30)]
    for case in cases:
        if case.mode != "compile":
            verdict = judge(case)
            assert not verdict.is_finding, f"{verdict.code}\n{verdict.words}"


def test_every_choice_is_drawn() -> None:
    cases = [drawn("grown", 0, number, Where()) for number in range(400)]
    for name in vars(GrownCase()):
        if name not in ("device", "backend"):
            assert len({getattr(case, name) for case in cases}) > 1, name
    assert {case.mask_mod for case in cases} == set(TWINS)
    assert cases[:20] == [drawn("grown", 0, number, Where()) for number in range(20)]


CASE = GrownCase(
    n_q=20, n_k=30, mask_mod="prefix_lm", batch=2, causal=True, steps=((13,), (30, 36, 0)), mode="backward"
)


@pytest.mark.parametrize("name", ["attention", "grown_kinds", "of_part"])
def test_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not judge(CASE).is_finding
    owner: Any = tilewise if name == "attention" else blocks
    right = getattr(owner, name)
    faults: dict[str, Any] = {
        "attention": lambda *args, **options: right(*args, **options) * 1.01,
        "grown_kinds": lambda *args: torch.where(right(*args) == 2, 3, right(*args)),
        "of_part": lambda mod, start, *rest: right(mod, max(0, start - 1), *rest),
    }
    monkeypatch.setattr(owner, name, faults[name])
    case = GrownCase(n_q=20, n_k=20, mask_mod="query", heads=2, steps=((9, 20, 0),)) if name == "of_part" else CASE
    verdict = judge(case)
    assert verdict.kind == "wrong"
    assert verdict.words.startswith("tiles" if name == "grown_kinds" else "out")
    small, again = shrink(case, verdict, judge)
    assert again.key == verdict.key
    assert small.features() <= case.features()


def test_accepted_mistakes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = GrownCase(bad=("", "mask.grown(-1)"))
    assert judge(case).kind == ""
    monkeypatch.setattr(blocks.BlockMask, "grown", lambda self, *_, **__: self)
    assert judge(case).kind == "accepted"
