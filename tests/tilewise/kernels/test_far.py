"""Scores that a mod makes as large as float32 has them, for a whole row: a mask that was written as numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tests.conftest import DEVICE
from tilewise import mods
from tilewise.kernels.mods import is_far
from tilewise.mods.program import Mod

LEAST = torch.finfo(torch.float32).min
ROW = 3


@tilewise.score_mod
def says(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx == 3, -3e38, score)


@tilewise.score_mod
def told(score, b, h, q_idx, kv_idx, far: float):
    return torch.where(q_idx == 3, far, score)


@tilewise.score_mod
def table(score, b, h, q_idx, kv_idx, t):
    return score + t[q_idx, kv_idx]


@tilewise.score_mod
def hidden(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx == 3, -float("inf"), score)


@tilewise.score_mod
def grown(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx == 3, -torch.exp(score * 0 + 80), score)


def bands(n: int) -> torch.Tensor:
    t = torch.zeros(n, n)
    t[ROW] = LEAST
    return t


MODS = {
    "a number in the text": lambda n: says(),
    "a number that is given": lambda n: told(-1e30),
    "a table of them": lambda n: table(bands(n).to(DEVICE)),
    "an exponential": lambda n: grown(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODS)
def test_a_row_of_equals_is_a_mean(name: str, dtype: torch.dtype, backend: str) -> None:
    """As softmax has it; and its gradients are finite."""
    check(MODS[name], dtype, backend)


def check(make: Any, dtype: torch.dtype, backend: str, n: int = 20, d: int = 16) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, d, device=DEVICE, dtype=dtype).requires_grad_() for _ in range(3))
    out, lse = tilewise.attention(q, k, v, score_mod=make(n), return_lse=True, backend=backend)
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out[0, ROW], v[0].mean(0), atol=rounding, rtol=rounding)
    assert (lse[0, :, ROW] < -1e29).all()
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(torch.isfinite(grad).all() for grad in grads)
    others = [row for row in range(n) if row != ROW]
    plain = tilewise.attention(q, k, v, backend="reference")
    torch.testing.assert_close(out[0, others], plain[0, others], atol=2 * rounding, rtol=2 * rounding)


def test_which_mods_are_far() -> None:
    def far(mod: Any) -> bool:
        assert isinstance(mod, Mod)
        return is_far(mod.key, mod.numbers)

    slopes = torch.ones(2)
    assert all(far(make(8)) for make in MODS.values())
    assert not any(map(far, (told(float("-inf")), hidden())))
    assert not any(map(far, (told(-1e4), mods.softcap(50.0), mods.alibi(slopes), mods.t5_relative(torch.ones(32, 2)))))
