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
    expected = truth(0, 0, i, j, ids=ids, prefix=prefix).expand(80, 75)
    assert torch.equal(mod(0, 0, i, j), expected)
    mask = tilewise.block_mask(mod, 80, 75, block=(16, 32))
    for row in range(5):
        for column in range(3):
            tile = expected[16 * row : 16 * row + 16, 32 * column : 32 * column + 32]
            assert mask.tiles[0, 0, row, column] == (2 if tile.all() else int(tile.any()))


def test_t5_buckets_are_those_of_the_formula() -> None:
    distance = torch.arange(-128, 129)
    n = distance.abs()
    large = 8 + (torch.log(n.clamp(min=1) / 8) / torch.log(torch.tensor(16.0)) * 8).long()
    expected = torch.where(n < 8, n, large.clamp(max=15)) + 16 * (distance > 0)
    assert torch.equal(mods.builtin.t5_buckets(32, True, 128).long(), expected)


BUILTIN = sorted(set(mods.__all__) - {"PROGRAMS", "BlockMask", "Mod", "Program", "block_mask", "block_mask_varlen",
                                      "mask_mod", "score_mod"})  # fmt: skip


@pytest.mark.parametrize("name", BUILTIN)
def test_examples_of_mods(name: str) -> None:
    test = doctest.DocTestParser().get_doctest(getattr(mods, name).__doc__, vars(mods.builtin).copy(), name, None, 0)
    assert doctest.DocTestRunner().run(test).failed == 0
