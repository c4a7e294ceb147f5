"""The mods that have names: their masks and their tiles, their examples."""

from __future__ import annotations

import doctest

import pytest
import torch

import tilewise
from tests import features
from tilewise import mods


@pytest.mark.parametrize("name", features.MASKS)
def test_builtin_masks_and_their_tiles(name: str) -> None:
    ids = torch.tensor([0] * 20 + [1] * 33 + [2] * 27, dtype=torch.int32)[None]
    prefix = torch.tensor([37])
    ours, truth = features.MASKS[name]
    mod = ours(ids, prefix)
    i, j = torch.arange(80)[:, None], torch.arange(75)
    expected = truth(0, 0, i - 5, j, ids=ids, prefix=prefix).expand(80, 75)
    assert torch.equal(mod(0, 0, i, j, q_len=80, kv_len=75), expected)
    assert torch.equal(mod(0, 0, i - 5, j)[5:], expected[5:])  # lengths that are not given are taken for equal
    mask = tilewise.block_mask(mod, 80, 75, block=(16, 32))
    for row in range(5):
        for column in range(3):
            tile = expected[16 * row : 16 * row + 16, 32 * column : 32 * column + 32]
            assert mask.tiles[0, 0, row, column] == (2 if tile.all() else int(tile.any()))


@pytest.mark.parametrize("name", [*features.MASKS, "t5"])
@pytest.mark.parametrize("rows", [1, 3])
def test_decoded_rows_are_those_of_the_whole_sequence(name: str, rows: int, backend: str) -> None:
    """The last rows alone, against all keys, as with a KV cache."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, 2, 16) for _ in range(3))
    ids, prefix = torch.arange(40).expand(2, -1) // 13, torch.tensor([7, 38])
    if name == "t5":
        options = {"score_mod": mods.t5_relative(torch.randn(8, 2), max_distance=12)}
    else:
        options = {"mask_mod": features.MASKS[name][0](ids, prefix)}
    whole = tilewise.attention(q, k, v, backend="reference", **options)
    torch.testing.assert_close(tilewise.attention(q[:, -rows:], k, v, backend=backend, **options), whole[:, -rows:])


def test_packed_rows_sit_at_the_end_of_their_own_keys(backend: str) -> None:
    torch.manual_seed(0)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 4], [0, 20, 49]))
    q, k, v = torch.randn(4, 2, 16), *torch.randn(2, 49, 2, 16)
    table = torch.randn(8, 2, requires_grad=True)
    found = tilewise.attention_varlen(
        q, k, v, cu_q, cu_k, score_mod=mods.t5_relative(table, max_distance=12), mask_mod=mods.strided_sparse(3),
        backend=backend,
    )  # fmt: skip
    (slope,) = torch.autograd.grad(found.sum(), table)
    each = [
        tilewise.attention(
            *(x[None] for x in (q[a:b], k[c:d], v[c:d])), score_mod=mods.t5_relative(table, max_distance=12),
            mask_mod=mods.strided_sparse(3), backend="reference",
        )[0]
        for a, b, c, d in ((0, 1, 0, 20), (1, 4, 20, 49))
    ]  # fmt: skip
    torch.testing.assert_close(found, torch.cat(each))
    torch.testing.assert_close(slope, torch.autograd.grad(torch.cat(each).sum(), table)[0])


def test_t5_buckets_are_those_of_the_formula() -> None:
    distance = torch.arange(-128, 129)
    n = distance.abs()
    large = 8 + (torch.log(n.clamp(min=1) / 8) / torch.log(torch.tensor(16.0)) * 8).long()
    expected = torch.where(n < 8, n, large.clamp(max=15)) + 16 * (distance > 0)
    assert torch.equal(mods.builtin.t5_buckets(32, True, 128).long(), expected)


BUILTIN = sorted(set(mods.__all__) - {"PROGRAMS", "BlockMask", "Mod", "Program", "block_mask", "block_mask_varlen",
                                      "mask_mod", "score_mod", "tree_positions"})  # fmt: skip


@pytest.mark.parametrize("name", BUILTIN)
def test_examples_of_mods(name: str) -> None:
    names = vars(mods.builtin) | vars(mods)
    test = doctest.DocTestParser().get_doctest(getattr(mods, name).__doc__, names, name, None, 0)
    assert doctest.DocTestRunner().run(test).failed == 0
