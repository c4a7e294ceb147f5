"""Capped scores, for which the portable kernels subtract no maximum: what rounding the weights to bfloat16 may cost."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tests.conftest import DEVICE
from tilewise.backends.common.score_terms import is_bounded
from tilewise.request import Request, Spec

pytestmark = pytest.mark.usefixtures("triton_runs")


def tensors(tokens: int, *, d: int = 192) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, tokens, 2, d, device=DEVICE).bfloat16().requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("cap", [20.0, 50.0])
def test_one_visible_key_is_its_value(cap: float) -> None:
    """Its weight is 1: out is v, and no gradient goes through the score."""
    q, k, v = tensors(20)
    out, lse = tilewise.attention(
        q, k, v, causal=True, window=(0, 0), softcap=cap, backend="triton", return_lse=True
    )  # fmt: skip
    assert torch.equal(out, v)
    score = cap * torch.tanh((q.double() * k.double()).sum(-1) * 192**-0.5 / cap)
    torch.testing.assert_close(lse.double(), score.mT, atol=1e-5, rtol=0)
    dq, dk, _ = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert max(dq.abs().max(), dk.abs().max()) < 1e-5


def test_rounding_has_no_sign() -> None:
    """Scores at the cap have the same weight, which is rounded in the same direction in all rows: up to 2^-9 of out."""
    q, k, v = tensors(40, d=64)
    with torch.no_grad():
        q *= 200
        out = tilewise.attention(q, k, v, softcap=20.0, backend="triton")
        exact = tilewise.attention(*(x.double() for x in (q, k, v)), softcap=20.0, backend="reference")
    error = out.double() - exact
    assert abs((error * exact.sign()).sum() / exact.abs().sum()) < 1e-4  # was 1.0e-3


@pytest.mark.parametrize("split", [None, 0])
def test_a_cache_with_one_visible_key(split: int | None) -> None:
    q, k, v = (x.detach() for x in tensors(20, d=64))
    lengths = torch.full((1,), 20, dtype=torch.int32, device=DEVICE)
    out = tilewise.attention_kv(
        q, k, v, lengths, causal=True, window=(0, 0), softcap=20.0, split=split, backend="triton"
    )  # fmt: skip
    assert torch.equal(out, v)


def test_dropout_has_a_maximum() -> None:
    q, k, v = tensors(4, d=16)
    cap = tilewise.mods.softcap(20.0)
    request = Request(q, k, v, Spec(0.25, score_mod=cap.key, score_numbers=cap.numbers))
    assert is_bounded(request, 20.0)
    assert not is_bounded(request._replace(seed=torch.zeros(1, dtype=torch.int64)), 20.0)


def test_sinks_have_a_maximum() -> None:
    """A sink has no bound: the maximum of a row begins with it."""
    q, k, v = (x.detach() for x in tensors(20, d=64))
    for sink in (-3.0, 30.0, 200.0):
        sinks = torch.full((2,), sink, device=DEVICE)
        out, lse = tilewise.attention(q, k, v, softcap=20.0, sinks=sinks, backend="triton", return_lse=True)
        wide = (x.double() for x in (q, k, v))
        exact = tilewise.attention(*wide, softcap=20.0, sinks=sinks.double(), backend="reference", return_lse=True)
        torch.testing.assert_close((out.double(), lse.double()), exact, atol=2e-2, rtol=1e-4)
