"""The bench of the KV cache: what it times is what it checked."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tilewise_lab.bench import kv
from tilewise_lab.bench.kv_cases import GROUPS, KvCase, inputs, small
from tilewise_lab.clock import Work


class Recorder:
    """A CUDA graph as far as a CPU can be one: it does nothing and, like a real one, holds nothing of the call."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


class Stream:
    def wait_stream(self, other: Any) -> None: ...


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, replacement in {
        "Stream": Stream, "current_stream": Stream, "stream": nullcontext, "CUDAGraph": Recorder, "graph": nullcontext,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, replacement)


@pytest.mark.usefixtures("recording")
def test_what_a_recorded_call_reads_lives_as_long_as_the_recording() -> None:
    def caller() -> tuple[Work, Any]:
        buffer = torch.zeros(3)
        return lambda: buffer.add_(1), weakref.ref(buffer)

    work, buffer = caller()
    recorded = kv.graphed(work)
    del work
    recorded()
    assert buffer() is not None
    del recorded
    assert buffer() is None


@pytest.mark.usefixtures("recording")
def test_a_timed_call_keeps_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the check to the last round."""
    case = KvCase("small", "tiny", (20, 3), heads=2, kv_heads=1, dim=16)
    x = inputs(case, torch.device("cpu"), torch.float32)
    plans: list[Any] = []
    made = kv.tilewise.plan_kv
    monkeypatch.setattr(kv.tilewise, "plan_kv", lambda *args, **options: _told(made(*args, **options), plans))
    entry, work = kv._admit(lambda: kv._ours(case, x, ""), case, x, torch.device("cpu"))
    assert entry["error"] < 1e-5
    assert work is not None
    timed = kv.graphed(work)
    del work
    timed()
    assert [ref() is not None for ref in plans] == [True, True]


def test_shared_prefixes_and_quantised_caches_are_checked_on_a_cpu() -> None:
    for group in ("prefix", "quantised"):
        for case in map(small, GROUPS[group]()):
            x = inputs(case, torch.device("cpu"), torch.float32)
            for name, make in kv._callers(case, x, [""], {}).items():
                entry, _ = kv._admit(make, case, x, torch.device("cpu"))
                assert entry.get("error", 1.0) < kv.TOLERANCE, (case.name, name, entry)
            if case.prefix:
                assert x.table is not None
                assert (x.table[:, 0] == x.table[0, 0]).all()
            assert (x.k.element_size() == 1) == bool(case.stored)


def _told(plan: Any, plans: list[Any]) -> Any:
    plans += map(weakref.ref, plan[:2])
    return plan
