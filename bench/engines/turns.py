"""Engines that run in turns: each in a process of its own, told by files in a folder when it may run.

A worker calls `ready`, then `wait_for_turn(n)` and `done(n)` for every turn. The parent starts all workers, and gives
turns to those that may run at the same time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from vllm_engine import say, wait_for


def spawn(script: str, words: list[str], env: dict[str, str], folder: Path, log: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, script, "--folder", str(folder), *words]
    with open(folder / log, "w") as f:
        return subprocess.Popen(command, env=env, stdout=f, stderr=subprocess.STDOUT, start_new_session=True)


def finish(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """The exit code of a process; None if it was ended at the deadline. Its own children are ended with it."""
    code = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(max(0.1, deadline - time.monotonic()))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return code


def tail(path: Path, lines: int) -> str:
    return "\n".join(x[:300] for x in path.read_text(errors="replace").splitlines()[-lines:])


class Worker:
    """The side of the engine: `name` is that of its files."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def ready(self) -> None:
        (self.folder / f"{self.name}.ready").touch()

    def wait_for_turn(self, n: int) -> None:
        wait_for(self.folder / f"{self.name}.turn{n}")

    def done(self, n: int) -> None:
        (self.folder / f"{self.name}.done{n}").touch()


class Engines:
    """The side of the parent: processes by name. `last` is the number of the last turn."""

    def __init__(self, script: str, folder: Path, last: int) -> None:
        self.script, self.folder, self.last = script, folder, last
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for kind in ("json", "ready", "turn*", "done*"):
            for old in folder.glob(f"*.{kind}"):
                old.unlink()

    def start(self, name: str, words: list[str], env: dict[str, str]) -> None:
        self.processes[name] = spawn(self.script, words, env, self.folder, f"{name}.log")

    def wait(self, what: str, names: list[str], deadline: float) -> None:
        """Until these have a file of this kind, or have ended."""

        def is_waited_for(name: str) -> bool:
            return self.processes[name].poll() is None and not (self.folder / f"{name}.{what}").exists()

        while time.monotonic() < deadline and any(is_waited_for(name) for name in names):
            time.sleep(0.01)

    def drop_late(self) -> list[str]:
        """Ends those that are not ready; returns the others."""
        late = [name for name in self.processes if not (self.folder / f"{name}.ready").exists()]
        for name in late:
            code = self.processes[name].poll()
            say(name, "has not started in time" if code is None else f"failed ({code})")
            print(tail(self.folder / f"{name}.log", 40), flush=True)
            finish(self.processes[name], 0.0)
        return [name for name in self.processes if name not in late]

    def turn(self, n: int, names: list[str], deadline: float) -> None:
        for name in names:
            (self.folder / f"{name}.turn{n}").touch()
        self.wait(f"done{n}", names, deadline)

    def end(self) -> None:
        """Ends all; shows the end of the log of an engine that had not run all of its turns."""
        for name, process in self.processes.items():
            code = process.poll()
            started, done = ((self.folder / f"{name}.{x}").exists() for x in ("ready", f"done{self.last}"))
            if started and not done:
                say(name, "ended at the time limit" if code is None else f"failed ({code}); the log ends with")
                print(tail(self.folder / f"{name}.log", 5 if code is None else 40), flush=True)
            finish(process, 0.0)
