"""Measurements within a time: every case in a process of its own, prepared side by side, measured one after the other.

    def prepare(case: str) -> Callable[[], list[Row]]: ...      # builds, compiles, compares; at the top of its module
    if __name__ == "__main__":
        main(__doc__, "flex", prepare, CASES)

Most of what a first call takes is compilers, which know nothing of each other: side by side they take as long as the
slowest. Only who is ready is measured, alone; who fails, crashes or is late is named in the table and stops nobody.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tilewise_lab.bench.machine import facts, slug
from tilewise_lab.progress import progress

Row = dict[str, Any]
Prepare = Callable[[str], Callable[[], list[Row]]]
OURS = "tilewise"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = DEVICE.type == "cpu"  # to see that it runs
RESULTS = Path(__file__).parent / "results"


def row(what: str, times: dict[str, float], **more: Any) -> Row:
    """Milliseconds of everyone, and how many times as fast as the best of the others we are."""
    others = {name: ms for name, ms in times.items() if name != OURS}
    best = min(others, key=others.__getitem__) if others else None
    return {"what": what, "ms": times, "best": best, "ratio": times[best] / times[OURS] if best else None, **more}


@dataclass
class Child:
    name: str
    process: BaseProcess
    pipe: Connection
    ready_after: float | None = None
    state: str = "preparing"  # then ready, measuring, done
    rows: list[Row] = field(default_factory=list)
    why: str | None = None

    def hear(self, began: float) -> None:
        try:
            word, found = self.pipe.recv()
        except EOFError:
            self.process.join(5)
            self.state, self.why = "done", f"the process ended with {self.process.exitcode}"
            return
        if word == "ready":
            self.state, self.ready_after = "ready", time.monotonic() - began
        elif word == "rows":
            self.state, self.rows = "done", found
        else:
            self.state, self.why = "done", found


def child(prepare: Prepare, case: str, pipe: Connection) -> None:
    try:
        measure = prepare(case)
        pipe.send(("ready", None))
        pipe.recv()
        pipe.send(("rows", measure()))
    except Exception as error:  # whatever it is, it belongs into the table
        traceback.print_exc()
        pipe.send(("failed", f"{type(error).__name__}: {error}"[:300]))


def measure(prepare: Prepare, cases: Sequence[str], seconds: float, kept: Callable[[list[Child]], None]) -> list[Child]:
    """Past 0.7 of the time those who are ready are measured without waiting for the rest; at the end all are ended."""
    context, began = get_context("spawn"), time.monotonic()
    children = []
    for name in cases:
        here, there = context.Pipe()
        process = context.Process(target=child, args=(prepare, name, there), daemon=False)
        process.start()
        there.close()
        children.append(Child(name, process, here))
    with progress() as show:
        while (left := began + seconds - time.monotonic()) > 0 and (
            at_work := [c for c in children if c.state != "done"]
        ):
            if not any(c.state == "measuring" for c in at_work):
                ready = [c for c in at_work if c.state == "ready"]
                if ready and (len(ready) == len(at_work) or left < 0.3 * seconds):
                    ready[0].state = "measuring"
                    ready[0].pipe.send("go")
            for heard in wait([c.pipe for c in at_work], timeout=min(left, 1.0)):
                next(c for c in at_work if c.pipe is heard).hear(began)
            kept(children)
            done = sum(c.state == "done" for c in children)
            show(", ".join(f"{c.name} {c.state}" for c in at_work), done, len(children))
    for c in children:
        if c.state != "done":
            c.why = f"still {c.state} after {seconds:.0f} s"
            c.process.kill()
        c.process.join(10)
    return children


def table(children: Sequence[Child]) -> str:
    """Markdown; a bar is told where the case names one."""
    lines = ["| what | tilewise ms | best of the others | times as fast | bar | peak MiB: tilewise, best | away |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    for c in children:
        for r in c.rows:
            ms, best, peak = r["ms"], r["best"], r.get("peak_mib", {})
            bar = r.get("bar")
            cells = [
                r["what"],
                f"{ms[OURS]:.3f}",
                f"{best} {ms[best]:.3f}" if best else "nobody",
                f"{r['ratio']:.2f}" if best else "",
                "" if SMALL or bar is None or best is None else f"{bar:.2f} {'met' if r['ratio'] >= bar else 'MISSED'}",
                f"{peak[OURS]:.0f}, {peak[best]:.0f}" if best in peak and OURS in peak else "",
                ", ".join(f"{name} {x:.1e}" for name, x in r.get("away", {}).items()),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| {c.name} | not measured: {c.why} | | | | | |" for c in children if c.why]
    for c in children:
        for r in c.rows:
            lines += [f"{r['what']}: {name} refused: {why}" for name, why in r.get("refused", {}).items()]
    return "\n".join(lines)


def main(doc: str, name: str, prepare: Prepare, cases: Sequence[str], versions: dict[str, str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of: {', '.join(cases)}; all if none is named")
    parser.add_argument("--seconds", type=float, default=95, help="what is not measured by then is not measured")
    parser.add_argument("--keep", action="store_true", help=f"write DATE-DEVICE-{name}.json to bench/results")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="a folder for the same file (or OUT)")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(cases):
        parser.error(f"{', '.join(sorted(unknown))}: not of {', '.join(cases)}")
    machine = facts(DEVICE) | (versions or {})
    folders = [RESULTS] * args.keep + ([Path(args.out)] if args.out else [])
    file = f"{machine['date'][:10]}-{slug(machine['device'])}-{name}.json"

    def keep(children: list[Child]) -> None:
        """After every step, for whatever ends the run must not take what was measured with it."""
        found = {c.name: {"ready_after_s": c.ready_after, "rows": c.rows, "why_not": c.why} for c in children}
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(json.dumps({"machine": machine, "cases": found}, indent=1) + "\n")

    began = time.monotonic()
    children = measure(prepare, args.cases or list(cases), args.seconds, keep)
    keep(children)
    took = f"{time.monotonic() - began:.0f} s, of which preparing {max(c.ready_after or 0 for c in children):.0f} s"
    print(
        f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, commit {machine['commit']}; {took}"
    )
    print(table(children), flush=True)
