"""Block masks made inside compiled functions: no graph break, and the results of uncompiled ones."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import AttentionError, mods
from tilewise.mods.blocks import restored_block_mask

SIZES: dict[str, Any] = {"batch": 2, "causal": True, "block": (16, 32)}


@tilewise.mask_mod
def same(b, h, q_idx, kv_idx, ids):
    return ids[b, q_idx] == ids[b, kv_idx]


@tilewise.mask_mod
def near(b, h, q_idx, kv_idx, ids, slopes, every, scale):
    return ((ids[b, q_idx] == ids[b, kv_idx]) & (q_idx * scale - kv_idx < slopes[h])) | (kv_idx % every == 0)


def documents(seed: int, n: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randint(0, 4, (2, n)).sort(-1).values


def model(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """One mask for two layers."""
    mask = tilewise.block_mask(same(ids), q.shape[1], k.shape[1], **SIZES)
    out = tilewise.attention(q, k, v, causal=True, mask_mod=mask)
    return tilewise.attention(out, k, v, causal=True, mask_mod=mask)


@pytest.fixture
def no_recompile() -> Iterator[None]:
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_mask_of_each_step(backend: str, no_recompile: None) -> None:
    """Document ids are an input of the graph; other ids, with other numbers of tiles, do not compile again."""
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for seed in range(3):
        ids = documents(seed, 50)
        x = [torch.randn(2, 50, 2, 8, requires_grad=True) for _ in range(3)]
        found, expected = compiled(*x, ids), model(*x, ids)
        truth = model(*(t.double() for t in x), ids)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)
        grads = [torch.autograd.grad(out.square().sum(), x) for out in (found, expected)]
        torch.testing.assert_close(*grads)


def test_on_the_kernels(triton_runs: None, no_recompile: None) -> None:
    """They read the lists of static length."""

    def call(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        mask = tilewise.block_mask(same(ids), q.shape[1], k.shape[1], batch=2, causal=True, block=(64, 64))
        return tilewise.attention(q, k, v, causal=True, mask_mod=mask, backend="triton")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        ids = documents(seed, 90)
        x = [torch.randn(2, 90, h, 16, requires_grad=True) for h in (2, 1, 1)]
        out = compiled(*x, ids)
        grads = torch.autograd.grad(out.square().sum(), x)
        doubles = [t.detach().double().requires_grad_() for t in x]
        truth = tilewise.attention(*doubles, causal=True, mask_mod=same(ids))
        exact = torch.autograd.grad(truth.square().sum(), doubles)
        for a, b in zip((out, *grads), (truth, *exact), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


def test_dynamic_sizes(no_recompile: None) -> None:
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for seed, n in enumerate((50, 64, 81)):
        ids, x = documents(seed, n), [torch.randn(2, n, 2, 8) for _ in range(3)]
        torch.testing.assert_close(compiled(*x, ids), model(*x, ids))


def test_heads_numbers_and_windows() -> None:
    def lists(ids: Tensor, slopes: Tensor) -> Any:
        mod = near(ids, slopes, 7, 1.5)
        return tilewise.block_mask(mod, 50, 70, batch=2, heads=2, window=(30, 2), block=(16, 16))

    given = documents(0, 70), torch.tensor([4.0, 20.0], requires_grad=True)
    found, expected = torch.compile(lists, fullgraph=True, backend="aot_eager")(*given), lists(*given)
    assert found.shape == expected.shape
    assert found.band == expected.band
    assert torch.equal(found.tiles, expected.tiles)


def made(ids: Tensor) -> mods.BlockMask:
    return tilewise.block_mask(same(ids), 50, 50, **SIZES)


def test_a_mask_that_leaves_the_graph() -> None:
    """Its lists are longer than their tiles."""
    ids = documents(1, 50)
    found, expected = torch.compile(made, fullgraph=True, backend="aot_eager")(ids), made(ids)
    assert len(found.lists[1]) > len(expected.lists[1])
    assert torch.equal(found.tiles, expected.tiles)
    assert found.density() == expected.density()
    assert repr(found).replace("mask_mod mod", "mask_mod same") == repr(expected)
    assert torch.equal(pickle.loads(pickle.dumps(found)).tiles, expected.tiles)
    assert torch.equal(
        found.to("cpu").grown(3, mod=same(documents(1, 53))).tiles[..., :3, :1], found.tiles[..., :3, :1]
    )
    q = torch.randn(2, 50, 2, 8)
    torch.testing.assert_close(
        tilewise.attention(q, q, q, causal=True, mask_mod=found),
        tilewise.attention(q, q, q, causal=True, mask_mod=expected),
    )
    broken = list(found)
    broken[1] = (*found.lists[:3], found.lists[3] + 1)
    with pytest.raises(AttentionError, match="a saved block mask"):
        restored_block_mask(*broken)


def test_queries_and_grown(no_recompile: None) -> None:
    """A step of decoding, compiled once for all."""
    ids = documents(2, 60)
    mask = made(ids)

    def step(q: Tensor, k: Tensor, v: Tensor, at: int) -> Tensor:
        return tilewise.attention(q, k, v, causal=True, mask_mod=mask.queries(at, at + 1))

    compiled = torch.compile(step, fullgraph=True, backend="eager", dynamic=True)
    for n in range(50, 54):
        q, k, v = torch.randn(2, 1, 2, 8), *(torch.randn(2, n + 1, 2, 8) for _ in range(2))
        torch.testing.assert_close(compiled(q, k, v, n), step(q, k, v, n))
    found = torch.compile(lambda: mask.grown(3).lists, fullgraph=True, backend="eager")()
    for ours, theirs in zip(found, mask.grown(3).lists, strict=True):
        assert torch.equal(ours[: len(theirs)], theirs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_packed_sequences(backend: str, no_recompile: None) -> None:
    def call(x: Tensor, cu: Tensor, ids: Tensor) -> Tensor:
        mod, most = same(ids), {"max_seqlen_q": 40, "max_seqlen_k": 40}
        mask = tilewise.block_mask_varlen(mod, cu, cu, causal=True, block=(16, 16), **most)
        return tilewise.attention_varlen(x, x, x, cu, cu, causal=True, mask_mod=mask)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for seed, ends in enumerate(([0, 40, 57], [0, 20, 60])):
        cu, ids, x = torch.tensor(ends, dtype=torch.int32), documents(seed, 40), torch.randn(60, 2, 8)
        expected = tilewise.attention_varlen(x, x, x, cu, cu, causal=True, mask_mod=same(ids))
        torch.testing.assert_close(compiled(x, cu, ids), expected)
    with pytest.raises(AttentionError, match="max_seqlen_q of a block mask: found 40; expected at least 41"):
        compiled(x, torch.tensor([0, 41, 60], dtype=torch.int32), ids)


def test_max_seqlen_of_a_mask() -> None:
    cu, mod = torch.tensor([0, 20, 60]), mods.block_diagonal(9)
    mask = tilewise.block_mask_varlen(mod, cu, cu, block=(16, 16), max_seqlen_q=80, max_seqlen_k=50)
    assert mask.shape == (2, 1, 80, 50)
    x = torch.randn(60, 2, 8)
    found = tilewise.attention_varlen(x, x, x, cu, cu, mask_mod=mask)
    torch.testing.assert_close(found, tilewise.attention_varlen(x, x, x, cu, cu, mask_mod=mod))
    with pytest.raises(
        AttentionError, match="max_seqlen_k of a block mask: found 39; expected at least 40, the length"
    ):
        tilewise.block_mask_varlen(mod, cu, cu, max_seqlen_k=39)
    with pytest.raises(AttentionError, match="max_seqlen_q of a block mask: found 0; expected an int, at least 1"):
        tilewise.block_mask_varlen(mod, cu, cu, max_seqlen_q=0)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="lengths are not read there"):
        torch.compile(lambda: tilewise.block_mask_varlen(mod, cu, cu), fullgraph=True, backend="eager")()


def test_ops_are_registered_right() -> None:
    """Fakes have the shapes and dtypes of results."""
    ids = documents(0, 50)
    mod = same(ids)
    like, cu = torch.empty(0, dtype=torch.int32), torch.tensor([0, 20, 50])
    rest: Any = [mod.tensors[0]], mod.key, []
    ops = torch.ops.tilewise_mods
    torch.library.opcheck(ops.tile_lists.default, (like, *rest, [2, 1, 50, 40], None, 0, [16, 32]))
    torch.library.opcheck(ops.tile_lists_varlen.default, (cu, cu, *rest, [2, 1, 30, 33], 9, None, [16, 32]))
