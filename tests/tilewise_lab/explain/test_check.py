from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilewise_lab import cli
from tilewise_lab.costs.devices import device
from tilewise_lab.costs.predict import MODEL, Model, predict
from tilewise_lab.explain import check

H200 = device("H200")
ROOT = Path(__file__).parents[3]


def invented(model=MODEL):
    return [
        check.Measured(
            call,
            "triton",
            which,
            predict(call, "triton", H200, only_backward=which == "backward", model=model).device,
            0.0,
        )
        for call in check.calls()
        for which in ("forward", "backward")
    ]


def test_enough_calls_are_measured():
    calls = list(check.calls())
    assert len(set(calls)) == len(calls)
    assert 2 * len(calls) >= 60


def test_no_benchmark_makes_the_calls_that_check_the_model():
    for kept in (ROOT / "bench" / "results").glob("*-nvidia-h200.json"):
        fitted = {m.call for m in check.load(kept)[1]}
        assert len(fitted) >= 36
        assert not fitted & set(check.calls())


def test_a_file_is_read_as_it_was_written(tmp_path):
    measured = invented()
    entries = [
        {"call": m.call.to_dict(), "backend": m.backend, "pass": m.which, "seconds": m.seconds, "spread": m.spread}
        for m in measured
    ]
    path = tmp_path / "calls.json"
    path.write_text(json.dumps({"device": "NVIDIA H200", "calls": entries}))
    assert check.load(path) == ("NVIDIA H200", measured)


def test_the_fit_finds_the_efficiencies_that_made_the_data():
    slower = {key: {d: 0.8 * e for d, e in row.items()} for key, row in MODEL.efficiency.items()}
    measured = [m for m in invented(replace(MODEL, efficiency=slower)) if m.call.d == 64 and m.call.after is None]
    before = statistics.median(m.error(H200) for m in measured)
    fitted = check.fit(measured, H200, rounds=1)
    after = statistics.median(m.error(H200, fitted) for m in measured)
    assert after < 0.05 < before


def test_a_fit_is_written_and_read(tmp_path, monkeypatch, capsys):
    (kept,) = (ROOT / "bench" / "results").glob("*-nvidia-h200.json")
    monkeypatch.setattr(check, "fit", lambda measured, on: replace(MODEL, edge=0.123))
    save = Model.save
    monkeypatch.setattr(check.Model, "save", lambda model: save(model, tmp_path / "model.json"))
    assert cli.main(["explain", "--fit", str(kept)]) == 0
    assert Model.load(tmp_path / "model.json").edge == 0.123
    assert "median error" in capsys.readouterr().out


def test_the_comparison_ends_with_the_median():
    assert check.compare(invented(), H200).splitlines()[-1] == "76 calls: median error 0.0%, 100% within 20 %"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path, capsys):
    assert cli.main(["explain", "--check", str(tmp_path / "x.json")]) == 2
    assert "none is here" in capsys.readouterr().err


def test_predictions_are_within_a_fifth_of_the_h200():
    """The median over every forward and backward that the kept benchmark measured."""
    (kept,) = (ROOT / "bench" / "results").glob("*-nvidia-h200.json")
    name, measured = check.load(kept)
    assert len(measured) >= 60
    assert statistics.median(m.error(device(name)) for m in measured) <= 0.2


def test_calls_that_no_benchmark_makes_are_predicted_within_a_fifth():
    """The median over what `tilewise explain --check` measured."""
    kept = max((ROOT / "bench" / "results").glob("*-nvidia-h200-calls.json"), default=None)
    if kept is None:
        pytest.skip("no measured calls are kept")
    name, measured = check.load(kept)
    assert len(measured) >= 60
    assert {m.call for m in measured} <= set(check.calls())
    assert statistics.median(m.error(device(name)) for m in measured) <= 0.2
