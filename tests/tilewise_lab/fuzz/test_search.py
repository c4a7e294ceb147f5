"""Seeds repeat, findings become small, crashes and hangs are findings, and the command says what it found."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest
import torch

import tilewise
from tilewise.call.fields import ATTENTION, CACHE
from tilewise_lab import cli
from tilewise_lab.fuzz import command, family
from tilewise_lab.fuzz.bad import BAD
from tilewise_lab.fuzz.case import Case, code
from tilewise_lab.fuzz.child import Child
from tilewise_lab.fuzz.draw import FUNCTIONS, Where, draw
from tilewise_lab.fuzz.judge import Verdict, executed, judge
from tilewise_lab.fuzz.search import Search
from tilewise_lab.fuzz.shrink import shrink

PLACES = [Where("reference"), Where("triton"), Where("hopper", "cuda")]


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_seeds_repeat(where):
    cases = [draw(3, n, where) for n in range(50)]
    assert cases == [draw(3, n, where) for n in range(50)]
    assert len({code(case) for case in cases}) > 40
    assert cases != [draw(4, n, where) for n in range(50)]


def test_cases_survive_json():
    for n in range(100):
        case = draw(0, n, Where())
        assert Case.of(json.loads(json.dumps(case.dict()))) == case


def test_every_function_and_option_is_drawn():
    cases = [draw(0, n, Where()) for n in range(600)]
    used = [case for case in cases if case.bad is None]
    simplest = Case()
    for name in simplest.__dict__:
        if name not in ("device", "dropout_seed"):
            assert any(getattr(case, name) != getattr(simplest, name) for case in cases), name
    assert {case.function for case in used} == set(FUNCTIONS)
    assert len({case.bad[0] for case in cases if case.bad}) > len(BAD) / 2
    assert any(0 in (case.n_q, case.n_k, case.batch) for case in used)
    assert any((0 in pair) for case in used for pair in case.lengths)


def test_shrinking_keeps_the_cause_only(monkeypatch):
    """A bug that needs a softcap and three keys is reported with one, and with few more than three."""
    right = tilewise.attention

    def attention(q, k, v, **options):
        if options.get("softcap") and k.shape[1] >= 3:
            raise TypeError("three keys")
        return right(q, k, v, **options)

    monkeypatch.setattr(tilewise, "attention", attention)
    case = Case(
        backend="reference", mode="func.vjp", dtype="float16", batch=2, n_q=9, n_k=11, heads=4, group=2, d=17, dv=8,
        wants=("q", "v", "bias"), bias="hij", softcap=2.0, causal=True, window=(3, None), sinks=True, return_lse=True,
        layouts=(("q", "turned 1"), ("k", "stepped 1")), dropout_p=0.1, gain=20.0, hidden="nan",
    )  # fmt: skip
    small, verdict = shrink(case, judge(case), judge)
    assert small == Case(backend="reference", n_k=3, softcap=2.0, wants=small.wants)
    assert "TypeError" in verdict.words
    with pytest.raises(TypeError):
        executed(verdict.code)


def test_alike_findings_are_one():
    def broken(case):
        return Verdict("wrong", "wrong out", "out: off", code(case)) if getattr(case, "softcap", None) else Verdict()

    search = Search(0, Where(), broken)
    list(search.run(None, 200))
    assert [f.case.features() for f in search.findings] == [frozenset({"softcap"})]
    assert search.findings[0].count > 3
    assert search.cases == 200


def test_crashes_and_hangs_are_findings():
    judging = Child()
    try:
        fine = Case(backend="reference")
        assert judging(fine) == Verdict()
        judging.process.kill()
        verdict = judging(fine)
        assert (verdict.kind, "tilewise.attention" in verdict.code) == ("crash", True)
        assert judging(fine) == Verdict()
        os.kill(judging.process.pid, signal.SIGSTOP)
        judging.hang = 0.5
        assert judging(fine).kind == "hang"
    finally:
        judging.close()


@pytest.mark.parametrize("wrong", [False, True])
def test_the_command_says_what_it_found(monkeypatch, capsys, tmp_path, wrong):
    class Fake:
        def __call__(self, case):
            return Verdict("wrong", "wrong out", "out: error", code(case)) if wrong else Verdict()

        def close(self):
            pass

    monkeypatch.setattr(command, "Child", Fake)
    saved = tmp_path / "found.json"
    assert cli.main(["fuzz", "--cases", "20", "--seed", "5", "--json", str(saved)]) == int(wrong)
    said = capsys.readouterr().out
    found = json.loads(saved.read_text())
    assert found["cases"] == 20
    assert bool(found["findings"]) is wrong
    assert ("import torch, tilewise" in said) is wrong
    assert "20 calls" in said


@pytest.mark.parametrize(
    ("option", "word"), [("--device", "cuda"), ("--json", "no/folder/found.json"), ("--cases", "0")]
)
def test_what_cannot_be_is_one_sentence(monkeypatch, capsys, option, word):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["fuzz", option, word]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert option in said


def test_a_case_is_a_few_lines():
    case = replace(Case(backend="reference", n_q=2, n_k=2), causal=True)
    assert code(case).splitlines()[-3:] == [
        "def f():",
        "    return tilewise.attention(q, k, v, causal=True, backend='reference'),",
        "outs = f()",
    ]


def test_no_jacobian_of_nothing_is_drawn() -> None:
    """torch's own fails there."""
    drawn = [draw(3, n, Where()) for n in range(6000)]
    assert sum(case.mode == "jacrev" for case in drawn) > 20
    assert not any(case.mode == "jacrev" and 0 in case.outputs()["out"] for case in drawn)


def test_every_field_of_the_tables_is_drawn_or_named_with_its_test():
    fields = [*family.OPTIONS, *family.PLACES, *family.ELSEWHERE]
    assert len(set(fields)) == len(fields)
    assert set(fields) == {*ATTENTION.fields, *CACHE.fields}
