from __future__ import annotations

import math

import pytest

from tilewise_lab.machine.history import CHIPS, GAINS, years_to_double

FIRST, TURN, LAST = CHIPS[0], next(chip for chip in CHIPS if chip.year == 2000), CHIPS[-1]


def test_transistors_double_about_every_two_years():
    """Not every year, as the notes have it: that would make an H100 of 5 · 10¹⁸ transistors."""
    assert years_to_double("transistors", FIRST, LAST) == pytest.approx(2, abs=0.1)
    for earlier, later in ((FIRST, TURN), (TURN, LAST)):
        assert years_to_double("transistors", earlier, later) == pytest.approx(2, abs=0.1)
    assert FIRST.transistors * 2 ** (LAST.year - FIRST.year) > 1e7 * LAST.transistors


def test_clocks_rose_with_the_transistors_and_then_no_more():
    """Dennard scaling, until about 2005; since then speed comes from doing more at once."""
    assert years_to_double("clock", FIRST, TURN) < 3
    assert years_to_double("clock", TURN, LAST) > 30


def test_a_thousandfold_in_ten_years_and_little_of_it_from_the_process():
    assert math.prod(GAINS.values()) == 1000
    assert math.log(GAINS["process"], 1000) < 0.15
