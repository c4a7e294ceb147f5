from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import seen
from tilewise.request import Spec
from tilewise_lab.costs.cost import BACKWARD, FORWARD, Call, naive_steps, traffic, visible_pairs

GPT2_MEDIUM = Call(batch=64, n_q=1024, n_k=1024, heads=16, kv_heads=16, d=64, dv=64, dtype="float16")
side = st.none() | st.integers(0, 12)


@settings(deadline=None)
@given(st.integers(0, 10), st.integers(0, 10), side, side)
def test_visible_pairs_are_those_of_the_mask(n_q, n_k, before, after):
    mask = seen(n_q, n_k, Spec(scale=1.0, before=before, after=after))
    assert visible_pairs(n_q, n_k, before, after) == int(mask.sum())


def test_flops_are_those_of_the_products():
    """4 B H S S D forward and 2.5 times that backward, halved (but for the diagonal) when causal."""
    full = Call(2, 512, 512, 8, 2, 64, 64)
    assert full.flops() == 4 * 2 * 8 * 512 * 512 * 64
    assert full.flops(backward=True) == 10 * 2 * 8 * 512 * 512 * 64
    causal = Call(2, 512, 512, 8, 2, 64, 64, after=0)
    assert causal.flops() / full.flops() == pytest.approx(0.5 + 0.5 / 512)


def test_packed_sequences_count_as_they_are():
    packed = Call(3, 60, 60, 4, 4, 64, 64, lengths=((10, 10), (0, 0), (50, 50)))
    assert packed.pairs == 4 * (10 * 10 + 50 * 50)
    assert packed.rows("q") == 60 * 4 * 64 * 2


def test_the_notes_table():
    """HBM 40.3 GB naive and 4.4 GB tiled, GPT-2 medium on an A100, forward and backward: from the shape alone."""
    assert GPT2_MEDIUM.score_bytes / 1e9 == pytest.approx(2.147, abs=0.001)
    minimal = traffic(GPT2_MEDIUM, backward=True)
    assert minimal.naive / 1e9 == pytest.approx(25.4, rel=0.01)
    full = traffic(GPT2_MEDIUM, backward=True, masked=True, dropout=True)
    assert full.naive / 1e9 == pytest.approx(44.7, rel=0.01)
    assert full.naive / 1e9 == pytest.approx(40.3, rel=0.15)
    assert 40.3e9 / GPT2_MEDIUM.score_bytes == pytest.approx(18.8, abs=0.05)
    rows = full.fa1 - 22 * GPT2_MEDIUM.statistic_bytes
    assert rows / 1e9 == pytest.approx(4.56, abs=0.005)
    assert full.fa1 / 1e9 == pytest.approx(4.4, rel=0.15)
    assert pytest.approx(9.2, abs=0.05) == 40.3 / 4.4


def test_our_order_moves_less_than_fa1():
    bill = traffic(GPT2_MEDIUM, backward=True)
    assert bill.least < bill.tiled < bill.fa1 < bill.naive


def test_naive_passes():
    """Four passes over the scores forward, seven backward; a mask and a dropout of its own add nine."""
    assert sum(step.passes for step in FORWARD) == 4
    assert sum(step.passes for step in BACKWARD) == 7
    assert sum(step.passes for step in naive_steps(backward=True, masked=True, dropout=True)) == 20


def test_tiled_traffic_is_linear_and_naive_quadratic():
    short, long = (Call(1, n, n, 8, 8, 64, 64) for n in (1024, 8192))
    assert traffic(long).tiled == 8 * traffic(short).tiled
    assert traffic(long).naive > 50 * traffic(short).naive


def test_rows_match_tensors():
    call = Call(2, 10, 20, 8, 2, 64, 32, dtype="float32")
    q, k = torch.empty(2, 10, 8, 64), torch.empty(2, 20, 2, 64)
    v, o = torch.empty(2, 20, 2, 32), torch.empty(2, 10, 8, 32)
    sizes = [x.numel() * x.element_size() for x in (q, k, v, o)]
    assert [call.rows(name) for name in "qkvo"] == sizes
    assert traffic(call).least == sum(sizes) + 2 * 8 * 10 * 4


def test_every_band_is_at_most_full():
    for before, after in itertools.product((None, 0, 3), repeat=2):
        assert visible_pairs(7, 9, before, after) <= 63
