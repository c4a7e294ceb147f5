"""Rows of COVERAGE.md about decoding, the ring, an attention and a kernel of one's own (lessons 15 to 18)."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import tilewise
from tests.conftest import DEVICE, HAS_TRITON
from tilewise.backends.common import tiles
from tilewise_lab.learn import check
from tilewise_lab.learn.course import lesson


def test_keys_are_divided_until_the_processors_are_busy() -> None:
    assert tiles.parts_of_keys(8, 65536, 64, 132) == 16  # 128 programs
    assert tiles.parts_of_keys(32, 65536, 64, 132) == 4
    assert tiles.parts_of_keys(128, 65536, 64, 132) == 1  # the batch fills them by itself


def test_each_sequence_of_a_cache_sees_its_own_length() -> None:
    lengths = torch.tensor([30, 7, 12], dtype=torch.int32, device=DEVICE)
    k, v = torch.randn(2, 3, 40, 2, 8, device=DEVICE)
    q = torch.randn(3, 1, 4, 8, device=DEVICE)
    out = tilewise.attention_kv(q, k, v, lengths)
    for b, n in enumerate(lengths.tolist()):
        s = torch.einsum("hd,nhd->hn", q[b, 0], k[b, :n].repeat_interleave(2, 1)) / math.sqrt(8)
        expected = torch.einsum("hn,nhd->hd", torch.softmax(s, -1), v[b, :n].repeat_interleave(2, 1))
        assert_close(out[b, 0], expected, atol=1e-5, rtol=1e-4)


def test_gradients_of_keys_come_home_from_around_the_ring() -> None:
    x = [y.requires_grad_() for y in inputs(9)]
    plan = tilewise.distributed.plan(3, seqlen=9, causal=True, strategy="ring")
    found, expected = (
        torch.autograd.grad(out.square().sum(), x)
        for out in (tilewise.distributed.rehearse(*x, plan=plan), tilewise.attention(*x, causal=True))
    )
    assert_close(found, expected, atol=1e-5, rtol=1e-4)


@tilewise.score_mod
def fading(score, b, h, q_idx, kv_idx, slopes):
    return score - slopes[h] * abs(q_idx - kv_idx)


@tilewise.mask_mod
def window_and_anchors(b, h, q_idx, kv_idx, width, anchors, *, q_pos):
    return (kv_idx <= q_pos) & ((q_pos - kv_idx <= width) | (kv_idx < anchors))


def seen(n: int, width: int, anchors: int) -> torch.Tensor:
    i, j = torch.arange(n, device=DEVICE)[:, None], torch.arange(n, device=DEVICE)
    return (j <= i) & ((i - j <= width) | (j < anchors))


def inputs(n: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, n, 2, 16, device=DEVICE) for _ in range(3)]


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])


def test_a_score_mod_is_the_ten_lines_and_its_tensors_learn(backend: str) -> None:
    q, k, v = inputs(20)
    slopes = torch.tensor([0.1, 1.0], device=DEVICE, requires_grad=True)
    at = torch.arange(20, device=DEVICE)
    s = scores(q, k) - slopes[:, None, None] * (at[:, None] - at).abs()
    expected = torch.einsum("bhij,bjhd->bihd", torch.softmax(s, -1), v)
    out = tilewise.attention(q, k, v, score_mod=fading(slopes), backend=backend)
    assert_close(out, expected, atol=1e-5, rtol=1e-4)
    weight = torch.randn_like(out)
    assert_close(*(torch.autograd.grad(x, slopes, weight)[0] for x in (out, expected)), atol=1e-3, rtol=1e-3)


def test_a_mask_counts_from_where_the_query_sits_among_the_keys(backend: str) -> None:
    q, k, v = inputs(20)
    options = {"mask_mod": window_and_anchors(6, 2), "backend": backend}
    out = tilewise.attention(q, k, v, **options)
    hidden = scores(q, k).masked_fill(~seen(20, 6, 2), -torch.inf)
    assert_close(out, torch.einsum("bhij,bjhd->bihd", torch.softmax(hidden, -1), v), atol=1e-5, rtol=1e-4)
    assert_close(tilewise.attention(q[:, -1:], k, v, **options), out[:, -1:])  # the last token, with a cache


def test_tiles_are_empty_partial_or_full() -> None:
    n, block = 64, 16
    tiles = seen(n, 20, 4).view(n // block, block, n // block, block).transpose(1, 2).flatten(2)
    kinds = tiles.any(-1).int() + tiles.all(-1).int()
    mask = tilewise.block_mask(window_and_anchors(20, 4), n, n, block=(block, block), device=DEVICE)
    assert set(kinds.flatten().tolist()) == {0, 1}  # the window is narrower than two tiles
    assert torch.equal(mask.tiles[0, 0].int(), kinds)
    wide = tilewise.block_mask(window_and_anchors(n, 0), n, n, block=(block, block), device=DEVICE)
    assert torch.equal(
        wide.tiles[0, 0].int(),
        torch.ones(4, 4, device=DEVICE).int().tril() + torch.ones(4, 4, device=DEVICE).int().tril(-1),
    )
    assert mask.density() == float((kinds > 0).double().mean())


@tilewise.mask_mod
def even_keys(b, h, q_idx, kv_idx):
    return (kv_idx % 2 == 0) & (q_idx != 3)


def test_a_query_that_a_mask_hides_everything_from_gets_nothing(backend: str) -> None:
    q, k, v = inputs(7)
    out, lse = tilewise.attention(q, k, v, mask_mod=even_keys(), return_lse=True, backend=backend)
    assert not out[:, 3].any()
    assert (lse[:, :, 3] == -torch.inf).all()
    assert_close(lse[:, :, 4], scores(q, k)[:, :, 4, ::2].logsumexp(-1), atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(not HAS_TRITON, reason="the answer is a Triton kernel")
def test_the_kernels_of_the_solution_pass_all_six_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "")  # the checks set it
    monkeypatch.delenv("TRITON_INTERPRET")
    assert [one.hint for one in check.verdicts(18, lesson(18).beside("solutions"))] == ["", "", ""]
