"""What mods may say, on the GPU: the cases of Triton's interpreter, of sizes that its kernels take."""

from __future__ import annotations

import pytest
import torch

from tests.tilewise.backends import test_bounded, test_far
from tests.tilewise.mods import test_functions, test_integers


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("name", test_far.MODS)
def test_a_row_of_equals_is_a_mean(name: str, backend: str) -> None:
    test_far.check(test_far.MODS[name], torch.bfloat16, backend, n=300, d=64)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("name", ["full", "causal, shared keys", "sinks as far out", "few queries"])
def test_gradients_of_rows_that_are_far_out(name: str, backend: str) -> None:
    sizes = {"n_q": 200, "n_k": 300} if name != "few queries" else {"n_q": 3, "n_k": 5000}
    test_far.gradients(backend, test_far.LEAST, **test_far.CALLS[name] | {"dtype": torch.bfloat16, **sizes})


@pytest.mark.parametrize("softcap", [20.0, 50.0])
def test_one_visible_key_is_its_value(softcap: float) -> None:
    test_bounded.test_one_visible_key_is_its_value(softcap)


def test_functions_are_torchs() -> None:
    test_functions.test_on_every_backend("triton")
    test_functions.test_far_out("triton")


@pytest.mark.parametrize("block", [None, 64])
@pytest.mark.parametrize("name", test_integers.CASES)
def test_integers_have_one_meaning(name: str, block: int | None) -> None:
    make, expected = test_integers.CASES[name]
    assert torch.equal(test_integers.seen_by(make(), "triton", block), expected)
