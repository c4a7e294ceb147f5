"""return_max_logit of `attention_kv`, against a float64 loop over sequences and heads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise


def largest(q: Tensor, k: Tensor, window: int | None = None) -> Tensor:
    """(H,) of one sequence: q (n, H, D) at the end of k (m, Hk, D), causal."""
    n, heads, d = q.shape
    m, group = k.shape[0], heads // k.shape[1]
    at, j = torch.arange(n)[:, None] + m - n, torch.arange(m)
    seen = (j <= at) & (True if window is None else j >= at - window)
    found = []
    for h in range(heads):
        pairs = (q[:, h].double() @ k[:, h // group].double().T * d**-0.5)[seen]
        found.append(pairs.max() if pairs.numel() else torch.tensor(-math.inf, dtype=torch.float64))
    return torch.stack(found)


LENGTHS = (20, 0, 270)


def inputs(heads: int = 4) -> Any:
    torch.manual_seed(0)
    cache = torch.randn(3, 300, 2, 16)
    return torch.randn(3, 2, heads, 16), cache, torch.tensor(LENGTHS, dtype=torch.int32)


def check(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("options", [{}, {"window": (9, 0)}, {"sinks": torch.full((4,), 30.0)}, {"split": 128}])
def test_dense_queries(options: dict[str, Any], backend: str) -> None:
    q, cache, lengths = inputs()
    out, lse, found = tilewise.attention_kv(
        q, cache, cache, lengths, return_lse=True, return_max_logit=True, backend=backend, **options
    )
    window = options["window"][0] if "window" in options else None
    check(found, torch.stack([largest(q[b], cache[b, :n], window) for b, n in enumerate(LENGTHS)]))
    plain = tilewise.attention_kv(q, cache, cache, lengths, return_lse=True, backend=backend, **options)
    torch.testing.assert_close((out, lse), plain, equal_nan=True)
    alone = tilewise.attention_kv(q, cache, cache, lengths, return_max_logit=True, backend=backend, **options)
    assert len(alone) == 2
    check(alone[1], found.double())


def test_pages_new_tokens_and_packed_queries(backend: str) -> None:
    q, _, _ = inputs()
    pages = torch.randn(12, 16, 2, 16)
    table = torch.tensor([[3, 1, 0], [5, 2, 7]], dtype=torch.int32)
    lengths = torch.tensor([17, 30], dtype=torch.int32)
    new = torch.randn(2, 3, 2, 16)
    _, found = tilewise.attention_kv(
        q[:2], pages, pages.clone(), lengths, page_table=table, k_new=new, v_new=new, return_max_logit=True,
        backend=backend,
    )  # fmt: skip
    keys = [pages[table[b].long()].flatten(0, 1)[: n + 3] for b, n in enumerate((17, 30))]
    check(found, torch.stack([largest(q[b], k) for b, k in enumerate(keys)]))
    cu = torch.tensor([0, 2, 3], dtype=torch.int32)
    packed = torch.cat([q[0], q[1, :1], torch.full((1, 4, 16), 1e3)])
    _, found = tilewise.attention_kv(
        packed, pages, pages, lengths + 3, page_table=table, cu_seqlens_q=cu, return_max_logit=True, backend=backend
    )
    assert found.shape == (4,)
    check(found, torch.maximum(largest(q[0], keys[0]), largest(q[1, :1], keys[1])))


def test_with_a_plan_and_compiled() -> None:
    q, cache, lengths = inputs()
    plan = tilewise.plan_kv(q, cache, cache, lengths)
    expected = torch.stack([largest(q[b], cache[b, :n]) for b, n in enumerate(LENGTHS)])
    _, found = tilewise.attention_kv(q, cache, cache, lengths, plan=plan, return_max_logit=True)
    check(found, expected)
    compiled = torch.compile(tilewise.attention_kv, backend="aot_eager", fullgraph=True)
    _, found = compiled(q, cache, cache, lengths, return_max_logit=True)
    check(found, expected)
