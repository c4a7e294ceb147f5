from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise_lab import cli, trace
from tilewise_lab.trace.graph import Value, edges

number = st.floats(-3, 3)


def test_the_notes_example():
    """∂φ/∂w₁ = 1 · 2y₂ · 1 · a = 2a(aw₁ + b₁)"""
    a, w1, b1 = 2.0, 3.0, 1.0
    nodes = {node["name"]: node for node in trace.notes_example(a, w1, b1)["nodes"]}
    assert (nodes["y1"]["value"], nodes["y2"]["value"], nodes["φ"]["value"]) == (6, 7, 49)
    assert nodes["φ"]["gradient"] == 1
    assert nodes["y2"]["gradient"] == 2 * 7
    assert nodes["w1"]["gradient"] == 2 * a * (a * w1 + b1) == 28


@settings(deadline=None)
@given(number, number, number)
def test_gradients_are_torchs(a, b, c):
    def f(x, y, z):
        return ((x * y - z).exp() + (x * x + 1.0).log() / (y * y + 2.0)) ** 2 - z

    mine = [Value(x) for x in (a, b, c)]
    out = f(*mine)
    out.backward()
    theirs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (a, b, c)]
    expected = f(*theirs)
    grads = torch.autograd.grad(expected, theirs)
    assert out.value == pytest.approx(expected.item())
    assert [x.gradient for x in mine] == pytest.approx([g.item() for g in grads], rel=1e-9, abs=1e-9)


def test_a_derivative_is_right_to_first_order():
    """f(x + Δ) ≈ f(x) + f'(x) Δ: halve the step, and the error falls to a quarter."""

    def f(x):
        return x**3 - x * 2.0

    x = Value(1.5)
    y = f(x)
    y.backward()
    errors = [abs(f(Value(1.5 + d)).value - (y.value + x.gradient * d)) for d in (2.0**-i for i in range(4, 12))]
    assert [a / b for a, b in pairwise(errors)] == pytest.approx([4] * 7, rel=0.02)


def test_walking_against_the_gradient_makes_a_function_smaller():
    """y_new ≈ y_old + ∇f · Δx, so Δx = -η ∇f: the loss falls at every step, to its minimum."""
    w, losses = [0.0, 0.0], []
    for _ in range(60):
        a, b = Value(w[0]), Value(w[1])
        loss = (a - 3.0) ** 2 + (a + b * 2.0 - 1.0) ** 2
        loss.backward()
        losses.append(loss.value)
        w = [x.value - 0.1 * x.gradient for x in (a, b)]
    assert w == pytest.approx([3, -1], abs=1e-3)
    assert losses == sorted(losses, reverse=True)


def test_a_jacobian_has_a_row_for_every_output():
    """f: ℝ² -> ℝ³, Δy ≈ J Δx: backward from each output makes its row of the (3, 2) matrix."""

    def outputs(x, y):
        return [x * y, y.exp(), x * x + y]

    def vector(t):
        return torch.stack(outputs(*t))

    at = torch.tensor([1.3, 0.4], dtype=torch.float64)
    rows = []
    for n in range(3):
        mine = [Value(v) for v in at.tolist()]
        outputs(*mine)[n].backward()
        rows.append([x.gradient for x in mine])
    jacobian = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(vector, at))
    small = torch.tensor([1e-6, -2e-6], dtype=torch.float64)
    torch.testing.assert_close(vector(at + small) - vector(at), jacobian @ small, atol=1e-10, rtol=0)


def test_a_value_used_twice_collects_both_gradients():
    x = Value(3.0)
    y = x * x + x
    y.backward()
    assert x.gradient == 7
    y.backward()
    assert x.gradient == 7  # not added up over calls


def test_gradients_flow_along_edges():
    graph = trace.notes_example()
    arriving = {node["id"]: 0.0 for node in graph["nodes"]}
    for source, _, flow in edges(graph):
        arriving[source] += flow
    last = graph["nodes"][-1]["id"]
    assert all(node["gradient"] == arriving[node["id"]] for node in graph["nodes"] if node["id"] != last)


def test_command(capsys):
    assert cli.main(["trace", "autograd", "2", "3", "1"]) == 0
    assert "28" in capsys.readouterr().out
    assert cli.main(["trace", "autograd", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "graph"
