"""Every row of COVERAGE.md has a test that fails when its claim is broken: this breaks them, one after the other.

    python -m tests.tilewise_lab.course.mutations                    all rows
    python -m tests.tilewise_lab.course.mutations K4 X7              some of them
    python -m tests.tilewise_lab.course.mutations --red --share 0/2  half of them, without the tree as it is

`mutations.diff` says how. A row is proven if its test passes on the tree as it is and fails on the tree with the
change; a test that cannot be collected, or that stumbles over a name that is not there, proves nothing. Nothing is
written into the tree: a mutated one is a folder of links with one file of its own. torch and Triton are imported once,
and each test runs in a fork of that process.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]
DIFF = Path(__file__).with_name("mutations.diff")
COVERAGE = ROOT / "course" / "COVERAGE.md"
WARM = (
    "numpy", "torch", "torch.testing", "torch.distributed.tensor", "torch.utils._python_dispatch",
    "torch.utils.flop_counter", "torch._inductor.config", "hypothesis", "triton.runtime.interpreter",
    "triton.experimental.gluon.language",
)  # fmt: skip
BROKEN = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "AttributeError", "UnboundLocalError")


class Mutation(NamedTuple):
    """`old` stands once in a file below src, or in one of course/, and becomes `new`: then `what` is so, and the claim
    of `row` is not."""

    row: str
    what: str
    file: str
    old: str
    new: str

    @property
    def place(self) -> Path:
        """From the top of the tree."""
        return Path(self.file) if self.file.startswith("course/") else Path("src", self.file)

    def apply(self, text: str) -> str:
        found = text.count(self.old)
        assert found == 1, f"{DIFF.name} breaks {self.row} here; {self.file} has this {found} times:\n{self.old}"
        return text.replace(self.old, self.new)


class Verdict(NamedTuple):
    code: int  # pytest's: 0 all passed, 1 some failed
    errors: tuple[str, ...] = ()  # the types of what was raised
    said: str = ""
    seconds: float = 0.0  # of a processor

    @property
    def is_red(self) -> bool:
        return self.code == 1 and bool(self.errors) and not set(self.errors) & {*BROKEN}


def rows() -> dict[str, tuple[str, str]]:
    """What runs, and the test that proves it, by row."""
    found = re.findall(r"^\| ([A-Z]\d+) \| (.+) \| `(.+)` \|$", COVERAGE.read_text(encoding="utf-8"), re.M)
    return {row: (what, test) for row, what, test in found}


def mutations() -> list[Mutation]:
    return [*parse(DIFF.read_text(encoding="utf-8"))]


def parse(text: str) -> Iterator[Mutation]:
    """
    >>> list(parse("# D4: nothing is summed\\n--- m.py\\n-s += x\\n+s = x\\n"))
    [Mutation(row='D4', what='nothing is summed', file='m.py', old='s += x\\n', new='s = x\\n')]
    """
    for head, body in re.findall(r"^# (\w+: .+)\n--- (.+\n(?:[ +-].*\n)+)", text + "\n", re.M):
        row, what = head.split(": ", 1)
        file, *lines = body.splitlines()
        old, new = ("".join(line[1:] + "\n" for line in lines if line[0] in " " + sign) for sign in "-+")
        yield Mutation(row, what, file, old, new)


def overlay(folder: Path, mutation: Mutation) -> Path:
    """A `src` like ours, with the course beside it, but for one file; links to all others."""
    for top in {"src", "course"} - {mutation.place.parts[0]}:
        (folder / top).symlink_to(ROOT / top)
    here, there = folder / mutation.place.parts[0], ROOT / mutation.place.parts[0]
    for part in mutation.place.parts[1:]:
        here.mkdir()
        for entry in there.iterdir():
            if entry.name != part:
                (here / entry.name).symlink_to(entry)
        here, there = here / part, there / part
    here.write_text(mutation.apply(there.read_text(encoding="utf-8")), encoding="utf-8")
    return folder / "src"


def warm() -> None:
    """What every test needs, but nothing of ours."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in WARM:
        with contextlib.suppress(ModuleNotFoundError):
            import_module(name)
    del os.environ["TRITON_INTERPRET"]
    torch, hypothesis = import_module("torch"), import_module("hypothesis")
    torch.set_num_threads(1)
    phases = hypothesis.Phase.explicit, hypothesis.Phase.generate  # the first failure will do
    hypothesis.settings.register_profile("mutations", phases=phases, database=None, derandomize=True)
    hypothesis.settings.load_profile("mutations")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    gc.freeze()


class Watch:
    """A plugin of pytest: what was raised."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def pytest_exception_interact(self, call: Any) -> None:
        self.errors.append(type(call.excinfo.value).__name__)


def bare(test: str) -> bool:
    """Whether a test does without the fixtures of tests/conftest.py, which imports every kernel."""
    fixtures = re.findall(r"^@pytest.fixture.*\ndef (\w+)", (ROOT / "tests" / "conftest.py").read_text("utf-8"), re.M)
    text = (ROOT / test.partition("::")[0]).read_text(encoding="utf-8")
    return not re.search(rf"\b({'|'.join(fixtures)}|triton)\b", text)


def run(tests: Sequence[str], mutation: Mutation | None) -> Verdict:
    """The tests, on our tree or on a mutated one; to be called once in a process."""
    import pytest

    sys.dont_write_bytecode = mutation is not None
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        src = ROOT / "src" if mutation is None else overlay(Path(folder), mutation)
        sys.path = [path for path in sys.path if Path(path).resolve() != ROOT / "src"]
        os.environ["PYTHONPATH"] = str(src)
        watch = Watch()
        options = ["-p", "no:cacheprovider", "-x", "--tb=native", "-o", f"pythonpath={src}"]
        options += ["--noconftest"] * all(map(bare, tests))
        code = pytest.main([*options, *tests], plugins=[watch])
    return Verdict(int(code), tuple(watch.errors), said.getvalue())


def forked(work: Callable[[], Verdict]) -> Verdict:
    """Its result, from a child; a child that dies has -1."""
    from multiprocessing import Pipe

    ours, theirs = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            theirs.send(work())
        finally:
            os._exit(0)
    theirs.close()
    verdict = _received(ours)
    used = os.wait4(child, 0)[2]
    return verdict._replace(seconds=used.ru_utime + used.ru_stime)


def _received(ours: Connection) -> Verdict:
    try:
        found: Verdict = ours.recv()
        return found
    except EOFError:
        return Verdict(-1, (), "the process that ran the test died")


def prove(wanted: Sequence[Mutation], red_only: bool) -> list[str]:
    """What is wrong: tests that fail as it is, and mutations that no test notices."""
    named = rows()
    wrong = []
    if not red_only:
        whole = forked(lambda: run(sorted({named[one.row][1] for one in wanted}), None))
        print(f"the tree as it is {whole.seconds:5.1f} s", flush=True)
        wrong += [f"on the tree as it is:\n{whole.said}"] if whole.code else []
    for one in wanted:
        test = named[one.row][1]
        verdict = forked(lambda: run([test], one))  # noqa: B023 - called at once
        mark = "red" if verdict.is_red else "NOT RED"
        print(f"{one.row:4} {mark:8}{verdict.seconds:5.1f} s  {one.what} ({', '.join(verdict.errors)})", flush=True)
        if not verdict.is_red:
            wrong.append(f"{one.row}: {test} does not fail when {one.what}\n{verdict.said}")
    return wrong


def main(words: Sequence[str]) -> int:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="such as K4; all, if none is named")
    parser.add_argument("--share", default="0/1", metavar="N/M", help="every M-th change, from the N-th on")
    parser.add_argument("--red", action="store_true", help="do not run the tests on the tree as it is")
    args = parser.parse_args(words)
    first, step = map(int, args.share.split("/"))
    wanted = [one for one in mutations() if not args.rows or one.row in args.rows][first::step]
    warm()
    wrong = prove(wanted, args.red)
    print(f"{len(wanted)} claims broken; what is wrong: {len(wrong) or 'nothing'}", *wrong, sep="\n\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
