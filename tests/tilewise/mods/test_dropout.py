"""The dropout hash."""

from __future__ import annotations

import torch

import tilewise


def test_dropout_keeps_what_it_says_and_is_free_of_patterns() -> None:
    keep = tilewise.dropout_mask(2, 3, 256, 256, p=0.3, seed=1).double() - 0.7
    assert abs(keep.mean()) < 3e-3
    for shift in ((1, 0), (0, 1), (1, 1)):
        rolled = keep.roll(shift, (2, 3))
        assert abs((keep * rolled).mean() / 0.21) < 1e-2
    assert not torch.equal(keep[0], keep[1])
