"""The run: every case checked, then timed; every result handed on as soon as it is there."""

from __future__ import annotations

import gc
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilewise.spec import AttentionError
from tilewise_lab.bench import machine, models
from tilewise_lab.bench.cases import PASSES, Case, Inputs
from tilewise_lab.bench.judge import BUDGET, Error, Judge
from tilewise_lab.bench.measure import (
    Ceiling,
    Clock,
    HostClock,
    Sensors,
    Work,
    ceilings,
    clock_for,
    nothing,
    rounds,
    synchronize,
)
from tilewise_lab.bench.providers import (
    OURS,
    Answer,
    Attention,
    Provider,
    RefusedError,
    Roster,
    Tilewise,
    auto,
    first_line,
)
from tilewise_lab.bench.results import Cell, Entry, Peak, Results
from tilewise_lab.bench.settings import CASES, Settings
from tilewise_lab.demo.measure import peak

TINY = Case(1, 64, 1, 1, 64, True)
HOST_PEERS = ("flash-attn", "fa3", "fa4")
HOST_CALLS = 50
Part = Callable[[], Iterator[Cell | Peak]]


@dataclass
class Run:
    settings: Settings
    roster: Roster
    clock: Clock
    sensors: Sensors = field(default_factory=Sensors)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.settings.seed)
        self.missing = {name: provider.missing(self.device) for name, provider in self.roster.known.items()}
        self.limits: list[Ceiling] = []

    @staticmethod
    def of(settings: Settings, roster: Roster, sensors: Sensors) -> Run:
        return Run(settings, roster, clock_for(settings.device), sensors)

    @property
    def device(self) -> torch.device:
        return self.settings.device

    def start(self) -> Results:
        return Results(
            machine=machine.facts(self.device),
            settings=self.settings.recorded(),
            providers={
                name: {
                    "about": provider.about,
                    "version": None if self.missing[name] else provider.version(),
                    "asked": name in self.roster.asked,
                    "missing": self.missing[name],
                }
                for name, provider in self.roster.known.items()
            },
        )

    def parts(self, targets: Sequence[str], results: Results) -> list[tuple[str, Part]]:
        """What there is to do, as (what to call it, the work)."""
        chosen = self.settings
        found: list[tuple[str, Part]] = []
        passes = [which for which in PASSES if which in targets]
        if passes:
            found += [
                (case.key, partial(self.attention, case, dict(zip(passes, passes, strict=True))))
                for case in chosen.grid()
            ]
        for target in targets:
            if target in CASES:
                groups = {which: f"{target} {which}" for which in CASES[target]}
                found += [(case.key, partial(self.attention, case, groups)) for case in getattr(chosen, target)]
            elif target == "layer":
                found.append((target, self.layer))
            elif target == "gpt":
                found += [
                    (f"gpt, {'compiled' if compiled else 'eager'}", partial(self.gpt, compiled))
                    for compiled in ((False, True) if chosen.compiled else (False,))
                ]
            elif target == "memory":
                found += [(f"memory at {n}", partial(self.memory, n)) for n in chosen.memory_lengths]
            elif target == "overhead":
                found.append((target, partial(self.overhead, results.notes)))
        return found

    def attention(self, case: Case, groups: Mapping[str, str]) -> Iterator[Cell]:
        """Check every provider on the very call that is timed, time the right ones, check the calls that were timed.

        The last answer of every round is compared with the first one, all of it; the last of all with float64 again.
        """
        x = case.inputs(self.device, self.settings.seed)
        judge = Judge(case, x, self.settings.samples, self.settings.seed)
        for which, group in groups.items():
            entries: dict[str, Entry] = {}
            works: dict[str, Kept] = {}
            for provider in self.roster.taking_part():
                entries[provider.name], work = self.admit(provider, case, which, x, judge)
                if work is not None:
                    works[provider.name] = work
            cell = Cell(group, case.key, asdict(case), case.flops(which), self.auto(case, x), entries)
            cell.checked = judge.checked

            def look_again(entries: dict[str, Entry] = entries, works: dict[str, Kept] = works) -> None:
                for name, work in works.items():
                    moved = judge.changes(work.first, work.last, same_bits=case.deterministic)
                    condemn(entries[name], moved, "in the rounds: ")

            self.time(cell, works, look_again)
            for name, work in works.items():
                note(entries[name], judge.errors(work.last))
                condemn(entries[name], judge.errors(work.last), "in the last round: ")
            yield cell
            works.clear()
            self.tidy()

    def auto(self, case: Case, x: Inputs) -> str | None:
        try:
            return auto(case, x)
        except AttentionError:
            return None

    def admit(self, provider: Provider, case: Case, which: str, x: Inputs, judge: Judge) -> tuple[Entry, Kept | None]:
        missing = self.missing[provider.name]
        if missing:
            return Entry("missing", missing), None
        refusal = provider.refuses(case, which) or (provider.same_bits(case) if case.deterministic else None)
        if refusal:
            return Entry("refused", refusal), None
        began = time.perf_counter()
        entry, work = self.attempt(lambda: Kept(provider.answer(case, which, x)))
        if work is None:
            return entry, None
        synchronize(self.device)
        entry.first = round(time.perf_counter() - began, 4)
        _, lse = self.attempt(lambda: provider.lse(case, x) if which == "forward" else None)
        shape = (*x.q.shape[:-3], case.heads, x.q.shape[-3])
        has_lse = lse is not None and tuple(lse.shape) == shape
        errors = judge.errors({**work.first, "lse": lse} if has_lse else work.first)
        note(entry, errors)
        condemn(entry, errors)
        return entry, work if entry.status == "ok" else None

    def attempt(self, do: Callable[[], Any]) -> tuple[Entry, Any]:
        """What it gives, or the entry that says why it gives nothing."""
        try:
            return Entry("ok"), do()
        except torch.OutOfMemoryError:
            entry = Entry("out of memory")
        except (RefusedError, AttentionError) as error:
            entry = Entry("refused", str(error))
        except Exception as error:
            if "CUDA error" in str(error):  # the context is lost: nothing after this could be believed
                raise
            entry = Entry("failed", first_line(error))
        self.tidy()
        return entry, None

    def rounds(self, works: Mapping[str, Work], clock: Clock, after_each: Work = nothing) -> dict[str, list[float]]:
        s = self.settings
        return rounds(
            works, clock, count=s.rounds, burst=s.burst, limit=s.limit, rng=self.rng, least=s.passes,
            after_each=after_each,
        )  # fmt: skip

    def time(self, cell: Cell, works: Mapping[str, Work], after_each: Work = nothing) -> None:
        if not works:
            return
        if not self.limits:
            self.limits = ceilings(self.device, getattr(torch, self.settings.dtype))
        everyone = {**works, **{f"ceiling {limit.name}": limit.work for limit in self.limits}}
        began = time.monotonic()
        times = self.rounds(everyone, self.clock, after_each)
        cell.sensors = self.sensors.since(began)
        for name in works:
            if cell.entries[name].status == "ok":
                cell.entries[name].times = [_short(t) for t in times[name]]
        for limit in self.limits:
            found = [_short(t) for t in times[f"ceiling {limit.name}"]]
            cell.ceilings[limit.name] = {"amount": limit.amount, "unit": limit.unit, "times": found}

    def layer(self) -> Iterator[Cell]:
        size, dtype = self.settings.layer, getattr(torch, self.settings.dtype)
        case = Case(size.batch, size.seq, size.heads, size.heads, size.hidden // size.heads, True)
        ours = self.attentions(case)
        make = partial(models.layer_steps, size, ours, ours["naive"], self.device, dtype)
        yield self.model("layer", size.name, models.flops(size), make)

    def gpt(self, compiled: bool) -> Iterator[Cell]:
        size, dtype = self.settings.gpt, getattr(torch, self.settings.dtype)
        case = Case(size.batch, size.seq, size.heads, size.heads, size.hidden // size.heads, True)
        ours = self.attentions(case)
        naive = ours.pop("naive") if compiled else ours["naive"]
        make = partial(models.gpt_steps, size, ours, naive, self.device, dtype, compiled)
        yield self.model(f"gpt {'compiled' if compiled else 'eager'}", size.name, models.flops(size), make)

    def attentions(self, case: Case) -> dict[str, Attention]:
        """tilewise and torch as users call them, with their own choice of backend; and the textbook."""
        return {provider.name: self.bound(provider, case) for provider in self.usual()}

    def usual(self) -> list[Provider]:
        return [Tilewise(OURS, "tilewise"), self.roster.known["sdpa"], self.roster.known["naive"]]

    def bound(self, provider: Provider, case: Case) -> Attention:
        return provider.bind(case, Inputs(*(torch.empty(0, device=self.device) for _ in range(4))))

    def model(
        self,
        group: str,
        name: str,
        flops: float,
        make: Callable[[], tuple[dict[str, models.Step], models.Step, models.Step]],
    ) -> Cell:
        steps, usual, exact = make()
        truth = list(exact())
        off = models.distance(usual(), truth)
        assert off is not None
        limit = BUDGET * off
        del usual, exact
        entries, works = {}, {}
        for contender, step in steps.items():
            start = time.perf_counter()
            entry, found = self.attempt(step)
            entries[contender] = entry
            if found is None:
                continue
            synchronize(self.device)
            entry.first = round(time.perf_counter() - start, 4)
            errors = {"all": Error(models.distance(found, truth), limit)}
            note(entry, errors)
            condemn(entry, errors)
            if entry.status == "ok":
                works[contender] = step
        cell = Cell(group, name, {}, flops, OURS, entries, checked="all outputs and gradients, by their norm")
        self.time(cell, works)
        works.clear()
        steps.clear()
        self.tidy()
        return cell

    def memory(self, length: int) -> Iterator[Peak]:
        case = replace(self.settings.memory, seq=length)
        leaves = case.inputs(self.device, self.settings.seed).leaves()

        def work(attention: Attention) -> None:
            torch.autograd.grad(attention(*leaves[:3]), leaves[:3], leaves.dout)

        def measured(provider: Provider) -> int:
            return peak(partial(work, self.bound(provider, case)), self.device)

        for provider in self.usual():
            entry, most = self.attempt(partial(measured, provider))
            if entry.status in ("ok", "out of memory"):
                yield Peak(provider.name, length, most)
        self.tidy()

    def overhead(self, notes: dict[str, Any]) -> Iterator[Cell]:
        """A call so small that the host is all it costs."""
        case = replace(TINY, dtype=self.settings.dtype)
        x = case.inputs(self.device, self.settings.seed)
        judge = Judge(case, x, 1)
        callers = [Tilewise(OURS, "tilewise"), self.roster.known["sdpa"]]
        callers += [provider for provider in self.roster.taking_part() if provider.name in HOST_PEERS]
        entries, works = {}, {}
        for provider in callers:
            self.missing.setdefault(provider.name, provider.missing(self.device))
            entries[provider.name], work = self.admit(provider, case, "forward", x, judge)
            if work is not None:
                works[provider.name] = work
        cell = Cell("overhead", case.key, asdict(case), None, OURS, entries, checked=judge.checked)
        in_a_row = {name: partial(_repeat, work, HOST_CALLS) for name, work in works.items()}
        times = self.rounds(in_a_row, HostClock(self.device))
        for name in works:
            entries[name].times = [_short(t / HOST_CALLS) for t in times[name]]
        notes["profiler_us"] = {name: round(profiled(work, self.device), 2) for name, work in works.items()}
        notes.update(importing())
        yield cell

    def tidy(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _repeat(work: Work, times: int) -> None:
    for _ in range(times):
        work()


class Kept:
    """A call that keeps its first answer and its last."""

    def __init__(self, work: Answer) -> None:
        self.work = work
        self.first = self.last = work()

    def __call__(self) -> None:
        self.last = self.work()


def note(entry: Entry, errors: Mapping[str, Error]) -> None:
    """Write errors down, the largest of each tensor so far."""
    for name, error in errors.items():
        found, limit = entry.errors.get(name, (0.0, error.limit))
        entry.errors[name] = [None if None in (found, error.found) else max(found or 0.0, error.found or 0.0), limit]


def condemn(entry: Entry, errors: Mapping[str, Error], when: str = "") -> None:
    """A wrong answer loses its status and its times, however many right ones there were."""
    bad = {name: error for name, error in errors.items() if not error.ok}
    if bad and entry.status == "ok":
        words = (
            f"{n} is not finite" if e.found is None else f"{n} is off by {e.found:.1e}, allowed {e.limit:.1e}"
            for n, e in bad.items()
        )
        entry.status, entry.reason, entry.times = "wrong", when + "; ".join(words), []


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


def _short(seconds: float) -> float:
    return float(f"{seconds:.5g}")
