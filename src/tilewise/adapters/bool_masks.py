"""A bool mask as a window, or as a block mask that skips tiles without a visible pair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..mods.blocks import block_mask
from ..mods.modifier import mask_mod


@mask_mod
def table(b, h, q_idx, kv_idx, seen):  # type: ignore[no-untyped-def]
    """A bool mask (B, H, Sq, Sk), each axis possibly 1: an index past the end reads the last element.

    >>> table(torch.tensor([[[[True, False]]]]))(0, 0, torch.arange(2)[:, None], torch.arange(2)).int()
    tensor([[1, 0],
            [1, 0]], dtype=torch.int32)
    """
    return seen[b, h, q_idx, kv_idx]


def recognised(seen: Tensor, n_q: int, n_k: int) -> dict[str, Any]:
    """The options of `tilewise.attention` that mean the same as a mask of bools (B, H, Sq, Sk), each axis possibly 1.

    >>> recognised(torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(), 4, 4)
    {'window': (None, 0)}
    >>> recognised(torch.arange(6)[None, None, None] < 4, 4, 6)["mask_mod"]  # doctest: +ELLIPSIS
    block mask of ...

    Reads the mask, which synchronizes with the GPU.
    """
    if 0 in (seen.numel(), n_q, n_k):
        return {}
    before, after, is_band = _band(seen.expand(-1, -1, n_q, n_k))
    shift = n_k - n_q  # of the diagonal on which `window` counts
    if is_band and (before is None or before + shift >= 0) and (after is None or after - shift >= 0):
        return {"window": (None if before is None else before + shift, None if after is None else after - shift)}
    return {"mask_mod": block_mask(table(seen), n_q, n_k, batch=seen.shape[0], heads=seen.shape[1])}


def _band(seen: Tensor) -> tuple[int | None, int | None, bool]:
    """(before, after): query i sees the keys i - before .. i + after, None for all; and whether that is the mask."""
    n_q, n_k = seen.shape[-2:]
    i, j = torch.arange(n_q, device=seen.device)[:, None], torch.arange(n_k, device=seen.device)
    far = torch.full_like(i - j, -n_q - n_k)
    before = torch.where(seen, i - j, far).amax()
    after = torch.where(seen, j - i, far).amax()
    is_band = (seen == ((j >= i - before) & (j <= i + after))).all()
    left, right, same = torch.stack([before, after, is_band.long()]).tolist()
    return None if left >= n_q - 1 else left, None if right >= n_k - 1 else right, bool(same)
