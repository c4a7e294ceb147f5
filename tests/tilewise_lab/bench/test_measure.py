from __future__ import annotations

import random

import pytest
import torch

from tilewise_lab.bench import measure
from tilewise_lab.bench.measure import Sensors, rounds


class FakeClock:
    """Each work is a number: the seconds it takes."""

    def __init__(self):
        self.started = []

    def start(self, calls):
        found = [work() for work in calls]
        self.started.append(found)
        return lambda: found


def run(works, count=8, burst=0.1, limit=1e9, **more):
    clock = FakeClock()
    times = rounds(works, clock, count=count, burst=burst, limit=limit, rng=random.Random(0), **more)
    return times, clock.started[2:]  # without the pass that warms up, and the one that is estimated from


def test_everyone_has_a_turn_in_each_pass():
    times, started = run({"a": lambda: 0.01, "b": lambda: 0.03})
    assert {name: pytest.approx(found) for name, found in times.items()} == {"a": [0.01] * 8, "b": [0.03] * 8}
    assert len(started) == 8
    for calls in started:
        assert len(calls) == 10  # 2 x 0.1 s in passes of 0.04 s
        assert all(sorted(calls[n : n + 2]) == [0.01, 0.03] for n in range(0, 10, 2))


def test_the_order_is_shuffled():
    _, started = run({name: lambda n=n: 0.01 * (n + 1) for n, name in enumerate("abcd")}, count=12)
    orders = {tuple(calls[n : n + 4]) for calls in started for n in range(0, len(calls), 4)}
    assert len(orders) > 3


def test_rounds_are_as_long_as_asked():
    _, started = run({"tiny": lambda: 1e-9})
    assert {len(calls) for calls in started} == {measure.MOST_PASSES}
    _, started = run({"slow": lambda: 0.9})
    assert {len(calls) for calls in started} == {1}
    _, started = run({"slow": lambda: 0.9}, least=3)
    assert {len(calls) for calls in started} == {3}


def test_a_round_is_queued_before_anyone_waits():
    events = []

    class Queue:
        def start(self, calls):
            events.append(len(calls))
            return lambda: events.append("wait") or [0.1] * len(calls)

    rounds(dict.fromkeys("abc"), Queue(), count=2, burst=0.2, limit=1e9, rng=random.Random(0))
    assert events == [3, "wait", 3, "wait", 6, "wait", 6, "wait"]


def test_a_hiccup_does_not_count():
    times = iter([0.01] * 2 + [0.01, 0.01, 9.0, 0.01, 0.01] * 8)
    found, _ = run({"a": lambda: next(times)}, burst=0.05)
    assert found["a"] == pytest.approx([0.01] * 8)


def test_every_round_is_looked_at():
    seen = []
    run({"a": lambda: 1.0}, count=5, after_each=lambda: seen.append(1))
    assert len(seen) == 5


def test_the_limit_ends_it_but_leaves_a_median():
    times, _ = run({"a": lambda: 1.0}, count=100, limit=-1.0)
    assert len(times["a"]) == measure.LEAST_ROUNDS


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
