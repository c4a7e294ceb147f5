from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tilewise_lab.clock import HEAD_START, CpuClock, CudaClock, HostClock


@pytest.mark.parametrize("clock", [CpuClock(), HostClock(torch.device("cpu"))], ids=["cpu", "host"])
def test_clocks_call_as_often_as_asked(clock):
    calls = []
    times = clock.start([lambda: calls.append(1)] * 5)()
    assert len(calls) == len(times) == 5
    assert min(times) > 0


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
    clock = object.__new__(CudaClock)
    clock.cache = SimpleNamespace(zero_=lambda: log.append("empty"))
    result = clock.start([lambda: log.append("call")] * 3)
    assert log[HEAD_START:] == ["empty", "event", "call", "event"] * 3
    assert result() == [4e-3] * 3
    assert log[-1] == "wait"
