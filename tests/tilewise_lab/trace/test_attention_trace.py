from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import AttentionError
from tilewise_lab import cli, trace
from tilewise_lab.costs.cost import Call
from tilewise_lab.derivation import attention as rung
from tilewise_lab.trace.memory import Memory

side = st.none() | st.integers(0, 9)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.sampled_from(["fa1", "fa2"]),
    side, side, st.sampled_from(["one", "two"]),
)  # fmt: skip
def test_any_trace_is_right(sq, sk, rows, columns, order, left, right, owners):
    found = trace.attention(
        sq, sk, d=3, dv=2, rows=rows, columns=columns, order=order, window=(left, right), backward=True, owners=owners
    )
    assert found["error"] < 1e-12
    json.dumps(found, allow_nan=False)
    visited = {(step["i"], step["j"]) for step in found["steps"] if step["phase"] == "forward"}
    assert len(visited) == found["totals"]["visited"]
    assert not visited & {tuple(at) for at in found["skipped"]}


def test_states_are_those_of_the_rung():
    """m, l and the correction factors of each step equal `reference.attention.states`, over 4 blocks of 2 keys."""
    found = trace.attention(8, 8, d=4, rows=2, columns=2, seed=3)
    make = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(8, 4, generator=make, dtype=torch.float64) for _ in range(3))
    steps = iter(step for step in found["steps"] if step["phase"] == "forward")
    for q_i in q.split(2):
        old = rung.nothing(q_i, v)
        for state in rung.states(q_i, k, v, 2):
            step = next(steps)
            assert step["m"] == state.m.tolist()
            assert step["l"] == pytest.approx(state.l.tolist())
            assert step["factor"] == pytest.approx(torch.exp(old.m - state.m).tolist())
            old = state


def test_causal_visits_a_triangle():
    found = trace.attention(16, 16, rows=2, columns=2, causal=True)
    assert found["totals"]["visited"] == 8 * 9 // 2
    masked = [(step["i"], step["j"]) for step in found["steps"] if step.get("masked")]
    assert masked == [(i, i) for i in range(8)]


def test_fa1_pays_for_its_order():
    """FA1 moves O, m and l in and out for every block of keys; FA2 writes O and lse once."""
    fa1, fa2 = (trace.attention(16, 16, rows=4, columns=4, order=order)["totals"] for order in ("fa1", "fa2"))
    size = 16 * 4 * 4
    assert fa1["stored"] == {"o": 4 * size, "m": 4 * 64, "l": 4 * 64}
    assert fa2["stored"] == {"o": size, "lse": 64}
    assert fa1["loaded"]["o"] == 4 * size
    assert "o" not in fa2["loaded"]
    assert (fa1["loaded"]["k"], fa2["loaded"]["k"]) == (size, 4 * size)
    assert (fa1["loaded"]["q"], fa2["loaded"]["q"]) == (4 * size, size)
    assert fa1["flops"] == fa2["flops"]


def test_which_loop_is_outside():
    """FA1 takes a block of keys and meets all queries; FA2, which is ours, a block of queries and all keys."""
    tiles = [(i, j) for i in range(3) for j in range(2)]

    def visited(**options):
        return [(s["i"], s["j"]) for s in trace.attention(6, 4, **options)["steps"] if s["phase"] == "forward"]

    assert visited() == visited(order="fa2") == tiles
    assert visited(order="fa1") == sorted(tiles, key=lambda at: at[::-1])


def test_nothing_is_computed_that_was_not_loaded():
    """HBM -> SRAM -> registers -> HBM: at every tile its blocks of q, k and v are near, and m, l and o are kept."""
    found = trace.attention(8, 8, rows=2, columns=4, causal=True)
    for step in found["steps"]:
        if step["phase"] == "forward":
            near = {tuple(block) for block in step["resident"]}
            assert {("q", step["i"]), ("k", step["j"]), ("v", step["j"])} <= near
            assert {(name, step["i"]) for name in "mlo"} <= near
            assert not step["stores"]
        else:
            assert [name for name, _ in step["stores"]] == ["o", "lse"]
    moved = [tuple(block) for step in found["steps"] for block in step["loads"]]
    assert len(moved) == 4 + 2 * found["totals"]["visited"]  # each q once, k and v for every tile


def test_blocks_of_queries_and_of_keys_have_sizes_of_their_own():
    """Q and O in T_r = ⌈N / B_r⌉ blocks of B_r x d, K and V in T_c = ⌈N / B_c⌉ of B_c x d, L has N entries."""
    found = trace.attention(10, 7, d=5, rows=4, columns=3)
    sizes = {(s["i"], s["j"]): (len(s["s"]), len(s["s"][0])) for s in found["steps"] if s["phase"] == "forward"}
    assert sizes == {(i, j): (r, c) for i, r in enumerate((4, 4, 2)) for j, c in enumerate((3, 3, 1))}
    assert len(found["lse"]) == len(found["out"]) == 10
    assert found["error"] < 1e-12


def test_weights_never_reach_hbm():
    forward = trace.attention(16, 16, rows=4, columns=4)["totals"]
    assert set(forward["stored"]) == {"o", "lse"}
    for order in ("fa1", "fa2"):
        found = trace.attention(16, 16, rows=4, columns=4, order=order, backward=True)["totals"]
        assert not {"p", "s", "ds"} & {*found["stored"], *found["loaded"]}


def test_flops_are_those_of_the_model():
    forward = trace.attention(16, 16, d=8, rows=4, columns=4)["totals"]["flops"]
    assert forward == Call(1, 16, 16, 1, 1, 8, 8).flops()
    one = trace.attention(16, 16, d=8, rows=4, columns=4, backward=True, owners="one")["totals"]["flops"]
    assert one - forward == Call(1, 16, 16, 1, 1, 8, 8).flops(backward=True)
    two = trace.attention(16, 16, d=8, rows=4, columns=4, backward=True)["totals"]["flops"]
    assert two - forward == 7 / 5 * (one - forward)  # S and dP a second time


def test_one_owner_per_sum_spares_hbm():
    """With a single loop dQ goes in and out for every tile; with two owners each gradient is written once."""
    one, two = (trace.attention(16, 16, rows=4, columns=4, backward=True, owners=o)["totals"] for o in ("one", "two"))
    assert one["stored"]["dq"] == 4 * two["stored"]["dq"]
    assert one["loaded"]["dq"] == one["stored"]["dq"]
    assert "dq" not in two["loaded"]


def test_rows_that_see_nothing():
    found = trace.attention(4, 2, rows=2, columns=2, causal=True)
    assert found["out"][:2] == [[0.0] * 4] * 2
    assert found["lse"][:2] == ["-inf"] * 2


def test_sram_has_a_limit():
    needed = trace.attention(16, 16, d=8, rows=4, columns=4)["totals"]["peak"]
    assert trace.attention(16, 16, d=8, rows=4, columns=4, sram=needed)["error"] < 1e-12
    with pytest.raises(AttentionError, match="smaller blocks"):
        trace.attention(16, 16, d=8, rows=4, columns=4, sram=needed - 1)
    small = trace.attention(64, 64, d=8, rows=4, columns=4)["totals"]["peak"]
    assert small == needed  # O(block), not O(N)


def test_a_loaded_block_is_not_loaded_again():
    memory = Memory({"q": torch.zeros(4, 2).split(2)}, itemsize=4)
    memory.load("q", 0)
    memory.load("q", 0)
    assert memory.loaded["q"] == 16
    memory.drop("q")
    memory.load("q", 0)
    assert memory.loaded["q"] == 32


@pytest.mark.parametrize("options", [{"order": "fa3"}, {"owners": "three", "backward": True}, {"window": (-1, 0)}])
def test_refusals(options):
    with pytest.raises(AttentionError):
        trace.attention(4, 4, **options)


def test_command(capsys):
    assert cli.main(["trace", "attention", "--sq", "8", "--sk", "8", "--block", "2", "--order", "fa1"]) == 0
    said = capsys.readouterr().out
    assert "16 tiles visited, 0 skipped" in said
    assert "m3 l3 o3 q3" in said
    assert cli.main(["trace", "attention", "--causal", "--backward", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {step["phase"] for step in found["steps"]} == {"forward", "finish", "delta", "key", "query"}
    assert cli.main(["trace", "attention", "--sram", "10"]) == 2
