"""Second derivatives of the sparse attentions by autograd: against finite differences, and of the kernels against the
reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import sparse

Call = Callable[..., Tensor]
CU = torch.tensor([0, 3, 3, 8])
INDICES = torch.tensor([[0, 1], [1, 2], [3, -1], [3, 4], [4, 5], [5, -1], [-1, -1], [7, 2]]).view(1, 8, 1, 2)
OWN = (torch.arange(8) // 2).view(1, 8, 1, 1)
BLOCKS = torch.cat([OWN, torch.where(OWN > 1, OWN - 2, -1)], -1)
NSA: Any = {"block_size": 2, "num_blocks": 2, "window": 3}


def calls(backend: str) -> dict[str, Call]:
    """Functions of q, k and v, (S, H, D), and for nsa of three gates (S, H)."""

    def dense(f: Call, batch: int = 1) -> Call:
        def call(*x: Tensor) -> Tensor:
            return f(*(torch.stack([t, t.flip(0)][:batch]) for t in x))

        return call

    def nsa(q: Tensor, k: Tensor, v: Tensor, *gates: Any, **more: Any) -> Tensor:
        return sparse.nsa(q, k, v, gates, backend=backend, **NSA, **more)

    return {
        "moba": dense(lambda *x: sparse.moba(*x[:3], block_size=2, top_k=2, backend=backend), 2),
        "moba, own blocks": dense(lambda *x: sparse.moba(*x[:3], block_size=2, top_k=1, scale=-0.4, backend=backend)),
        "moba, packed": lambda *x: sparse.moba(*x[:3], block_size=2, top_k=2, cu_seqlens=CU, backend=backend),
        "nsa": dense(nsa, 2),
        "nsa, blocks": dense(lambda *x: nsa(*x, blocks=BLOCKS)),
        "nsa, packed": lambda *x: nsa(*x, cu_seqlens=CU),
        "topk": dense(lambda *x: sparse.topk(*x[:3], INDICES, backend=backend)),
        "topk, lse": dense(lambda *x: with_lse(*sparse.topk(*x[:3], INDICES, return_lse=True, backend=backend))),
        "topk, columns": dense(lambda *x: sparse.topk(x[0], x[1], 2, INDICES, backend=backend)),
    }


def with_lse(out: Tensor, lse: Tensor) -> Tensor:
    return torch.cat([out.flatten(), lse.masked_fill(lse == -torch.inf, 0.0).flatten()])


def inputs(name: str, d: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    x = [torch.randn(8, h, d, dtype=torch.float64) for h in (2, 1, 1)]
    if "nsa" in name:
        x += [torch.rand(8, 2, dtype=torch.float64) for _ in range(3)]
    return x


@pytest.mark.parametrize("name", calls("reference"))
def test_by_finite_differences(name: str) -> None:
    leaves = [t.requires_grad_() for t in inputs(name)]
    assert torch.autograd.gradgradcheck(calls("auto")[name], leaves, fast_mode=True)


def second(f: Call, x: list[Tensor]) -> list[Tensor]:
    """The gradients, and those of a function of them, with respect to all inputs and to the gradient of out."""
    leaves = [t.detach().requires_grad_() for t in x]
    out = f(*leaves)
    torch.manual_seed(1)
    dout = torch.randn(out.shape, dtype=torch.float64).to(out.dtype).requires_grad_()
    first = torch.autograd.grad(out, leaves, dout, create_graph=True, allow_unused=True)
    given = [g for g in first if g is not None]
    along = [torch.randn(g.shape, dtype=torch.float64).to(g.dtype) for g in given]
    found = torch.autograd.grad(given, (*leaves, dout), along, allow_unused=True, materialize_grads=True)
    return [t.detach() for t in (*given, *found)]


@pytest.mark.parametrize("name", calls("reference"))
def test_of_the_kernels(name: str, triton_runs: None) -> None:
    """Within twice the error of the reference in float32, and a rounding of the largest result: others are differences
    of terms of its size, as dq of a query with a single key."""
    x = inputs(name, 16)
    exact = second(calls("reference")[name], x)
    narrow = [t.float() for t in x]
    ours, theirs = (second(calls(backend)[name], narrow) for backend in ("triton", "reference"))
    rounding = 1e-6 * max(truth.abs().max().item() for truth in exact)
    for a, b, truth in zip(ours, theirs, exact, strict=True):
        assert a.isfinite().all()
        error, limit = ((y.double() - truth).abs().max().item() for y in (a, b))
        assert error <= 2 * limit + rounding


@pytest.mark.parametrize("name", calls("reference"))
def test_gradients_that_can_be_differentiated_are_the_same(name: str) -> None:
    """Also if an input is computed from another, or needs no gradient."""
    f, x = calls("reference")[name], inputs(name)
    q, rest = x[0].requires_grad_(), x[1:]

    def loss() -> Tensor:
        k = q[:, :1] * 0.5  # of q
        return f(q, k, rest[1], *rest[2:]).square().sum()

    (plain,) = torch.autograd.grad(loss(), q)
    (again,) = torch.autograd.grad(loss(), q, create_graph=True)
    torch.testing.assert_close(again, plain)
    assert again.requires_grad


def test_a_penalty_on_the_gradient_trains() -> None:
    """As in R1 regularisation: the penalty's gradient reaches the weights."""
    x, weight = torch.randn(1, 8, 2, 4), torch.randn(4, 4, requires_grad=True)
    given = x.clone().requires_grad_()
    rows = given @ weight
    out = sparse.moba(rows, rows, rows, block_size=4, top_k=2)
    (slope,) = torch.autograd.grad(out.square().sum(), given, create_graph=True)
    slope.square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().min() > 0
