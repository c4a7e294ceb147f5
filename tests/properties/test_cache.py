"""Properties of `attention_kv`, for the rows of a table in which every pair of options occurs."""

from __future__ import annotations

from typing import Any

import torch

import tilewise
from tests import covering
from tests.covering import Row
from tests.properties import cache


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
