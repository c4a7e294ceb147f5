"""MoBA against a float64 loop over queries, with its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilewise import sparse


def loop(q: Tensor, k: Tensor, v: Tensor, block_size: int, top_k: int, scale: float | None = None) -> Tensor:
    """Query by query, in float64: its own block causally, and the best of the blocks wholly before it."""
    batch, n, heads, d = q.shape
    scale = d**-0.5 if scale is None else scale
    rows = []
    for b in range(batch):
        for i in range(n):
            for h in range(heads):
                own, g = i // block_size, h * k.shape[2] // heads
                means = [k[b, c * block_size : (c + 1) * block_size, g].mean(0) for c in range(own)]
                wanted = torch.stack([q[b, i, h] @ m for m in means]) if means else q.new_zeros(0)
                best = wanted.topk(min(top_k - 1, own)).indices.tolist()
                keys = [j for c in sorted(best) for j in range(c * block_size, (c + 1) * block_size)]
                keys += range(own * block_size, i + 1)
                p = (scale * (k[b, keys, g] @ q[b, i, h])).softmax(0)
                rows.append(p @ v[b, keys, g])
    return torch.stack(rows).view(batch, n, heads, v.shape[3])


def inputs(
    n: int, heads: int = 4, kv_heads: int = 2, batch: int = 2, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    torch.manual_seed(n + heads)
    dims = (heads, 8), (kv_heads, 8), (kv_heads, 6)
    return [torch.randn(batch, n, *dim, dtype=dtype, requires_grad=True) for dim in dims]


@pytest.mark.parametrize(
    ("n", "block_size", "top_k", "heads", "kv_heads"),
    [(24, 4, 3, 4, 2), (24, 8, 1, 2, 2), (24, 8, 9, 4, 1), (5, 5, 2, 2, 1), (12, 1, 3, 3, 3), (30, 5, 2, 6, 2)],
)
def test_as_the_loop(n: int, block_size: int, top_k: int, heads: int, kv_heads: int) -> None:
    x = inputs(n, heads, kv_heads)
    expected = loop(*x, block_size, top_k)
    out = sparse.moba(*x, block_size=block_size, top_k=top_k)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    grads = [torch.autograd.grad((y * weights).sum(), x) for y in (out, expected)]
    torch.testing.assert_close(*grads)


def test_scale_and_gate() -> None:
    x = inputs(24)
    torch.testing.assert_close(
        sparse.moba(*x, block_size=6, top_k=2, scale=-0.3), loop(*x, block_size=6, top_k=2, scale=-0.3)
    )

    def nearest(q: Tensor, k: Tensor, block_size: int) -> Tensor:
        """The blocks right before a query: a window."""
        assert not torch.is_grad_enabled()
        blocks = torch.arange(q.shape[1] // block_size, dtype=torch.float32)
        return blocks.expand(*q.shape[:3], -1)

    out = sparse.moba(*x, block_size=6, top_k=2, gate=nearest)
    q, k, v = (t.transpose(1, 2) for t in x)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    i, j = torch.arange(24)[:, None], torch.arange(24)
    seen = (j <= i) & (j // 6 >= i // 6 - 1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)
    torch.testing.assert_close(out, expected)


def test_on_the_kernels(backend: str) -> None:
    x = inputs(24, dtype=torch.float32)
    wide = [t.detach().double().requires_grad_() for t in x]
    expected = loop(*wide, block_size=8, top_k=2)
    out = sparse.moba(*x, block_size=8, top_k=2, backend=backend)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(out.square().sum(), x), torch.autograd.grad(expected.square().sum(), wide)
    for ours, truth in zip(*grads, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-4)


def test_all_blocks_are_causal_attention() -> None:
    import tilewise

    x = inputs(32)
    torch.testing.assert_close(sparse.moba(*x, block_size=8, top_k=4), tilewise.attention(*x, causal=True))


def test_compiled() -> None:
    x = inputs(24, dtype=torch.float32)
    compiled = torch.compile(sparse.moba, backend="aot_eager", fullgraph=True)
    out, eager = compiled(*x, block_size=8, top_k=2), sparse.moba(*x, block_size=8, top_k=2)
    torch.testing.assert_close(out, eager)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(eager.sum(), x))
