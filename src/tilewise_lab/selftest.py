"""`tilewise selftest`: is tilewise right on this machine, and how fast beside torch's own attention? In two minutes,
with a report to paste into an issue, or into the table of docs/compatibility.md.

The calls are the fuzzer's, always the same ones, judged as the fuzzer does: against float64, with errors of at most
twice those of torch in the same dtype, plus the rounding of intermediate results.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilewise.backends.registry import NAMES
from tilewise.errors import AttentionError
from tilewise_lab import asked
from tilewise_lab.bench import machine
from tilewise_lab.clock import Clock, CpuClock, CudaClock
from tilewise_lab.demo.measure import Results, Setting, load, ours, sdpa
from tilewise_lab.fuzz.case import AnyCase
from tilewise_lab.fuzz.child import Child
from tilewise_lab.fuzz.draw import Where
from tilewise_lab.fuzz.search import case_of
from tilewise_lab.progress import Show, progress

SEED = 1
OF_CALLS = 0.7  # of the time; the rest is for speed
LENGTHS = {"cpu": (256, 1024, 2048), "cuda": (1024, 4096, 16384)}
PASSES = ("forward", "forward and backward")
COLUMNS = ("device", "tilewise", "torch", "Triton", "Python", "calls right", "speed beside SDPA", "date")


@dataclass(frozen=True)
class Wrong:
    """A call that did not give a right answer: the number of its case, what is wrong, and its lines."""

    number: int
    kind: str
    words: str
    code: str


@dataclass(frozen=True)
class Speed:
    """Median milliseconds of causal attention, and the median of SDPA's time divided by ours, taken in turns."""

    what: str
    shape: tuple[int, int, int, int]
    ours: float
    sdpa: float
    ratio: float


@dataclass
class Report:
    """What was found. `asked`: how many calls there should have been; if fewer ran, the time was spent. `refused`: how
    many the backend does not support, as docs/compatibility.md says."""

    facts: dict[str, Any]
    backend: str
    asked: int
    right: int = 0
    refused: int = 0
    wrong: list[Wrong] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def calls(self) -> int:
        return self.right + self.refused + len(self.wrong)

    def mean(self, what: str) -> float:
        """The geometric mean of the ratios of a pass."""
        return math.exp(statistics.fmean(math.log(x.ratio) for x in self.speeds if x.what == what))

    def row(self) -> str:
        """The line of the table in docs/compatibility.md."""
        facts = self.facts
        speed = ", ".join(f"{self.mean(what):.2f} {what}" for what in PASSES) if self.speeds else "not measured"
        if facts["busy"]:
            speed += " (the machine was busy)"
        cells = (
            facts["device"], facts["tilewise"], facts["torch"], facts["triton"] or "none", facts["python"],
            f"{self.right} of {self.calls - self.refused}", speed, facts["date"].partition(" ")[0],
        )  # fmt: skip
        return f"| {' | '.join(map(str, cells))} |"

    def lines(self) -> Iterator[str]:
        yield "```text"
        yield from (f"{name}: {value}" for name, value in self.facts.items() if value is not None)
        yield f"backend: {self.backend}"
        kinds = f"{self.right} right, {len(self.wrong)} wrong, {self.refused} refused"
        yield f"calls: {self.calls} of {self.asked}: {kinds}"
        yield f"seconds: {self.seconds:.0f}"
        for x in self.speeds:
            yield f"{x.what}, causal, {x.shape}: {x.ours:.2f} ms, SDPA {x.sdpa:.2f} ms, ratio {x.ratio:.2f}"
        for bad in self.wrong:
            yield f"\ncase {bad.number}, {bad.kind}: {bad.words}\n{bad.code}"
        yield "```"
        yield "\nFor docs/compatibility.md:\n"
        yield f"| {' | '.join(COLUMNS)} |"
        yield f"|{'---|' * len(COLUMNS)}"
        yield self.row()


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=120.0, help="how long at most (default: %(default)g)")
    parser.add_argument("--calls", type=int, default=40, help="how many calls are checked (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--backend", choices=NAMES, default="auto", help="default: %(default)s")
    parser.add_argument(
        "--json", type=Path, default=Path("tilewise-selftest.json"), help="a file for the report (default: %(default)s)"
    )


def run(options: Namespace) -> int:
    device = asked.device(options.device)
    asked.place(options.json, "--json")
    where = Where(options.backend, device.type)
    if where.interpreted:
        raise AttentionError("--backend", "'triton' on a CPU", "a GPU; for Triton's interpreter: tilewise fuzz")
    for name in ("seconds", "calls"):
        if getattr(options, name) <= 0:
            raise AttentionError(f"--{name}", getattr(options, name), "more than 0")
    began = time.monotonic()
    busy = Results(Setting.choose(device), load=load()).busy
    report = Report(machine.facts(device) | {"busy": busy or None}, options.backend, options.calls)
    with progress() as show:
        check(report, where, began + OF_CALLS * options.seconds, show)
        measure(report, device, began + options.seconds, show)
    report.seconds = time.monotonic() - began
    options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    print("\n".join(report.lines()))
    print(f"\nwrote {options.json}")
    return 1 if report.wrong or not report.right else 0


def cases(where: Where) -> Iterator[tuple[int, AnyCase]]:
    """The fuzzer's calls that are meant to be right, with their numbers."""
    number = 0
    while True:
        case = case_of(SEED, number, where)
        if not case.bad:
            yield number, case
        number += 1


def check(report: Report, where: Where, until: float, show: Show) -> None:
    """Judges the calls, each in a process that may crash or hang, until all are judged or the time is spent."""
    judge = Child()
    try:
        for number, case in cases(where):
            if report.calls == report.asked or (report.calls and time.monotonic() > until):
                return
            show(f"calls against float64, {len(report.wrong)} wrong", report.calls, report.asked)
            verdict = judge(case)
            if verdict.is_finding:
                report.wrong.append(Wrong(number, verdict.kind, verdict.words, verdict.code))
            elif verdict.kind == "refused":
                report.refused += 1
            else:
                report.right += 1
    finally:
        judge.close()


def measure(report: Report, device: torch.device, until: float, show: Show) -> None:
    """Times causal attention and SDPA in turns, at three lengths, with and without the backward."""
    setting = Setting.choose(device)
    clock: Clock = CudaClock(device) if device.type == "cuda" else CpuClock()
    jobs = [(n, what) for n in LENGTHS[device.type] for what in PASSES]
    for done, (n, what) in enumerate(jobs):
        show(f"{what}, {n} tokens", done, len(jobs))
        shape = (1, n, setting.heads, setting.head_dim)
        backward = what != "forward"
        inputs = [torch.randn(shape, device=device, dtype=setting.dtype, requires_grad=backward) for _ in range(3)]
        grad = torch.randn(shape, device=device, dtype=setting.dtype)

        def once(attend: Any, inputs: list[torch.Tensor], grad: torch.Tensor | None) -> None:
            out = attend(*inputs)
            if grad is not None:
                torch.autograd.grad(out, inputs, grad)

        pair = [partial(once, f, inputs, grad if backward else None) for f in (ours, sdpa)]
        for work in pair:  # compiles
            work()
        share = max(0.0, until - time.monotonic()) / (len(jobs) - done)
        times: list[list[float]] = []
        end = time.monotonic() + share
        while not times or (len(times) < 100 and time.monotonic() < end):
            times.append(clock.start(pair)())
        a, b = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(theirs / mine for mine, theirs in times)
        report.speeds.append(Speed(what, shape, 1e3 * a, 1e3 * b, ratio))
