"""What a user sees of attention: a layer, a GPT's training step, memory, and what a call keeps the host."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilewise_lab.bench import machine, models
from tilewise_lab.bench.cases import Case, Inputs
from tilewise_lab.bench.judge import BUDGET, Error, Judge, condemn, note
from tilewise_lab.bench.provider import OURS, Attention, Provider, Tilewise
from tilewise_lab.bench.results import Cell, Peak
from tilewise_lab.bench.runner import Run
from tilewise_lab.bench.settings import Model
from tilewise_lab.clock import Clock, HostClock, StepClock, Work, synchronize
from tilewise_lab.demo.measure import peak

TINY = Case(1, 64, 1, 1, 64, True)
HOST_PEERS = ("flash-attn", "fa3", "fa4")
HOST_CALLS = 50
# what one call is: what the overhead's cell is called
CALLS = {"forward": "", "recorded": ", forward that wants a gradient", "step": ", forward and backward"}


def layer(run: Run) -> Iterator[Cell]:
    size, dtype = run.settings.layer, getattr(torch, run.settings.dtype)
    ours = {provider.name: bound(run, provider, case_of(size)) for provider in usual(run)}
    make = partial(models.layer_steps, size, ours, ours["naive"], run.device, dtype)
    yield model(run, "layer", size, make)


def gpt(run: Run, size: Model, mode: str) -> Iterator[Cell]:
    case, dtype = case_of(size), getattr(torch, run.settings.dtype)
    others = [x for x in run.roster.taking_part() if x.name in HOST_PEERS and not run.missing[x.name]]
    ours = {provider.name: bound(run, provider, case) for provider in [*usual(run)[:2], *others]}
    naive = bound(run, run.roster.known["naive"], case)
    make = partial(models.gpt_steps, size, ours, naive, run.device, dtype, mode)
    yield model(run, f"gpt {mode}", size, make, StepClock(run.device))
    torch.compiler.reset()


def case_of(size: Model) -> Case:
    return Case(size.batch, size.seq, size.heads, size.heads, size.hidden // size.heads, True)


def usual(run: Run) -> list[Provider]:
    """tilewise and torch as users call them, with their own choice of backend; and the textbook."""
    return [Tilewise(OURS, "tilewise"), run.roster.known["sdpa"], run.roster.known["naive"]]


def bound(run: Run, provider: Provider, case: Case) -> Attention:
    return provider.bind(case, Inputs(*(torch.empty(0, device=run.device) for _ in range(4))))


def model(
    run: Run,
    group: str,
    size: Model,
    make: Callable[[], tuple[dict[str, models.Step], models.Step, models.Step]],
    clock: Clock | None = None,
) -> Cell:
    """Every step checked, timed, and checked again."""
    steps, usual, exact = make()
    truth = list(exact())
    off = models.distance(usual(), truth)
    assert off is not None
    limit = BUDGET * off
    del usual, exact
    run.tidy()
    entries, works = {}, {}
    for contender, step in steps.items():
        start = time.perf_counter()
        entry, found = run.attempt(step)
        entries[contender] = entry
        if found is None:
            continue
        synchronize(run.device)
        entry.first = round(time.perf_counter() - start, 4)
        errors = {"all": Error(models.distance(found, truth), limit)}
        note(entry, errors)
        condemn(entry, errors)
        if entry.status == "ok":
            works[contender] = step
    cell = Cell(
        group, size.name, {}, models.flops(size), OURS, entries, checked="all outputs and gradients, by their norm"
    )
    run.time(cell, works, clock=clock)
    for contender, step in works.items():
        errors = {"all": Error(models.distance(step(), truth), limit)}
        note(entries[contender], errors)
        condemn(entries[contender], errors, "after the rounds: ")
    works.clear()
    steps.clear()
    run.tidy()
    return cell


def memory(run: Run, length: int) -> Iterator[Peak]:
    case = replace(run.settings.memory, seq=length)
    leaves = case.inputs(run.device, run.settings.seed).leaves()

    def work(attention: Attention) -> None:
        torch.autograd.grad(attention(*leaves[:3]), leaves[:3], leaves.dout)

    def measured(provider: Provider) -> int:
        return peak(partial(work, bound(run, provider, case)), run.device)

    for provider in usual(run):
        entry, most = run.attempt(partial(measured, provider))
        if entry.status in ("ok", "out of memory"):
            yield Peak(provider.name, length, most)
    run.tidy()


def overhead(run: Run, notes: dict[str, Any]) -> Iterator[Cell]:
    """Calls so small that the host is all they cost: without a gradient, with one to come, and with it."""
    case = replace(TINY, dtype=run.settings.dtype)
    x = case.inputs(run.device, run.settings.seed)
    judge = Judge(case, x, 1)
    callers = usual(run)[:2] + [provider for provider in run.roster.taking_part() if provider.name in HOST_PEERS]
    for which, words in CALLS.items():
        entries, works = {}, {}
        for provider in callers:
            run.missing.setdefault(provider.name, provider.missing(run.device))
            entries[provider.name], work = run.admit(provider, case, which, x, judge)
            if work is not None:
                works[provider.name] = work
        cell = Cell("overhead", case.key + words, asdict(case), None, OURS, entries, checked=judge.checked)
        run.time(cell, {name: partial(_repeat, work) for name, work in works.items()}, clock=HostClock(run.device))
        for name in works:
            entries[name].times = [float(f"{t / HOST_CALLS:.5g}") for t in entries[name].times]
        if which == "forward":
            notes["profiler_us"] = {name: round(profiled(work, run.device), 2) for name, work in works.items()}
        yield cell
    notes.update(importing())


def _repeat(work: Work) -> None:
    for _ in range(HOST_CALLS):
        work()


def profiled(work: Callable[[], Any], device: torch.device, calls: int = 100) -> float:
    """Microseconds of host time per call as torch's profiler sees them, its own cost included."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            with torch.profiler.record_function("one call"):
                work()
    synchronize(device)
    (found,) = (event for event in profile.key_averages() if event.key == "one call")
    return float(found.cpu_time_total) / calls


IMPORT = """
import sys, time, torch
before, began = "triton" in sys.modules, time.perf_counter()
import tilewise
print(time.perf_counter() - began, not before and "triton" in sys.modules)
"""


def importing(times: int = 3) -> dict[str, Any]:
    """What `import tilewise` adds to `import torch`, in fresh processes."""
    command, here = [sys.executable, "-c", IMPORT], Path(machine.__file__).parents[2]
    said = [
        subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(times)
    ]
    seconds = statistics.median(float(words[0]) for words in said)
    return {"import_ms": round(1e3 * seconds, 2), "import_brings_triton": said[0][1] == "True"}
