"""Attention over a KV cache: every rule of its semantics, on each backend, beside brute force."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tests.covering import each_once
from tests.kv_cases import KvCase, KvInputs, compare, inputs

BASE = KvCase((20, 3, 0, 33), dim=16)


def call(x: KvInputs, backend: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        found = tilewise.attention_kv(
            x.q, x.k, x.v, x.lengths, **x.options, return_lse=True, backend=backend, **options
        )
    return found


CASES = [  # beside those of tests/tables/cache.tsv
    BASE.but(page=24),
    BASE.but(page=64, layout="interleaved"),
    BASE.but(new=5, queries=2, page=3),
    BASE.but(queries=(9, 1, 1, 4), new=(9, 1, 0, 4), padding=2, csr=True, page=2),
    BASE.but(queries=(0, 0, 0, 0), padding=4),
    BASE.but(starts=(18, 0, 0, 1), page=0, queries=2, new=2),
    KvCase((), dim=16),
    KvCase((40, 41), queries=0, dim=16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout(case: KvCase, backend: str) -> None:
    x = inputs(case)
    compare(call(x, backend), x)


@tilewise.mask_mod
def every_third(b, h, q_idx, kv_idx, offsets):
    return (kv_idx + offsets[b]) % 3 != 0


@tilewise.score_mod
def per_head(score, b, h, q_idx, kv_idx, shift):
    return score * 0.5 + shift[h]


@tilewise.score_mod
def of_any_size(score, b, h, q_idx, kv_idx):
    return score + 0.1 * torch.exp(score)


@pytest.mark.usefixtures("triton_runs")
def test_a_sink_beside_scores_of_any_size() -> None:
    """Their sums are kept beside their maxima, and count with the sink as they do without."""
    x = inputs(KvCase((40, 17, 0), page=8, dim=16))
    options: dict[str, Any] = {"score_mod": of_any_size(), "sinks": torch.tensor([-2.0, 0.0, 1.0, 9.0])}
    for split in (None, 0):
        found, expected = (call(x, backend, **options, split=split) for backend in ("triton", "reference"))
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


TREE = [[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [0, 1, 0], [0, 1, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]


def test_a_tree_of_nothing(backend: str) -> None:
    x = inputs(KvCase((5, 3), queries=(0, 0), dim=16))
    assert call(x, backend, tree=torch.ones(0, 0, dtype=torch.bool))[0].shape == (0, 4, 16)


def test_a_tree_of_many_drafts(backend: str) -> None:
    """More than fit into one word."""
    torch.manual_seed(0)
    tree = torch.tril(torch.rand(1, 70, 70) < 0.5) | torch.eye(70, dtype=torch.bool)
    x = inputs(KvCase((7,), queries=70, new=70, dim=16, heads=1, kv_heads=1))
    compare(call(x, backend, tree=tree), x, tree=tree.tolist())


def test_a_tree_for_the_whole_batch(backend: str) -> None:
    tree = torch.tensor(TREE[1], dtype=torch.bool)
    for given in (tree, tree[None]):
        x = inputs(KvCase((5, 9), queries=3, new=3, dim=16))
        compare(call(x, backend, tree=given), x, tree=[tree.tolist()] * 2)
    with pytest.raises(tilewise.AttentionError, match="shape of tree"):
        call(x, backend, tree=tree[:2, :2])


def test_pages_may_be_shared(backend: str) -> None:
    x = inputs(KvCase((30, 30), page=8, dim=16))
    table = x.options["page_table"]
    table[1, :3] = table[0, :3]
    for data, cache in ((x.keys, x.k), (x.values, x.v)):
        data[1][:24] = data[0][:24]
        data[1][24:] = cache[table[1, 3].item(), :6]
    compare(call(x, backend), x)


def test_lse_merges(backend: str) -> None:
    """Two calls over halves of a cache, and tilewise.merge, are one call over all of it."""
    x = inputs(KvCase((40, 17), page=8, dim=16))
    table = x.options["page_table"]
    whole = call(x, backend, causal=False)
    first = tilewise.attention_kv(
        x.q,
        x.k,
        x.v,
        torch.tensor([16, 16], dtype=torch.int32),
        page_table=table,
        causal=False,
        return_lse=True,
        backend=backend,
    )
    rest = tilewise.attention_kv(
        x.q,
        x.k,
        x.v,
        x.lengths - 16,
        page_table=table[:, 2:].contiguous(),
        causal=False,
        return_lse=True,
        backend=backend,
    )
    for a, b in zip(tilewise.merge(first, rest), whole, strict=True):
        assert torch.allclose(a, b, atol=2e-6)


def test_a_plan_serves_many_layers(backend: str) -> None:
    x, y = (inputs(BASE.but(new=1), seed=seed) for seed in (0, 1))
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **x.options, backend=backend)
    for each in (x, y):
        compare(call(each, backend, plan=plan), each)
    with pytest.raises(tilewise.AttentionError, match="plan"):
        call(inputs(BASE), backend, plan=plan)


@each_once(split=[0, 128], window=[None, (130, 0)])
def test_a_split_gives_bits_that_no_batch_changes(split: int, window: Any, backend: str) -> None:
    """Alone, in a batch, and as the last rows of a prefill."""
    case = KvCase((200, 40, 290), page=16, dim=16, queries=(1, 1, 1))
    x = inputs(case)
    sinks = torch.randn(4)
    options = {"split": split, "window": window, "sinks": sinks}
    batch = call(x, backend, **options)
    compare(batch, x, window=window, sinks=sinks)
    if backend == "reference":
        return
    for b in (0, 2):
        alone = tilewise.attention_kv(
            x.q[b : b + 1],
            x.k,
            x.v,
            x.lengths[b : b + 1],
            page_table=x.options["page_table"][b : b + 1],
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
            return_lse=True,
            backend=backend,
            **options,
        )
        assert torch.equal(alone[0][0], batch[0][b])
        assert torch.equal(alone[1][:, 0], batch[1][:, b])
    q = torch.cat([torch.randn(19, 4, 16), x.q[2:3]])
    many = tilewise.attention_kv(
        q,
        x.k,
        x.v,
        x.lengths[2:3],
        page_table=x.options["page_table"][2:3],
        cu_seqlens_q=torch.tensor([0, 20], dtype=torch.int32),
        return_lse=True,
        backend=backend,
        **options,
    )
    assert torch.equal(many[0][-1], batch[0][2])
    assert torch.equal(many[1][:, -1], batch[1][:, 2])


def test_a_call_repeated_gives_the_same_bits(backend: str) -> None:
    x = inputs(KvCase((300, 40, 517, 1), page=16, dim=16))
    a, b = call(x, backend), call(x, backend)
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    compare(a, x)


@pytest.mark.parametrize("words", ["", "split", "tree", "mask_mod"])
def test_what_a_query_does_not_see_cannot_reach_it(words: str, backend: str) -> None:
    """Keys and values that only later queries see: theirs are the only results that are not finite."""
    x, y = (inputs(KvCase((9, 3, 17), queries=4, new=4, dim=16, heads=2, kv_heads=1, page=8)) for _ in range(2))
    options: dict[str, Any] = {
        "": {"window": (6, 0)},
        "split": {"split": 128},
        "mask_mod": {"causal": False, "mask_mod": not_after()},
        "tree": {"tree": torch.tril(torch.ones(3, 4, 4, dtype=torch.bool))},
    }[words]
    clean = call(x, backend, **options)
    for name in ("k_new", "v_new"):
        y.options[name][:, 2] = torch.tensor([torch.nan, torch.inf, -torch.inf])[:, None, None]
    out, lse = call(y, backend, **options)
    assert torch.equal(out[:, :2], clean[0][:, :2])
    assert torch.equal(lse[..., :2], clean[1][..., :2])
    assert not out[:, 2:].isfinite().any()


@tilewise.mask_mod
def not_after(b, h, q_idx, kv_idx, *, q_len, kv_len):  # type: ignore[no-untyped-def]
    return kv_idx <= q_idx + (kv_len - q_len)


@pytest.mark.parametrize("heads", [2, 8])
def test_rows_past_the_last_sequence_may_be_more_than_max_seqlen_q(backend: str, heads: int) -> None:
    """As in a CUDA graph of a larger batch: max_seqlen_q is of the sequences."""
    x = inputs(KvCase((5, 0, 18), queries=(1, 1, 1), padding=21, heads=heads, kv_heads=2, dim=16))
    out = torch.full_like(x.q, torch.nan)
    found = tilewise.attention_kv(
        x.q, x.k, x.v, x.lengths, **x.options, out=out, max_seqlen_q=1, return_lse=True, backend=backend
    )
    compare(found, x)
    assert (out[-21:] == 0).all()
    assert (found[1][:, -21:] == -torch.inf).all()
