"""Neighbourhood attention against a float64 loop over tokens, with its gradients."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tilewise
from tilewise import sparse


def seen(x: int, length: int, size: int, step: int, causal: bool) -> list[int]:
    """The coordinates that coordinate x of an axis sees, as NATTEN's documentation has it."""
    own = list(range(x % step, length, step))  # the tokens that dilation leaves
    at = own.index(x)
    if causal:
        return own[max(0, at - size + 1) : at + 1]
    start = min(max(at - size // 2, 0), len(own) - size)
    return own[start : start + size]


def loop(q: Tensor, k: Tensor, v: Tensor, sizes: Any, steps: Any, causal: Any) -> Tensor:
    space = q.shape[1:-2]
    group = q.shape[-2] // k.shape[-2]
    out = []
    for b in range(q.shape[0]):
        for at in product(*map(range, space)):
            keys = list(product(*(seen(*x) for x in zip(at, space, sizes, steps, causal, strict=True))))
            for h in range(q.shape[-2]):
                ks = torch.stack([k[(b, *j)][h // group] for j in keys])
                vs = torch.stack([v[(b, *j)][h // group] for j in keys])
                p = (ks @ q[(b, *at)][h] / q.shape[-1] ** 0.5).softmax(0)
                out.append(p @ vs)
    return torch.stack(out).view(q.shape[0], *space, q.shape[-2], v.shape[-1])


CASES: dict[str, tuple[Any, ...]] = {
    "1d": ((23,), (5,), (1,), (False,)),
    "1d even": ((20,), (4,), (2,), (False,)),
    "1d causal": ((23,), (5,), (3,), (True,)),
    "1d whole": ((9,), (9,), (1,), (False,)),
    "2d": ((7, 9), (3, 5), (1, 1), (False, False)),
    "2d dilated": ((9, 11), (3, 2), (3, 4), (False, False)),
    "2d half causal": ((6, 7), (3, 3), (2, 1), (True, False)),
    "2d kernel 1": ((5, 4), (1, 1), (1, 2), (False, True)),
    "3d": ((4, 5, 6), (3, 2, 3), (1, 2, 2), (False, False, True)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_the_loop(name: str) -> None:
    space, sizes, steps, causal = CASES[name]
    torch.manual_seed(0)
    x = [torch.randn(1, *space, h, 4, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1)]
    expected = loop(*x, sizes, steps, causal)
    out = sparse.neighborhood(*x, kernel_size=sizes, dilation=steps, causal=causal)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    grads = [torch.autograd.grad((y * weights).sum(), x) for y in (out, expected)]
    torch.testing.assert_close(*grads)


def test_numbers_for_all_axes_and_scale() -> None:
    x = [torch.randn(2, 8, 8, 2, 4, dtype=torch.float64) for _ in range(3)]
    out = sparse.neighborhood(*x, kernel_size=3, dilation=2, causal=True, scale=0.3)
    expected = loop(x[0] * 0.6, *x[1:], (3, 3), (2, 2), (True, True))
    torch.testing.assert_close(out, expected)


def test_on_the_kernels(backend: str) -> None:
    torch.manual_seed(1)
    x = [torch.randn(1, 12, 13, h, 16, requires_grad=True) for h in (2, 1, 1)]
    wide = [t.detach().double().requires_grad_() for t in x]
    expected = loop(*wide, (5, 3), (2, 1), (False, False))
    out = sparse.neighborhood(*x, kernel_size=(5, 3), dilation=(2, 1), backend=backend)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(out.square().sum(), x), torch.autograd.grad(expected.square().sum(), wide)
    for ours, truth in zip(*grads, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-4)


@tilewise.mask_mod
def in_rows(b, h, q_idx, kv_idx, n, size):
    row = min(max(q_idx // n - size // 2, 0), n - size)
    column = min(max(q_idx % n - size // 2, 0), n - size)
    in_row = (kv_idx // n >= row) & (kv_idx // n < row + size)
    return in_row & (kv_idx % n >= column) & (kv_idx % n < column + size)


@pytest.mark.parametrize(("n", "size", "share"), [(32, 7, 1.0), (64, 15, 0.85), (128, 13, 0.75)])
def test_boxes_visit_no_more_tiles_than_rows(n: int, size: int, share: float) -> None:
    from tilewise.sparse.neighborhood_attention import Window, _kept_layout

    ours = _kept_layout((Window(n, size, 1, False),) * 2, torch.device("cpu")).mask
    rows = tilewise.block_mask(in_rows(n, size), n * n, n * n)
    assert len(ours.lists[1]) <= share * len(rows.lists[1])
    assert ours.block == (128, 128)


def test_compiled() -> None:
    x = [torch.randn(1, 9, 9, 2, 8, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(sparse.neighborhood, backend="aot_eager", fullgraph=True)
    out, eager = compiled(*x, kernel_size=3), sparse.neighborhood(*x, kernel_size=3)
    torch.testing.assert_close(out, eager)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(eager.sum(), x))


def test_of_meta_tensors_the_shape():
    q, v = torch.empty(2, 6, 9, 4, 8, device="meta"), torch.empty(2, 6, 9, 2, 16, device="meta")
    found = sparse.neighborhood(q, q[:, :, :, :2], v, kernel_size=3)
    assert (found.device.type, found.shape) == ("meta", (2, 6, 9, 4, 16))


def test_of_fake_tensors_the_shape() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 6, 7, 2, 16, requires_grad=True)
        out = sparse.neighborhood(q, q, q, kernel_size=3)
        out.sum().backward()
    assert out.shape == q.shape == q.grad.shape


class Neighborhood(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sparse.neighborhood(x, x, x, kernel_size=3)


@pytest.mark.parametrize("way", ["export", "make_fx"])
def test_recorded_before_any_other_call(way: str) -> None:
    """The order of tokens is computed outside of the mode that records, and is a constant of the program."""
    q = torch.randn(1, 5, 9 if way == "export" else 11, 2, 16)  # grids of no other test
    if way == "export":
        program = torch.export.export(Neighborhood(), (q,), strict=False).module()
    else:
        program = make_fx(Neighborhood())(q)
    other = torch.randn_like(q)
    torch.testing.assert_close(program(other), sparse.neighborhood(other, other, other, kernel_size=3))
