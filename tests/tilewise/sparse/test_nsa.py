"""NSA against a float64 loop over queries, with its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import sparse


def loop(
    q: Tensor, k: Tensor, v: Tensor, gates: Any, block_size: int, num_blocks: int, window: int, compressed: Any = None
) -> Tensor:
    batch, n, heads, d = q.shape
    kv_heads, group = k.shape[2], heads // k.shape[2]
    if compressed is None:
        compressed = [x.view(batch, -1, block_size, *x.shape[2:]).mean(2) for x in (k, v)]
    ck, cv = compressed

    def attend(b: int, i: int, h: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        p = (keys @ q[b, i, h] / d**0.5).softmax(0)
        return p @ values if len(p) else q.new_zeros(v.shape[3]), p

    out = torch.zeros(batch, n, heads, v.shape[3], dtype=q.dtype)
    rows = []
    for b in range(batch):
        for i in range(n):
            ended, own = (i + 1) // block_size, i // block_size
            for g in range(kv_heads):
                mine = range(g * group, (g + 1) * group)
                coarse = [attend(b, i, h, ck[b, :ended, g], cv[b, :ended, g]) for h in mine]
                weight = sum(p.detach() for _, p in coarse)[:own]
                best = weight.topk(min(num_blocks - 1, own)).indices.tolist() if own else []
                keys = [j for c in (*best, own) for j in range(c * block_size, (c + 1) * block_size) if j <= i]
                near = slice(max(0, i - window + 1), i + 1)
                for h, (o, _) in zip(mine, coarse, strict=True):
                    chosen = attend(b, i, h, k[b, keys, g], v[b, keys, g])[0]
                    last = attend(b, i, h, k[b, near, g], v[b, near, g])[0]
                    parts = zip((o, chosen, last), gates, strict=True)
                    rows.append(sum(x * gate[b, i, h] for x, gate in parts))
    return torch.stack(rows).view_as(out)


def inputs(n: int, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Any]:
    torch.manual_seed(n)
    dims = (heads, 8), (kv_heads, 8), (kv_heads, 6)
    x = [torch.randn(1, n, *dim, dtype=dtype, requires_grad=True) for dim in dims]
    return x, [torch.rand(1, n, heads, dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize(
    ("n", "block_size", "num_blocks", "window", "heads", "kv_heads"),
    [(24, 4, 3, 5, 4, 2), (32, 8, 2, 1, 2, 1), (16, 16, 4, 40, 2, 2), (20, 5, 1, 7, 6, 2)],
)
def test_as_the_loop(n: int, block_size: int, num_blocks: int, window: int, heads: int, kv_heads: int) -> None:
    x, gates = inputs(n, heads, kv_heads)
    sizes = {"block_size": block_size, "num_blocks": num_blocks, "window": window}
    out, expected = sparse.nsa(*x, tuple(gates), **sizes), loop(*x, gates, **sizes)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    grads = [torch.autograd.grad((y * weights).sum(), [*x, *gates], allow_unused=True) for y in (out, expected)]
    torch.testing.assert_close(*grads)


def test_own_compression_and_blocks() -> None:
    x, gates = inputs(24)
    compressed = [torch.randn(1, 6, 2, d, dtype=torch.float64, requires_grad=True) for d in (8, 6)]
    sizes = {"block_size": 4, "num_blocks": 2, "window": 3}
    out = sparse.nsa(*x, tuple(gates), compressed=tuple(compressed), **sizes)
    expected = loop(*x, gates, compressed=compressed, **sizes)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(y.sum(), [*x, *compressed]) for y in (out, expected)]
    torch.testing.assert_close(*grads)
    own = (torch.arange(24) // 4).view(1, 24, 1, 1).expand(1, 24, 2, 1)
    torch.testing.assert_close(
        sparse.nsa(*x, tuple(gates), blocks=own, **sizes), loop(*x, gates, **sizes | {"num_blocks": 1})
    )


def test_on_the_kernels(backend: str) -> None:
    x, gates = inputs(16, dtype=torch.float32)
    sizes = {"block_size": 4, "num_blocks": 2, "window": 3}
    out = sparse.nsa(*x, tuple(gates), backend=backend, **sizes)
    wide = [t.detach().double().requires_grad_() for t in (*x, *gates)]
    expected = loop(*wide[:3], wide[3:], **sizes)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out.square().sum(), [*x, *gates])
    for ours, truth in zip(found, torch.autograd.grad(expected.square().sum(), wide), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-4)


def test_compiled() -> None:
    x, gates = inputs(16, dtype=torch.float32)
    sizes = {"block_size": 4, "num_blocks": 2, "window": 3}
    compiled = torch.compile(sparse.nsa, backend="aot_eager", fullgraph=True)
    out, eager = compiled(*x, tuple(gates), **sizes), sparse.nsa(*x, tuple(gates), **sizes)
    torch.testing.assert_close(out, eager)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(eager.sum(), x))
