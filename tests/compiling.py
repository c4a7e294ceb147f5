"""Compiles kernels in a process whose Triton is the compiler's: the tests' own process may have the interpreter."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from tests.forks import ROOT, environment, python

REPORT = "report: "  # begins the lines of `answer`: compilers print, too


def reports(module: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a module prints, a line of JSON each, for rows on its standard input."""
    done = python("-m", module, input=json.dumps(rows))
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


class Compiler:
    """A process that runs a module whose main is `answer`. It compiles many calls: its imports take seconds."""

    def __init__(self, module: str, triton: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(triton),
            cwd=ROOT,
        )
        atexit.register(self.process.communicate)

    def report(self, call: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        with suppress(BrokenPipeError):  # the process has ended; its errors say why
            print(json.dumps(call), file=self.process.stdin, flush=True)
        lines = []
        for line in self.process.stdout:
            if line.startswith(REPORT):
                found: dict[str, Any] = json.loads(line.removeprefix(REPORT))
                return found
            lines.append(line)
        compiler.cache_clear()  # the next call starts another process
        raise AssertionError("".join(lines)[-3000:])


@cache
def compiler(module: str, triton: str = "") -> Compiler:
    return Compiler(module, triton)


def answer(main: Callable[..., dict[str, Any]]) -> None:
    """Prints main(**call) for each call on standard input, a line of JSON each."""
    for line in sys.stdin:
        print(REPORT + json.dumps(main(**json.loads(line))), flush=True)
