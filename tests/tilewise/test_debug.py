"""`tilewise.weights`: the weights with which `attention` sums its values."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise import AttentionError

ROWS = [5, 0, 16]
OPTIONS = [
    {},
    {"causal": True},
    {"window": (2, 1), "scale": -0.7},
    {"causal": True, "softcap": 2.0, "sinks": torch.randn(4, dtype=torch.float64)},
    {"bias": torch.randn(1, 4, 17, 23, dtype=torch.float64), "alibi_slopes": torch.rand(4, dtype=torch.float64)},
    {"dropout_p": 0.3, "seed": 7},
    {"mask_mod": lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + b) % 3 == 0},
    {"mask_mod": tilewise.block_mask(tilewise.mods.block_diagonal(16), 17, 23, block=(16, 16)), "causal": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: ",".join(x) or "plain")
def test_the_weights_sum_the_values_to_the_result(options):
    torch.manual_seed(1)
    q = torch.randn(2, 17, 4, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 23, 2, 8, dtype=torch.float64) for _ in range(2))
    found = tilewise.weights(q, k, v, rows=ROWS, **options)
    assert found.shape == (2, 4, 3, 23)
    out = torch.einsum("bhij,bjhd->bihd", found, v.repeat_interleave(2, 2))
    assert torch.allclose(out, tilewise.attention(q, k, v, backend="reference", **options)[:, ROWS], atol=1e-12)
    every = tilewise.weights(q, k, v, **options)
    assert torch.equal(every[:, :, ROWS], found)


def test_several_blocks_of_rows(monkeypatch):
    monkeypatch.setattr("tilewise.backends.reference.scored.ROWS", 64)
    q = torch.randn(1, 40, 2, 8)
    found = tilewise.weights(q, q, q, rows=torch.tensor([39, 3, 3]), causal=True)
    s = torch.einsum("bihd,bjhd->bhij", q, q) / 8**0.5
    p = s.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf).softmax(-1)
    assert torch.allclose(found, p[:, :, [39, 3, 3]], atol=1e-6)
    assert found.dtype == torch.float32
    assert torch.equal(tilewise.weights(*[q.transpose(1, 2)] * 3, rows=3, layout="bhsd", causal=True), found[:, :, 1:2])


def test_a_query_that_sees_nothing_has_no_weights():
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 2, 8)
    assert tilewise.weights(q, k, k, rows=[0, 3], causal=True)[0, 0].sum(-1).tolist() == pytest.approx([0.0, 1.0])
    assert tilewise.weights(q, k, k, rows=[]).shape == (1, 2, 0, 2)


@pytest.mark.parametrize("rows", [[4], -1, [0.5], "a", torch.tensor([True])])
def test_rows_that_are_none(rows):
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(AttentionError, match="rows: found"):
        tilewise.weights(q, q, q, rows=rows)
    with pytest.raises(AttentionError, match="keyword argument: found row="):
        tilewise.weights(q, q, q, row=3)


def test_of_meta_tensors_the_shape() -> None:
    q, k = (
        torch.empty(2, 5, 4, 8, device="meta", dtype=torch.bfloat16),
        torch.empty(2, 7, 2, 8, device="meta").bfloat16(),
    )
    found = tilewise.weights(q, k, k, rows=[1, 3], causal=True)
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.float32, (2, 4, 2, 7))
    assert tilewise.weights(q, k, k).shape == (2, 4, 5, 7)
    with pytest.raises(tilewise.AttentionError, match="rows: found 5 to 5; expected 0 to 4"):
        tilewise.weights(q, k, k, rows=5)
