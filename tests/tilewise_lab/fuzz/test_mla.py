"""Caches of MLA: right calls pass, wrong bytes and wrong numbers are found and made small."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tilewise_lab.fuzz.draw import Where, drawn
from tilewise_lab.fuzz.judge import judge
from tilewise_lab.fuzz.mla import DEEPSEEK, STORES, VALUES, MlaCase, candidates
from tilewise_lab.fuzz.shrink import shrink


def test_right_calls_are_right() -> None:
    for number in range(25):
        case = drawn("mla", 5, number, Where())
        if case.mode != "compile":
            verdict = judge(case)
            assert not verdict.is_finding, f"{verdict.code}\n{verdict.words}"


def test_every_choice_is_drawn() -> None:
    cases = [drawn("mla", 0, number, Where()) for number in range(600)]
    for name in ("mode", "k_scale", "page", "csr", "room", "dims", "indices", "counts", "rotary", "slots", "window"):
        assert len({getattr(case, name) for case in cases}) > 1, name
    assert {case.k_store for case in cases} == set(STORES)
    assert {kind for case in cases for kind in case.values} == set(VALUES)
    assert cases[:20] == [drawn("mla", 0, number, Where()) for number in range(20)]


CASE = MlaCase(
    lengths=(3, 9), queries=(1, 2), new=(1, 2), packed=True, page=4, k_store=DEEPSEEK, v_store=DEEPSEEK,
    values=("normal", "tiny"), seed=2,
)  # fmt: skip


def changed(cache: torch.Tensor, place: tuple[int, int], byte: int) -> None:
    cache.view(torch.uint8)[(*place, 0, byte)] ^= 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda k: changed(k, CASE.place(0, 3), 7), "cache: other bytes"),
        (lambda k: changed(k, CASE.place(0, 3), 513), "cache: other scales"),
        (lambda k: changed(k, CASE.place(1, 10), 655), "cache: other numbers after the values"),
        (lambda k: changed(k, CASE.place(1, 8), 655), "cache: a token that is not new has changed"),
    ],
    ids=["latent", "scale", "rest", "another token"],
)
def test_wrong_bytes_are_found(fault: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tilewise.append_kv

    def append_kv(k_new: Any, v_new: Any, k: Any, *args: Any, **options: Any) -> Any:
        found = right(k_new, v_new, k, *args, **options)
        fault(k)
        return found

    assert not judge(CASE).is_finding
    monkeypatch.setattr(tilewise, "append_kv", append_kv)
    verdict = judge(CASE)
    assert (verdict.kind, verdict.words) == ("wrong", words)


@pytest.mark.parametrize("store", ["float8_e4m3fn", "int8", DEEPSEEK])
def test_wrong_numbers_are_found(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = "" if store == DEEPSEEK else "batch"
    formats = {"k_store": store, "v_store": store, "k_scale": scale, "v_scale": scale}
    case = MlaCase(lengths=(3, 9), queries=(1, 1), **formats, sinks=True)  # type: ignore[arg-type]
    assert not judge(case).is_finding
    right = tilewise.attention_mla
    monkeypatch.setattr(tilewise, "attention_mla", lambda *args, **options: right(*args, **options) * 1.001)
    verdict = judge(case)
    assert verdict.words.startswith("out: error")
    small, again = shrink(case, verdict, judge)
    assert again.key == verdict.key
    assert small.features() < case.features()


def test_candidates_are_simpler_and_right() -> None:
    case = next(
        c for n in range(99) if (c := drawn("mla", 1, n, Where())).k_store == "int8" and c.new and c.mode == "mla"
    )
    simpler = list(candidates(case))
    assert case not in simpler
    assert not any(judge(one).is_finding for one in simpler)
