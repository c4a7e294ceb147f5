"""Random calls of `tilewise.sparse`: right ones pass, wrong numbers are found and made small."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise import sparse
from tilewise_lab.fuzz.draw import Where, drawn
from tilewise_lab.fuzz.judge import judge
from tilewise_lab.fuzz.shrink import shrink
from tilewise_lab.fuzz.sparse import EXTRAS, FUNCTIONS, SparseCase


def test_right_calls_are_right() -> None:
    for number in range(30):
        verdict = judge(drawn("sparse", 7, number, Where()))
        assert not verdict.is_finding, f"{verdict.code}\n{verdict.words}"


def test_every_choice_is_drawn() -> None:
    cases = [drawn("sparse", 0, number, Where()) for number in range(300)]
    for name in vars(SparseCase()):
        if name not in ("device", "backend"):
            assert len({getattr(case, name) for case in cases}) > 1, name
    assert {case.function for case in cases if case.bad} == set(FUNCTIONS)
    assert {case.extra for case in cases if not case.bad} == {"", *(x for extras in EXTRAS.values() for x in extras)}
    assert cases[:20] == [drawn("sparse", 0, number, Where()) for number in range(20)]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_faults_are_found(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (drawn("sparse", 3, number, Where()) for number in range(200))
    case = next(c for c in cases if c.function == function and not c.bad and c.mode == "call" and c.dtype == "float32")
    assert not judge(case).is_finding
    right = getattr(sparse, function)
    monkeypatch.setattr(sparse, function, lambda *a, **k: right(*a, **k) * 1.01 + 0.1)
    verdict = judge(case)
    assert verdict.kind == "wrong"
    small, again = shrink(case, verdict, judge, 2.0)
    assert again.key == verdict.key
    assert small.features() <= case.features()


def test_accepted_mistakes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (drawn("sparse", 0, number, Where()) for number in range(300))
    case = next(c for c in cases if c.bad)

    def anything(*_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(1)

    monkeypatch.setattr(sparse, case.function, anything)
    assert judge(case).kind == "accepted"


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mode", ["create_graph", "jvp of grad"])
def test_wrong_second_derivatives_are_found(function: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (drawn("sparse", 3, number, Where()) for number in range(900))
    case = next(
        c for c in cases if c.function == function and not c.bad and c.mode == mode and c.dtype == "float32" and c.d > 2
    )
    assert not judge(case).is_finding
    right = getattr(sparse, function)

    def bent(q: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Its first derivatives are right."""
        found = right(q, *args, **options)
        far = (q.detach() - q).square().sum()
        return (found[0] + far, found[1]) if isinstance(found, tuple) else found + far

    monkeypatch.setattr(sparse, function, bent)
    assert judge(case).kind == "wrong"
