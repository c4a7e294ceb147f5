"""Few queries of grouped heads on a GPU: tiles hold those of a whole group. Every number of queries, window and term,
forward and backward, within their budgets; in a CUDA graph, without a look of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests import budget, features, features_budget
from tests.cases import Case, make, run
from tilewise.backends.common.kernel_call import new_results
from tilewise.backends.common.launch import DeviceMemory, target_of
from tilewise.backends.triton.launches import forward_launch
from tilewise.request import Request

BANDS = ((None, None), (None, 0), (300, 0), (100, 3), (0, 0))


def heads_of_a_tile(q: Tensor, k: Tensor, v: Tensor, **words: Any) -> int:
    spec = Case(d=q.shape[-1]).spec._replace(backend="triton", **words)
    request = Request(q, k, v, spec)
    results = new_results(request, DeviceMemory(q.device))
    return int(forward_launch(request, *results, target_of(q.device).gpu).options["CONFIG"].HEADS)


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(8, 1, 64), (32, 8, 128), (6, 2, 256), (71, 1, 64), (12, 4, 40)])
def test_within_budget(heads: int, kv_heads: int, d: int, band: tuple[int | None, int | None]) -> None:
    for n_q, n_k in ((1, 2048), (2, 1500), (7, 4097), (33, 1024), (63, 1030), (40, 30)):
        inputs = make(Case(2, n_q, n_k, heads, kv_heads, d, d, "bfloat16", *band, seed=n_q), "cuda")
        assert heads_of_a_tile(inputs.q, inputs.k, inputs.v) == heads // kv_heads
        budget.check(run(inputs, "triton"), inputs)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("layouts", [("bshd",) * 4, ("bdsh", "heads", "strided", "bhsd")], ids=["dense", "strided"])
def test_dtypes_and_strides(dtype: str, layouts: tuple[str, str, str, str]) -> None:
    for n_q in (3, 20):
        inputs = make(Case(2, n_q, 1111, 8, 2, 64, 48, dtype, 200, 0, layouts=layouts, seed=n_q), "cuda")
        budget.check(run(inputs, "triton"), inputs)


def test_packed() -> None:
    lengths = ((3, 700), (0, 7), (9, 0), (40, 40), (1, 3000))
    n_q, n_k = (sum(x) for x in zip(*lengths, strict=True))
    for before in (None, 200):
        inputs = make(Case(5, n_q, n_k, 16, 2, 128, 128, "bfloat16", before, 0, lengths=lengths), "cuda")
        budget.check(run(inputs, "triton"), inputs)


@pytest.mark.parametrize("number", range(len(features.ALONE)))
def test_terms(number: int) -> None:
    """Each with others, of 1 to 20 queries."""
    chosen = features.Features.random(3000 + number, dims=(64, 128), dtypes=("bfloat16", "float32"), blocks=0)
    chosen = features.replace(chosen.having(number), heads=(12, 3))
    for seed in range(4):
        features_budget.check(features.make(chosen, seed, longest=1500, device="cuda", queries=20), "triton")


def test_a_graph_repeats_it_and_nothing_is_read_back() -> None:
    q, k, v = (
        torch.randn(2, n, h, 128, device="cuda", dtype=torch.bfloat16) for n, h in ((5, 32), (4000, 8), (4000, 8))
    )
    options: dict[str, Any] = {"window": (1000, 0), "backend": "triton", "return_lse": True}
    tilewise.attention(q, k, v, **options)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = tilewise.attention(q, k, v, **options)
    q.copy_(torch.randn_like(q))
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay()
        expected = tilewise.attention(q, k, v, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
