"""`tilewise selftest`: a right library passes, a wrong result is reported, and so is a crash."""

from __future__ import annotations

import json

import pytest

import tilewise
from tilewise_lab import cli, selftest
from tilewise_lab.fuzz.judge import judge


class Here:
    """Judges in this process, in which a test can make a result wrong."""

    def __call__(self, case):
        return judge(case)

    def close(self):
        pass


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """The exit status, the JSON and the text of a run with a few calls and short sequences."""

    def run(*arguments):
        path = tmp_path / "report.json"
        command = ["selftest", "--device", "cpu", "--seconds", "100", "--json", str(path), *arguments]
        status = cli.main(command)
        return status, json.loads(path.read_text()), capsys.readouterr().out

    monkeypatch.setattr(selftest, "LENGTHS", {"cpu": (16,)})
    monkeypatch.setattr(selftest, "Child", Here)
    return run


def test_a_report(report):
    status, found, said = report("--calls", "2")
    assert status == 0
    assert (found["asked"], found["right"], found["wrong"]) == (2, 2, [])
    assert found["facts"]["torch"] == tilewise.attention.__globals__["torch"].__version__
    assert [x["what"] for x in found["speeds"]] == list(selftest.PASSES)
    assert all(x["ours"] > 0 and x["sdpa"] > 0 for x in found["speeds"])
    row = said.splitlines()[-3]
    assert row.startswith(f"| {found['facts']['device']} | {tilewise.__version__} | ")
    assert row.count("|") == len(selftest.COLUMNS) + 1
    assert f"{found['right']} right, 0 wrong" in said


def test_a_wrong_result_is_reported(report, monkeypatch):
    right = tilewise.attention

    def wrong(*tensors, **options):
        found = right(*tensors, **options)
        return (1.01 * found[0], *found[1:]) if isinstance(found, tuple) else 1.01 * found

    monkeypatch.setattr(tilewise, "attention", wrong)
    status, found, said = report("--calls", "5")
    assert status == 1
    assert found["wrong"]
    assert {x["kind"] for x in found["wrong"]} == {"wrong"}
    assert "tilewise.attention(" in found["wrong"][0]["code"]
    assert f"{len(found['wrong'])} wrong" in said
    assert found["wrong"][0]["words"] in said
    exec(compile(found["wrong"][0]["code"], "<report>", "exec"), {})  # the lines run


def test_the_time_is_a_bound(report):
    status, found, said = report("--calls", "1000", "--seconds", "2")
    assert status == 0
    ran = found["right"] + found["refused"]
    assert 1 <= ran < 1000
    assert f"calls: {ran} of 1000" in said


def test_calls_are_always_the_same():
    where = selftest.Where("auto", "cpu")
    first, second = ([case for _, case in zip(range(20), selftest.cases(where), strict=False)] for _ in range(2))
    assert first == second
    assert all(not case.bad for _, case in first)


@pytest.mark.parametrize("words", ["--backend triton", "--calls 0", "--seconds 0", "--json nowhere/report.json"])
def test_mistakes(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["selftest", "--device", "cpu", *words.split()]) == 2
    assert words.split()[0] in capsys.readouterr().err
