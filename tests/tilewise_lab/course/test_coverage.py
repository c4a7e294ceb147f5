"""COVERAGE.md is complete, and every test it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROWS = {"A": 6, "B": 8, "C": 5, "D": 6, "E": 7, "F": 13, "G": 8, "H": 10, "I": 5, "J": 6, "K": 8, "L": 11, "X": 32}
TABLE = re.findall(r"^\| ([A-Z]\d+) \| (.+) \| `(.+)` \|$", (ROOT / "course" / "COVERAGE.md").read_text(), re.M)


def test_no_row_is_missing():
    assert [row for row, _, _ in TABLE] == [f"{part}{n}" for part, last in ROWS.items() for n in range(1, last + 1)]


@pytest.mark.parametrize(("row", "test"), [(row, test) for row, _, test in TABLE])
def test_the_named_test_exists(row, test):
    path, _, name = test.partition("::")
    function, _, parameter = name.partition("[")
    defined = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert function in defined, f"{row}: no {function} in {path}"
    if parameter:
        assert list((ROOT / "course").glob(f"{int(parameter[:-1]):02}_*.py")), f"{row}: no lesson {parameter}"
