from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, replace

import pytest
import torch

from tilewise_lab.bench import calls, cold, rows, whole
from tilewise_lab.bench.cases import Case
from tilewise_lab.bench.measure import Sensors
from tilewise_lab.bench.provider import OURS, Provider, RefusedError, Tilewise
from tilewise_lab.bench.providers import Roster, roster
from tilewise_lab.bench.runner import Run
from tilewise_lab.bench.settings import Model, settings
from tilewise_lab.bench.torch_peers import Naive
from tilewise_lab.clock import CpuClock

CPU = torch.device("cpu")
CASE = Case(1, 24, 2, 2, 8, causal=True, dtype="float32")
SMALL = replace(
    settings(CPU, quick=True), rounds=3, burst=1e-4, limit=60.0, dims=(8,), seqs=(16,), tokens=16, hidden=16,
    gqa=(CASE,), varlen=(replace(CASE, lengths=(3, 9)),), window=(replace(CASE, window=4),),
    heads=(replace(CASE, dim=12), replace(CASE, causal=False, value_dim=6)),
    deterministic=(replace(CASE, deterministic=True),), decode=(replace(CASE, causal=False, kv_heads=1, queries=1),),
    layer=Model(1, 16, 2, 1, 24, 0), gpt=(Model(2, 16, 2, 1, 24, 32),),
    memory=replace(CASE, seq=0), memory_lengths=(64, 256),
)  # fmt: skip


@dataclass(frozen=True)
class Peculiar(Provider):
    """The textbook, except in one way."""

    how: str = ""

    def missing(self, device):
        return "left at home" if self.how == "missing" else None

    def refuses(self, case, which):
        return "does not like it" if self.how == "refuses" else None

    def bind(self, case, x):
        right = Naive("", "").bind(case, x)
        calls = []

        def attention(q, k, v):
            calls.append(1)
            if self.how == "raises":
                raise RuntimeError("no kernel\nfor this")
            if self.how == "refuses late":
                raise RefusedError("not today")
            if self.how == "full":
                raise torch.OutOfMemoryError
            if self.how == "wrong" or (self.how == "wrong later" and len(calls) > 2):
                return right(q, k, v) * 1.01
            return right(q, k, v) * (1 + (self.how == "wrong once" and len(calls) == 4))

        return attention


HOWS = ("right", "missing", "refuses", "raises", "refuses late", "full", "wrong", "wrong later", "wrong once")


@pytest.fixture
def run():
    everyone = {how: Peculiar(how, how, how) for how in HOWS}
    everyone["tilewise-reference"] = Tilewise("tilewise-reference", "", "reference")
    return Run(SMALL, Roster(everyone, tuple(everyone)), CpuClock(), Sensors())


def test_only_right_answers_have_a_speed(run):
    (cell,) = run.attention(CASE, {"forward": "forward"})
    assert {name: entry.status for name, entry in cell.entries.items()} == {
        "right": "ok", "missing": "missing", "refuses": "refused", "raises": "failed", "refuses late": "refused",
        "full": "out of memory", "wrong": "wrong", "wrong later": "wrong", "wrong once": "wrong",
        "tilewise-reference": "ok",
    }  # fmt: skip
    assert cell.timed() == ["right", "tilewise-reference"]
    assert all(len(cell.entries[name].times) == 3 for name in cell.timed())
    assert [len(limit["times"]) for limit in cell.ceilings.values()] == [3, 3]
    assert cell.ours == "tilewise-torch"


def test_reasons_are_kept(run):
    (cell,) = run.attention(CASE, {"forward": "forward"})
    reasons = {name: entry.reason for name, entry in cell.entries.items()}
    assert reasons["missing"] == "left at home"
    assert reasons["refuses"] == "does not like it"
    assert reasons["raises"] == "RuntimeError: no kernel"
    assert reasons["refuses late"] == "not today"
    assert reasons["wrong"].startswith("out is off by")
    assert reasons["wrong later"].startswith("in the rounds: out is off by")
    assert reasons["wrong once"].startswith("in the rounds: out is off by")


def test_a_wrong_gradient_is_wrong(run):
    forward, backward = run.attention(CASE, {"forward": "a", "backward": "b"})
    assert (forward.group, backward.group) == ("a", "b")
    assert backward.entries["wrong"].status == "wrong"
    assert "dv is off" in backward.entries["wrong"].reason
    assert set(backward.entries["right"].errors) == {"dq", "dk", "dv"}
    assert backward.flops == 2.5 * forward.flops


def test_a_lost_device_ends_the_run(run):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        run.attempt(lost)


def everything(monkeypatch, folder, *targets, **given):
    monkeypatch.setattr(whole, "importing", lambda: {"import_ms": 1.0})
    monkeypatch.setattr(cold, "program", lambda run, caller, work, cache: {"first": 2.0, "then window,": 1.0})
    run = Run.of(SMALL, roster(CPU), Sensors())
    options = argparse.Namespace(wanted=tuple(targets), seconds=None, **given)
    return rows.measure(run, options, folder / "results.json", lambda *words: None)


@pytest.mark.slow
def test_every_target_gives_something(monkeypatch, tmp_path):
    results = everything(monkeypatch, tmp_path, *[x for x in list(rows.TARGETS)[:13] if x != "gpt"])
    groups = {cell.group for cell in results.cells}
    assert groups == {
        "forward", "backward", "gqa forward", "gqa backward", "varlen forward", "varlen backward", "window forward",
        "window backward", "heads forward", "heads backward", "deterministic backward", "decode forward", "layer",
        "overhead", "cold",
    }  # fmt: skip
    assert not results.wrong(ours=True)
    assert not results.wrong(ours=False)
    for cell in results.cells:
        assert cell.chosen(), cell.key
    for cell in results.of("decode forward", "heads forward"):
        assert set(cell.timed()) - {"tilewise-torch"} == {"tilewise-reference", "sdpa", "naive"}
        assert set(cell.entries["tilewise-reference"].errors) == {"out", "lse"}
    assert len(results.of("heads forward")) == len(results.of("heads backward")) == 2
    assert {(peak.provider, peak.length) for peak in results.memory} == {
        (name, n) for name in (OURS, "sdpa", "naive") for n in (64, 256)
    }
    naive = {peak.length: peak.bytes for peak in results.memory if peak.provider == "naive"}
    assert naive[256] > 8 * naive[64]
    assert results.notes["profiler_us"][OURS] > 0
    assert [cell.name for cell in results.of("cold")] == [
        "first forward", "then window, forward", "first forward, cache on disk",
        "first step", "then window, step", "first step, cache on disk",
    ]  # fmt: skip
    assert [set(cell.entries[OURS].errors) for cell in results.of("overhead")] == [
        {"out", "lse"}, {"out"}, {"dq", "dk", "dv"},
    ]  # fmt: skip


@pytest.mark.parametrize("caller", cold.CALLERS)
def test_a_programs_first_calls(monkeypatch, capsys, caller):
    monkeypatch.setattr(cold, "OTHER_SIZES", ((1, 3, 1, 8),))
    kinds = {name: ((1, 4, 4, 8), 2, options) for name, (_, _, options) in cold.KINDS.items()}
    monkeypatch.setattr(cold, "KINDS", kinds)
    monkeypatch.setattr(cold, "SIZE", (1, 4, 4, 8))
    cold.main("cpu", "float32", caller, "step")
    found = json.loads(capsys.readouterr().out)
    assert all(seconds > 0 for seconds in found.values())
    assert {"first", "four other sizes,", "then no mask,"} <= set(found)
    assert ("then softcap," in found) == (caller == OURS)


def test_a_training_step_is_checked(monkeypatch, tmp_path):
    results = everything(monkeypatch, tmp_path, "gpt")
    (cell,) = results.cells
    assert cell.group == "gpt eager"
    assert set(cell.timed()) == {OURS, "sdpa"}

    real = Tilewise.bind
    monkeypatch.setattr(Tilewise, "bind", lambda *args: lambda q, k, v: real(*args)(q, k, v) * 1.01)
    (cell,) = everything(monkeypatch, tmp_path, "gpt").cells
    assert cell.entries[OURS].status == "wrong"
    assert not cell.entries[OURS].times


def test_a_training_step_that_goes_wrong_later_is_wrong(monkeypatch, tmp_path):
    real, calls = Tilewise.bind, []

    def bind(self, case, x):
        attention = real(self, case, x)

        def tiring(q, k, v):
            calls.append(self.name)
            return attention(q, k, v) * (1 + (self.name == OURS and calls.count(OURS) > 2 * SMALL.gpt[0].layers) / 50)

        return tiring

    monkeypatch.setattr(Tilewise, "bind", bind)
    (cell,) = everything(monkeypatch, tmp_path, "gpt").cells
    assert cell.entries[OURS].reason.startswith("after the rounds")
    assert not cell.entries[OURS].times


GIVEN = {"quick": True, "groups": ["small", "host", "append"], "serving": None, "tiles": None, "peers": ["naive"],
         "count": 2, "seed": 0, "part": "1/1"}  # fmt: skip


def test_calls_with_masks_and_mods_are_compared_with_their_peers(monkeypatch, tmp_path):
    """One row of each kind; on a CPU FlexAttention has no backward."""
    some = {"terms": "softcap", "flex": "sliding window", "masks": "documents 128", "sparse": "neighbourhood 2D"}
    monkeypatch.setattr(calls, "ROWS", {group: {name: calls.ROWS[group][name]} for group, name in some.items()})
    monkeypatch.setattr(calls, "sized", lambda device, *sizes: (1, 64, 2, 16))
    results = everything(monkeypatch, tmp_path, *some)
    assert [(x.group, x.name) for x in results.cells] == [
        (f"{group} {which}", name) for group, name in some.items() for which in ("forward", "backward")
    ]
    for cell in results.cells:
        assert cell.entries[OURS].status == "ok", cell
        forward = cell.group.endswith("forward")
        assert ("flex" in cell.timed()) == forward
        assert set(cell.entries[OURS].errors) == (
            {"out"} if forward else {"d0", "d1", "d2"} & set(cell.entries[OURS].errors)
        )
    packed = results.of("masks backward")[0].entries["packed"]
    assert packed.status == "ok"


def test_a_call_that_differs_from_its_peer_has_no_times(run):
    x = [torch.randn(4, requires_grad=True)]
    row = calls.Row(
        lambda device: {OURS: calls.Caller(lambda t: 2 * t, x), "peer": calls.Caller(lambda t: t + t * 0.9, x)}
    )
    for cell in calls.cells(run, "group", "row", row):
        assert cell.entries[OURS].status == "wrong"
        assert cell.timed() == ["peer"]


def test_derivatives_new_shapes_and_caches(monkeypatch, tmp_path):
    monkeypatch.setattr(calls, "sized", lambda device, *sizes: (1, 16, 1, 8))
    results = everything(monkeypatch, tmp_path, "second", "growing", "kv", "mla", **GIVEN)
    assert len(results.of("second")) == 4
    assert [x.name for x in results.of("growing")] == ["decoding", "packed step", "dense step"]
    assert all(x.chosen() for x in results.cells), [x.key for x in results.cells]
    assert {"kv small", "kv host", "kv append", "kv graph", "mla"} <= {x.group for x in results.cells}
    assert results.of("kv small")[0].case["bytes"] > 0


def test_two_runs_of_a_seed_shuffle_alike():
    assert random.Random(SMALL.seed).random() == Run.of(SMALL, roster(CPU), Sensors()).rng.random()


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_default_grids_can_be_cut(device, quick):
    chosen = settings(torch.device(device), quick=quick)
    for case in chosen.grid():
        assert case.batch * case.seq == chosen.tokens
        assert case.heads * case.dim == chosen.hidden


def test_decode_is_one_query_of_grouped_heads():
    cases = settings(torch.device("cuda")).decode
    assert {(case.n_q, case.mask, case.kv_heads, case.dtype) for case in cases} == {(1, "full", 8, "bfloat16")}
    assert [(case.batch, case.seq, case.heads) for case in cases] == [
        (1, 8192, 32), (16, 8192, 32), (64, 8192, 64), (128, 2048, 64),
    ]  # fmt: skip


def test_heads_are_no_powers_of_two():
    cases = settings(torch.device("cuda")).heads
    assert {(case.dim, case.dv) for case in cases} == {(80, 80), (96, 96), (192, 192), (192, 128), (512, 512)}
    assert {case.batch * case.seq for case in cases} == {16384}
    assert len({case.key for case in cases}) == len(cases) == 18


def test_the_full_grid_is_the_one_that_was_promised():
    chosen = settings(torch.device("cuda"))
    assert (chosen.tokens, chosen.hidden, chosen.dims) == (16384, 2048, (64, 128, 256))
    assert chosen.seqs == (512, 1024, 2048, 4096, 8192, 16384)
    assert len(chosen.grid()) == 36
