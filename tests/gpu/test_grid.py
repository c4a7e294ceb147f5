"""The wide grid: random calls over many tiles, within their budgets. A test runs one kernel on several sizes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests import budget
from tests.cases import LARGE, Case, length, make, random_case, run
from tilewise.backends.registry import choose
from tilewise.errors import AttentionError
from tilewise.request import Request

SIZES = 5
# Without tensor cores, float32 kernels of wide heads take the compiler a minute.
VARIANTS = [random_case(seed, LARGE, ("float16", "bfloat16", "bfloat16", "float32")) for seed in range(84)]
VARIANTS = [case for case in VARIANTS if case.dtype != "float32" or max(case.d, case.dv) <= 96]


def sizes(case: Case) -> list[Case]:
    """The same kernel on other lengths, batches, windows and data."""
    r = random.Random(case.seed)
    found = [case]
    for n in range(1, SIZES):
        n_q = r.choice((r.randint(1, LARGE.tokens), 128 * r.randint(1, 8)))
        n_k = n_q if case.n_q == case.n_k else r.choice((r.randint(1, LARGE.tokens), 128 * r.randint(1, 8)))
        batch, lengths = r.randint(1, LARGE.batch), None
        if case.lengths is not None:
            batch = r.randint(1, 3 * LARGE.batch)
            lengths = tuple((length(r, LARGE), length(r, LARGE)) for _ in range(batch))
            n_q, n_k = (sum(x) for x in zip(*lengths, strict=True))
        before, after = (
            None if side is None else r.choice((side, r.randint(0, 400))) for side in (case.before, case.after)
        )
        found.append(
            replace(
                case,
                batch=batch,
                n_q=n_q,
                n_k=n_k,
                lengths=lengths,
                before=before,
                after=after,
                seed=case.seed + 1000 * n,
            )
        )
    return found


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_within_budget(case: Case, backend: str, record_property: Any) -> None:
    ratios, wrong = [], []
    for each in sizes(case):
        inputs = make(each, "cuda")
        try:
            choose(Request(*inputs[1:4], each.spec._replace(backend=backend)))
        except AttentionError as error:
            pytest.skip(str(error))
        for stick, x in zip(budget.yardsticks(inputs), run(inputs, backend), strict=True):
            ratios.append((f"{backend} {each.dtype}", stick.name, stick.ratio(x)))
            if (fault := stick.fault(x)) is not None:
                wrong.append(f"{each}: {fault}")
    record_property("ratios", ratios)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("after", [None, 0], ids=["full", "causal"])
def test_unbiased(dtype: str, after: int | None) -> None:
    case = Case(
        batch=8, n_q=500, n_k=500, heads=8, kv_heads=8, d=64, dv=64, dtype=dtype, after=after, lse_gradient=False
    )
    inputs = make(case, "cuda")
    for stick, x in zip(budget.yardsticks(inputs), run(inputs, "auto"), strict=True):
        budget.check_unbiased(stick, x)


@pytest.mark.parametrize(("backend", "dtype"), [("triton", "float32"), ("triton", "bfloat16"), ("hopper", "bfloat16")])
def test_errors_do_not_add_up_over_tiles(backend: str, dtype: str) -> None:
    """Few queries, so many keys that an error of one rounding per tile, always of the same sign, is past the budget."""
    case = Case(n_q=64, n_k=1 << 16, heads=2, kv_heads=1, d=64, dv=64, dtype=dtype)
    inputs = make(case, "cuda")
    try:
        choose(Request(*inputs[1:4], case.spec._replace(backend=backend)))
    except AttentionError as error:
        pytest.skip(str(error))
    budget.check(run(inputs, backend), inputs)


@pytest.mark.parametrize("seed", range(3))
def test_reference_on_the_gpu(seed: int) -> None:
    inputs = make(random_case(seed, LARGE), "cuda")
    budget.check(run(inputs, "reference"), inputs)
