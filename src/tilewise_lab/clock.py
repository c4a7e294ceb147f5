"""Clocks: calls one behind the other, and the seconds of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Work = Callable[[], Any]
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
