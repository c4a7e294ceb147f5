from __future__ import annotations

import pytest
import torch

from tests.oracle import seen
from tilewise.errors import AttentionError
from tilewise.request import Spec
from tilewise_lab.bench.cases import Case, grid, random_lengths


@pytest.mark.parametrize(
    ("case", "pairs"),
    [
        (Case(2, 64, 3, 3, 16), 2 * 64 * 64),
        (Case(2, 64, 3, 3, 16, causal=True), 2 * 64 * 64 / 2),
        (Case(1, 64, 3, 3, 16, causal=True, window=10), int(seen(64, 64, Spec(1.0, 10, 0)).sum())),
        (Case(1, 8, 3, 3, 16, causal=True, window=100), 8 * 8 / 2),
        (Case(1, 0, 3, 3, 16, causal=True, lengths=(3, 5)), (9 + 25) / 2),
        (Case(2, 64, 3, 3, 16, queries=5), 2 * 5 * 64),
    ],
    ids=lambda x: x.key if isinstance(x, Case) else "",
)
def test_flops_count_what_is_seen(case, pairs):
    assert case.flops("forward") == 4 * 3 * 16 * pairs
    assert case.flops("backward") == 10 * 3 * 16 * pairs


def test_flops_count_the_columns_of_each_product():
    case = Case(2, 64, 3, 3, 24, value_dim=16)
    assert case.flops("forward") == 2 * 3 * 2 * 64 * 64 * (24 + 16)
    assert case.flops("backward") == 2 * 3 * 2 * 64 * 64 * (24 + 24 + 24 + 16 + 16)


@pytest.mark.parametrize(
    ("case", "key"),
    [
        (Case(16, 8192, 32, 8, 128, queries=1), "b16 q1 s8192 h32/8 d128 full bfloat16"),
        (Case(2, 1024, 16, 16, 192, True, value_dim=128), "b2 s1024 h16 d192/128 causal bfloat16"),
        (Case(2, 1024, 16, 16, 96, queries=1024, value_dim=96), "b2 s1024 h16 d96 full bfloat16"),
    ],
)
def test_keys_tell_what_differs(case, key):
    assert case.key == key


@pytest.mark.parametrize("other", [{"causal": True}, {"lengths": (3, 5)}])
def test_few_queries_see_every_key(other):
    with pytest.raises(AttentionError, match="queries"):
        Case(1, 8, 2, 2, 16, queries=1, **other)


def test_inputs_have_their_own_rows_and_widths():
    x = Case(2, 8, 4, 2, 16, queries=3, value_dim=5).inputs(torch.device("cpu"), seed=0)
    assert [tuple(tensor.shape) for tensor in x[:4]] == [(2, 3, 4, 16), (2, 8, 2, 16), (2, 8, 2, 5), (2, 3, 4, 5)]


def test_the_grid_keeps_tokens_and_hidden_size():
    cases = grid((64, 128, 256), ("full", "causal"), (512, 16384), tokens=16384, hidden=2048, dtype="bfloat16")
    assert {(case.batch * case.seq, case.heads * case.dim) for case in cases} == {(16384, 2048)}
    assert len({case.key for case in cases}) == len(cases) == 12


def test_inputs_are_random_and_the_same_again():
    case = Case(2, 8, 4, 2, 16, dtype="float32")
    a, b = (case.inputs(torch.device("cpu"), seed=3) for _ in range(2))
    assert torch.equal(a.q, b.q)
    assert a.q.std() > 0.5
    assert a.k.shape == (2, 8, 2, 16)


def test_packed_inputs_have_their_ends():
    case = Case(1, 0, 4, 4, 16, lengths=(3, 0, 5))
    x = case.inputs(torch.device("cpu"), seed=0)
    assert x.cu is not None
    assert x.cu.tolist() == [0, 3, 3, 8]
    assert x.cu.dtype == torch.int32
    assert x.q.shape == (8, 4, 16)


def test_lengths_stay_within():
    lengths = random_lengths(200, 50)
    assert 1 <= min(lengths) < max(lengths) <= 50
