"""A process that judges cases, so that a crash or a hang is a finding like any other."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from typing import Any

from tilewise_lab.fuzz.case import AnyCase, code
from tilewise_lab.fuzz.judge import Verdict, judge

HANG = 60.0  # seconds after which a call is given up
END = 2.0  # seconds in which it ends by itself
START = 180.0  # seconds in which a process must have imported torch


class Child:
    """Judges cases in a process of its own, which is started again after a crash or a hang."""

    def __init__(self, hang: float = HANG) -> None:
        self.hang = hang
        self.process: Any = None
        self.pipe: Any = None

    def __call__(self, case: AnyCase) -> Verdict:
        if self.process is None:
            self._start()
        self.pipe.send(case)
        try:
            if self.pipe.poll(self.hang):
                return Verdict(*self.pipe.recv())
            verdict = Verdict("hang", "hang", f"no answer after {self.hang:.0f} s", code(case))
        except (EOFError, ConnectionError):
            self.process.join()
            verdict = Verdict("crash", "crash", f"the process died, exit status {self.process.exitcode}", code(case))
        self.close()
        return verdict

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        if not self.pipe.poll(START):
            raise TimeoutError("the process that runs the cases does not start")
        self.pipe.recv()

    def close(self) -> None:
        if self.process is not None:
            self.pipe.close()  # upon which it ends, and cleans up after itself, unless it hangs
            self.process.join(END)
            self.process.kill()
            self.process.join()
            self.process = None


def _serve(pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tilewise_lab import interpreter

        interpreter.teach_bfloat16()
        interpreter.patch_once_per_launch()
    pipe.send("ready")
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        try:
            verdict = judge(case)
        except Exception:
            verdict = Verdict("judge", "the judge failed", traceback.format_exc(limit=-4), code(case))
        pipe.send(tuple(verdict))
