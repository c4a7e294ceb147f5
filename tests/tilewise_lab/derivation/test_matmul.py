"""Blocks multiply like numbers, in every conformable partition and in no other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tilewise.errors import AttentionError
from tilewise_lab.derivation import matmul
from tilewise_lab.machine import budget

partitions = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def test_eight_cores() -> None:
    a, b = torch.randn(8, 4), torch.randn(4, 8)
    c = matmul.blocked(matmul.split(a, [4, 4], [2, 2]), matmul.split(b, [2, 2], [2] * 4))
    assert [[tuple(c_ij.shape) for c_ij in c_i] for c_i in c] == [[(4, 2)] * 4] * 2
    assert_close(c[0][0], a[:4, :2] @ b[:2, :2] + a[:4, 2:] @ b[2:, :2])
    assert_close(matmul.join(c), a @ b)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(partitions, partitions, partitions)
def test_any_conformable_partition(rows: list[int], inner: list[int], columns: list[int]) -> None:
    a = torch.randn(sum(rows), sum(inner), dtype=torch.float64)
    b = torch.randn(sum(inner), sum(columns), dtype=torch.float64)
    assert_close(matmul.join(matmul.blocked(matmul.split(a, rows, inner), matmul.split(b, inner, columns))), a @ b)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(partitions, partitions)
def test_split_and_join(rows: list[int], columns: list[int]) -> None:
    a = torch.randn(sum(rows), sum(columns))
    assert torch.equal(matmul.join(matmul.split(a, rows, columns)), a)


def test_not_conformable() -> None:
    a, b = matmul.split(torch.zeros(2, 4), [2], [1, 3]), matmul.split(torch.zeros(4, 2), [2, 2], [2])
    with pytest.raises(AttentionError, match=r"found \[2, 2\]; expected .*\[1, 3\]"):
        matmul.blocked(a, b)


def test_partition_of_another_size() -> None:
    with pytest.raises(AttentionError, match=r"found \[2, 2\] by \[4\]; expected .*\(5, 4\)"):
        matmul.split(torch.zeros(5, 4), [2, 2], [4])


@pytest.mark.parametrize("shape", [(3, 3, 3), (1, 3, 4), (5, 2, 3)])
def test_gradients(shape: tuple[int, int, int]) -> None:
    n, m, p = shape
    x = torch.randn(n, m, dtype=torch.float64, requires_grad=True)
    w = torch.randn(m, p, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(n, p, dtype=torch.float64)
    assert_close(matmul.gradients(x.detach(), w.detach(), dy), torch.autograd.grad(x @ w, (x, w), dy))


def test_a_gradient_is_a_contraction_with_the_jacobian_of_four_axes() -> None:
    x, w, dy = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 3), (3, 4), (2, 4)))
    of_x, of_w = torch.autograd.functional.jacobian(torch.matmul, (x, w))
    assert (of_x.shape, of_w.shape) == ((2, 4, 2, 3), (2, 4, 3, 4))
    found = tuple(torch.einsum("nd,nd...->...", dy, jacobian) for jacobian in (of_x, of_w))
    assert_close(matmul.gradients(x, w, dy), found)


def test_the_jacobian_that_is_never_built() -> None:
    """X (1024, 1024), W (1024, 2048): 2.2e12 entries, 8.8 TB. The notes' X 1 x 3, W 3 x 4 has one that can be seen."""
    entries = budget.jacobian(1024, 1024, 2048)
    assert entries.elements == pytest.approx(2.2e12, rel=0.01)
    assert entries.bytes == pytest.approx(8.8e12, rel=0.01)
    x, w, dy = torch.randn(1, 3), torch.randn(3, 4), torch.randn(1, 4)
    jacobian = torch.autograd.functional.jacobian(lambda x: x @ w, x)  # (1, 4, 1, 3)
    assert jacobian.numel() == budget.jacobian(1, 3, 4).elements
    assert_close(jacobian.view(4, 3), w.mT)
    assert_close(matmul.gradients(x, w, dy), (dy @ w.mT, x.mT @ dy))
