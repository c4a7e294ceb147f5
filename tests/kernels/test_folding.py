"""A score mod divided by the number that the softmax multiplies by: the same score, with fewer multiplications."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise import mods
from tilewise.kernels.mods import factors, value_of
from tilewise.mods.expr import Place, evaluate, nodes
from tilewise.mods.program import Mod, bound

SLOPES = torch.tensor([0.5, 0.25], dtype=torch.float64)
SCALE = 0.3


@tilewise.score_mod
def mixed(score, b, h, q_idx, kv_idx, t, a: float):
    return 2.0 * (torch.tanh(score * a / 3.0) * t[h] - t[q_idx % 2] + kv_idx) / a


@tilewise.score_mod
def twice(score, b, h, q_idx, kv_idx):
    return score + torch.sigmoid(score) * score


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


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_score_is_the_same(name: str) -> None:
    mod, expected = PROGRAMS[name]
    assert isinstance(mod, Mod)
    product = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    place = Place(0, torch.arange(2)[:, None, None], torch.arange(5)[:, None], torch.arange(6), 5, 6)
    unit, rest = factors(mod.program)
    factor = value_of(unit, (*mod.numbers, SCALE))
    assert factor == pytest.approx(expected)
    (score,) = evaluate([mod.program.root], place, SCALE * product, mod.tensors, mod.numbers, torch.float64)
    (found,) = evaluate([rest], place, product, mod.tensors, (*mod.numbers, SCALE), torch.float64)
    torch.testing.assert_close(factor * found, score)


def test_what_is_left_for_every_pair() -> None:
    """Of softcap a product and tanh, of ALiBi a difference, its absolute value, and one multiplication and addition."""
    for mod, left in ((mods.softcap(2.0), 2), (mods.alibi(SLOPES), 4)):
        _, rest = factors(mod.program)
        pairwise = [x for x in nodes(rest) if x.args and x.deps & {"score", "i"} and x.deps & {"score", "j"}]
        assert len(pairwise) == left


def test_a_division_by_zero_is_not_folded() -> None:
    unit, _ = factors(reciprocal(0.0).program)
    assert not value_of(unit, (0.0, SCALE)) > 0
