"""Random combinations of score terms on both backends, tiny, with every gradient."""

from __future__ import annotations

import pytest

from tests import features


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("seed", range(16))
def test_random_combinations(seed: int, backend: str) -> None:
    chosen = features.Features.random(seed, dims=(8, 16), dtypes=("float32",), blocks=16)
    features.check(features.make(chosen, seed, longest=40, device="cpu"), backend)
