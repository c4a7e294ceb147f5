"""Properties of `attention_kv`, for the rows of a table in which every pair of options occurs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tests import covering, plans
from tests.covering import Row
from tests.kv_cases import KvCase, compare, inputs
from tests.properties import cache
from tests.quantised_cases import INT8, quantised


@covering.rows("cache")
def test_results_and_bytes(row: Row, backend: str, device: str) -> None:
    """out, lse and max_logit, and the bytes of both caches and of their scales."""
    call = cache.call(row, device)
    options: dict[str, Any] = {}
    if row["max_logit"] != "no":
        options["return_max_logit"] = True
    if row["plan"] != "no":
        x = call.x
        options["plan"] = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **x.options, **call.options, backend=backend)
    if row["out"] != "no":
        shape = *call.x.q.shape[:-1], call.x.case.dim_v
        room = torch.full((*shape[:-2], shape[-2] + 2, shape[-1]), torch.nan, dtype=call.x.q.dtype, device=device)
        options["out"] = room[..., 1:-1, :]
    found = call.run(backend, **options)
    cache.check(found, call)
    if row["out"] != "no":
        assert found[0].data_ptr() == options["out"].data_ptr()
        assert room[..., (0, -1), :].isnan().all()


@covering.rows("cache")
def test_a_call_with_a_plan_runs_on_its_own_tensors(row: Row, device: str) -> None:
    """The second of two calls with tensors of the same shapes, and of other numbers, pages and lengths of queries."""
    with plans.on_gpu() as counted:
        for seed in (1, 2):
            call = cache.call(row, device, seed)
            cache.check(call.run("auto", return_max_logit=True), call)
        assert counted.made.count("attend") == 1


@covering.every_value("cache")
def test_compiled(row: Row, device: str) -> None:
    """One graph, in which the writes into the caches are declared."""
    call = cache.call(row, device)
    x, options = call.x, call.x.options | call.options
    tensors = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in options.items() if name not in tensors}

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    def step(q, k, v, lengths, tensors):  # type: ignore[no-untyped-def]
        if row["plan"] != "no":
            tensors = tensors | {"plan": tilewise.plan_kv(q, k, v, lengths, **tensors, **others)}
        return tilewise.attention_kv(q, k, v, lengths, **tensors, **others, return_lse=True)

    cache.check(step(x.q, x.k, x.v, x.lengths, tensors), call)


@pytest.mark.parametrize("kind", ["head", "token"])
def test_compiled_with_symbolic_sizes(kind: str) -> None:
    """A batch and heads that are symbols, with scales whose shapes depend on both."""
    x, _ = quantised(inputs(KvCase((20, 3, 7), dim=16, page=8)), (INT8, INT8), (kind, kind))
    step = torch.compile(tilewise.attention_kv, backend="eager", fullgraph=True, dynamic=True)
    compare(step(x.q, x.k, x.v, x.lengths, **x.options, return_lse=True), x)
