"""Random calls with a KV cache: right ones pass, wrong numbers are found and made small."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tilewise_lab.fuzz.draw import Where, drawn
from tilewise_lab.fuzz.judge import judge
from tilewise_lab.fuzz.kv import KvCase, candidates
from tilewise_lab.fuzz.shrink import shrink


def test_right_calls_are_right() -> None:
    for number in range(25):
        verdict = judge(drawn("kv", 5, number, Where()))
        assert not verdict.is_finding, f"{verdict.code}\n{verdict.words}"


def test_right_calls_of_latent_caches_are_right() -> None:
    cases = [case for number in range(800) if (case := drawn("kv", 5, number, Where())).latent]
    assert {"", "int8"} <= {case.k_store for case in cases}
    for case in cases[:12]:
        verdict = judge(case)
        assert not verdict.is_finding, f"{verdict.code}\n{verdict.words}"


def test_every_choice_is_drawn() -> None:
    cases = [drawn("kv", 0, number, Where()) for number in range(400)]
    for name in KvCase().dict() | vars(KvCase()):
        if name != "device":
            assert len({getattr(case, name) for case in cases}) > (0 if name == "backend" else 1), name
    assert cases[:20] == [drawn("kv", 0, number, Where()) for number in range(20)]


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (lambda out, k: out.mul_(1.001), "out"),
        (lambda out, k: k.nan_to_num_(), "k_cache"),
        (lambda out, k: out[:1].fill_(torch.nan), "out"),
    ],
    ids=["numbers", "cache", "nan"],
)
def test_faults_are_found(fault: Any, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tilewise.attention_kv

    def attention_kv(q: torch.Tensor, k: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = right(q, k, *args, **options)
        fault(found[0] if isinstance(found, tuple) else found, k)
        return found

    case = KvCase(lengths=(3, 9), queries=(1, 2), packed=True, page=4, softcap=2.0, d=8)
    assert not judge(case).is_finding
    monkeypatch.setattr(tilewise, "attention_kv", attention_kv)
    verdict = judge(case)
    assert verdict.kind == "wrong"
    assert verdict.words.startswith(part)
    small, again = shrink(case, verdict, judge)
    assert again.key == verdict.key
    assert small.features() < case.features()


def test_candidates_are_simpler_and_right() -> None:
    case = drawn("kv", 1, 4, Where())
    simpler = list(candidates(case))
    assert case not in simpler
    assert not any(judge(one).is_finding for one in simpler)
