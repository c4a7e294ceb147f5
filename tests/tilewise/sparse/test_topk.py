"""Attention over named keys against a float64 loop over queries, with its gradients."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tilewise
from tilewise import AttentionError, sparse


def loop(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    batch, n, heads, d = q.shape
    group = heads // k.shape[2]
    out, lse = [], []
    for b in range(batch):
        for i in range(n):
            for h in range(heads):
                keys = [j for j in indices[b, i, h // group].tolist() if j >= 0]
                s = (d**-0.5 if scale is None else scale) * (k[b, keys, h // group] @ q[b, i, h])
                out.append(s.softmax(0) @ v[b, keys, h // group] if keys else v.new_zeros(v.shape[3]))
                lse.append(s.logsumexp(0) if keys else s.new_tensor(-torch.inf))
    return torch.stack(out).view(batch, n, heads, -1), torch.stack(lse).view(batch, n, heads).transpose(1, 2)


def drawn(seed: int, n: int, n_k: int, kv_heads: int, count: int, batch: int = 2) -> Tensor:
    """Some -1 among them, some queries without any."""
    r = random.Random(seed)

    def row() -> list[int]:
        kept = r.sample(range(n_k), min(n_k, r.randint(0, count)))
        found = kept + [-1] * (count - len(kept))
        r.shuffle(found)
        return found

    return torch.tensor([[[row() for _ in range(kv_heads)] for _ in range(n)] for _ in range(batch)])


def inputs(n: int, n_k: int, heads: int, kv_heads: int, d: int, dv: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(n + d)
    shapes = (2, n, heads, d), (2, n_k, kv_heads, d), (2, n_k, kv_heads, dv)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def grads(out: Tensor, lse: Tensor, x: list[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(7)
    seen = lse > -torch.inf
    loss = (out * torch.randn(out.shape, dtype=torch.float64).to(out.dtype)).sum()
    loss = loss + (lse.masked_fill(~seen, 0.0) * torch.randn(lse.shape, dtype=torch.float64).to(lse.dtype)).sum()
    return torch.autograd.grad(loss, x)


SHAPES = [(9, 14, 4, 2, 8, 6, 5), (7, 11, 3, 3, 5, 8, 11), (6, 20, 6, 1, 24, 16, 20), (5, 4, 2, 1, 4, 4, 1)]


@pytest.mark.parametrize(("n", "n_k", "heads", "kv_heads", "d", "dv", "count"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_as_the_loop(
    n: int, n_k: int, heads: int, kv_heads: int, d: int, dv: int, count: int, dtype: torch.dtype
) -> None:
    x, indices = inputs(n, n_k, heads, kv_heads, d, dv, torch.float64), drawn(n, n, n_k, kv_heads, count).to(dtype)
    ours = sparse.topk(*x, indices, return_lse=True)
    expected = loop(*x, indices)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(grads(*ours, x), grads(*expected, x))
    torch.testing.assert_close(sparse.topk(*x, indices, scale=-0.2), loop(*x, indices, -0.2)[0])


@pytest.mark.parametrize("chunk", [1, 700])
def test_some_queries_at_a_time(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys.modules["tilewise.sparse.topk_attention"], "GATHERED", chunk)
    x, indices = inputs(9, 14, 4, 2, 8, 6, torch.float64), drawn(3, 9, 14, 2, 5)
    ours, expected = sparse.topk(*x, indices, return_lse=True), loop(*x, indices)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(grads(*ours, x), grads(*expected, x))


@pytest.mark.parametrize(("n", "n_k", "heads", "kv_heads", "d", "dv", "count"), [*SHAPES, (2, 40, 20, 1, 80, 64, 37)])
def test_kernels(n: int, n_k: int, heads: int, kv_heads: int, d: int, dv: int, count: int, triton_runs: None) -> None:
    x, indices = inputs(n, n_k, heads, kv_heads, d, dv, torch.float32), drawn(n, n, n_k, kv_heads, count).int()
    ours = sparse.topk(*x, indices, return_lse=True, backend="triton")
    wide = [t.detach().double().requires_grad_() for t in x]
    expected = loop(*wide, indices)
    for a, b in zip((*ours, *grads(*ours, x)), (*expected, *grads(*expected, wide)), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)


def test_kernels_of_any_strides(triton_runs: None) -> None:
    x, indices = inputs(9, 14, 4, 2, 8, 6, torch.float32), drawn(3, 9, 14, 2, 5)
    moved = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in x]
    steps = torch.stack([indices, indices], -1)[..., 0]
    ours, expected = (sparse.topk(*t, i, return_lse=True, backend="triton") for t, i in ((moved, steps), (x, indices)))
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(grads(*ours, moved), grads(*expected, x))


def test_unnamed_keys_do_not_leak(backend: str) -> None:
    x = [t.detach() for t in inputs(9, 14, 4, 2, 8, 6, torch.float32)]
    indices = drawn(3, 9, 10, 2, 5)
    poisoned = [x[0], *(t.clone() for t in x[1:])]
    for t in poisoned[1:]:
        t[:, 10:] = torch.nan
        t[:, 0] = torch.where((indices == 0).any(), t[:, 0], torch.nan)
    leaves = [[t.requires_grad_() for t in some] for some in (x, poisoned)]
    out = [sparse.topk(*some, indices, backend=backend) for some in leaves]
    torch.testing.assert_close(*out)
    found = [torch.autograd.grad(o.sum(), some) for o, some in zip(out, leaves, strict=True)]
    torch.testing.assert_close(*found)


def test_all_keys_are_causal_attention(backend: str) -> None:
    x = inputs(12, 12, 4, 2, 16, 16, torch.float32)
    j = torch.arange(12)
    indices = torch.where(j <= j[:, None], j, -1).view(1, 12, 1, 12).expand(2, 12, 2, 12)
    expected = tilewise.attention(*x, causal=True)
    torch.testing.assert_close(sparse.topk(*x, indices, backend=backend), expected, rtol=1e-5, atol=1e-5)


def test_deterministic_and_compiled() -> None:
    x, indices = inputs(9, 14, 4, 2, 8, 6, torch.float32), drawn(3, 9, 14, 2, 5)
    eager = sparse.topk(*x, indices, return_lse=True)
    compiled = torch.compile(sparse.topk, backend="aot_eager", fullgraph=True)
    expected = grads(*eager, x)
    for f, more in ((compiled, {}), (sparse.topk, {"deterministic": True})):
        found = f(*x, indices, return_lse=True, **more)
        torch.testing.assert_close(found, eager)
        torch.testing.assert_close(grads(*found, x), expected)


@pytest.mark.parametrize("kernels", [False, True])
def test_values_are_columns_of_the_keys(kernels: bool, request: pytest.FixtureRequest) -> None:
    if kernels:
        request.getfixturevalue("triton_runs")
    dtype, backend = (torch.float32, "triton") if kernels else (torch.float64, "reference")
    x, indices = inputs(5, 14, 6, 2, 24, 16, dtype)[:2], drawn(3, 5, 14, 2, 5)
    for columns in (16, 5, 24):
        ours = sparse.topk(*x, columns, indices, return_lse=True, backend=backend)
        wide = [t.detach().double().requires_grad_() for t in x]
        expected = loop(*wide, wide[1][..., :columns], indices)
        for a, b in zip((*ours, *grads(*ours, x)), (*expected, *grads(*expected, wide)), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)
    with pytest.raises(
        AttentionError, match="v of topk: found 25; expected a tensor, or the number of k's columns: 1 to 24"
    ):
        sparse.topk(*x, 25, indices)
    with pytest.raises(AttentionError, match="v of topk: found True"):
        sparse.topk(*x, True, indices)


def test_columns_in_chunks(triton_runs: None) -> None:
    """The launch of a Hopper GPU has its columns in chunks: the same kernel with narrow ones, interpreted."""
    from tilewise.backends.common import topk as kernels
    from tilewise.backends.common.kernel_call import view
    from tilewise.request import INTERPRETER

    q, k = (t.detach() for t in inputs(3, 14, 4, 2, 48, 32, torch.float32)[:2])
    indices, v = drawn(3, 3, 14, 2, 5), k[..., :32]
    given = kernels.Inputs(q, k, v, indices, 0.2)
    out, lse = kernels.forward(given, INTERPRETER)
    dout = torch.randn_like(out)
    expected = kernels.backward(given, (out, lse, dout, None), INTERPRETER, summed=True)
    dq, dk = torch.full_like(q, torch.nan), torch.zeros_like(k)
    tensors = kernels.TopkTensors(view(q), view(k), view(v), view(out), lse, indices)
    gradients = kernels.TopkGradients(view(dout), view(dq), view(dk), view(dk), None)
    launch = kernels._launch(kernels.topk_backward_kernel, (tensors, gradients), given, INTERPRETER, True)
    config = launch.options["CONFIG"]
    assert config.SUMMED
    assert config.WIDTH == config.V_WIDTH == 32
    launch._replace(options={"CONFIG": config._replace(WIDTH=16, CHUNKS=2, V_WIDTH=16, V_CHUNKS=2)})()
    torch.testing.assert_close((dq, dk), expected[:2])


def test_no_keys() -> None:
    q, k = torch.randn(1, 3, 2, 4, requires_grad=True), torch.randn(1, 0, 1, 4, requires_grad=True)
    out, lse = sparse.topk(q, k, k, torch.full((1, 3, 1, 2), -1), return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not torch.autograd.grad(out.sum(), q)[0].any()


def test_fake_tensors() -> None:
    """Their indices have no contents to check."""
    with FakeTensorMode():
        q, indices = torch.empty(1, 5, 2, 8, requires_grad=True), torch.zeros(1, 5, 2, 1, dtype=torch.int64)
        out = sparse.topk(q, q, q, indices)
        out.sum().backward()
    assert out.shape == q.shape


@pytest.mark.parametrize("found", [torch.nan, torch.inf])
def test_queries_without_keys_do_not_leak(found: float, backend: str) -> None:
    """Neither they nor their gradients reach a key: a slot of -1 names none, and 0 * nan is nan."""
    q, k = torch.randn(1, 3, 1, 16), torch.randn(1, 5, 1, 16, requires_grad=True)
    indices = torch.tensor([[3, 4], [2, -1], [-1, -1]]).view(1, 3, 1, 2)
    dout = torch.randn(1, 3, 1, 16)
    expected = torch.autograd.grad(sparse.topk(q, k, k, indices, backend=backend), k, dout)[0]
    assert not expected[0, :2].any()
    for poisoned in (q, dout):
        poisoned[0, 2] = found
    found_grad = torch.autograd.grad(sparse.topk(q, k, k, indices, backend=backend), k, dout)[0]
    torch.testing.assert_close(found_grad, expected)


def test_tangents_of_queries_without_keys() -> None:
    """lse is -inf whatever q and k are: its tangent is 0, as that of `attention`."""
    q, k, v = (torch.randn(1, 3, 1, 4) for _ in range(3))
    indices = torch.tensor([[0, 2], [-1, -1], [2, 1]]).view(1, 3, 1, 2)
    _, tangents = torch.func.jvp(lambda *x: sparse.topk(*x, indices, return_lse=True), (q, k, v), (k, v, q))
    assert (tangents[1][0, 0] != 0).tolist() == [True, False, True]
    assert not any(x.isnan().any() for x in tangents)


def test_second_derivatives_do_not_warn() -> None:
    """torch warned that the backward has no derivative of its own."""
    q = torch.randn(1, 3, 1, 4, requires_grad=True)
    indices = torch.tensor([[0, 2], [1, -1], [2, 1]]).view(1, 3, 1, 2)
    (dq,) = torch.autograd.grad(sparse.topk(q, q, q, indices).square().sum(), q, create_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.autograd.grad(dq.square().sum(), q)
