"""Prefix trees: a packed tree gives the results and gradients of its separate sequences."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import AttentionError, mods


def drawn(seed: int) -> tuple[list[int], list[int]]:
    """Parents and ends of a random forest, some segments empty, in any order that has parents first."""
    r = random.Random(seed)
    parents = [r.randint(-1, s - 1) if r.random() < 0.8 else -1 for s in range(r.randint(1, 9))]
    ends = [0]
    for _ in parents:
        ends.append(ends[-1] + r.choice((0, 1, 2, 5, 9, 17)))
    if ends[-1] == 0:
        ends[-1] = 3
    return parents, ends


def paths(parents: list[int], ends: list[int]) -> list[list[int]]:
    """For each segment, the tokens from its root to its end."""
    found: list[list[int]] = []
    for s, parent in enumerate(parents):
        found.append((found[parent] if parent >= 0 else []) + [*range(ends[s], ends[s + 1])])
    return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_mask_and_positions(seed: int, dtype: torch.dtype) -> None:
    parents, ends = drawn(seed)
    tree = torch.tensor(parents, dtype=dtype), torch.tensor(ends, dtype=dtype)
    n = ends[-1]
    expected, position = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)
    for s, path in enumerate(paths(parents, ends)):
        for t in range(ends[s], ends[s + 1]):
            at = path.index(t)
            expected[t, path[: at + 1]] = True
            position[t] = at
    mod = mods.prefix_tree(*tree)
    assert torch.equal(mod(0, 0, torch.arange(n)[:, None], torch.arange(n)), expected)
    assert torch.equal(mods.tree_positions(*tree), position)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE of (.., tokens, heads, dim)."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * 0.5 ** torch.arange(half)
    cos, sin = (f(angles).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("blocks", [False, True], ids=["mod", "tile lists"])
def test_loss_and_gradients_are_those_of_separate_sequences(seed: int, blocks: bool) -> None:
    """In float64. The loss has one term for each token of each segment, with RoPE and grouped heads."""
    parents, ends = drawn(seed)
    tree, n = (torch.tensor(parents), torch.tensor(ends)), ends[-1]
    torch.manual_seed(seed)
    leaves = [torch.randn(1, n, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    weights = torch.randn(1, n, 4, 8, dtype=torch.float64)
    mask = mods.prefix_tree(*tree)
    if blocks:
        mask = tilewise.block_mask(mask, n, n, causal=True, block=(16, 16))
    q, k, v = leaves
    positions = mods.tree_positions(*tree)
    out = tilewise.attention(rotated(q, positions), rotated(k, positions), v, causal=True, mask_mod=mask)
    packed = (out * weights).sum()

    separate = torch.zeros((), dtype=torch.float64)
    for s, path in enumerate(paths(parents, ends)):
        own = len(path) - (ends[s + 1] - ends[s])
        q_s, k_s, v_s = (x[0, path] for x in leaves)
        q_s, k_s = (rotated(x, torch.arange(len(path))) for x in (q_s, k_s))
        for h in range(4):
            scores = q_s[:, h] @ k_s[:, h // 2].T / 8**0.5
            hidden = torch.ones(len(path), len(path), dtype=torch.bool).triu(1)
            o = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v_s[:, h // 2]
            separate = separate + (o[own:] * weights[0, path[own:], h]).sum()
    torch.testing.assert_close(packed, separate)
    torch.testing.assert_close(torch.autograd.grad(packed, leaves), torch.autograd.grad(separate, leaves))


def test_on_the_kernels(backend: str) -> None:
    tree = torch.tensor([-1, 0, 0, 1, -1]), torch.tensor([0, 20, 30, 33, 50, 61])
    torch.manual_seed(0)
    x = [torch.randn(1, 61, h, 16, requires_grad=True) for h in (4, 2, 2)]
    mod = mods.prefix_tree(*tree)
    block = tilewise.block_mask(mod, 61, 61, causal=True)
    truth = tilewise.attention(*(t.double() for t in x), mask_mod=mod)
    expected = torch.autograd.grad(truth.square().sum(), x)
    for mask, causal in ((mod, False), (mod, True), (block, True)):
        out = tilewise.attention(*x, causal=causal, mask_mod=mask, backend=backend)
        torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-5)
        for a, b in zip(torch.autograd.grad(out.square().sum(), x), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_on_a_cache(backend: str) -> None:
    """The positions of the mod are those of the tokens, whatever the number of pages."""
    tree = torch.tensor([-1, 0, 0]), torch.tensor([0, 20, 24, 31])
    torch.manual_seed(0)
    q, k, v = (torch.randn(31, h, 16) for h in (4, 2, 2))
    mod, cu = mods.prefix_tree(*tree), torch.tensor([0, 31], dtype=torch.int32)
    expected = tilewise.attention_varlen(q, k, v, cu, cu, causal=True, mask_mod=mod)
    pages = [torch.zeros(6, 8, 2, 16) for _ in "kv"]
    for page, x in zip(pages, (k, v), strict=True):
        page.view(48, 2, 16)[8:39] = x
    table, length = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32), cu[1:]
    options = {"page_table": table, "mask_mod": mod, "backend": backend}
    out = tilewise.attention_kv(q, *pages, length, cu_seqlens_q=cu, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(tilewise.attention_kv(q[None], *pages, length, **options)[0], expected)  # type: ignore[arg-type]


def test_tiles_of_a_prompt_and_its_continuations() -> None:
    """Full where a continuation sees the prompt, empty between continuations."""
    parents, ends = torch.tensor([-1, 0, 0]), torch.tensor([0, 256, 384, 512])
    mask = tilewise.block_mask(mods.prefix_tree(parents, ends), 512, 512, causal=True)
    assert mask.tiles[0, 0].tolist() == [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 0, 1]]
    assert mask.lists[1].tolist() == [2, 3, 6, 3, 7, 10, 3, 7, 14]  # on the diagonal only the band hides pairs


@pytest.mark.parametrize(
    ("parents", "ends", "match"),
    [
        ([0], [0, 3], r"parents\[0\] of prefix_tree: found 0; expected a segment before 0, or -1 for a root"),
        ([-1, 2, 1], [0, 3, 4, 5], r"parents\[1\] of prefix_tree: found 2"),
        ([-1, -2], [0, 3, 4], r"parents\[1\] of prefix_tree: found -2"),
        ([-1, 0], [0, 3], "cu_segments of prefix_tree: found 2 numbers for 2 segments"),
        ([-1, 0], [1, 3, 4], r"cu_segments\[0\] of prefix_tree: found 1; expected 0"),
        ([-1, 0], [0, 3, 2], r"cu_segments\[2\] of prefix_tree: found 2; expected at least"),
        ([-1], [0, 0], "cu_segments of prefix_tree: found no tokens"),
        ([-1.0], [0, 3], "parents of prefix_tree: found torch.float32"),
        ([[-1]], [0, 3], "parents of prefix_tree"),
    ],
)
def test_errors(parents: list[int], ends: list[int], match: str) -> None:
    with pytest.raises(AttentionError, match=match):
        mods.prefix_tree(torch.tensor(parents), torch.tensor(ends))
    with pytest.raises(AttentionError, match="tree_positions"):
        mods.tree_positions(torch.tensor(parents), torch.tensor(ends))
    with pytest.raises(AttentionError, match="parents of prefix_tree: found list"):
        mods.prefix_tree([-1], torch.tensor([0, 3]))  # type: ignore[arg-type]
    with pytest.raises(AttentionError, match="device of cu_segments of prefix_tree: found meta"):
        mods.prefix_tree(torch.tensor([-1]), torch.tensor([0, 3], device="meta"))


def test_block_masks_of_more_keys_than_tokens() -> None:
    """They raise as a call without a block mask does; shorter sequences are prefixes of the tree."""
    mod = mods.prefix_tree(torch.tensor([-1, 0, 0]), torch.tensor([0, 4, 6, 10]))
    with pytest.raises(AttentionError, match=r"axis 0 of tensor 0 of the mask mod 'prefix_tree': found 10; .* 12"):
        tilewise.block_mask(mod, 12, 12, causal=True)
    cu = torch.tensor([0, 10, 22])
    with pytest.raises(AttentionError, match=r"axis 0 of tensor 0 of the mask mod 'prefix_tree': found 10; .* 12"):
        tilewise.block_mask_varlen(mod, cu, cu)
    assert tilewise.block_mask(mod, 1, 10, causal=True).tiles.tolist() == [[[[1]]]]


def test_packed_sequences_longer_than_the_tree() -> None:
    """Without a block mask, and where lengths are not read: in torch.compile, on meta tensors as on a GPU."""
    mod, x = mods.prefix_tree(torch.tensor([-1, 0, 0]), torch.tensor([0, 4, 6, 10])), torch.randn(22, 2, 8)
    one, two = torch.tensor([0, 22]), torch.tensor([0, 10, 22])
    call = tilewise.attention_varlen
    with pytest.raises(AttentionError, match="tokens of the prefix_tree: found 10; expected enough for k's 22 tokens"):
        call(x, x, x, one, one, mask_mod=mod)
    with pytest.raises(
        AttentionError, match=r"found 10; .* 22 tokens in 2 sequences, which all read the tree from its"
    ):
        call(x, x, x, two, two, mask_mod=mod)
    meta, offsets = x.to("meta"), one.to("meta")
    with pytest.raises(AttentionError, match=r"tokens of the prefix_tree: found 10; .* 22 tokens in 1 sequence"):
        call(meta, meta, meta, offsets, offsets, mask_mod=mod.to("meta"))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="enough for k's 22 tokens in 1 sequence"):
        torch.compile(lambda x: call(x, x, x, one, one, mask_mod=mod), fullgraph=True, backend="eager")(x)
    uneven = torch.tensor([0, 12, 20])
    with pytest.raises(AttentionError, match="one for each key, 12"):  # the lengths of a CPU are read
        call(x[:20], x[:20], x[:20], uneven, uneven, mask_mod=mod)
    even = torch.tensor([0, 10, 20])
    found = call(x[:20], x[:20], x[:20], even, even, mask_mod=mod)
    expected = tilewise.attention(*(x[:20].view(2, 10, 2, 8),) * 3, mask_mod=mod)
    torch.testing.assert_close(found.view(2, 10, 2, 8), expected)


def test_a_cache_longer_than_the_tree() -> None:
    """Lengths of a cache are read by the check alone."""
    mod = mods.prefix_tree(torch.tensor([-1, 0, 0]), torch.tensor([0, 4, 6, 10]))
    q, cache = torch.randn(1, 2, 2, 8), torch.randn(1, 16, 2, 8)
    tilewise.check_kv(q, cache, cache, torch.tensor([10], dtype=torch.int32), mask_mod=mod)
    with pytest.raises(AttentionError, match=r"axis 0 of tensor 0 of the mask mod .*: found 10; .* 12"):
        tilewise.check_kv(q, cache, cache, torch.tensor([12], dtype=torch.int32), mask_mod=mod)
