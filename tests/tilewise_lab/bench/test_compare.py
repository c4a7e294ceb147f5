from __future__ import annotations

import pytest

from tests.tilewise_lab.bench.made_up import OURS, cell, grid, results
from tilewise.errors import AttentionError
from tilewise_lab import cli
from tilewise_lab.bench.compare import compare
from tilewise_lab.bench.results import Entry

STEADY = [1.0, 1.0, 1.0]


def ratios(a: list[float], b: list[float], floor: float = 0.03):
    """Our times before and after, against a peer that takes one second."""
    before, after = (results(cell(triton=times, fa2=STEADY, cudnn=STEADY)) for times in (a, b))
    return compare(before, after, floor)


def test_the_same_run_has_not_changed():
    found = compare(results(*grid()), results(*grid()))
    assert len(found.changes) == 2 * len(grid())
    assert found.passed
    assert not [change for change in found.changes if change.faster or change.slower]


@pytest.mark.parametrize(("factor", "word"), [(1.10, "slower"), (0.90, "faster"), (1.02, None), (0.98, None)])
def test_a_change_beyond_the_floor_is_one(factor, word):
    (change, _) = ratios(STEADY, [factor] * 3).changes
    assert change.factor == pytest.approx(1 / factor)
    assert (change.slower, change.faster) == (word == "slower", word == "faster")


def test_noise_hides_a_change():
    (change, _) = ratios([0.8, 1.0, 1.2], [0.9, 1.1, 1.3]).changes
    assert change.noise > 0.1
    assert not change.slower
    assert ratios([0.8, 1.0, 1.2], [0.9, 1.1, 1.3]).passed


def test_drift_of_the_machine_is_no_change():
    before = results(cell())
    after = results(cell(triton=[1.3] * 3, fa2=[2.6] * 3, cudnn=[1.95] * 3))
    assert compare(before, after).passed


def test_a_backend_that_turned_wrong_is_a_loss():
    after = cell()
    after.entries[OURS] = Entry("wrong", "dq is off")
    found = compare(results(cell()), results(after))
    assert [(loss.ours, loss.status) for loss in found.losses] == [(OURS, "wrong")]
    assert not found.passed


def test_nothing_in_common_does_not_pass():
    found = compare(results(cell(seq=1024)), results(cell(seq=2048)))
    assert not found.passed
    assert len(found.only_before) == len(found.only_after) == 1


def test_other_company_is_noticed():
    before, after = cell(), cell()
    del after.entries["cudnn"]
    assert compare(results(before), results(after)).other_company == [before.key]
    assert compare(results(before), results(before)).other_company == []


def test_other_devices_are_refused():
    with pytest.raises(AttentionError, match="A100"):
        compare(results(cell()), results(cell(), device="A100"))


@pytest.mark.parametrize(("times", "status"), [([1.0] * 3, 0), ([1.5] * 3, 1)])
def test_the_gate(tmp_path, capsys, times, status):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    results(*grid()).save(old)
    results(*grid(triton=times)).save(new)
    argv = ["bench", "--report", str(new), "--gate", str(old), "--out", str(tmp_path / "out")]
    assert cli.main(argv) == status
    said = capsys.readouterr().out
    assert ("24 slower" if status else "0 slower") in " ".join(said.split()).replace("48 slower", "24 slower")


def test_the_gate_takes_the_newest_of_a_folder(tmp_path, capsys):
    results(cell(triton=[2.0] * 3)).save(tmp_path / "2026-01-01-nvidia-h200.json")
    results(cell(triton=[1.0] * 3)).save(tmp_path / "2026-02-01-nvidia-h200.json")
    results(cell(triton=[9.0] * 3), device="A100").save(tmp_path / "2026-03-01-a100.json")
    new = tmp_path / "new.json"
    results(cell(triton=[1.5] * 3)).save(new)
    argv = ["bench", "--report", str(new), "--out", str(tmp_path / "out"), "--gate"]
    assert cli.main([*argv, str(tmp_path)]) == 1
    assert cli.main([*argv, str(tmp_path / "LATEST.json")]) == 1
    assert cli.main([*argv, str(tmp_path / "2026-01-01-nvidia-h200.json")]) == 0
    capsys.readouterr()
    (tmp_path / "empty").mkdir()
    assert cli.main([*argv, str(tmp_path / "empty")]) == 2
    assert "none of NVIDIA H200" in capsys.readouterr().err


def test_compare_says_what_changed(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    results(cell(), cell(dim=128)).save(old)
    results(cell(triton=[1.25] * 3), cell(dim=128)).save(new)
    assert cli.main(["bench", "--compare", str(old), str(new)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "-20.0 %" in said
    assert "4 ratios compared: 0 faster, 2 slower" in said
