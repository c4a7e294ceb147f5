"""Shared prefixes on a GPU: page sizes, dims and options, and graphs that serve other groups than they recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tests.kv_cases import KvCase, KvInputs, compare
from tests.prefix_cases import shared_inputs
from tilewise.backends.common.kv import partition, prefix_launches
from tilewise.plan_cache import plans

CASE = KvCase((900, 777, 1030, 640, 1100, 555, 300), heads=8, kv_heads=2, dim=128)
COMMON = (0, 640, 640, 0, 512, 512, 64)  # keys


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are shared however little that saves."""
    monkeypatch.setattr(partition, "MIN_SAVED", 0)
    monkeypatch.setattr(partition, "MIN_SHARED", 64)
    plans.clear()


def made(case: KvCase, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> KvInputs:
    return shared_inputs(case, tuple(n // case.page for n in COMMON), dtype, "cuda", seed)


def check(case: KvCase, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    x = made(case, dtype)
    given = {"backend": "triton", "shared_prefix": "auto"} | x.options | options
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **given)
    starts = prefix_launches.parts_of(request_of(x, given), prefix_launches.target_of(x.q.device), plan.schedule)
    assert int(starts.groups.starts[:3].min()) >= 512
    out = torch.full((*x.q.shape[:-1], x.v.shape[-1]), torch.nan, dtype=dtype, device="cuda")
    found = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, return_lse=True, out=out, plan=plan, **given)
    compare(found, x, **options)
    compare(tilewise.attention_kv(x.q, x.k, x.v, x.lengths, return_lse=True, **given), x, **options)


def request_of(x: KvInputs, options: dict[str, Any]) -> Any:
    from tilewise.call.fields import CACHE
    from tilewise.validation import kv as checks

    given: Any = options
    return checks.attend_request(x.q, x.k, x.v, x.lengths, CACHE.completed(given))


@pytest.mark.parametrize("page", [1, 16, 24, 64])
def test_pages(page: int) -> None:
    check(CASE.but(page=page))


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float16, 64), (torch.bfloat16, 256), (torch.float32, 40)])
def test_dims(dtype: torch.dtype, dim: int) -> None:
    check(CASE.but(dim=dim, dim_v=max(1, dim - 7)), dtype)


def test_options() -> None:
    check(CASE.but(queries=4, new=4))
    check(CASE.but(csr=True), softcap=20.0)
    check(CASE.but(queries=(2, 1, 9, 1, 30, 0, 3), padding=5), sinks=torch.linspace(-1, 2, 8, device="cuda"))
    check(CASE.but(heads=2, layout="interleaved"), causal=False)


def test_graphs() -> None:
    """A graph with its plan, replayed for other tables, lengths and groups."""
    x = made(CASE)
    changed = CASE.but(lengths=(500, 1100, 400, 1200, 700, 9, 999))
    other = shared_inputs(changed, (0, 0, 20, 25, 40, 0, 0), torch.bfloat16, "cuda", seed=5)
    pages = max(x.k.shape[0], other.k.shape[0])
    k, v = (torch.full((pages, *x.k.shape[1:]), torch.nan, dtype=x.k.dtype, device="cuda") for _ in range(2))
    wide = max(y.options["page_table"].shape[1] for y in (x, other))
    table = torch.zeros(7, wide, dtype=torch.int32, device="cuda")
    q, lengths, out = x.q.clone(), x.lengths.clone(), torch.empty_like(x.q)
    options: dict[str, Any] = {"page_table": table, "backend": "triton", "shared_prefix": "auto"}

    def fill(y: KvInputs) -> None:
        k[: y.k.shape[0]], v[: y.k.shape[0]] = y.k, y.v
        table[:, : y.options["page_table"].shape[1]] = y.options["page_table"]
        q.copy_(y.q)
        lengths.copy_(y.lengths)
        out.fill_(torch.nan)

    def step() -> Any:
        plan = tilewise.plan_kv(q, k, v, lengths, **options)
        return plan, tilewise.attention_kv(q, k, v, lengths, plan=plan, out=out, return_lse=True, **options)

    fill(x)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _plan, found = step()
    for y in (other, x, other):
        fill(y)
        graph.replay()
        compare(found, y)
