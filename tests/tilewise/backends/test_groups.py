"""Few queries of grouped heads: tiles hold those of a whole group, whatever their number, the window and the terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise
from tests import budget, features, features_budget
from tests.cases import Case, make, run
from tests.conftest import DEVICE
from tests.covering import cases
from tilewise.backends.common.kernel_call import new_results
from tilewise.backends.common.launch import DeviceMemory, Launch
from tilewise.backends.triton.launches import forward_launch
from tilewise.request import INTERPRETER, Request

FEW = Case(n_q=5, n_k=40, heads=6, kv_heads=2, d=16, dv=16, after=0)
CALLS = {
    "keys in parts": replace(FEW, n_k=130, heads=3, kv_heads=1),
    "one query, a window": replace(FEW, batch=2, n_q=1, before=20),
    "several tiles, a window that begins within one": replace(FEW, n_q=11, before=9, after=2, dtype="bfloat16"),
    "queries before the first key": replace(FEW, n_q=13, n_k=6),
    "one head of keys, dims in columns, any strides": replace(
        FEW, n_q=3, n_k=20, heads=5, kv_heads=1, d=40, dv=20, layouts=("bdsh", "heads", "strided", "bhsd")
    ),
    "packed": replace(FEW, n_q=14, n_k=60, before=20, lengths=((3, 20), (0, 7), (9, 0), (2, 33))),
}


def made(case: Case, **changes: Any) -> Launch:
    q, k, v = make(case, "cpu")[1:4]
    request = Request(q, k, v, case.spec._replace(backend="triton"))._replace(**changes)
    return forward_launch(request, *new_results(request, DeviceMemory(q.device)), INTERPRETER)


@cases("name", ["keys in parts", "packed"], CALLS)
def test_within_budget(name: str) -> None:
    inputs = make(CALLS[name], DEVICE)
    budget.check(run(inputs, "triton"), inputs)


TERMS = {
    "sinks, slopes": {"sinks": True, "alibi": "bh", "softcap": True},
    "bias, dropout": {"bias": "bhij", "dropout": True, "turned": True},
    "mods": {"mod": "relative", "mask": "prefix_lm"},
    "packed": {"alibi": "bh", "sinks": True, "packed": True},
}


@cases("name", ["bias, dropout"], TERMS)
def test_terms(name: str) -> None:
    chosen = features.Features(**TERMS[name], d=16, dv=16, band=(True, True), heads=(4, 2))  # type: ignore[arg-type]
    features_budget.check(features.make(chosen, 5, longest=30, device=DEVICE, queries=7), "triton")


def test_a_hidden_nan_stays_hidden_and_a_seen_one_is_its_heads_alone() -> None:
    """Rows of one tile are of different heads and queries: what each sees is its own matter."""
    q, k, v = (torch.randn(1, n, h, 16, device=DEVICE) for n, h in ((3, 8), (40, 2), (40, 2)))
    v[0, 39, 0] = torch.nan  # seen by the last query, in the first group
    v[0, :5, 1] = torch.inf  # before every window
    out, lse = tilewise.attention(q, k, v, causal=True, window=(30, 0), backend="triton", return_lse=True)
    seen = torch.zeros(1, 3, 8, 1, dtype=torch.bool, device=DEVICE)
    seen[0, 2, :4] = True
    assert torch.equal(out.isnan(), seen.expand_as(out))
    assert out[~seen.expand_as(out)].isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize(
    ("case", "heads", "programs"),
    [
        (FEW, 3, 2),  # 15 rows for each head of keys
        (replace(FEW, n_q=11, batch=2), 3, 2 * 2 * 3),
        (replace(FEW, n_q=1, before=7), 3, 2),
        (replace(FEW, n_q=16), 1, 6),  # full tiles
        (replace(FEW, heads=2), 1, 2),
    ],
    ids=str,
)
def test_what_shares_a_tile(case: Case, heads: int, programs: int) -> None:
    found = made(case)
    assert (found.options["CONFIG"].HEADS, found.programs) == (heads, programs)


def test_packed_sequences_share_tiles_if_they_are_short_on_average() -> None:
    cu = torch.tensor([0, 3, 3, 14], dtype=torch.int32)
    assert made(CALLS["packed"], cu_q=cu, cu_k=cu).options["CONFIG"].HEADS == 3
    assert made(replace(CALLS["packed"], n_q=48), cu_q=cu, cu_k=cu).options["CONFIG"].HEADS == 1


def test_the_lists_of_a_block_mask_are_of_one_head() -> None:
    mask = tilewise.block_mask(tilewise.mods.block_diagonal(11), 5, 40, block=(16, 16))
    q, k, v = make(FEW, DEVICE)[1:4]
    found, exact = (tilewise.attention(q, k, v, mask_mod=mask, backend=name) for name in ("triton", "reference"))
    torch.testing.assert_close(found, exact)
