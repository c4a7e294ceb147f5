"""xformers' memory_efficient_attention with each of its bias classes, against a table of pairs in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tilewise
from tilewise.adapters.xformers import BANDS
from tilewise.compat import xformers as x


def naive(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    s = s if bias is None else s + bias
    seen = torch.ones(s.shape[-2:], dtype=torch.bool) if seen is None else seen
    empty = ~seen.any(-1, keepdim=True)
    p = s.masked_fill(~seen & ~empty, -torch.inf).softmax(-1).masked_fill(empty, 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def made(n_q: int, n_k: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, n, 3, 8, dtype=torch.float64) for n in (n_q, n_k, n_k))
    return q, k, v


def places(lengths: list[int], padding: int | None = None) -> tuple[Tensor, Tensor]:
    """Of each token its sequence and its place there; of padding, sequence -1."""
    ids, at = [], []
    for b, n in enumerate(lengths):
        room = n if padding is None else padding
        ids += [b] * n + [-1] * (room - n)
        at += [*range(room)]
    return torch.tensor(ids), torch.tensor(at)


@pytest.mark.parametrize(("n_q", "n_k"), [(7, 7), (4, 9), (9, 4)])
def test_one_sequence(n_q: int, n_k: int) -> None:
    q, k, v = made(n_q, n_k, 2)
    i, j = torch.arange(n_q)[:, None], torch.arange(n_k)
    p = i + n_k - n_q
    bias = torch.randn(2, 3, n_q, n_k, dtype=torch.float64)
    cases: list[tuple[Any, Tensor | None, Tensor | None]] = [
        (None, None, None),
        (bias, None, bias),
        (x.LowerTriangularMask(), j <= i, None),
        (x.LowerTriangularMask().add_bias(bias), j <= i, bias),
        (x.LowerTriangularFromBottomRightMask(), j <= p, None),
        (x.LowerTriangularFromBottomRightMask().make_local_attention(3), (j <= p) & (j > p - 3), None),
        (x.LocalAttentionFromBottomRightMask(2, 1), (j >= p - 2) & (j <= p + 1), None),
    ]
    for attn_bias, seen, added in cases:
        assert_close(x.memory_efficient_attention(q, k, v, attn_bias), naive(q, k, v, seen, added))


@pytest.mark.parametrize(("n_q", "n_k"), [(7, 7), (4, 9), (9, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_has_the_axes_of_the_query(causal: bool, n_q: int, n_k: int) -> None:
    """Three of one head, five of groups of heads; alone, and within a causal mask."""
    q, k, v = made(n_q, n_k, 2)
    seen = torch.arange(n_k) <= torch.arange(n_q)[:, None] if causal else None
    bias = torch.randn(2, 6, n_q, n_k, dtype=torch.float64)

    def given(bias: Tensor) -> Any:
        return x.LowerTriangularMask().add_bias(bias) if causal else bias

    one = x.memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], given(bias[:, 0]))
    assert_close(one, naive(q[:, :, :1], k[:, :, :1], v[:, :, :1], seen, bias[:, :1])[:, :, 0])
    grouped = [torch.stack([t, -t], 2) for t in (q, k, v)]
    found = x.memory_efficient_attention(*grouped, given(bias.unflatten(1, (2, 3))))
    expected = naive(*(t.flatten(2, 3) for t in grouped), seen, bias)
    assert_close(found, expected.unflatten(2, (2, 3)))
    for groups, heads in ((1, 1), (1, 3), (2, 1)):  # the same for the others
        part = bias.unflatten(1, (2, 3))[:, :groups, :heads]
        all_heads = part.expand(-1, 2, 3, -1, -1).flatten(1, 2)
        expected = naive(*(t.flatten(2, 3) for t in grouped), seen, all_heads)
        assert_close(x.memory_efficient_attention(*grouped, given(part)), expected.unflatten(2, (2, 3)))


@pytest.mark.parametrize("kv", [[3, 4, 2], [5, 4, 6], [2, 4, 7]])
def test_sequences_in_a_row(kv: list[int]) -> None:
    lengths = [3, 4, 2]
    q, k, v = made(sum(lengths), sum(kv))
    (b_q, i), (b_k, j) = places(lengths), places(kv)
    b_q, i = b_q[:, None], i[:, None]
    late = torch.tensor(kv)[b_q] - torch.tensor(lengths)[b_q]
    same, mask = b_q == b_k, x.BlockDiagonalMask.from_seqlens(lengths, kv)
    for attn_bias, seen in (
        (mask, same),
        (mask.make_causal(), same & (j <= i)),
        (mask.make_local_attention(2), same & (j <= i) & (j > i - 2)),
        (mask.make_causal_from_bottomright(), same & (j <= i + late)),
        (mask.make_local_attention_from_bottomright(2), same & (j <= i + late) & (j > i + late - 2)),
    ):
        assert_close(x.memory_efficient_attention(q, k, v, attn_bias), naive(q, k, v, seen))
        if kv == lengths:  # a band, and no mod that is asked about every pair
            assert "mask_mod" not in BANDS[type(attn_bias).__name__](attn_bias)


def test_padded_keys() -> None:
    lengths, kv, padding = [1, 2, 1], [4, 2, 6], 6
    q, k, v = made(sum(lengths), 3 * padding)
    (b_q, i), (b_k, j) = places(lengths), places(kv, padding)
    b_q, i = b_q[:, None], i[:, None]
    late = torch.tensor(kv)[b_q] - torch.tensor(lengths)[b_q]
    same = b_q == b_k
    for kind, seen in (
        (x.BlockDiagonalPaddedKeysMask, same),
        (x.BlockDiagonalCausalWithOffsetPaddedKeysMask, same & (j <= i + late)),
    ):
        attn_bias = kind.from_seqlens(lengths, padding, kv)
        assert_close(x.memory_efficient_attention(q, k, v, attn_bias), naive(q, k, v, seen))
    p = i + late
    for attn_bias, seen in (
        (
            x.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(lengths, padding, kv, 2),
            (j <= p) & (j > p - 2),
        ),
        (
            x.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(lengths, padding, kv, 2, 1),
            (j <= p + 1) & (j >= p - 2),
        ),
    ):
        assert_close(x.memory_efficient_attention(q, k, v, attn_bias), naive(q, k, v, same & seen))


def test_sequences_from_tensors_and_back() -> None:
    parts = [torch.randn(b, n, 3, 8, dtype=torch.float64) for b, n in ((1, 3), (2, 5), (1, 2))]
    mask, row = x.BlockDiagonalMask.from_tensor_list(parts)
    found = mask.make_causal().split(x.memory_efficient_attention(row, row, row, mask.make_causal()))
    for y, part in zip(found, parts, strict=True):
        n = part.shape[1]
        assert_close(y, naive(part, part, part, torch.ones(n, n).tril().bool()))


def test_shapes_and_dtypes() -> None:
    q, k, v = made(5, 6)
    one = x.memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0])
    assert_close(one, naive(q[:, :, :1], k[:, :, :1], v[:, :, :1])[:, :, 0])
    groups = torch.randn(1, 5, 2, 3, 8, dtype=torch.float64)
    shared = [torch.randn(1, 6, 2, 1, 8, dtype=torch.float64).expand(-1, -1, -1, 3, -1) for _ in "kv"]
    found = x.memory_efficient_attention(groups, *shared, output_dtype=torch.float32)
    expected = naive(groups.flatten(2, 3), *(y.flatten(2, 3) for y in shared)).view_as(groups)
    assert_close(found, expected.float())


def test_what_cannot_be_honoured_raises() -> None:
    q, k, v = made(5, 5, 2)

    class PagedBlockDiagonalPaddedKeysMask:
        pass

    with pytest.raises(tilewise.AttentionError, match="attn_bias"):
        x.memory_efficient_attention(q, k, v, PagedBlockDiagonalPaddedKeysMask())
    local = x.LowerTriangularFromBottomRightMask().make_local_attention(0)
    for one, mask, words in (
        (q, local, "window_size"),
        (q[:1], x.BlockDiagonalMask.from_seqlens([3, 2]).make_local_attention(0), "window_size"),
        (q[:1], x.BlockDiagonalMask.from_seqlens([2, 2]), "tokens of query: found 5; expected the 4"),
        (q[:1], x.BlockDiagonalMask.from_seqlens([3, 2], [3, 1]), "tokens of key"),
    ):
        with pytest.raises(tilewise.AttentionError, match=words):
            x.memory_efficient_attention(one, one, one, mask)
    with pytest.raises(tilewise.AttentionError, match="one after the other"):
        x.memory_efficient_attention(q, k, v, x.BlockDiagonalMask.from_seqlens([5]))


def test_classes_that_were_tensors_once() -> None:
    """In xformers before 0.0.33 some masks are tensors without numbers: their class tells, not that."""

    class LowerTriangularMask(torch.Tensor):
        pass

    q, k, v = made(5, 7)
    mask = torch.Tensor._make_subclass(LowerTriangularMask, torch.empty(0))
    assert_close(x.memory_efficient_attention(q, k, v, mask), naive(q, k, v, torch.ones(5, 7).tril().bool()))
