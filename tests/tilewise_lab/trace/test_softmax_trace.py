from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise_lab import cli, trace
from tilewise_lab.derivation import softmax as rungs
from tilewise_lab.trace.softmax import loads

e = math.exp


def test_the_worked_example():
    """x = [3, 2, 5, 1]: every number of the notes, right and wrong."""
    found = trace.softmax([3, 2, 5, 1])
    right, wrong = found["right"]["steps"], found["wrong"]["steps"]
    assert [step["m"] for step in right] == [3, 3, 5, 5]
    assert [step["factor"] for step in right] == pytest.approx([0, 1, e(-2), 1])
    assert right[2]["l"] == pytest.approx((e(0) + e(-1)) * e(3 - 5) + e(0)) == pytest.approx(1.185122, abs=1e-6)
    assert right[3]["l"] == pytest.approx(e(-2) + e(-3) + e(0) + e(-4)) == pytest.approx(1.203438, abs=1e-6)
    assert found["right"]["out"] == pytest.approx([0.112457, 0.041371, 0.830953, 0.015219], abs=1e-6)
    assert found["right"]["lse"] == pytest.approx(5.185182, abs=1e-6)
    assert wrong[2]["l"] == pytest.approx(e(0) + e(-1) + e(0)) == pytest.approx(2.367879, abs=1e-6)
    assert [step["ok"] for step in right] == [True] * 4
    assert [step["ok"] for step in wrong] == [True, True, False, False]


def test_the_correction_uses_l2_not_l_squared():
    """The notes print l² where l₂ is meant; the two differ."""
    l2 = trace.softmax([3, 2])["right"]["steps"][-1]["l"]
    l3 = trace.softmax([3, 2, 5])["right"]["steps"][-1]["l"]
    assert l3 == pytest.approx(l2 * e(3 - 5) + 1)
    assert l3 != pytest.approx(l2**2 * e(3 - 5) + 1)


@settings(deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=12))
def test_every_prefix_is_right(x):
    found = trace.softmax(x)["right"]
    for n, step in enumerate(found["steps"], 1):
        assert step["m"] == max(x[:n])
        assert step["l"] == pytest.approx(sum(e(v - max(x[:n])) for v in x[:n]))
        assert step["l"] == pytest.approx(step["kept"] + step["term"])
    assert sum(found["out"]) == pytest.approx(1)


@pytest.mark.parametrize("n", [1, 7, 100])
def test_three_passes_become_two(n):
    x = torch.randn(n)
    assert loads(rungs.safe, x) == 3
    assert loads(rungs.online, x) == 2


def test_masked_elements():
    found = trace.softmax([-math.inf, 1.0])
    assert found["right"]["steps"][0]["l"] == 0
    assert found["right"]["out"] == [0, 1]
    assert found["x"][0] == "-inf"
    json.loads(json.dumps(found, allow_nan=False))


def test_command(capsys):
    assert cli.main(["trace", "softmax", "3", "2", "5", "1"]) == 0
    said = capsys.readouterr().out
    for number in ("1.203438", "1.185122", "2.367879", "0.112457", "5.185182", "0.135335"):
        assert number in said
    assert said.count("wrong") == 2
    assert cli.main(["trace", "softmax", "3", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "softmax"
