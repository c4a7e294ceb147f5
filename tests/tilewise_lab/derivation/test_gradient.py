"""The gradient by hand, from the Jacobian of softmax to recomputation from lse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tilewise_lab.derivation import attention, gradient

SHAPES = [(8, 8, 16, 16), (7, 5, 3, 4), (1, 9, 4, 1)]
BLOCKS = [(2, 2), (3, 2), (4, 16), (100, 100)]


def inputs(n: int, m: int, d: int, e: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((n, d), (m, d), (m, e), (n, e))]


def test_softmax_jacobian() -> None:
    s = torch.randn(6, dtype=torch.float64)
    p = torch.softmax(s, -1)
    jacobian = gradient.softmax_jacobian(p)
    assert_close(jacobian, torch.autograd.functional.jacobian(lambda s: torch.softmax(s, -1), s))
    assert torch.equal(jacobian, jacobian.mT)
    assert_close(jacobian.sum(-1), torch.zeros_like(p))


def test_softmax_vjp_is_the_jacobian_of_every_row() -> None:
    p, dp = torch.softmax(torch.randn(4, 6), -1), torch.randn(4, 6)
    assert_close(gradient.softmax_vjp(p, dp), torch.stack([gradient.softmax_jacobian(r) @ d for r, d in zip(p, dp)]))  # noqa: B905


@pytest.mark.parametrize("shape", SHAPES)
def test_naive_equals_autograd(shape) -> None:
    *leaves, do = inputs(*shape)
    leaves = [x.requires_grad_() for x in leaves]
    expected = torch.autograd.grad(attention.naive(*leaves), leaves, do)
    assert_close(gradient.naive(*(x.detach() for x in leaves), do), expected)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tiled_equals_naive(shape, blocks) -> None:
    q, k, v, do = inputs(*shape)
    o, lse = attention.fa2(q, k, v, *blocks)
    assert_close(gradient.tiled(q, k, v, o, lse, do, *blocks), gradient.naive(q, k, v, do))


def test_row_sum_is_known_before_the_first_block() -> None:
    q, k, v, do = inputs(8, 8, 16, 16)
    p = torch.softmax(attention.scores(q, k), -1)
    assert_close((p * (do @ v.mT)).sum(-1), (do * attention.naive(q, k, v)).sum(-1))
