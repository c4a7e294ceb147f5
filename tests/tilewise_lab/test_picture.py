"""Pictures of masks."""

from __future__ import annotations

import torch

import tilewise
from tilewise import mods
from tilewise_lab import picture


def test_picture_of_a_mask() -> None:
    """One pixel a pair: seen pairs of a partial tile in another colour than hidden ones."""
    mask = tilewise.block_mask(mods.window_with_globals(9, 3), 80, 75, block=(16, 32))
    image = picture.picture(mask)
    assert image.shape == (80, 75, 3)
    (hidden, seen) = picture.COLOURS[1]
    assert tuple(image[10, 12].tolist()) == seen
    assert tuple(image[10, 25].tolist()) == hidden
    assert tuple(image[20, 70].tolist()) == picture.COLOURS[0][0]
    assert picture.png(image).startswith(b"\x89PNG")
    assert torch.equal(image, picture.picture(mask.to("cpu")))
