"""How it is measured: bursts on a clock, rounds in shuffled order, ceilings beside them, and what the GPU reports.

A GPU under attention runs at its power limit, and its clock drifts by a tenth within minutes. So nobody is timed alone:
in each round everybody has one burst of calls, in random order, and only ratios within a round are compared.
"""

from __future__ import annotations

import csv
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[], Any]
MOST_REPEATS = 500
LEAST_ROUNDS = 3


class Clock(Protocol):
    def burst(self, work: Work, repeats: int) -> float:
        """Seconds per call, over so many calls in a row, each with a cold cache."""


class CpuClock:
    def __init__(self) -> None:
        self.cache = torch.zeros(2**23)  # 32 MiB, more than the cache of most

    def burst(self, work: Work, repeats: int) -> float:
        total = 0.0
        for _ in range(repeats):
            self.cache.add_(1)
            began = time.perf_counter()
            work()
            total += time.perf_counter() - began
        return total / repeats


class CudaClock:
    """One pair of events per call. Emptying the cache first also lets the host queue calls ahead of the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size: int = torch.cuda.get_device_properties(device).L2_cache_size
        self.cache = torch.empty(2 * size, dtype=torch.int8, device=device)

    def burst(self, work: Work, repeats: int) -> float:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for _ in range(8):
            self.cache.zero_()
        for start, end in events:
            self.cache.zero_()
            start.record()
            work()
            end.record()
        torch.cuda.synchronize(self.device)
        milliseconds: float = sum(start.elapsed_time(end) for start, end in events)
        return milliseconds / repeats / 1e3


class HostClock:
    """The time a call keeps the caller, whatever the device still has to do."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def burst(self, work: Work, repeats: int) -> float:
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        seconds = time.perf_counter() - began
        synchronize(self.device)
        return seconds / repeats


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rounds(
    works: Mapping[str, Work], clock: Clock, *, count: int, burst: float, limit: float, rng: random.Random
) -> dict[str, list[float]]:
    """Seconds per call, one number per round: each round gives every work one burst of about `burst` seconds.

    Past `limit` seconds no new round begins, once there are enough for a median.
    """
    began = time.monotonic()
    repeats = {}
    for name, work in works.items():
        seconds = clock.burst(work, 1)
        repeats[name] = min(MOST_REPEATS, max(1, round(burst / seconds)))
    times: dict[str, list[float]] = {name: [] for name in works}
    for done in range(count):
        if done >= LEAST_ROUNDS and time.monotonic() - began > limit:
            break
        order = list(works)
        rng.shuffle(order)
        for name in order:
            times[name].append(clock.burst(works[name], repeats[name]))
    return times


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
