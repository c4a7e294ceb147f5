"""The sweep over shapes of models: what is drawn, how it is timed, and how the worst rows are explained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.conftest import HAS_TRITON
from tests.forks import python
from tilewise.errors import AttentionError
from tilewise_lab import cli
from tilewise_lab.bench import rows
from tilewise_lab.bench.cases import Case
from tilewise_lab.bench.provider import OURS, Tilewise
from tilewise_lab.bench.results import load
from tilewise_lab.bench.shapes import FLOPS, LONG_FLOPS, MODELS, MOST, TOKENS, Shape, part_of, shapes
from tilewise_lab.bench.sweep import (
    ROWS,
    TOLERANCE,
    cells,
    differences,
    in_turns,
    named_shapes,
    needed_bytes,
    request_of,
)
from tilewise_lab.bench.torch_peers import Naive

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


def test_results_that_differ_are_found():
    ours, peer = {"out": torch.ones(4)}, {"out": torch.ones(4)}
    assert differences({OURS: ours, "fa3": peer})["out"] == (0.0, TOLERANCE)
    assert not differences({OURS: {"out": torch.full((4,), 1.1)}, "fa3": peer})["out"].ok
    assert not differences({OURS: {"out": torch.full((4,), torch.nan)}, "fa3": peer})["out"].ok
    assert differences({"fa3": peer}) == differences({OURS: ours}) == {}


def tiny(number, **given):
    case = Case(
        **{"batch": 2, "seq": 24, "heads": 4, "kv_heads": 2, "dim": 16, "causal": True, "dtype": "float32"} | given
    )
    return Shape(number, "tiny", case)


def test_shapes_are_timed_on_a_cpu():
    providers = [Tilewise(OURS, ""), Naive("naive", "")]
    drawn = [tiny(0), tiny(1, lengths=(5, 9), batch=1, seq=0), tiny(2, window=3, value_dim=8)]
    found = [cell for shape in drawn for cell in cells(shape, providers, CPU, "shapes")]
    assert [(x.case["number"], x.group) for x in found] == [
        (n, f"shapes {which}") for n in range(3) for which in ("forward", "backward")
    ]
    assert all(x.entries[OURS].status == "ok" for x in found)
    assert [x.ratio_to_best() is None for x in found] == [False, False, True, True, False, False]
    assert "mostly padding" in found[2].entries["naive"].reason
    assert found[0].flops == drawn[0].case.flops("forward")


def test_a_wrong_result_is_found():
    class Wrong(Naive):
        def bind(self, case, x):
            attention = super().bind(case, x)
            return lambda q, k, v: attention(q, k, 2 * v)

    for cell in cells(tiny(0), [Tilewise(OURS, ""), Wrong("naive", "")], CPU, "shapes"):
        assert cell.entries[OURS].status == "wrong"
        assert cell.timed() == ["naive"]


def test_a_provider_that_fails_is_listed_with_its_reason():
    class Failing(Naive):
        def bind(self, case, x):
            raise RuntimeError("no kernel\nat all")

    forward, _ = cells(tiny(0), [Failing("naive", "")], CPU, "shapes")
    assert forward.entries["naive"].reason == "RuntimeError: no kernel"
    assert forward.timed() == []
    assert in_turns({}, CPU) == {}
    assert needed_bytes(Case(1, 1000, 8, 8, 128)) == 28 * 1000 * 16 * 256


COMPILATIONS = """
from tilewise.request import Gpu
from tilewise_lab.bench.shapes import shapes
from tilewise_lab.bench.sweep import compilations
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
    monkeypatch.setattr(rows, "shapes", lambda count, seed, part: [tiny(count + seed + part[1])])
    argv = ["bench", "models-shapes", "--device", "cpu", "--count", "3", "--part", "1/2", "--peers", "naive"]
    assert cli.main([*argv, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "tiny: b2 s24 h4/2 d16 causal" in said
    found = load(tmp_path / "results.json")
    assert [x.case["number"] for x in found.cells] == [5, 5]
    assert {x.group for x in found.cells} == {"models-shapes forward", "models-shapes backward"}
    assert cli.main([*argv, "--out", str(tmp_path), "--seconds", "-1"]) == 0
    assert load(tmp_path / "results.json").notes["not measured"] == "2 rows, for lack of time (--seconds)"
    for wrong in (["--part", "3/2"], ["--count", "0"], ["--peers", "fa9"]):
        assert cli.main(["bench", "models-shapes", "--device", "cpu", *wrong, "--out", str(tmp_path)]) == 2


def test_named_rows_and_the_grid_are_different_cases():
    cases = [x.case for x in named_shapes()]
    assert len(set(cases)) == len(cases) == len(ROWS) + 36
