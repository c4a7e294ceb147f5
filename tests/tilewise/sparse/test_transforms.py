"""torch.func and forward mode on the sparse attentions: derivatives as by autograd, batches as one by one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import AttentionError, sparse

Calls = dict[str, Callable[..., Tensor]]


def calls() -> tuple[list[Tensor], Calls]:
    """Functions of q, k and v: (S, H, D), and (1, S, H, D) inside."""
    torch.manual_seed(0)
    x = [torch.randn(8, h, 4, dtype=torch.float64) for h in (2, 1, 1)]
    gates: Any = tuple(torch.rand(1, 8, 2, dtype=torch.float64) for _ in range(3))
    flat: Any = tuple(g[0] for g in gates)
    indices = torch.tensor([[0, 1], [1, 2], [3, -1], [3, 4], [4, 5], [5, -1], [-1, -1], [7, 2]]).view(1, 8, 1, 2)
    own = (torch.arange(8) // 2).view(1, 8, 1, 1)
    blocks = torch.cat([own, torch.where(own > 1, own - 2, -1)], -1)
    cu = torch.tensor([0, 3, 3, 8])
    sizes: Any = {"block_size": 2, "num_blocks": 2, "window": 3}

    def dense(f: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda *x: f(*(t[None] for t in x))[0]

    return x, {
        "moba": dense(lambda *x: sparse.moba(*x, block_size=2, top_k=2)),
        "moba, own blocks": dense(lambda *x: sparse.moba(*x, block_size=2, top_k=1)),
        "moba, packed": lambda *x: sparse.moba(*x, block_size=2, top_k=2, cu_seqlens=cu),
        "nsa": dense(lambda *x: sparse.nsa(*x, gates, **sizes)),
        "nsa, blocks": dense(lambda *x: sparse.nsa(*x, gates, blocks=blocks, **sizes)),
        "nsa, packed": lambda *x: sparse.nsa(*x, flat, cu_seqlens=cu, **sizes),
        "topk": dense(lambda *x: sparse.topk(*x, indices)),
        "neighborhood": dense(lambda *x: sparse.neighborhood(*x, kernel_size=3)),
    }


@pytest.mark.parametrize("name", calls()[1])
def test_as_by_autograd(name: str) -> None:
    x, functions = calls()
    f = functions[name]
    weights = torch.randn(f(*x).shape, dtype=torch.float64)

    def loss(*x: Tensor) -> Tensor:
        return (f(*x) * weights).square().sum()

    leaves = [t.clone().requires_grad_() for t in x]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(loss, (0, 1, 2))(*x), expected)
    stacks = [torch.stack([t, -t, t.flip(0)]) for t in x]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where an op has no rule of vmap
        out = torch.vmap(f)(*stacks)
        grads = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*stacks)
        one = torch.vmap(f, in_dims=(0, None, None))(stacks[0], *x[1:])
    torch.testing.assert_close(out, torch.stack([f(*(t[n] for t in stacks)) for n in range(3)]))
    torch.testing.assert_close(one, torch.stack([f(stacks[0][n], *x[1:]) for n in range(3)]))
    torch.testing.assert_close(tuple(g[0] for g in grads), expected)
    tangents = tuple(torch.randn_like(t) for t in x)
    out, along = torch.func.jvp(f, tuple(x), tangents)
    torch.testing.assert_close(out, f(*x))
    moved = [f(*(t + step * d for t, d in zip(x, tangents, strict=True))) for step in (1e-6, -1e-6)]
    torch.testing.assert_close(along, (moved[0] - moved[1]) / 2e-6, rtol=1e-5, atol=1e-7)
    hessian = torch.func.hessian(lambda q: loss(q, *x[1:]))(x[0])
    assert hessian.isfinite().all()


@pytest.mark.parametrize("name", calls()[1])
def test_stacks_of_gradients(name: str) -> None:
    x, functions = calls()
    leaves = [t.clone().requires_grad_() for t in x]
    out = functions[name](*leaves)
    douts = torch.randn(3, *out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, leaves, douts, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, leaves, dout, retain_graph=True) for dout in douts]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*each, strict=True))))


def test_topk_on_the_kernels(triton_runs: None) -> None:
    x, indices = torch.randn(1, 4, 1, 16), torch.zeros(1, 4, 1, 1, dtype=torch.int64)
    with pytest.raises(AttentionError, match=r"backend='triton' of topk: found a torch.func transform"):
        torch.func.grad(lambda q: sparse.topk(q, x, x, indices, backend="triton").sum())(x)
    with pytest.raises(AttentionError, match=r"indices\[0, 0, 0, 0\] of topk: found 4"):
        torch.func.grad(lambda q: sparse.topk(q, x, x, indices + 4).sum())(x)


def test_topk_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where "auto" is the kernels, as on sm_90."""
    x, indices = torch.randn(1, 4, 1, 16), torch.zeros(1, 4, 1, 1, dtype=torch.int64)

    def gradient() -> Tensor:
        return torch.func.grad(lambda q: sparse.topk(q, x, x, indices).square().sum())(x)

    expected = gradient()
    monkeypatch.setattr(sys.modules["tilewise.sparse.topk_attention"], "_backend", lambda q, name: "triton")
    assert torch.equal(gradient(), expected)


@pytest.mark.parametrize("name", ["moba", "nsa"])
def test_blocks_on_the_kernels(name: str, triton_runs: None) -> None:
    torch.manual_seed(0)
    x = [torch.randn(1, 8, h, 16) for h in (2, 1, 1)]
    gates: Any = tuple(torch.rand(1, 8, 2) for _ in range(3))

    def f(*x: Tensor, backend: str = "triton") -> Tensor:
        if name == "moba":
            return sparse.moba(*x, block_size=4, top_k=2, backend=backend)
        return sparse.nsa(*x, gates, block_size=4, num_blocks=2, window=3, backend=backend)

    leaves = [t.clone().requires_grad_() for t in x]
    expected = torch.autograd.grad(f(*leaves, backend="reference").square().sum(), leaves)
    found = torch.func.grad(lambda *x: f(*x).square().sum(), (0, 1, 2))(*x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    stacks = [torch.stack([t, t]) for t in x]
    torch.testing.assert_close(torch.vmap(f)(*stacks)[1], f(*x), rtol=1e-5, atol=1e-5)
