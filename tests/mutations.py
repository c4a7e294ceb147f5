"""The library, broken by 60 small changes, one after the other: the default run must notice at least 57 of them.

    python -m tests.mutations                       all
    python -m tests.mutations sdpa_corner fused_tiles   some of them
    python -m tests.mutations --share 0/2           every second one
    python -m tests.mutations --whole sdpa_corner   the whole default run for it, not the tests that concern it alone

`mutations.diff` says how, and which tests of the default run concern each change. They run until one fails. Nothing is
written into the tree: a mutated one is a folder of links with one file of its own. torch and Triton are imported once,
and each run is a fork of that process. tests/tilewise_lab/course/mutations.py breaks the claims of the lessons the same
way.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import signal
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
DIFF = Path(__file__).with_name("mutations.diff")
DEFAULT_RUN = ("-m", "not slow and not nightly")
LEAST_CAUGHT = 57
LIMIT = 1800  # seconds of a run: a mutated loop may have no end, which a test runner would notice
WARM = (
    "numpy", "torch", "torch.testing", "torch.distributed.tensor", "torch.utils._python_dispatch",
    "torch.utils.flop_counter", "torch._inductor.config", "hypothesis", "triton.runtime.interpreter",
    "triton.experimental.gluon.language",
)  # fmt: skip


class Mutation(NamedTuple):
    """`old` stands once in a file below src, or in one of course/, and becomes `new`: then `what` is so. `tests`: files
    and folders of tests that concern it."""

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()

    @property
    def place(self) -> Path:
        """From the top of the tree."""
        return Path(self.file) if self.file.startswith("course/") else Path("src", self.file)

    def apply(self, text: str) -> str:
        found = text.count(self.old)
        assert found == 1, f"{self.name} breaks {self.file} here, which has this {found} times:\n{self.old}"
        return text.replace(self.old, self.new)


class Verdict(NamedTuple):
    code: int  # pytest's: 0 all passed, 1 some failed; -1 the process died; -2 it was not done in time
    errors: tuple[str, ...] = ()  # the types of what was raised
    failed: tuple[str, ...] = ()  # the tests
    said: str = ""
    seconds: float = 0.0  # of a processor


def mutations(diff: Path = DIFF) -> list[Mutation]:
    return [*parse(diff.read_text(encoding="utf-8"))]


def parse(text: str) -> Iterator[Mutation]:
    """
    >>> list(parse("# D4: nothing is summed\\n@@ tests/a.py\\n--- m.py\\n-s += x\\n+s = x\\n"))  # doctest: +ELLIPSIS
    [Mutation(name='D4', what='nothing is summed', file='m.py', old='s += x\\n', new='s = x\\n', tests=('tests/a.py',))]
    """
    for head, tests, body in re.findall(r"^# (\w+: .+)\n(?:@@ (.+)\n)?--- (.+\n(?:[ +-].*\n)+)", text + "\n", re.M):
        name, what = head.split(": ", 1)
        file, *lines = body.splitlines()
        old, new = ("".join(line[1:] + "\n" for line in lines if line[0] in " " + sign) for sign in "-+")
        yield Mutation(name, what, file, old, new, tuple(tests.split()))


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
    """A plugin of pytest: what was raised, and where."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.failed: list[str] = []

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        self.errors.append(type(call.excinfo.value).__name__)
        self.failed.append(node.nodeid)


def run(tests: Sequence[str], mutation: Mutation | None, options: Sequence[str] = ()) -> Verdict:
    """The tests until the first fails, on our tree or on a mutated one; to be called once in a process."""
    import pytest

    sys.dont_write_bytecode = mutation is not None
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        src = ROOT / "src" if mutation is None else overlay(Path(folder), mutation)
        sys.path = [path for path in sys.path if Path(path).resolve() != ROOT / "src"]
        os.environ["PYTHONPATH"] = str(src)
        watch = Watch()
        options = ["-p", "no:cacheprovider", "-x", "--tb=native", "-o", f"pythonpath={src}", *options]
        code = pytest.main([*options, *tests], plugins=[watch])
    return Verdict(int(code), tuple(watch.errors), tuple(watch.failed), said.getvalue())


def forked(work: Callable[[], Verdict], limit: int = 0) -> Verdict:
    """Its result, from a child; -1 if it dies, -2 if it is not done after so many seconds (0: no limit)."""
    from multiprocessing import Pipe

    ours, theirs = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(limit)
            theirs.send(work())
        finally:
            os._exit(0)
    theirs.close()
    verdict = _received(ours)
    _, status, used = os.wait4(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        verdict = Verdict(-2, said=f"not done after {limit} s")
    return verdict._replace(seconds=used.ru_utime + used.ru_stime)


def _received(ours: Connection) -> Verdict:
    try:
        found: Verdict = ours.recv()
        return found
    except EOFError:
        return Verdict(-1, said="the process that ran the test died")


def main(words: Sequence[str]) -> int:
    every = mutations()
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as sdpa_corner; all, if none is named")
    parser.add_argument("--share", default="0/1", metavar="N/M", help="every M-th change, from the N-th on")
    parser.add_argument("--whole", action="store_true", help="run all tests of the default run")
    args = parser.parse_args(words)
    unknown = {*args.names} - {one.name for one in every}
    if unknown:
        parser.error(f"no such mutation: {', '.join(sorted(unknown))}")
    first, step = map(int, args.share.split("/"))
    wanted = [one for one in every if not args.names or one.name in args.names][first::step]
    warm()
    survivors = []
    for one in wanted:
        tests = ("tests",) if args.whole else one.tests
        verdict = forked(lambda: run(tests, one, DEFAULT_RUN), LIMIT)  # noqa: B023 - called at once
        where = verdict.failed[0] if verdict.failed else "" if verdict.code == 0 else verdict.said[-300:]
        caught = "survived" if verdict.code == 0 else "caught" if verdict.code in (1, -2) else "not run"
        print(f"{caught:9}{one.name:24}{verdict.seconds:6.0f} s  {where}", flush=True)
        if caught != "caught":
            survivors.append(one)
    print(f"{len(wanted) - len(survivors)} of {len(wanted)} caught", flush=True)
    for one in survivors:
        print(f"    {one.name}: {one.what}")
    return len(survivors) > len(every) - LEAST_CAUGHT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
