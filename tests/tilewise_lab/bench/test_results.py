from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from tests.tilewise_lab.bench.made_up import OTHER, OURS, PEER, cell, grid, results
from tilewise.errors import AttentionError
from tilewise_lab.bench.results import Entry, Spread, absent, load, standings


def test_ratios_are_taken_round_by_round():
    drifting = cell(triton=[1.0, 2.0, 4.0], fa2=[1.1, 2.2, 4.4])  # the clock drifts fourfold, the ratio not at all
    ratio = drifting.ratio(OURS, PEER)
    assert ratio.low == pytest.approx(1.1)
    assert ratio.high == pytest.approx(1.1)
    assert ratio.noise < 1e-12


def test_the_median_ratio_is_not_the_ratio_of_medians():
    c = cell(triton=[1.0, 2.0, 3.0], fa2=[3.0, 2.0, 2.0])
    assert c.ratio(OURS, PEER).median == 1.0


def test_the_best_peer_is_the_fastest():
    c = cell(fa2=[2.0] * 3, cudnn=[1.5] * 3)
    assert c.best_peer() == OTHER
    assert c.ratio_to_best().median == 1.5
    assert c.peers() == [PEER, OTHER]


def test_a_wrong_backend_has_no_ratio():
    c = cell()
    c.entries[OURS] = Entry("wrong", "out is off")
    assert c.chosen() is None
    assert c.ratio_to_best() is None
    assert c.share_of_ceiling() is None


def test_share_of_the_ceiling():
    c = cell(triton=[2.0] * 3)
    c.flops = 4e12
    assert c.share_of_ceiling().median == 0.5


def test_rates():
    c = cell(triton=[0.5] * 3)
    assert c.rate(OURS).median == 2 * c.flops


def test_save_and_load(tmp_path):
    path = tmp_path / "results.json"
    before = results(*grid())
    before.save(path)
    assert load(path) == before
    assert sum('"group"' in line for line in path.read_text().splitlines()) == len(before.cells)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 99}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(AttentionError):
        load(path)


def test_older_files_are_read(tmp_path):
    """With targets that could not be measured, and cases of fewer fields."""
    now = results(cell())
    del now.cells[0].case["queries"], now.cells[0].case["value_dim"]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(asdict(now) | {"unmeasured": {"decode": "no kernel yet"}}))
    assert load(path) == now


def test_not_a_number_is_never_written(tmp_path):
    bad = results(cell(triton=[float("nan")] * 3))
    with pytest.raises(ValueError, match="JSON compliant"):
        bad.save(tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_standings_are_geometric_means():
    cells = [cell(seq=1024, triton=[1.0] * 3, fa2=[4.0] * 3), cell(seq=2048, triton=[1.0] * 3, fa2=[1.0] * 3)]
    found = {(s.peer): s for s in standings(results(*cells))}
    assert found[PEER].ratio == pytest.approx(2.0)
    assert (found[PEER].worst, found[PEER].best, found[PEER].cells) == (1.0, 4.0, 2)
    assert found["best"].ratio == pytest.approx((1.5 * 1.0) ** 0.5)


def test_nobody_vanishes():
    c = cell()
    c.entries["flex"] = Entry("refused", "no such mask")
    found = results(c)
    found.providers["naive"] = {"about": "", "version": "1", "asked": False, "missing": None}
    assert absent(found) == [
        ("fa3", "this machine", "it is not installed"),
        ("naive", "this run", "not asked for (--peers)"),
        ("flex", c.key, "refused: no such mask"),
    ]


def test_spread_of_one():
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0, 1)


def test_errors_as_a_share():
    assert Entry("ok", errors={"dq": [1.0, 4.0], "dk": [3.0, 4.0]}).share_of_limit() == 0.75
    assert Entry("wrong", errors={"out": [None, 4.0]}).share_of_limit() is None
    assert Entry("missing").share_of_limit() is None
