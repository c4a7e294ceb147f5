"""The tables in tests/tables are what `tests.covering` makes, and have every pair of options."""

from __future__ import annotations

import pytest

from tests.covering import FOLDER, MOST_ROWS, TABLES, Factors, covering, pairs_of, table, text


@pytest.mark.parametrize("name", TABLES)
def test_every_pair_occurs(name: str) -> None:
    factors, rows = TABLES[name](), table(name)
    assert all(factors.allows(row) for row in rows)
    assert {x for row in rows for x in pairs_of(row)} == set(factors.pairs())
    assert {(option, x) for row in rows for option, x in row.items()} == {
        (option, x) for option, values in factors.options.items() for x in values
    }, "a value that no rule allows"
    assert len(rows) <= MOST_ROWS


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_what_the_generator_makes(name: str) -> None:
    made = text(covering(TABLES[name]()))
    assert (FOLDER / f"{name}.tsv").read_text(encoding="utf-8") == made, "run: python -m tests.covering"


def test_there_is_no_other_table() -> None:
    assert {path.stem for path in FOLDER.glob("*.tsv")} == set(TABLES)


def test_pairs_that_rules_forbid_do_not_occur() -> None:
    """(1, 3) is allowed by each rule and by no row: c = 5 needs a != 1, c = 6 needs b != 3."""
    factors = Factors(
        {"a": ("1", "2"), "b": ("3", "4"), "c": ("5", "6")},
        rules=(lambda a, c: (a, c) != ("1", "5"), lambda b, c: (b, c) != ("3", "6")),
    )
    assert ("a", "1", "b", "3") not in factors.pairs()
    assert {x for row in covering(factors) for x in pairs_of(row)} == set(factors.pairs())
