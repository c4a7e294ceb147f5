"""The dropout hash."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tilewise


def test_dropout_keeps_what_it_says_and_is_free_of_patterns() -> None:
    keep = tilewise.dropout_mask(2, 3, 256, 256, p=0.3, seed=1).double() - 0.7
    assert abs(keep.mean()) < 3e-3
    for shift in ((1, 0), (0, 1), (1, 1)):
        rolled = keep.roll(shift, (2, 3))
        assert abs((keep * rolled).mean() / 0.21) < 1e-2
    assert not torch.equal(keep[0], keep[1])


@pytest.mark.parametrize("p", [0.0001, 0.3, 0.9999, 1 - 2.0**-18])
def test_the_mean_over_what_is_dropped_is_exact_attention(p: float, backend: str, device: str) -> None:
    """Of equal keys and values of 1, out is the share of the kept weights, times their factor; the gradient of v is
    the same. The factor belongs to the probability that was rounded to 1 / 65536."""
    n_q, n_k = 40, 48
    q, k, v = (torch.ones(1, n, 2, 16, device=device, requires_grad=True) for n in (n_q, n_k, n_k))
    keep, seed = next(found for found in masks(n_q, n_k, p) if found[0].any())
    out = tilewise.attention(q, k, v, dropout_p=p, seed=seed, backend=backend)
    (dv,) = torch.autograd.grad(out.sum(), v)
    chance = max(1 - round(p * 65536) / 65536, 1 / 65536)
    weights = (keep.double() / chance / n_k).float().to(device)
    torch.testing.assert_close(out[..., 0].transpose(1, 2), weights.sum(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dv[..., 0].transpose(1, 2), weights.sum(-2), rtol=1e-5, atol=1e-6)


def masks(n_q: int, n_k: int, p: float) -> Iterator[tuple[torch.Tensor, int]]:
    return ((tilewise.dropout_mask(1, 2, n_q, n_k, p=p, seed=seed), seed) for seed in range(1000))
