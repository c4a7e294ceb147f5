from __future__ import annotations

import pytest
import torch

from tests.oracle import naive_grads
from tilewise.request import Spec
from tilewise_lab.bench.cases import Case
from tilewise_lab.bench.judge import Judge, blocks, formula
from tilewise_lab.bench.provider import Tilewise
from tilewise_lab.bench.providers import roster
from tilewise_lab.bench.torch_peers import Naive

CPU = torch.device("cpu")
CASES = [
    Case(2, 40, 4, 4, 16, dtype="float32"),
    Case(2, 40, 4, 2, 16, causal=True, dtype="float32"),
    Case(1, 40, 2, 1, 16, causal=True, window=7, dtype="float32"),
    Case(1, 0, 4, 2, 16, causal=True, lengths=(9, 1, 30), dtype="float32"),
    Case(2, 40, 4, 2, 16, queries=1, dtype="float32"),
    Case(2, 40, 4, 2, 24, queries=17, value_dim=16, dtype="float32"),
    Case(2, 40, 4, 4, 24, causal=True, value_dim=16, dtype="float32"),
    Case(2, 40, 4, 4, 16, value_dim=24, dtype="float32"),
]


def truth(case, x):
    spec = Spec(case.dim**-0.5, case.window, 0 if case.causal else None)
    out, _, dq, dk, dv = naive_grads(x.q, x.k, x.v, spec, x.dout, None, x.cu, x.cu)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_the_judge_agrees_with_the_oracle(case, monkeypatch):
    monkeypatch.setattr("tilewise_lab.bench.judge.ELEMENTS", 13 * case.longest)  # several steps of few rows
    x = case.inputs(CPU, seed=1)
    judge = Judge(case, x, samples=100)
    errors = judge.errors(truth(case, x))
    assert set(errors) == {"out", "dq", "dk", "dv"}
    for error in errors.values():
        assert error.found < 1e-12
        assert 1e-8 < error.limit < 1e-4


@pytest.mark.parametrize("case", [*CASES[:2], *CASES[4:]], ids=lambda case: case.key)
@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_one_wrong_element_is_found(case, name):
    x = case.inputs(CPU, seed=1)
    judge = Judge(case, x, samples=100)
    answer = {key: value.float() for key, value in truth(case, x).items()}
    assert all(error.ok for error in judge.errors(answer).values())
    answer[name][1, -1, -1, 3] += 1e-3
    assert [key for key, error in judge.errors(answer).items() if not error.ok] == [name]


def test_nan_is_found_where_nobody_looks():
    case = CASES[0]
    x = case.inputs(CPU, seed=1)
    judge = Judge(case, x, samples=2)
    out = truth(case, x)["out"].float()
    assert judge.errors({"out": out})["out"].ok
    out[0, 0, 2, 0] = float("nan")  # neither the first nor the last head
    error = judge.errors({"out": out})["out"]
    assert error.found is None
    assert not error.ok


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_textbook_itself_is_right(dtype):
    case = Case(1, 96, 2, 2, 32, causal=True, dtype=dtype)
    x = case.inputs(CPU, seed=2)
    judge = Judge(case, x, samples=2)
    provider = Naive("naive", "")
    for which in ("forward", "backward"):
        assert all(error.ok for error in judge.errors(provider.answer(case, which, x)()).values())


def test_a_dropped_mask_is_wrong_in_bfloat16():
    case = Case(1, 96, 2, 2, 32, causal=True, dtype="bfloat16")
    x = case.inputs(CPU, seed=2)
    full = Case(1, 96, 2, 2, 32, dtype="bfloat16")
    assert not Judge(case, x, 2).errors(Naive("naive", "").forward(full, x)())["out"].ok


def test_samples_hold_the_first_and_the_last():
    case = Case(4, 8, 4, 4, 8, dtype="float32")
    judge = Judge(case, case.inputs(CPU, seed=0), samples=3)
    every = blocks(case)
    assert judge.chosen[0] == every[0]
    assert judge.chosen[-1] == every[-1]
    assert len(judge.chosen) == 3
    assert judge.checked.startswith("3 of 16")


def test_formula_keeps_the_dtype():
    x = torch.randn(2, 8, 4, dtype=torch.float16)
    found = formula(Case(1, 8, 2, 1, 4), x, x[0], x[0], x)
    assert found.pop("lse").dtype == torch.float32
    assert {value.dtype for value in found.values()} == {torch.float16}


@pytest.mark.parametrize("case", CASES[4:], ids=lambda case: case.key)
def test_our_own_answer_is_right_and_a_bent_one_is_not(case):
    x = case.inputs(CPU, seed=1)
    judge = Judge(case, x, samples=100)
    ours = Tilewise("tilewise", "")
    answer = {**ours.forward(case, x)(), "lse": ours.lse(case, x)}
    assert all(error.ok for error in judge.errors(answer).values())
    bent = {name: 1.01 * value for name, value in answer.items()}
    assert not any(error.ok for error in judge.errors(bent).values())


@pytest.mark.parametrize("name", ["naive", "sdpa", "tilewise-reference"])
def test_one_row_is_allowed_what_the_textbook_needs(name):
    """A product of one row sums the keys one by one, which is off by more than a product of many rows."""
    case = Case(1, 2048, 8, 2, 64, queries=1, dtype="float32")
    x = case.inputs(CPU, seed=0)
    assert Judge(case, x, samples=4).errors(roster(CPU).known[name].forward(case, x)())["out"].ok


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "lengths": (5, 19)}, {"queries": 1}])
def test_the_logsumexp_is_judged(options):
    case = Case(2, 24, 4, 2, 8, dtype="float32", **options)
    x = case.inputs(CPU, seed=0)
    judge = Judge(case, x, samples=99)
    lse = Tilewise("tilewise", "").lse(case, x)
    assert judge.errors({"lse": lse})["lse"].ok
    assert not judge.errors({"lse": lse + 1e-3})["lse"].ok


def test_what_moves_too_far_is_seen_wherever_it_is():
    case = Case(2, 8, 4, 4, 4, dtype="float32")
    x = case.inputs(CPU, seed=0)
    judge = Judge(case, x, samples=1)
    first = {"out": torch.zeros_like(x.q)}
    last = {"out": torch.zeros_like(x.q)}
    assert judge.changes(first, last, same_bits=True)["out"].ok
    last["out"][1, 3, 2, 1] = judge.limits["out"]
    assert judge.changes(first, last, same_bits=False)["out"].ok
    assert not judge.changes(first, last, same_bits=True)["out"].ok
    last["out"][1, 3, 2, 1] = torch.nan
    assert judge.changes(first, last, same_bits=False)["out"] == (None, 2 * judge.limits["out"])


def test_sums_in_another_order_are_right_where_the_formula_is_exact_by_luck(monkeypatch):
    """On another CPU the formula in float32 may have smaller errors than any order of summation guarantees."""
    case = Case(1, 512, 1, 1, 16, causal=True, dtype="float32")
    x = case.inputs(CPU, seed=2)

    def lucky(case, *parts, tiled=False):
        return formula(case, *(part.double() for part in parts))

    monkeypatch.setattr("tilewise_lab.bench.judge.formula", lucky)
    judge = Judge(case, x, samples=1)
    q, k, v, dout = (part[0, :, 0] for part in (x.q, x.k, x.v, x.dout))
    p = (q / 4 @ k.T).masked_fill(torch.ones(512, 512).triu(1).bool(), -torch.inf).softmax(-1)
    ds = p * (dout @ v.T - (dout * (p @ v)).sum(-1, keepdim=True))
    dq = torch.zeros_like(q)
    for j in range(512):  # one key after the other
        dq += ds[:, j : j + 1] * k[j] / 4
    error = judge.errors({"dq": dq[None, :, None]})["dq"]
    assert error.ok
    assert error.limit < 20 * error.found
