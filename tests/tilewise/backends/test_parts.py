"""Few queries against many keys: several programs share the keys, and their results are put together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise
from tests import budget
from tests.cases import Case, make, run
from tests.conftest import DEVICE
from tests.covering import cases
from tilewise.backends.common import tiles
from tilewise.backends.common.launch import target_of
from tilewise.backends.registry import choose
from tilewise.backends.triton.launches import splits_of_keys
from tilewise.request import Gpu, Request, Spec

FEW = Case(batch=1, n_q=1, n_k=150, heads=4, kv_heads=2, d=16, dv=16, after=0)
CALLS = {
    "one query": FEW,
    "a head of its own": replace(FEW, heads=2),
    "two batch rows, a full mask": replace(FEW, batch=2, after=None, n_k=200),
    "five queries": replace(FEW, n_q=5, heads=2),
    "a window that most parts lie outside of": replace(FEW, n_q=3, before=40, n_k=300),
    "all keys of all queries in the last part": replace(FEW, n_q=2, before=3, n_k=201),
    "bfloat16": replace(FEW, dtype="bfloat16"),
    "values wider than keys": replace(FEW, d=8, dv=40),
}


def parts(case: Case) -> int:
    inputs = make(case, DEVICE)
    return splits_of_keys(Request(*inputs[1:4], case.spec), target_of(inputs.q.device))


@cases("name", ["bfloat16", "values wider than keys", "all keys of all queries in the last part"], CALLS)
def test_parts_make_the_whole(name: str) -> None:
    inputs = make(CALLS[name], DEVICE)
    assert parts(CALLS[name]) > 1
    budget.check(run(inputs, "triton"), inputs)


def test_the_same_bits_every_time() -> None:
    q, k, v = make(FEW, DEVICE)[1:4]
    first, again = (tilewise.attention(q, k, v, backend="triton", return_lse=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


TERMS: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": torch.tensor([0.5, -1.0])},
    "no sink": {"sinks": torch.tensor([-torch.inf, 2.0])},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": torch.linspace(-3, 3, 300).view(1, 1, 1, 300)},
    "dropout": {"dropout_p": 0.3, "seed": 7},
}


@cases("name", ["sinks", "dropout"], TERMS)
def test_terms_are_counted_once(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 16, generator=generator) for n in (3, 300, 300))
    found = tilewise.attention(q, k, v, backend="triton", return_lse=True, **TERMS[name])
    wide = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in TERMS[name].items()}
    exact = tilewise.attention(*(x.double() for x in (q, k, v)), return_lse=True, **wide)
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-6, atol=2e-6)


def test_a_hidden_nan_stays_hidden_and_a_seen_one_does_not() -> None:
    q, k, v = (torch.randn(1, n, 1, 16) for n in (2, 300, 300))
    v[:, 299] = torch.nan  # seen by the last query alone
    out, lse = tilewise.attention(q, k, v, causal=True, backend="triton", return_lse=True)
    assert out[:, 0].isfinite().all()
    assert out[:, 1].isnan().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize(
    ("case", "found"),
    [
        (FEW, 2),
        (replace(FEW, n_k=300), 4),
        (replace(FEW, n_k=63), 1),  # too few keys to share
        (replace(FEW, batch=16), 1),  # enough programs without
        (replace(FEW, n_q=65, n_k=400), 1),  # many queries
    ],
    ids=str,
)
def test_how_many_parts(case: Case, found: int) -> None:
    assert parts(case) == found


def test_a_block_mask_has_lists_of_its_own() -> None:
    mask = tilewise.mods.block_mask(tilewise.mods.document(ids=torch.zeros(400, dtype=torch.int32)), 16, 400)
    q, k = torch.randn(1, 16, 1, 16), torch.randn(1, 400, 1, 16)
    found, exact = (tilewise.attention(q, k, k, mask_mod=mask, backend=name) for name in ("triton", "reference"))
    torch.testing.assert_close(found, exact)


def test_auto_takes_the_kernel_that_divides_keys() -> None:
    q, k = (torch.empty(2, n, 4, 128, dtype=torch.bfloat16) for n in (1, 2048))
    chosen = choose(Request(q, k, k, Spec(0.1)), Gpu("cuda", 90))
    assert chosen.backend.name == "triton"
    assert "few queries" in chosen.reason
    assert choose(Request(q, k[:, :512], k[:, :512], Spec(0.1)), Gpu("cuda", 90)).backend.name == "hopper"
    assert choose(Request(k, k, k, Spec(0.1)), Gpu("cuda", 90)).backend.name == "hopper"
    assert choose(Request(q, k, k, Spec(0.1, backend="hopper")), Gpu("cuda", 90)).backend.name == "hopper"
    assert tiles.parts_of_keys(2 * 4, 2048, 64, 132) == 8
