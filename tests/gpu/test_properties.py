"""The rows of tests/tables on a GPU, by the tests that run them in Triton's interpreter: with the portable kernels, and
with those that are chosen."""

from __future__ import annotations

from tests.properties.test_attention import test_a_token_that_is_not_finite, test_results_and_gradients, test_strides
from tests.properties.test_cache import test_results_and_bytes

__all__ = ["test_a_token_that_is_not_finite", "test_results_and_bytes", "test_results_and_gradients", "test_strides"]
