"""How it is measured: rounds in shuffled order, ceilings beside them, and what the GPU reports.

A GPU under attention runs at its power limit: its clock drifts by a tenth within minutes, and for some milliseconds
after a hungry kernel it is lower than after a copy. So no provider is timed alone: a round calls all of them
in turn, many times, in an order shuffled for each pass, and only times of one round are compared.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewise_lab.clock import Clock, Work

MOST_PASSES = 500
LEAST_ROUNDS = 3


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
    """Seconds per call, one number per round: the mean of the middle half of its passes, which call all works.

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
