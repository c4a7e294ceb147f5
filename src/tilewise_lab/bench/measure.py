"""How it is measured: calls on a clock, rounds in shuffled order, ceilings beside them, and what the GPU reports.

A GPU under attention runs at its power limit: its clock drifts by a tenth within minutes, and for some milliseconds
after a hungry kernel it is lower than after a copy. So nobody is timed alone, nor for long at a time: a round calls
everybody in turn, again and again, in an order shuffled for each pass, and only times of one round are compared.
"""

from __future__ import annotations

import csv
import gc
import math
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[], Any]
MOST_PASSES = 500
LEAST_ROUNDS = 3
HEAD_START = 32  # writes of the cache, about a millisecond, while the host queues the first calls


class Clock(Protocol):
    def start(self, calls: Sequence[Work]) -> Callable[[], list[float]]:
        """Begin these calls, one behind the other; the result, when it is asked for, is the seconds of each."""


class CpuClock:
    def __init__(self) -> None:
        self.cache = torch.zeros(2**23)  # 32 MiB, more than the cache of most

    def start(self, calls: Sequence[Work]) -> Callable[[], list[float]]:
        found = []
        for work in calls:
            self.cache.add_(1)
            began = time.perf_counter()
            work()
            found.append(time.perf_counter() - began)
        return lambda: found


class CudaClock:
    """A pair of events around each call, the cache emptied before it.

    Nothing waits until the result is asked for: the host queues one call behind the other, so the device never idles
    and no call is measured while the host is still launching it.
    """

    def __init__(self, device: torch.device) -> None:
        size: int = torch.cuda.get_device_properties(device).L2_cache_size
        self.cache = torch.empty(2 * size, dtype=torch.int8, device=device)

    def start(self, calls: Sequence[Work]) -> Callable[[], list[float]]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
        for _ in range(HEAD_START):
            self.cache.zero_()
        for work, (begin, end) in zip(calls, events, strict=True):
            self.cache.zero_()
            begin.record()
            work()
            end.record()

        def result() -> list[float]:
            events[-1][1].synchronize()
            return [begin.elapsed_time(end) / 1e3 for begin, end in events]

        return result


class HostClock:
    """The time a call keeps the caller, whatever the device still has to do."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, calls: Sequence[Work]) -> Callable[[], list[float]]:
        found = []
        for work in calls:
            synchronize(self.device)
            began = time.perf_counter()
            work()
            found.append(time.perf_counter() - began)
        return lambda: found


class StepClock:
    """What a training loop sees: a few steps in a row, the device waited for before the first and after the last."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.in_a_row = device, 3 if device.type == "cuda" else 1

    def start(self, calls: Sequence[Work]) -> Callable[[], list[float]]:
        found = []
        for work in calls:
            synchronize(self.device)
            began = time.perf_counter()
            for _ in range(self.in_a_row):
                work()
            synchronize(self.device)
            found.append((time.perf_counter() - began) / self.in_a_row)
        return lambda: found


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def nothing() -> None:
    pass


def rounds(
    works: Mapping[str, Work],
    clock: Clock,
    *,
    count: int,
    burst: float,
    limit: float,
    rng: random.Random,
    least: int = 1,
    after_each: Work = nothing,
) -> dict[str, list[float]]:
    """Seconds per call, one number per round: the mean of the middle half of its passes, each of which calls everybody.

    A round has so many passes that a work has `burst` seconds of it, on average, and at least `least`. Past `limit`
    seconds no new round begins, once there are enough for a median.
    """
    began = time.monotonic()
    one_pass = sum(clock.start(list(works.values()))())
    if one_pass < 1.0:  # the first pass warms up; of long calls it tells enough
        one_pass = sum(clock.start(list(works.values()))())
    passes = min(MOST_PASSES, max(least, math.ceil(burst * len(works) / one_pass)))
    times: dict[str, list[float]] = {name: [] for name in works}
    for done in range(count):
        if done >= LEAST_ROUNDS and time.monotonic() - began > limit:
            break
        order = [name for _ in range(passes) for name in rng.sample(list(works), len(works))]
        found: dict[str, list[float]] = {name: [] for name in works}
        gc.disable()  # a collection while the host queues would leave the device waiting
        for name, seconds in zip(order, clock.start([works[name] for name in order])(), strict=True):
            found[name].append(seconds)
        gc.enable()
        for name in works:
            times[name].append(middle(found[name]))
        after_each()
    return times


def middle(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter.

    >>> middle([1.0, 9.0, 2.0, 3.0])
    2.5
    """
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


@dataclass(frozen=True)
class Ceiling:
    """Something as fast as the machine can: operations of a matmul, bytes read and written by a copy."""

    name: str
    work: Work
    amount: float
    unit: str


def ceilings(device: torch.device, dtype: torch.dtype) -> list[Ceiling]:
    n, size = (8192, 2**30) if device.type == "cuda" else (768, 2**25)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    c = torch.empty_like(a)
    source = torch.randint(-128, 127, (size,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)

    def multiply() -> Tensor:
        return torch.mm(a, b, out=c)

    def copy() -> Tensor:
        return target.copy_(source)

    return [Ceiling("matmul", multiply, 2.0 * n**3, "FLOP"), Ceiling("copy", copy, 2.0 * size, "byte")]


SENSORS = {"sm_mhz": "clocks.sm", "watts": "power.draw", "celsius": "temperature.gpu"}


@dataclass
class Sensors:
    """Clock, power and temperature, sampled by nvidia-smi while the rounds run."""

    samples: list[tuple[float, list[float]]] = field(default_factory=list)

    def since(self, began: float) -> dict[str, list[float]]:
        """Least, median and largest of each since a moment of time.monotonic()."""
        rows = [values for at, values in self.samples if at >= began]
        if not rows:
            return {}
        columns = zip(*rows, strict=True)
        return {
            name: [min(column), statistics.median(column), max(column)]
            for name, column in zip(SENSORS, columns, strict=True)
        }

    def read(self, lines: Iterator[str]) -> None:
        for row in csv.reader(lines):
            try:
                self.samples.append((time.monotonic(), [float(value) for value in row]))
            except ValueError:  # "[N/A]": this GPU does not tell
                continue


@contextmanager
def sensors(device: torch.device, every: float = 0.25) -> Iterator[Sensors]:
    found = Sensors()
    command = ["-lms", str(int(1e3 * every)), f"--query-gpu={','.join(SENSORS.values())}"]
    process = nvidia_smi(device, *command) if device.type == "cuda" else None
    if process is None:
        yield found
        return
    assert process.stdout is not None
    reader = threading.Thread(target=found.read, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        yield found
    finally:
        process.kill()
        reader.join()


def nvidia_smi(device: torch.device, *command: str) -> subprocess.Popen[str] | None:
    uuid = torch.cuda.get_device_properties(device).uuid
    try:
        return subprocess.Popen(
            ["nvidia-smi", "-i", f"GPU-{uuid}", "--format=csv,noheader,nounits", *command],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
    except OSError:
        return None
