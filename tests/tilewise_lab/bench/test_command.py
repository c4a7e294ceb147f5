from __future__ import annotations

from argparse import ArgumentParser

import pytest
import torch

from tilewise.errors import AttentionError
from tilewise_lab import bench, cli
from tilewise_lab.bench import machine, rows, whole
from tilewise_lab.bench.results import load

TINY = ["--device", "cpu", "--dims", "64", "--seqs", "16", "32", "--tokens", "32", "--rounds", "3", "--burst", "0.1"]


def options(*argv):
    parser = ArgumentParser()
    bench.configure(parser)
    return parser.parse_args(argv)


@pytest.mark.slow
def test_a_run_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(whole, "importing", lambda: {"import_ms": 1.0, "import_brings_triton": False})
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *TINY, "--out", "out", "--keep"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "answers right" in said
    assert "only for CUDA" in said
    found = load(tmp_path / "out/results.json")
    assert {cell.group for cell in found.cells} == {"forward", "backward", "overhead"}
    assert len(found.of("forward")) == 4
    assert (tmp_path / "out/report.html").stat().st_size > 5_000
    (kept,) = (tmp_path / "bench/results").iterdir()
    assert load(kept) == found
    assert not list(tmp_path.glob("**/*.partial"))

    report = ["bench", "--report", str(kept), "--out", "again"]
    assert cli.main(report) == 0
    assert (tmp_path / "again/report.html").read_text() == (tmp_path / "out/report.html").read_text()
    assert cli.main([*report, "--gate", str(kept)]) == 0


def test_a_wrong_tilewise_fails_the_command(tmp_path, monkeypatch, capsys):
    from tilewise_lab.bench.provider import Tilewise

    real = Tilewise.bind
    monkeypatch.setattr(Tilewise, "bind", lambda *args: lambda q, k, v: real(*args)(q, k, v) + 1)
    assert cli.main(["bench", "forward", *TINY, "--out", str(tmp_path)]) == 1
    assert "out is off" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "argv",
    [["sideways"], ["--peers", "fa9"], ["--dims", "48"], ["--seqs", "1000"], ["--compare", "no.json", "no.json"]],
)
def test_requests_that_cannot_be_met(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *argv, "--device", "cpu"]) == 2
    assert "expected" in capsys.readouterr().err


def test_targets():
    assert rows.chosen([]) == ("forward", "backward", "overhead")
    assert rows.chosen(["all"]) == tuple(rows.TARGETS)
    assert "memory" in rows.chosen([], quick=True)
    with pytest.raises(AttentionError, match="forwards"):
        rows.chosen(["forwards"])


def test_options_override_the_settings():
    chosen = bench.settings_of(options("--dims", "32", "--burst", "5", "--dtype", "float16"), torch.device("cpu"))
    assert (chosen.dims, chosen.burst, chosen.dtype) == ((32,), 0.005, "float16")
    assert {case.dtype for case in chosen.grid()} == {"float16"}


def test_facts_name_no_place():
    facts = machine.facts(torch.device("cpu"))
    assert facts["device"].endswith("threads")
    assert facts["torch"] == torch.__version__
    import platform

    assert platform.node() not in str(facts)


def test_importing_is_measured_in_a_fresh_process():
    found = whole.importing(times=1)
    assert 0 < found["import_ms"] < 60_000
    assert found["import_brings_triton"] in (True, False)
