"""MoBA and NSA of packed sequences: each sequence gives what it gives alone, in float64 loops over queries."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tilewise.sparse import test_moba, test_nsa
from tilewise import sparse
from tilewise.sparse.packed import packed_blocks

PAST = 2  # tokens past the last sequence
LENGTHS = [([13, 0, 8, 3, 20], 4), ([7], 8), ([5, 5, 30], 5)]


def inputs(lengths: list[int], dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """q, k and v; gates; and the offsets."""
    torch.manual_seed(sum(lengths))
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    tokens = int(cu[-1]) + PAST
    dims = (4, 8), (2, 8), (2, 6)
    x = [torch.randn(tokens, *dim, dtype=dtype, requires_grad=True) for dim in dims]
    return x, [torch.rand(tokens, 4, dtype=dtype, requires_grad=True) for _ in range(3)], cu


def each_alone(one: Any, x: list[Tensor], cu: Tensor) -> Tensor:
    """one(*tensors of a sequence), for all of them; 0 for the tokens past the last one."""
    empty = x[2].new_zeros(0, 4, 6)
    found = [one(*(t[None, a:b] for t in x))[0] if b > a else empty for a, b in pairwise(cu.tolist())]
    return torch.cat([*found, x[2].new_zeros(PAST, 4, 6)])


def check(out: Tensor, expected: Tensor, leaves: list[Tensor], wide: list[Tensor], tolerance: float) -> None:
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)
    for a, b in zip(ours, torch.autograd.grad((expected * weights).sum(), wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("lengths", "block_size"), LENGTHS)
@pytest.mark.parametrize("top_k", [1, 3, 40])
def test_moba_of_packed_sequences(lengths: list[int], block_size: int, top_k: int) -> None:
    x, _, cu = inputs(lengths)
    out = sparse.moba(*x, block_size=block_size, top_k=top_k, cu_seqlens=cu)
    check(out, each_alone(lambda *t: test_moba.loop(*t, block_size, top_k), x, cu), x, x, 1e-9)


def nsa_alone(block_size: int, num_blocks: int, window: int) -> Any:
    def one(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        whole = k.shape[1] // block_size  # a short last block is not compressed
        means = [t[:, : whole * block_size].unflatten(1, (whole, block_size)).mean(2) for t in (k, v)]
        return test_nsa.loop(q, k, v, gates, block_size, num_blocks, window, means)

    return one


@pytest.mark.parametrize(("lengths", "block_size"), LENGTHS)
@pytest.mark.parametrize(("num_blocks", "window"), [(1, 3), (3, 40)])
def test_nsa_of_packed_sequences(lengths: list[int], block_size: int, num_blocks: int, window: int) -> None:
    x, gates, cu = inputs(lengths)
    sizes = {"block_size": block_size, "num_blocks": num_blocks, "window": window}
    out = sparse.nsa(*x, tuple(gates), cu_seqlens=cu, **sizes)
    check(out, each_alone(nsa_alone(*sizes.values()), [*x, *gates], cu), [*x, *gates], [*x, *gates], 1e-9)


def test_on_the_kernels(backend: str) -> None:
    x, gates, cu = inputs([9, 0, 14, 3], torch.float32)
    wide = [t.detach().double().requires_grad_() for t in (*x, *gates)]
    out = sparse.moba(*x, block_size=4, top_k=2, cu_seqlens=cu, backend=backend)
    check(out, each_alone(lambda *t: test_moba.loop(*t, 4, 2), wide[:3], cu), x, wide[:3], 1e-4)
    out = sparse.nsa(*x, tuple(gates), block_size=4, num_blocks=2, window=3, cu_seqlens=cu, backend=backend)
    check(out, each_alone(nsa_alone(4, 2, 3), wide, cu), [*x, *gates], wide, 1e-4)


def test_blocks() -> None:
    starts, cu_blocks, own, first = packed_blocks(torch.tensor([0, 5, 5, 9]), 10, 4)
    assert starts.tolist() == [0, 4, 5, 9, 9, 9]  # as many as there can be
    assert cu_blocks.tolist() == [0, 2, 2, 3]
    assert own.tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert first.tolist() == [0, 0, 0, 0, 0, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("name", ["moba", "nsa"])
def test_int64_offsets(name: str) -> None:
    (q, k, v), gates, cu = inputs([9, 0, 5])
    found = []
    for offsets in (cu, cu.long()):
        if name == "moba":
            found.append(sparse.moba(q, k, v, block_size=4, top_k=2, cu_seqlens=offsets))
        else:
            some = gates[0], gates[1], gates[2]
            found.append(sparse.nsa(q, k, v, some, block_size=4, num_blocks=2, window=3, cu_seqlens=offsets))
    assert torch.equal(*found)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (0,)], ids=str)
def test_no_tokens(shape: tuple[int, ...]) -> None:
    """An empty batch, no tokens, and a buffer without tokens."""
    q, k, v = (torch.randn(*shape, *dim, requires_grad=True) for dim in ((4, 8), (2, 8), (2, 6)))
    gates = torch.rand(*shape, 4), torch.rand(*shape, 4), torch.rand(*shape, 4)
    options: dict[str, Any] = {"cu_seqlens": torch.zeros(3, dtype=torch.int32)} if len(shape) == 1 else {}
    for out in (
        sparse.moba(q, k, v, block_size=4, top_k=2, **options),
        sparse.nsa(q, k, v, gates, block_size=4, num_blocks=2, window=3, **options),
    ):
        assert out.shape == (*shape, 4, 6)
        assert [g.shape for g in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("name", ["moba", "nsa", "topk"])
def test_autocast(name: str) -> None:
    """As `attention`: q, k and v in autocast's dtype, gradients in their own."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, heads, 16, requires_grad=True) for heads in (2, 1, 1))
    gates = torch.rand(1, 8, 2), torch.rand(1, 8, 2), torch.rand(1, 8, 2)
    indices = torch.arange(8).view(1, 8, 1, 1)
    calls: dict[str, Any] = {
        "moba": lambda *x: sparse.moba(*x, block_size=4, top_k=2),
        "nsa": lambda *x: sparse.nsa(*x, gates, block_size=4, num_blocks=2, window=3),
        "topk": lambda *x: sparse.topk(*x, indices),
    }
    with torch.autocast("cpu", torch.bfloat16):
        out = calls[name](q, k.bfloat16(), v)
    expected = calls[name](q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), (q, k, v)))
