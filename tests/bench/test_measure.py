from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from tilewise.bench import measure
from tilewise.bench.measure import CpuClock, HostClock, Sensors, rounds


class FakeClock:
    """Each work is a number: the seconds it takes."""

    def __init__(self):
        self.bursts = []

    def start(self, work, repeats):
        self.bursts.append((work(), repeats))
        return work


def run(works, count=8, burst=0.1, limit=1e9):
    clock = FakeClock()
    return rounds(works, clock, count=count, burst=burst, limit=limit, rng=random.Random(0)), clock


def test_everyone_has_one_burst_in_each_round():
    times, clock = run({"a": lambda: 0.01, "b": lambda: 0.5})
    assert times == {"a": [0.01] * 8, "b": [0.5] * 8}
    after_calibration = clock.bursts[-16:]
    for n in range(8):
        assert sorted(after_calibration[2 * n : 2 * n + 2]) == [(0.01, 10), (0.5, 1)]


def test_the_order_is_shuffled():
    _, clock = run({name: lambda n=n: 0.01 * (n + 1) for n, name in enumerate("abcd")}, count=12)
    bursts = clock.bursts[-48:]
    orders = {tuple(bursts[n : n + 4]) for n in range(0, 48, 4)}
    assert len(orders) > 3


def test_bursts_are_as_long_as_asked():
    _, clock = run({"tiny": lambda: 1e-9, "slow": lambda: 3.0})
    assert {repeats for seconds, repeats in clock.bursts[-16:] if seconds == 1e-9} == {measure.MOST_REPEATS}
    assert {repeats for seconds, repeats in clock.bursts[-16:] if seconds == 3.0} == {1}


def test_a_round_is_queued_before_anyone_waits():
    events = []

    class Queue:
        def start(self, work, repeats):
            events.append("start")
            return lambda: events.append("wait") or 1.0

    rounds(dict.fromkeys("abc"), Queue(), count=2, burst=1.0, limit=1e9, rng=random.Random(0))
    assert events[6:] == (["start"] * 3 + ["wait"] * 3) * 2


def test_the_limit_ends_it_but_leaves_a_median():
    times, _ = run({"a": lambda: 1.0}, count=100, limit=-1.0)
    assert len(times["a"]) == measure.LEAST_ROUNDS


@pytest.mark.parametrize("clock", [CpuClock(), HostClock(torch.device("cpu"))], ids=["cpu", "host"])
def test_clocks_call_as_often_as_asked(clock):
    calls = []
    assert clock.start(lambda: calls.append(1), 5)() > 0
    assert len(calls) == 5


def test_cuda_events_enclose_each_call_and_not_the_cache(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(log)
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 4.0 if log[self.at : end.at + 1] == ["event", "call", "event"] else float("nan")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = object.__new__(measure.CudaClock)
    clock.cache = SimpleNamespace(zero_=lambda: log.append("empty"))
    result = clock.start(lambda: log.append("call"), 3)
    assert log[measure.HEAD_START :] == ["empty", "event", "call", "event"] * 3
    assert result() == 4e-3
    assert log[-1] == "wait"


def test_sensors_take_the_middle_and_skip_what_is_not_told():
    sensors = Sensors()
    sensors.read(iter(["1000, 700, 60", "[N/A], 1, 2", "1200, 690, 61", "1100, 650, 62"]))
    assert sensors.since(0.0) == {"sm_mhz": [1000, 1100, 1200], "watts": [650, 690, 700], "celsius": [60, 61, 62]}
    assert sensors.since(float("inf")) == {}


def test_ceilings_do_what_they_say():
    limits = {limit.name: limit for limit in measure.ceilings(torch.device("cpu"), torch.float32)}
    assert limits["matmul"].work().shape == (768, 768)
    assert limits["matmul"].amount == 2 * 768**3
    assert limits["copy"].amount == 2 * limits["copy"].work().nbytes
