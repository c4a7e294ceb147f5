"""The sweep over shapes of models: what is drawn, how it is timed, and how the worst rows are explained."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import asdict, replace

import pytest
import torch

from tests.conftest import HAS_TRITON
from tests.forks import python
from tilewise.errors import AttentionError
from tilewise_lab import bench, cli
from tilewise_lab.bench import shapes_run, shapes_time
from tilewise_lab.bench.cases import Case
from tilewise_lab.bench.model_shapes import FLOPS, LONG_FLOPS, MOST, TOKENS, Shape, part_of, shapes
from tilewise_lab.bench.model_table import MODELS
from tilewise_lab.bench.provider import OURS, Tilewise
from tilewise_lab.bench.shapes_causes import causes, sentence
from tilewise_lab.bench.shapes_compile import request_of
from tilewise_lab.bench.shapes_run import explain_worst, ratio, report, sweep, worst
from tilewise_lab.bench.shapes_time import differences, needed_bytes, time_case
from tilewise_lab.bench.torch_peers import Naive
from tilewise_lab.costs.devices import device as known_device

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="no Triton")


def test_the_table_has_layers_that_can_be_called():
    assert len({row.name for row in MODELS}) == len(MODELS)
    for row in MODELS:
        assert row.heads % row.kv_heads == 0
        assert 64 <= row.dim <= 256
        assert row.window is None or (row.causal and row.window < row.context)
        assert max(row.lengths, default=row.context) == row.context


def test_two_hundred_shapes_differ_and_cover_what_models_have():
    drawn = shapes(200)
    cases = [x.case for x in drawn]
    assert [x.number for x in drawn] == list(range(200))
    assert len(set(cases)) == 200
    assert {x.model for x in drawn} == {row.name for row in MODELS}
    assert min(x.longest for x in cases) < 200
    assert max(x.longest for x in cases) > MOST // 2
    assert min(x.heads for x in cases) == 8
    assert max(x.heads for x in cases) == max(x.kv_heads for x in cases) == 128
    assert min(x.kv_heads for x in cases) == 1
    assert {(x.dim, x.dv) for x in cases} >= {(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)}
    assert {x.batch for x in cases} >= {1, 2, 4, 8, 16, 32, 64}
    assert sum(bool(x.lengths) for x in cases) >= 20
    assert sum(x.window is not None for x in cases) >= 10
    assert sum(x.longest % 8 != 0 for x in cases) >= 40
    assert sum(not x.causal for x in cases) >= 20
    for x in cases:
        assert x.heads % x.kv_heads == 0
        assert x.flops("forward") <= LONG_FLOPS
        assert x.lengths == () or len(x.lengths) > 1
        assert x.batch == 1 or (x.batch * x.seq <= TOKENS and x.flops("forward") <= FLOPS)
        assert x.window is None or x.window < x.longest


def test_shapes_depend_on_the_seed_and_their_number():
    assert shapes(50) == shapes(200)[:50]
    assert shapes(50) != shapes(50, seed=1)
    halves = [shapes(50, part=(i, 2)) for i in (1, 2)]
    assert sorted(halves[0] + halves[1]) == sorted(shapes(50))
    assert not set(halves[0]) & set(halves[1])
    assert shapes(3, dtype="float16")[0].case.dtype == "float16"
    assert part_of("3/4") == (3, 4)
    for text in ("0/4", "5/4", "1", "a/b", "1/0"):
        with pytest.raises(AttentionError, match="--part"):
            part_of(text)


def test_pairs_of_packed_sequences_with_a_window():
    packed = Case(1, 0, 1, 1, 64, causal=True, window=3, lengths=(2, 10))
    assert packed.pairs() == 3 + (1 + 2 + 3 + 7 * 4)
    assert replace(packed, window=10).pairs() == (4 + 100) / 2


def row(us, which="forward", case=None, **others):
    case = case or Case(1, 1024, 16, 16, 128, True)
    found = {"number": 0, "model": "m", "key": f"m: {case.key}", "case": asdict(case), "pass": which, "us": us}
    return found | {"refused": {}, "tflops": {}, "ratio": ratio(found)} | others


def canned():
    small = Case(1, 512, 16, 16, 64, False)
    rows = [row({OURS: 10.0, "fa3": 10.0 + i}) for i in range(30)]
    rows += [
        row({OURS: 30.0, "fa3": 24.0, "cudnn": 27.0}, "backward", small, wrong="dq differs from fa3 by 0.3"),
        row({OURS: 9.0}, refused={"fa3": "no packed sequences"}),
        row({"fa3": 9.0}),
    ]
    return {"machine": {"device": "NVIDIA H200"}, "shapes": 17, "skipped": ["x: memory"], "rows": rows}


def test_the_worst_rows_are_those_with_the_lowest_ratios():
    found = canned()
    slow = worst(found["rows"])
    assert len(slow) == 20
    assert slow[0]["ratio"] == 0.8
    assert [x["ratio"] for x in slow[1:4]] == [1.0, 1.1, 1.2]


@needs_triton
def test_the_report_says_why_and_what_is_missing():
    found = canned()
    explain_worst(found["rows"], known_device("H200"), None)
    said = report(found)
    lines = said.splitlines()
    assert lines[0] == "17 shapes, 31 rows with a peer, on NVIDIA H200"
    assert "backward  mean 0.800  median 0.800  worst 0.800  1 of 1 below 0.93" in said
    first = next(i for i, line in enumerate(lines) if line.startswith("0.800"))
    assert lines[first] == "0.800 backward m: b1 s512 h16 d64 full bfloat16  30 us, fa3 24"
    assert "idle SMs 52% (64 tiles for 132 SMs)" in lines[first + 1]
    assert "wrong: backward m: b1 s512 h16 d64 full bfloat16: dq differs from fa3 by 0.3" in lines
    assert "fa3 forward, 1 rows: no packed sequences" in lines
    assert "skipped: x: memory" in lines
    assert sum("why" in x for x in found["rows"]) == 20


@needs_triton
def test_causes_of_known_calls():
    h200 = known_device("H200")

    def names(case, which, seconds, **given):
        return {x.name: x for x in causes(case, which, seconds, h200, **given)}

    few = names(Case(1, 512, 16, 16, 64), "backward", 30e-6)
    assert few["idle SMs"].share == pytest.approx(1 - 64 / 132, abs=0.01)
    diagonal = names(Case(16, 1024, 32, 32, 128, True), "forward", 3e-4)
    assert diagonal["hidden pairs"].share == pytest.approx(1 / 9, abs=0.01)
    few_queries = Case(1, 16384, 16, 16, 128, queries=1024)
    for which, tiles in (("forward", 128), ("backward", 2048)):
        seconds = few_queries.flops(which) / 700e12
        found = names(few_queries, which, seconds)
        assert found["rate of the tiles"].share == pytest.approx(700 / 989, abs=0.03)
        starts = found.get("starts of tiles")
        assert starts is None or starts.detail == f"{tiles} tiles"
    assert request_of(few_queries).q.shape == (1, 1024, 16, 128)
    padded = names(Case(4, 4096, 16, 16, 72), "forward", 1e-3)
    assert padded["padded columns"].share == pytest.approx(0.1)
    large = names(Case(4, 8192, 16, 16, 128), "forward", 3.4e-3, spills=324)
    assert [*large] == ["spills", "rate of the tiles"]
    assert large["spills"].detail == "324 bytes"
    assert 0.6 < large["rate of the tiles"].share < 0.7
    # a packed call of equal sequences has the tiles of the dense one
    dense, packed = (
        names(case, "backward", 1e-3)
        for case in (Case(8, 1000, 8, 8, 128, True), Case(1, 0, 8, 8, 128, True, lengths=(1000,) * 8))
    )
    assert dense["hidden pairs"] == packed["hidden pairs"]
    assert sentence([]) == ""


@needs_triton
def test_a_split_backward_has_more_tiles():
    found = causes(Case(1, 2048, 32, 8, 128, True), "backward", 2e-4, known_device("H200"))
    assert {x.name for x in found}.isdisjoint({"idle SMs"})  # two parts of 128 tiles fill 132 SMs


def test_results_that_differ_are_named():
    ours, peer = {"out": torch.ones(4)}, {"out": torch.ones(4)}
    assert differences({OURS: ours, "fa3": peer}) == ""
    assert differences({OURS: {"out": torch.full((4,), 1.1)}, "fa3": peer}) == "out differs from fa3 by 0.1"
    assert "nan" in differences({OURS: {"out": torch.full((4,), torch.nan)}, "fa3": peer})
    assert differences({"fa3": peer}) == differences({OURS: ours}) == ""


def tiny(number, **given):
    case = Case(
        **{"batch": 2, "seq": 24, "heads": 4, "kv_heads": 2, "dim": 16, "causal": True, "dtype": "float32"} | given
    )
    return Shape(number, "tiny", case)


def test_a_sweep_on_the_cpu(tmp_path):
    ours = Tilewise(OURS, "")
    drawn = [tiny(0), tiny(1, lengths=(5, 9), batch=1, seq=0), tiny(2, window=3, value_dim=8)]
    found = sweep(drawn, [ours, Naive("naive", "")], CPU, tmp_path / "all.json", None)
    assert found["skipped"] == []
    assert [(x["number"], x["pass"]) for x in found["rows"]] == [
        (n, which) for n in range(3) for which in ("forward", "backward")
    ]
    assert not any("wrong" in x for x in found["rows"])
    assert [x["ratio"] is None for x in found["rows"]] == [False, False, True, True, False, False]
    assert "mostly padding" in found["rows"][2]["refused"]["naive"]
    assert json.loads((tmp_path / "all.json").read_text()) == json.loads(json.dumps(found))
    assert "3 shapes, 4 rows with a peer" in report(found)


def test_a_wrong_result_is_found(tmp_path):
    class Wrong(Naive):
        def bind(self, case, x):
            attention = super().bind(case, x)
            return lambda q, k, v: attention(q, k, 2 * v)

    found = sweep([tiny(0)], [Tilewise(OURS, ""), Wrong("naive", "")], CPU, tmp_path / "all.json", None)
    assert all("wrong" in x for x in found["rows"])


def test_no_shape_begins_after_the_time_is_up(tmp_path):
    found = sweep([tiny(0), tiny(1)], [Tilewise(OURS, "")], CPU, tmp_path / "all.json", -1.0)
    assert found["rows"] == []
    assert found["skipped"] == ["2 shapes, for lack of time (--seconds)"]


def test_what_does_not_fit_is_skipped(tmp_path, monkeypatch):
    assert needed_bytes(Case(1, 1000, 8, 8, 128)) == 28 * 1000 * 16 * 256

    def no_room(*args):
        raise AttentionError("memory", "about 200 GB needed, 3 GB free", "a smaller case")
        yield

    monkeypatch.setattr(shapes_run, "time_case", no_room)
    found = sweep([tiny(0)], [Tilewise(OURS, "")], CPU, tmp_path / "all.json", None)
    assert found["skipped"] == [f"{tiny(0).key}: memory: found about 200 GB needed, 3 GB free; expected a smaller case"]


def test_a_provider_that_fails_is_listed_with_its_reason():
    class Failing(Naive):
        def bind(self, case, x):
            raise RuntimeError("no kernel\nat all")

    (forward, _) = time_case(tiny(0).case, [Failing("naive", "")], CPU)
    assert forward["refused"] == {"naive": "RuntimeError: no kernel"}
    assert forward["us"] == {}
    assert shapes_time.in_turns({}, CPU) == {}


COMPILATIONS = """
from tilewise.request import Gpu
from tilewise_lab.bench.model_shapes import shapes
from tilewise_lab.bench.shapes_compile import compilations
cases = [x.case for x in shapes(12)]
found = compilations(cases, Gpu("cuda", 90))
assert len(compilations(cases + cases, Gpu("cuda", 90))) == len(found)
print({x.launch for x in found})
"""


@needs_triton
def test_the_kernels_of_cases_are_compiled_once():
    done = python("-c", COMPILATIONS)
    assert done.returncode == 0, done.stderr
    for name in ("hopper forward", "hopper backward", "(preprocess)", "(postprocess)"):
        assert repr(name) in done.stdout


@needs_triton
def test_the_request_of_a_case():
    packed = request_of(Case(1, 0, 8, 2, 192, True, 100, (7, 300), value_dim=128))
    assert packed.q.shape == (307, 8, 192)
    assert packed.v.shape == (307, 2, 128)
    assert (packed.spec.before, packed.spec.after) == (100, 0)
    assert packed.cu_q.shape == (3,)
    dense = request_of(Case(2, 300, 8, 2, 64))
    assert dense.k.shape == (2, 300, 2, 64)
    assert (dense.spec.before, dense.spec.after) == (None, None)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shapes_run, "shapes", lambda count, seed, part: [tiny(count + seed + part[1])])
    argv = ["bench", "models-shapes", "--device", "cpu", "--count", "3", "--part", "1/2", "--peers", "naive"]
    assert cli.main([*argv, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "1 shapes, 2 rows with a peer" in said
    assert json.loads((tmp_path / "models-shapes.json").read_text())["rows"][0]["number"] == 5
    assert cli.main(["bench", "models-shapes", "--report", str(tmp_path / "models-shapes.json")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == said.splitlines()[1:]
    for wrong in (["--part", "3/2"], ["--count", "0"], ["--peers", "fa9"]):
        assert cli.main(["bench", "models-shapes", "--device", "cpu", *wrong]) == 2
    assert cli.main(["bench", "models-shapes", "forward", "--device", "cpu"]) == 2
    parser = ArgumentParser()
    bench.configure(parser)
    assert "models-shapes" in parser.format_help()
