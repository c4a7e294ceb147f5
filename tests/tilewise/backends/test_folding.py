"""A score mod divided by the number that the softmax multiplies by: the same score, with fewer multiplications."""

from __future__ import annotations

import math

import pytest
import torch

import tilewise
from tests.conftest import DEVICE
from tilewise import mods
from tilewise.backends.common.mod_source import bound as largest
from tilewise.backends.common.mod_source import derivative_factors, factors, has_infinite_derivative, value_of
from tilewise.backends.common.score_terms import folded
from tilewise.backends.triton import launches as launch
from tilewise.mods.expr import Place, evaluate, nodes
from tilewise.mods.program import Mod, bound
from tilewise.request import Gpu, Request, Spec, arguments, request_from_arguments

SLOPES = torch.tensor([0.5, 0.25], dtype=torch.float64)
SCALE = 0.3


@tilewise.score_mod
def mixed(score, b, h, q_idx, kv_idx, t, a: float):
    return 2.0 * (torch.tanh(score * a / 3.0) * t[h] - t[q_idx % 2] + kv_idx) / a


@tilewise.score_mod
def twice(score, b, h, q_idx, kv_idx):
    return score + torch.sigmoid(score) * score


@tilewise.score_mod
def rooted(score, b, h, q_idx, kv_idx):
    return torch.sqrt(abs(score))


@tilewise.score_mod
def reciprocal(score, b, h, q_idx, kv_idx, a: float):
    return score / a


PROGRAMS = {
    "softcap": (mods.softcap(2.0), 2.0),
    "alibi": (mods.alibi(SLOPES), SCALE),
    "softcap, alibi": (bound([mods.softcap(2.0), mods.alibi(SLOPES)]), 2.0),
    "mixed": (mixed(SLOPES, 0.7), 2.0 / 0.7),
    "twice": (twice(), 1.0),
}
PRODUCT = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PLACE = Place(0, torch.arange(2)[:, None, None], torch.arange(5)[:, None], torch.arange(6), 5, 6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_score_is_the_same(name: str) -> None:
    mod, expected = PROGRAMS[name]
    assert isinstance(mod, Mod)
    unit, rest = factors(mod.program)
    factor = value_of(unit, (*mod.numbers, SCALE))
    assert factor == pytest.approx(expected)
    (score,) = evaluate([mod.program.root], PLACE, SCALE * PRODUCT, mod.tensors, mod.numbers, torch.float64)
    (found,) = evaluate([rest], PLACE, PRODUCT, mod.tensors, (*mod.numbers, SCALE), torch.float64)
    torch.testing.assert_close(factor * found, score)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_slope_is_the_same(name: str) -> None:
    mod, _ = PROGRAMS[name]
    assert isinstance(mod, Mod)
    pull, steep = derivative_factors(mod.program)
    (slope,) = evaluate([mod.program.derivative], PLACE, SCALE * PRODUCT, mod.tensors, mod.numbers, torch.float64)
    (found,) = evaluate([steep], PLACE, PRODUCT, mod.tensors, (*mod.numbers, SCALE), torch.float64)
    factor = value_of(pull, (*mod.numbers, SCALE))
    torch.testing.assert_close(factor * torch.as_tensor(found), torch.as_tensor(slope), check_dtype=False)


def test_a_capped_score_is_bounded() -> None:
    assert largest(mods.softcap(2.0).key) == 1.0
    assert largest(mods.alibi(SLOPES).key) == torch.inf


def test_which_slopes_may_be_infinite() -> None:
    assert not has_infinite_derivative(mods.softcap(2.0).key)
    assert not has_infinite_derivative(twice().key)
    assert has_infinite_derivative(rooted().key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cap", [2.0, 50.0, 80.0])
def test_capped_scores_of_any_size(
    cap: float, dtype: torch.dtype, triton_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores far beyond their cap; with a maximum, or without where exp(cap) fits."""
    kinds = []
    is_bounded = launch.is_bounded
    monkeypatch.setattr(launch, "is_bounded", lambda *args: kinds.append(is_bounded(*args)) or kinds[-1])
    torch.manual_seed(0)
    x = [torch.randn(1, 20, 2, 16, device=DEVICE).to(dtype) for _ in range(4)]

    def results(backend: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in tensors[:3]]
        out, lse = tilewise.attention(*leaves, causal=True, softcap=cap, scale=20.0, return_lse=True, backend=backend)
        return out, lse, *torch.autograd.grad(out, leaves, tensors[3])

    expected = results("reference", *(t.double() for t in x))
    for ours, truth in zip(results("triton", *x), expected, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=2e-2, atol=2e-2 * float(truth.detach().abs().max()))
    assert kinds == [dtype == torch.bfloat16 and cap < 60]


def test_what_is_left_for_every_pair() -> None:
    """Of softcap a product and tanh, of ALiBi a difference, its absolute value, and one multiplication and addition."""
    for mod, left in ((mods.softcap(2.0), 2), (mods.alibi(SLOPES), 4)):
        _, rest = factors(mod.program)
        pairwise = [x for x in nodes(rest) if x.args and x.deps & {"score", "i"} and x.deps & {"score", "j"}]
        assert len(pairwise) == left


def test_a_division_by_zero_is_not_folded() -> None:
    mod = reciprocal(0.0)
    unit, _ = factors(mod.program)
    for zero, expected in ((0.0, torch.inf), (-0.0, -torch.inf)):
        assert value_of(unit, (zero, SCALE)) == expected
    assert math.isnan(value_of(unit, (0.0, 0.0)))
    q = torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16)
    spec = Spec(SCALE, score_mod=mod.key, score_numbers=(0.0,))
    assert not folded(Request(q, q, q, spec), Gpu("cuda", 90), derivative=False)[0]["FOLD"]


def test_zeros_of_both_signs_are_two_numbers() -> None:
    """No cache takes one for the other: as keys they are equal."""
    for zero in (0.0, -0.0):
        spec = Spec(zero, score_mod=reciprocal(zero).key, score_numbers=(zero,))
        q = torch.zeros(1, 1, 1, 16)
        found = request_from_arguments(*arguments(Request(q, q, q, spec))).spec
        assert [math.copysign(1, x) for x in (found.scale, *found.score_numbers)] == [math.copysign(1, zero)] * 2
