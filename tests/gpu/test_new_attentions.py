"""The largest score of each head, prefix trees and sparse attention on a GPU, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import mods, sparse


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def causal(n_q: int, n_k: int) -> Tensor:
    return torch.arange(n_k, device="cuda") <= torch.arange(n_q, device="cuda")[:, None] + n_k - n_q


def scores(q: Tensor, k: Tensor, seen: Tensor, scale: float | None = None) -> Tensor:
    k = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return s.masked_fill(~seen, -torch.inf)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("options", [{}, {"scale": -0.2}, {"sinks": 40.0}], ids=["plain", "negative", "sinks"])
def test_max_logit(d: int, backend: str, options: dict[str, Any]) -> None:
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    torch.manual_seed(d)
    q, k, v = randn(2, 333, 4, d), randn(2, 401, 2, d), randn(2, 401, 2, d)
    given = options | ({"sinks": torch.full((4,), 40.0, device="cuda")} if "sinks" in options else {})
    *_, found = tilewise.attention(q, k, v, causal=True, return_max_logit=True, backend=backend, **given)
    expected = scores(q, k, causal(333, 401), options.get("scale")).amax((2, 3))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("queries", [1, 3, 300])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_max_logit_with_a_cache(queries: int, backend: str) -> None:
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    torch.manual_seed(queries)
    q, cache = randn(3, queries, 8, 128), randn(3, 768, 2, 128)
    lengths = torch.tensor([400, 301, 700], dtype=torch.int32, device="cuda")
    _, found = tilewise.attention_kv(q, cache, cache, lengths, return_max_logit=True, backend=backend)
    each = [
        scores(q[b : b + 1], cache[b : b + 1, :n], causal(queries, n)).amax((2, 3))[0]
        for b, n in enumerate(lengths.tolist())
    ]
    torch.testing.assert_close(found.double(), torch.stack(each), rtol=1e-5, atol=1e-4)


def check(ours: Any, x: list[Tensor], seen: Tensor) -> None:
    """ours(*leaves) and its gradients, within twice the error of torch's own arithmetic in the same dtype."""

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[2] // k.shape[2]
        s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * q.shape[-1] ** -0.5
        p = s.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(group, 2))

    weights = randn(*x[0].shape[:3], x[2].shape[3])
    found = []
    for f, dtype in ((ours, torch.bfloat16), (plain, torch.bfloat16), (plain, torch.float64)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in x]
        out = f(*leaves)
        found.append((out, *torch.autograd.grad((out * weights.to(dtype)).sum(), leaves)))
    for name, a, b, truth in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        error, torchs = ((y.double() - truth).abs().max().item() for y in (a, b))
        assert error <= 2 * torchs + 1e-3, f"{name}: {error:.1e}, torch's {torchs:.1e}"


def test_prefix_tree() -> None:
    torch.manual_seed(0)
    mod = mods.prefix_tree(torch.tensor([-1, 0, 0, 2, 0]), torch.tensor([0, 300, 400, 415, 600, 777])).to("cuda")
    mask = tilewise.block_mask(mod, 777, 777, causal=True)
    i = torch.arange(777, device="cuda")
    x = [randn(1, 777, heads, 128) for heads in (4, 2, 2)]
    check(lambda q, k, v: tilewise.attention(q, k, v, causal=True, mask_mod=mask), x, mod(0, 0, i[:, None], i))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("heads", "kv_heads", "d", "dv"), [(16, 2, 128, 128), (128, 1, 576, 512), (4, 4, 80, 64)])
def test_topk(heads: int, kv_heads: int, d: int, dv: int, backend: str) -> None:
    torch.manual_seed(d)
    x = [randn(2, 64, heads, d), randn(2, 300, kv_heads, d), randn(2, 300, kv_heads, dv)]
    indices = torch.rand(2, 64, kv_heads, 300, device="cuda").argsort(-1)[..., :100].int()
    indices[:, :, :, 5] = -1
    seen = torch.zeros(2, 64, kv_heads, 301, dtype=torch.bool, device="cuda")
    seen = seen.scatter_(3, torch.where(indices < 0, 300, indices).long(), True)[..., :-1]
    seen = seen.transpose(1, 2).repeat_interleave(heads // kv_heads, 1)
    check(lambda q, k, v: sparse.topk(q, k, v, indices, backend=backend), x, seen)


def test_topk_of_latent_keys() -> None:
    """The values are the first columns of the keys: their gradients are one sum."""
    torch.manual_seed(0)
    x = [randn(2, 64, 128, 576), randn(2, 300, 1, 576)]
    indices = torch.rand(2, 64, 1, 300, device="cuda").argsort(-1)[..., :100].int()
    weights, found = randn(2, 64, 128, 512), []
    for dtype, backend in ((torch.bfloat16, "triton"), (torch.bfloat16, "reference"), (torch.float64, "reference")):
        q, k = (t.to(dtype).requires_grad_() for t in x)
        out = sparse.topk(q, k, 512, indices, backend=backend)
        apart = sparse.topk(q, k, k[..., :512], indices, backend=backend)
        grads = [torch.autograd.grad((y * weights.to(dtype)).sum(), (q, k)) for y in (out, apart)]
        found.append((out, *grads[0], apart, *grads[1]))
    for name, ours, torchs, truth in zip(("out", "dq", "dk") * 2, *found, strict=True):
        error, theirs = ((y.double() - truth).abs().max().item() for y in (ours, torchs))
        assert error <= 2 * theirs + 2e-3 * truth.abs().max().item(), f"{name}: {error:.1e}, torch's {theirs:.1e}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "count"), [(128, 1, 2048), (64, 1, 65), (160, 2, 1), (33, 1, 700)])
def test_topk_of_latent_keys_in_shapes(heads: int, kv_heads: int, count: int, dtype: torch.dtype) -> None:
    """The Hopper kernel: some tiles, short ones, queries without keys, keys that no query may name."""
    torch.manual_seed(count)
    q, k = (torch.randn(2, n, h, 576, device="cuda").to(dtype) for n, h in ((50, heads), (3000, kv_heads)))
    k[:, -1] = torch.nan
    indices = torch.rand(2, 50, kv_heads, 2999, device="cuda").argsort(-1)[..., :count]
    indices[:, 3, :, : count // 2] = -1
    indices[:, 4], indices[:, 5, :, 0] = -1, 3000
    seen = torch.where(indices < 3000, indices, -1)
    truth = sparse.topk(q.double(), k.double(), 512, seen, return_lse=True, backend="reference")
    plain = sparse.topk(q, k, 512, seen, return_lse=True, backend="reference")
    for at in (indices, indices.int()):
        for ours, torchs, exact in zip(sparse.topk(q, k, 512, at, return_lse=True), plain, truth, strict=True):
            found = exact > -torch.inf
            assert torch.equal(ours > -torch.inf, found)
            error, theirs = ((x.double() - exact)[found].abs().max().item() for x in (ours, torchs))
            assert error <= 2 * theirs + 2e-3, f"{error:.1e}, torch's {theirs:.1e}"


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize(("block", "heads", "kv_heads"), [(64, 32, 2), (16, 6, 2)])
def test_nsa(block: int, heads: int, kv_heads: int, backend: str) -> None:
    torch.manual_seed(0)
    n, sizes = 512, {"block_size": block, "num_blocks": 4, "window": 100}
    x = [randn(2, n, heads, 128), randn(2, n, kv_heads, 128), randn(2, n, kv_heads, 128)]
    x += [torch.rand(2, n, heads, device="cuda").bfloat16() for _ in range(3)]
    x += [t.unflatten(1, (-1, block)).mean(2) for t in x[1:3]]
    ended = (torch.arange(n // block, device="cuda") + 1) * block <= torch.arange(n, device="cuda")[:, None] + 1
    lse = scores(x[0], x[6], ended).logsumexp(-1)
    blocks = sparse.selected_blocks(x[0].double(), x[6].double(), lse, block_size=block, num_blocks=4)
    fast = sparse.selected_blocks(x[0], x[6], lse.float(), block_size=block, num_blocks=4)
    assert (blocks.sort(-1).values == fast.sort(-1).values).float().mean() > 0.999
    weights, found = randn(2, n, heads, 128), []
    for dtype, more in (
        (torch.bfloat16, {"backend": backend}),
        (torch.bfloat16, {"blocks": blocks, "backend": "reference"}),
        (torch.float64, {"blocks": blocks, "backend": "reference"}),
    ):
        leaves = [t.to(dtype).requires_grad_() for t in x]
        out = sparse.nsa(*leaves[:3], tuple(leaves[3:6]), compressed=tuple(leaves[6:]), **sizes, **more)
        found.append((out, *torch.autograd.grad((out * weights.to(dtype)).sum(), leaves)))
    for n, (ours, torchs, truth) in enumerate(zip(*found, strict=True)):
        # a few blocks differ where weights are equal within their rounding: the norms are compared
        error, theirs = ((y.double() - truth).norm().item() for y in (ours, torchs))
        assert error <= 2 * theirs + 1e-3 * truth.norm().item(), f"result {n}: {error:.1e}, torch's {theirs:.1e}"


@pytest.mark.parametrize("block", [128, 256])
def test_moba(block: int) -> None:
    """Blocks of more than 128 keys: dq is added to the rows of the queries."""
    from tilewise.sparse.moba_attention import best_before, mean_key_gate

    torch.manual_seed(0)
    x = [randn(2, 1024, heads, 128) for heads in (4, 2, 2)]
    count = 1024 // block
    chosen = best_before(mean_key_gate(x[0], x[1], block), block, 2).long()
    blocks = torch.zeros(2, 1024, 4, count + 1, dtype=torch.bool, device="cuda")
    blocks = blocks.scatter_(3, torch.where(chosen < 0, count, chosen), True)[..., :-1]
    own = torch.arange(1024, device="cuda") // block
    blocks |= own[None, :, None, None] == torch.arange(count, device="cuda")
    seen = blocks.repeat_interleave(block, 3).transpose(1, 2) & causal(1024, 1024)
    check(lambda q, k, v: sparse.moba(q, k, v, block_size=block, top_k=3), x, seen)


@pytest.mark.parametrize("block", [64, 256])
def test_packed_sequences(block: int) -> None:
    """MoBA and NSA of packed sequences are those of each alone."""
    torch.manual_seed(block)
    cu = torch.tensor([0, 768, 768, 2048, 2100], dtype=torch.int32, device="cuda")
    x = [randn(2110, heads, 128).requires_grad_() for heads in (16, 2, 2)]
    gates = [torch.rand(2110, 16, device="cuda").bfloat16() for _ in range(3)]
    sizes = {"block_size": block, "num_blocks": 3, "window": 64}

    def moba(q: Tensor, k: Tensor, v: Tensor, *gates: Any, **more: Any) -> Tensor:
        return sparse.moba(q, k, v, block_size=block, top_k=3, **more)

    def nsa(q: Tensor, k: Tensor, v: Tensor, *gates: Any, **more: Any) -> Tensor:
        return sparse.nsa(q, k, v, gates, **sizes, **more)

    for f in (moba, nsa):
        together = f(*x, *gates, cu_seqlens=cu)
        assert not together[2100:].any()
        weights = torch.randn_like(together)
        grads = torch.autograd.grad((together * weights).sum(), x)
        for a, b in ((0, 768), (768, 2048)):
            own = [t[a:b].detach()[None].requires_grad_() for t in x]
            alone = f(*own, *(g[a:b][None] for g in gates))
            pairs = [(together[a:b], alone[0])]
            for g, h in zip(grads, torch.autograd.grad((alone[0] * weights[a:b]).sum(), own), strict=True):
                pairs.append((g[a:b], h[0]))
            for ours, theirs in pairs:
                away = ((ours - theirs).float().norm() / theirs.float().norm()).item()
                assert away < 2e-2, f"{f.__name__}: {away:.1e}"


@pytest.mark.parametrize("name", ["moba", "nsa", "topk"])
def test_second_derivatives(name: str) -> None:
    """Of the kernels in bfloat16 against the reference in float64, by the norms of the errors."""
    torch.manual_seed(0)
    x = [randn(2, 256, heads, 64) for heads in (4, 2, 2)]
    gates = [torch.rand(2, 256, 4, device="cuda").bfloat16() for _ in range(3)]
    indices = torch.rand(2, 256, 2, 256, device="cuda").argsort(-1)[..., :40]
    blocks = torch.arange(256, device="cuda").div(64, rounding_mode="floor").view(1, 256, 1, 1).expand(2, 256, 2, 1)
    blocks = torch.cat([blocks, torch.where(blocks > 0, blocks - 1, -1)], -1)

    def gate(q: Tensor, k: Tensor, size: int) -> Tensor:
        return torch.arange(4, device="cuda").expand(*q.shape[:3], 4).float()  # rounding does not change the choice

    def call(backend: str, *leaves: Tensor) -> Any:
        q, k, v = leaves[:3]
        if name == "moba":
            return sparse.moba(q, k, v, block_size=64, top_k=2, gate=gate, backend=backend)
        if name == "topk":
            return sparse.topk(q, k, v, indices, backend=backend)
        given: Any = leaves[3:]
        return sparse.nsa(q, k, v, given, block_size=64, window=50, blocks=blocks, backend=backend)

    weights, along, found = randn(2, 256, 4, 64), [torch.randn_like(t) for t in x], []
    for backend, dtype in (("auto", torch.bfloat16), ("reference", torch.bfloat16), ("reference", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (*x, *(gates if name == "nsa" else ()))]
        out = call(backend, *leaves)
        first = torch.autograd.grad(out, leaves[:3], weights.to(dtype), create_graph=True)
        found.append((*first, *torch.autograd.grad(first, leaves, [t.to(dtype) for t in along])))
    for n, (ours, torchs, truth) in enumerate(zip(*found, strict=True)):
        error, theirs = ((y.double() - truth).norm().item() for y in (ours, torchs))
        assert error <= 2 * theirs + 1e-2 * truth.norm().item(), f"result {n}: {error:.1e}, torch's {theirs:.1e}"


def test_neighborhood() -> None:
    torch.manual_seed(0)
    x = [randn(1, 40 * 36, heads, 64) for heads in (4, 2, 2)]

    def near(length: int, size: int) -> Tensor:
        at = torch.arange(length, device="cuda")
        start = (at - size // 2).clamp(0, length - size)[:, None]
        return (at >= start) & (at < start + size)

    seen = (near(40, 7)[:, None, :, None] & near(36, 5)[None, :, None, :]).reshape(1440, 1440)

    def ours(*leaves: Tensor) -> Tensor:
        grids = (t.unflatten(1, (40, 36)) for t in leaves)
        return sparse.neighborhood(*grids, kernel_size=(7, 5)).flatten(1, 2)

    check(ours, x, seen)


@pytest.mark.parametrize(("d", "heads", "kv_heads"), [(64, 4, 2), (128, 2, 2)])
def test_neighborhood_in_boxes(d: int, heads: int, kv_heads: int) -> None:
    """A grid of whole boxes: the Hopper forward reads it as it lies."""
    torch.manual_seed(0)
    rows = randn(2, 64 * 32, heads + 2 * kv_heads, d)  # strides of a joint projection
    x = list(rows.split((heads, kv_heads, kv_heads), 2))

    def near(length: int, size: int) -> Tensor:
        at = torch.arange(length, device="cuda")
        start = (at - size // 2).clamp(0, length - size)[:, None]
        return (at >= start) & (at < start + size)

    seen = (near(64, 7)[:, None, :, None] & near(32, 9)[None, :, None, :]).reshape(2048, 2048)

    def ours(*leaves: Tensor) -> Tensor:
        grids = (t.unflatten(1, (64, 32)) for t in leaves)
        return sparse.neighborhood(*grids, kernel_size=(7, 9)).flatten(1, 2)

    check(ours, x, seen)
    clean = ours(*x)
    spoilt = [t.clone() for t in x]
    spoilt[1][:, 500] = spoilt[2][:, 700] = torch.nan
    found, hit = ours(*spoilt), seen[:, 500] | seen[:, 700]
    assert found[:, hit].isnan().any(-1).all()
    torch.testing.assert_close(found[:, ~hit], clean[:, ~hit], rtol=0, atol=1e-2)


def test_lists_of_a_block_mask_are_those_of_the_cpu() -> None:
    ids = torch.arange(1000) // 130
    masks = [tilewise.block_mask(mods.document(ids=x), 1000, 1000, causal=True) for x in (ids, ids.cuda())]
    for a, b in zip(*(mask.lists for mask in masks), strict=True):
        assert torch.equal(a, b.cpu())
