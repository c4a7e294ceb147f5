"""The Hopper backward with few tiles of keys, which several programs compute: within the budgets, and the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import budget
from tests.cases import Case, Inputs, make, run
from tilewise.backends.common.launch import target_of
from tilewise.errors import AttentionError
from tilewise.request import Request

PLAIN = Case(1, 1000, 1000, 8, 2, 128, 128, "bfloat16", None, 0)
LENGTHS = ((5, 0), (0, 60), (145, 210), (64, 80), (700, 650), (1, 1), (300, 129))
CASES = {
    "GQA": replace(PLAIN, n_q=2048, n_k=2048, heads=32, kv_heads=8),
    "MQA": replace(PLAIN, heads=32, kv_heads=1, lse_gradient=False),
    "64": replace(PLAIN, heads=64, kv_heads=8, d=64, dv=64, dtype="float16"),
    "one head of each": replace(PLAIN, n_q=3000, n_k=200, heads=8, kv_heads=8, d=96, dv=96, after=None),
    "seven heads": replace(PLAIN, n_q=700, n_k=300, heads=14, d=256, dv=256, after=None),
    "window": replace(PLAIN, before=300, layouts=("bhsd", "qkv", "bhsd", "batch"), batch=2),
    "packed": replace(PLAIN, batch=7, n_q=1215, n_k=1130, lengths=LENGTHS, heads=6),
    "192 by 128": replace(PLAIN, d=192, dv=128),
}


def inputs_of(name: str) -> Inputs:
    """The inputs of a call whose tiles are split."""
    from tilewise.backends.hopper.backward_schedule import choose_split

    inputs = make(CASES[name], "cuda")
    case, q, k, v, _, _, cu_q, cu_k = inputs
    split = choose_split(Request(q, k, v, case.spec, cu_q=cu_q, cu_k=cu_k), target_of(q.device).num_sms)
    assert split is not None
    assert split.parts > 1
    return inputs


@pytest.mark.parametrize("name", CASES)
def test_within_budget(name: str) -> None:
    inputs = inputs_of(name)
    try:
        budget.check(run(inputs, "hopper"), inputs)
    except AttentionError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(name: str) -> None:
    inputs = inputs_of(name)
    try:
        first = run(inputs, "hopper", deterministic=True)
    except AttentionError as error:
        pytest.skip(str(error))
    budget.check(first, inputs)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(inputs, "hopper", deterministic=True), strict=True))
