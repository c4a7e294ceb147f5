"""The yardstick of the score terms: it is the truth where it rounds nothing, and no result far from it passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import features, features_budget


def call(seed: int) -> features.Call:
    chosen = features.Features.random(seed, dims=(8, 16), dtypes=("float32", "bfloat16"), blocks=16)
    return features.make(chosen, seed, longest=40, device="cpu")


@pytest.mark.parametrize("seed", range(12))
def test_without_roundings_the_model_is_the_truth(seed: int) -> None:
    """Two derivations: torch's autograd of the forward, and the formulas of the backward."""
    exact = features_budget.truth(call(seed), torch.float64)
    for name, x in features_budget.rounded(call(seed), exact, size=0.0).items():
        torch.testing.assert_close(x, exact[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_result_does_not_pass(seed: int) -> None:
    """Off by a hundredth of its largest value, in float32."""
    given = call(seed)
    float32 = features.make(replace(given.features, dtype="float32"), seed, longest=40, device="cpu")
    for stick in features_budget.yardsticks(float32):
        assert stick.fault(stick.torch) is None
        largest = stick.exact[stick.exact.isfinite()].abs().max().item()
        assert stick.fault(stick.exact + 0.01 * largest) is not None, stick.name


def test_no_score_lies_at_a_kink() -> None:
    """A score on the kink of `per_key` is seen, and `make` returns data without one."""
    chosen = features.Features(mod="per_key", heads=(2, 2), d=16, dv=16)
    made = features.make(chosen, 3, longest=40, device="cpu")
    assert not features._is_near_kink(made)
    q = made.leaves["q"]
    row, key = q[0, 0, 1], made.leaves["k"][0, 0, 1].double()
    row.copy_(row.double() + (1.5 * 4 - row.double() @ key) / (key @ key) * key)
    assert features._is_near_kink(made)
