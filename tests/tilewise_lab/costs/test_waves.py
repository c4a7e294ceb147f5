from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise_lab.costs.waves import cliffs, matmul_blocks, schedule, waves


@pytest.mark.parametrize(
    ("n", "sms", "blocks", "rounds", "efficiency"),
    [
        (1792, 108, 98, 1, 0.907),
        (1793, 108, 120, 2, 0.556),
        (1792, 132, 98, 1, 0.742),
        (1793, 132, 120, 1, 0.909),  # no cliff here: it depends on the number of SMs
        (2048, 132, 128, 1, 0.970),
        (2049, 132, 153, 2, 0.580),
    ],
)
def test_the_notes_example_and_the_h200s(n, sms, blocks, rounds, efficiency):
    found = waves(matmul_blocks(n, n, (256, 128)), sms)
    assert (found.blocks, found.waves) == (blocks, rounds)
    assert found.efficiency == pytest.approx(efficiency, abs=0.0006)


def test_cliffs_depend_on_the_device():
    assert [n for n, _, _ in cliffs(range(1700, 1800), (256, 128), 108)] == [1793]
    assert cliffs(range(1500, 2900), (256, 128), 132) == [(2049, 128, 153), (2817, 242, 276)]


def test_nothing_to_do():
    assert waves(0, 108).waves == 0
    assert schedule([], 4).finish == 0


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 8))
def test_a_schedule_lies_between_its_bounds(work, slots):
    found = schedule(work, slots)
    assert max(max(work), sum(work) / slots) <= found.finish <= sum(work) / slots + max(work)
    assert found.efficiency == pytest.approx(sum(work) / (slots * found.finish))


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 20))
def test_equal_blocks_are_waves(blocks, slots):
    assert schedule([1] * blocks, slots).finish == waves(blocks, slots).waves


def test_a_core_for_every_output():
    """(100, K) by (K, 100) wants 10,000 cores; 8 x 8 outputs in blocks of 4 x 2 want 8, and a ragged edge one more."""
    assert matmul_blocks(100, 100, tile=(1, 1)) == 100 * 100 == 10_000
    assert matmul_blocks(8, 8, tile=(4, 2)) == 8
    assert matmul_blocks(9, 8, tile=(4, 2)) == 12
