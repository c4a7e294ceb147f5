"""The judge notices what it is there for: each bug is planted into the public function, and found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise
from tilewise_lab.fuzz import oracle
from tilewise_lab.fuzz.case import MODES, SECOND, Case, code
from tilewise_lab.fuzz.judge import executed, judge, results

RIGHT = tilewise.attention
CASE = Case(
    backend="reference", mode="backward", batch=2, n_q=5, n_k=7, heads=4, group=2, d=8, dv=3, causal=True,
    wants=("q", "k", "v"), return_lse=True,
)  # fmt: skip
TERMS = replace(
    CASE, bias="hij", alibi="bh", sinks=True, score_mod="gated", mask_mod="prefix_lm", softcap=2.0, dropout_p=0.5,
    wants=("q", "k", "v", "bias", "slopes_of_alibi", "sinks", "sharpness", "gate"),
)  # fmt: skip
PACKED = replace(TERMS, function="attention_varlen", lengths=((3, 4), (0, 2), (2, 0)), slack=(1, 2))
LAYOUTS = ("q", "turned 1"), ("k", "stepped 1"), ("v", "padded 3"), ("dout", "expanded 0")


def planted(monkeypatch, change):
    """`attention`, with its (out, lse) changed."""
    monkeypatch.setattr(tilewise, "attention", lambda *args, **options: change(*RIGHT(*args, **options)))


@pytest.mark.parametrize("case", [CASE, TERMS, PACKED, replace(CASE, layouts=LAYOUTS)], ids=range(4))
@pytest.mark.parametrize("mode", [m for m in MODES if "func" not in m and "vmap" not in m and "compile" not in m])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_right_calls_pass(case, mode, dtype):
    forward = mode in ("call", "no_grad", "inference")
    if case.slack != (0, 0) and mode in ("jvp", "jacrev", *SECOND):
        case = replace(case, slack=(0, 0))
    if mode in ("jacrev", "hessian"):
        case, dtype = replace(case, n_q=2, n_k=2, batch=1, lengths=case.lengths and ((1, 2),)), "float32"
    if mode in SECOND and dtype == "bfloat16":
        dtype = "float32"
    if mode in ("jvp", "jacrev", "functional_call", *SECOND):
        case = replace(case, wants=("q", "k", "v"))
    verdict = judge(replace(case, mode=mode, dtype=dtype, wants=() if forward else case.wants))
    assert not verdict.is_finding, f"{verdict.words}\n{verdict.code}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda out, lse: (out * 1.01, lse), "out: error"),
        (lambda out, lse: (out, lse + 1e-3), "lse: error"),
        (lambda out, lse: (out.detach() + 0 * out, lse), "gradient of v: lost"),
        (lambda out, lse: (out * torch.where(torch.arange(3) == 1, torch.nan, 1.0), lse), "out: NaN"),
        (lambda out, lse: (out.double(), lse), "out: dtype"),
        (lambda out, lse: (out[:, 1:], lse), "out: shape"),
    ],
    ids=["scaled", "lse", "a lost gradient", "NaN", "dtype", "shape"],
)
def test_wrong_results_are_found(monkeypatch, change, words):
    planted(monkeypatch, change)
    mode = "backward" if words != "out: shape" else "call"
    verdict = judge(replace(CASE, mode=mode))
    assert verdict.kind == "wrong"
    assert verdict.words.startswith(words)


def test_a_gradient_that_is_none_is_found(monkeypatch):
    def attention(q, k, v, **options):
        return RIGHT(q, k.detach(), v, **options)

    monkeypatch.setattr(tilewise, "attention", attention)
    assert judge(CASE).words == "gradient of k: lost (None)"


def test_hidden_nan_that_leaks_is_found(monkeypatch):
    def attention(q, k, v, **options):
        out, lse = RIGHT(q, k, v, **options)
        return out + 0 * v.sum(), lse

    case = replace(CASE, hidden="nan", mode="call", causal=False, window=(0, 0))
    assert not judge(case).is_finding
    monkeypatch.setattr(tilewise, "attention", attention)
    assert judge(case).words == "out: NaN"


def test_other_exceptions_are_found(monkeypatch):
    monkeypatch.setattr(tilewise, "attention", lambda *_, **__: [] + ())
    verdict = judge(CASE)
    assert (verdict.kind, "TypeError" in verdict.words) == ("raised", True)


def test_a_refused_right_call_is_found(monkeypatch):
    def attention(*args, **options):
        raise tilewise.AttentionError("causal", "a Tuesday", "any other day")

    monkeypatch.setattr(tilewise, "attention", attention)
    assert judge(CASE).kind == "refusal"
    assert judge(replace(CASE, bad=("causal", "'no'"), wants=(), mode="call")).kind == ""


def test_wrong_arguments_that_are_accepted_are_found(monkeypatch):
    monkeypatch.setattr(tilewise, "attention", lambda q, k, v, **options: q)
    assert judge(Case(bad=("window", "'ab'"))).kind == "accepted"


def test_runs_that_differ_are_found(monkeypatch):
    noise = iter(range(100))
    planted(monkeypatch, lambda out, lse: (out + 1e-9 * next(noise), lse))
    assert "run to run" in judge(replace(CASE, deterministic=True, dtype="float64")).words


@pytest.mark.parametrize("case", [TERMS, PACKED], ids=["dense", "packed"])
def test_noise_of_size_zero_is_no_noise(case):
    """The hand-written backward that roundings are drawn with is the one that autograd finds."""
    found = executed(code(case))
    exact = results(case, found, torch.float64)
    silent = results(case, found, torch.float64, oracle.Noise(0.0, 0.0, 0.0))
    for name, x in exact.items():
        torch.testing.assert_close(silent[name], x, rtol=1e-9, atol=1e-11)


def test_noise_of_numbers_near_zero_is_that_of_subnormals():
    """float16 rounds 1e-8 to 0 or 6e-8; 0 stays 0."""
    noise = oracle.Noise(2.0**-11, 2.0**-24, 0.0, 2.0**-25)
    cut = noise.cut(torch.tensor([1e-8] * 100 + [0.0], dtype=torch.float64))
    assert 2.0**-27 < (cut - 1e-8)[:-1].abs().max() <= 2.0**-25
    assert cut[-1] == 0.0


def squared_weights(q, k, v, **options):
    """Right results and first derivatives; the second ones are those of something else."""
    out, lse = RIGHT(q, k, v, **options)
    far = (q.detach() - q).square().sum()  # 0, and so is its gradient
    return out + far, lse


@pytest.mark.parametrize("mode", ["second", "jvp of grad", "hessian"])
def test_wrong_second_derivatives_are_found(monkeypatch, mode):
    case = replace(CASE, mode=mode, n_q=2, n_k=3, wants=("q", "k"), dtype="float64")
    assert not judge(case).is_finding
    monkeypatch.setattr(tilewise, "attention", squared_weights)
    assert judge(replace(case, mode="backward")).kind == ""
    assert judge(case).words.startswith("gradient of q: error")
