"""Every row of COVERAGE.md has a test that fails when its claim is broken: this breaks them, one after the other.

    python -m tests.tilewise_lab.course.mutations                    all rows
    python -m tests.tilewise_lab.course.mutations K4 X7              some of them
    python -m tests.tilewise_lab.course.mutations --red --share 0/2  half of them, without the tree as it is

`mutations.diff` beside this file says how, in the format of tests/mutations.py. A row is proven if its test passes on
the tree as it is and fails on the tree with the change; a test that cannot be collected, or that stumbles over a name
that is not there, proves nothing.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from tests import mutations as library
from tests.mutations import ROOT, Mutation, Verdict, forked, run, warm

DIFF = Path(__file__).with_name("mutations.diff")
COVERAGE = ROOT / "course" / "COVERAGE.md"
BROKEN = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "AttributeError", "UnboundLocalError")


def rows() -> dict[str, tuple[str, str]]:
    """What runs, and the test that proves it, by row."""
    found = re.findall(r"^\| ([A-Z]\d+) \| (.+) \| `(.+)` \|$", COVERAGE.read_text(encoding="utf-8"), re.M)
    return {row: (what, test) for row, what, test in found}


def mutations() -> list[Mutation]:
    return library.mutations(DIFF)


def is_red(verdict: Verdict) -> bool:
    return verdict.code == 1 and bool(verdict.errors) and not set(verdict.errors) & {*BROKEN}


def bare(test: str) -> bool:
    """Whether a test does without the fixtures of tests/conftest.py, which imports every kernel."""
    fixtures = re.findall(r"^@pytest.fixture.*\ndef (\w+)", (ROOT / "tests" / "conftest.py").read_text("utf-8"), re.M)
    text = (ROOT / test.partition("::")[0]).read_text(encoding="utf-8")
    return not re.search(rf"\b({'|'.join(fixtures)}|triton)\b", text)


def options(tests: Sequence[str]) -> list[str]:
    return ["--noconftest"] * all(map(bare, tests))


def prove(wanted: Sequence[Mutation], red_only: bool) -> list[str]:
    """What is wrong: tests that fail as it is, and mutations that no test notices."""
    named = rows()
    wrong = []
    if not red_only:
        tests = sorted({named[one.name][1] for one in wanted})
        whole = forked(lambda: run(tests, None, options(tests)))
        print(f"the tree as it is {whole.seconds:5.1f} s", flush=True)
        wrong += [f"on the tree as it is:\n{whole.said}"] if whole.code else []
    for one in wanted:
        test = named[one.name][1]
        verdict = forked(lambda: run([test], one, options([test])))  # noqa: B023 - called at once
        mark = "red" if is_red(verdict) else "NOT RED"
        print(f"{one.name:4} {mark:8}{verdict.seconds:5.1f} s  {one.what} ({', '.join(verdict.errors)})", flush=True)
        if not is_red(verdict):
            wrong.append(f"{one.name}: {test} does not fail when {one.what}\n{verdict.said}")
    return wrong


def main(words: Sequence[str]) -> int:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="such as K4; all, if none is named")
    parser.add_argument("--share", default="0/1", metavar="N/M", help="every M-th change, from the N-th on")
    parser.add_argument("--red", action="store_true", help="do not run the tests on the tree as it is")
    args = parser.parse_args(words)
    first, step = map(int, args.share.split("/"))
    wanted = [one for one in mutations() if not args.rows or one.name in args.rows][first::step]
    warm()
    wrong = prove(wanted, args.red)
    print(f"{len(wanted)} claims broken; what is wrong: {len(wrong) or 'nothing'}", *wrong, sep="\n\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
