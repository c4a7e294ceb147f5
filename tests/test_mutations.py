"""The 60 mutations of the library can be applied. (`python -m tests.mutations` does it, which takes an hour.)"""

from __future__ import annotations

import doctest

from tests import mutations

EVERY = mutations.mutations()


def test_every_text_is_found_once():
    """A change of the library that moves a text changes it in mutations.diff, too."""
    wrong = []
    for one in EVERY:
        path = mutations.ROOT / one.place
        found = path.read_text(encoding="utf-8").count(one.old) if path.exists() else 0
        if found != 1 or one.old == one.new:
            wrong.append(f"{one.name}: {found} times in {one.file}:\n{one.old}")
        wrong += [f"{one.name}: no {test}" for test in one.tests or ["tests"] if not (mutations.ROOT / test).exists()]
    assert not wrong, "\n".join(wrong)


def test_there_are_sixty():
    assert len(EVERY) == len({one.name for one in EVERY}) == 60
    assert len(EVERY) == mutations.DIFF.read_text(encoding="utf-8").count("\n--- ")
    assert all(one.tests for one in EVERY)


def test_the_format_is_read_as_it_is_meant():
    assert doctest.testmod(mutations).failed == 0
