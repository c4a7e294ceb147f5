"""The run: every case checked, then timed; every result handed on as soon as it is there."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tilewise.errors import AttentionError
from tilewise_lab.bench import machine
from tilewise_lab.bench.cases import Case, Inputs
from tilewise_lab.bench.judge import Judge, condemn, note
from tilewise_lab.bench.measure import Ceiling, Sensors, ceilings, nothing, rounds
from tilewise_lab.bench.provider import Answer, Provider, RefusedError, auto, first_line
from tilewise_lab.bench.providers import Roster
from tilewise_lab.bench.results import Cell, Entry, Results
from tilewise_lab.bench.settings import Settings
from tilewise_lab.clock import Clock, Work, clock_for, synchronize


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

    def time(
        self, cell: Cell, works: Mapping[str, Work], after_each: Work = nothing, clock: Clock | None = None
    ) -> None:
        """Rounds of all providers and of the ceilings. Times on another clock have no ceilings."""
        if not works:
            return
        if clock is not None:
            for name, found in self.rounds(works, clock, after_each).items():
                cell.entries[name].times = [_short(t) for t in found]
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

    def tidy(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class Kept:
    """A call that keeps its first answer and its last."""

    def __init__(self, work: Answer) -> None:
        self.work = work
        self.first = self.last = work()

    def __call__(self) -> None:
        self.last = self.work()


def _short(seconds: float) -> float:
    return float(f"{seconds:.5g}")
