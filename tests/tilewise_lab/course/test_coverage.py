"""COVERAGE.md is complete, every test it names exists, and every test fails when its row's claim is broken."""

from __future__ import annotations

import ast
import doctest
import os
import subprocess
import sys

import pytest

from tests.conftest import INTERPRETED
from tests.covering import cases
from tests.tilewise_lab.course import mutations

ROWS = {"A": 6, "B": 8, "C": 5, "D": 6, "E": 7, "F": 13, "G": 8, "H": 10, "I": 5, "J": 6, "K": 8, "L": 11}
ROWS |= {"M": 6, "N": 5, "O": 5, "P": 6, "X": 32}
TABLE = mutations.rows()
BREAKS = mutations.mutations()
SHARES = 4


def test_no_row_is_missing():
    every = [f"{part}{n}" for part, last in ROWS.items() for n in range(1, last + 1)]
    assert [*TABLE] == every
    assert [*dict.fromkeys(one.name for one in BREAKS)] == every


@pytest.mark.parametrize("row", TABLE)
def test_the_named_test_exists(row):
    path, _, name = TABLE[row][1].partition("::")
    body = ast.parse((mutations.ROOT / path).read_text(encoding="utf-8")).body
    assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}, f"{row}: no {name} in {path}"


@pytest.mark.parametrize("one", BREAKS, ids=lambda one: one.name)
def test_the_text_to_break_is_there(one):
    text = (mutations.ROOT / one.place).read_text(encoding="utf-8")
    assert one.apply(text) != text


def test_the_table_is_read_as_it_is_meant():
    assert doctest.testmod(mutations).failed == 0
    assert len(BREAKS) == mutations.DIFF.read_text(encoding="utf-8").count("\n--- ")


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED or not hasattr(os, "fork"), reason="kernels are interpreted, each change in a fork")
@cases("share", [0, 1], range(SHARES))
def test_a_broken_claim_breaks_its_test(share):
    """That the tests pass as long as nothing is broken, the rest of this run shows."""
    command = [sys.executable, "-m", "tests.tilewise_lab.course.mutations", "--red", "--share", f"{share}/{SHARES}"]
    done = subprocess.run(command, cwd=mutations.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
