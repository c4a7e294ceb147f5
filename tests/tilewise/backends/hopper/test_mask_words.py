"""The bits of a block mask's partial tiles, by Triton's interpreter, against the mask itself."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise.request import Request, Spec

pytestmark = pytest.mark.usefixtures("triton_runs")
mask_words = pytest.importorskip("tilewise.backends.hopper.mask_words")

from tilewise.backends.common.launch import DeviceMemory  # noqa: E402

N_Q, N_K = 300, 420


@tilewise.mask_mod
def same_block(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return q_idx // 70 == kv_idx // 70


@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("by_key", [False, True])
def test_words_and_flags(by_key: bool, size: int) -> None:
    mask = tilewise.block_mask(same_block(), N_Q, N_K, causal=True, block=(128, size))
    q, k = (torch.zeros(1, n, 4, 64, dtype=torch.bfloat16) for n in (N_Q, N_K))
    spec = Spec(1.0, after=0, mask_mod=mask.mod.key, mask_block=(*mask.block, 1, 1))
    request = Request(q, k, k, spec, blocks=mask.lists)
    words = mask_words.new_words(request, DeviceMemory(q.device), by_key)
    words.fill_(-1)
    (launch,) = mask_words.words_launches(request, words, by_key)
    launch()

    i, j = torch.arange(N_Q)[:, None], torch.arange(N_K)
    visible = torch.zeros(1024, 1024, dtype=torch.bool)
    visible[:N_Q, :N_K] = (i // 70 == j // 70) & (j <= i + N_K - N_Q)
    own, other = reversed(mask.block) if by_key else mask.block
    visible = visible.mT if by_key else visible
    offsets, entries = mask.lists[2:] if by_key else mask.lists[:2]
    rows = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    flags = words[len(entries) * own * other // 32 :].view(-1, own // 32)
    column = torch.arange(128)
    checked = 0
    for at, (row, entry) in enumerate(zip(rows.tolist(), entries.tolist(), strict=True)):
        for part in range(other // 128):
            n = at * (other // 128) + part
            first = entry // 4 * other + part * 128
            tile = visible[row * own : (row + 1) * own, first : first + 128]
            if entry & 2 == 0:
                bits = words[n * own * 4 : (n + 1) * own * 4].view(own, 4)[:, column % 8 // 2]
                assert torch.equal((bits >> (column // 8 * 2 + column % 2)) & 1 > 0, tile)
                checked += 1
            if not by_key:
                seen = tile.unflatten(0, (-1, 32)).any(2).any(1) | (entry & 2 > 0)
                assert torch.equal(flags[n] > 0, seen)
    assert checked
    assert by_key or not bool((flags > 0).all())
