"""Where the time of SGLang's steps goes: host time of an attention backend's functions, device time of CUDA graphs and
of prefill, and the time from one step to the next. `sglang_engine.py --timing` loads it instead of tilewise's entry
point; it registers tilewise, and wraps SGLang's own backend and tilewise's alike.

Steps are recorded while the file that SGLANG_TIMING names exists. The first step without it writes what was found to
the file's name with .found.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

STEPS = ("init_forward_metadata", "init_forward_metadata_out_graph")
LAYERS = ("forward_decode", "forward_extend")


class Recorder:
    def __init__(self, flag: Path) -> None:
        self.flag, self.on, self.is_gpu = flag, False, torch.cuda.is_available()
        self.host: dict[str, list[float]] = {}
        self.events: dict[str, list[list[Any]]] = {}
        self.steps: list[tuple[float, str]] = []

    def begin(self, name: str) -> None:
        on = self.flag.exists()
        if self.on and not on:
            self.write()
        self.on = on
        if on:
            self.steps.append((time.perf_counter(), name))

    def wrapped(self, name: str, call: Any, *, is_step: bool = False) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_step:
                self.begin(name)
            if not self.on or (self.is_gpu and torch.cuda.is_current_stream_capturing()):
                return call(*args, **kwargs)
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.is_gpu else []
            for event in pair[:1]:
                event.record()
            began = time.perf_counter()
            out = call(*args, **kwargs)
            self.host.setdefault(name, []).append(time.perf_counter() - began)
            for event in pair[1:]:
                event.record()
            self.events.setdefault(name, []).append(pair)
            return out

        return timed

    def write(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()
        found: dict[str, Any] = {}
        for name, seconds in self.host.items():
            found[name] = {"calls": len(seconds), "host_us": spread([s * 1e6 for s in seconds])}
            if self.is_gpu:
                found[name]["device_us"] = spread([a.elapsed_time(b) * 1e3 for a, b in self.events[name]])
        apart: dict[str, list[float]] = {}
        for (t, a), (u, b) in zip(self.steps, self.steps[1:], strict=False):
            apart.setdefault(f"{a} -> {b}", []).append((u - t) * 1e6)
        found["apart_us"] = {name: {"steps": len(x), **spread(x)} for name, x in apart.items()}
        Path(f"{self.flag}.found").write_text(json.dumps(found))
        self.host, self.events, self.steps = {}, {}, []


def spread(x: list[float]) -> dict[str, float]:
    """Median, the largest and the sum."""
    return {"median": round(statistics.median(x), 1), "largest": round(max(x), 1), "sum": round(sum(x), 1)}


def register() -> None:
    """SGLang calls it at its start, through the entry point."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from tilewise.integrations import sglang

    sglang.register()
    recorder = Recorder(Path(os.environ["SGLANG_TIMING"]))
    for name in ("torch_native", "triton", "tilewise"):
        ATTENTION_BACKENDS[name] = with_times(ATTENTION_BACKENDS[name], recorder)
    torch.cuda.CUDAGraph.replay = recorded_replay(recorder)  # type: ignore[method-assign]


def with_times(create: Any, recorder: Recorder) -> Any:
    def created(runner: Any) -> Any:
        backend = create(runner)
        for name in (*STEPS, *LAYERS):
            setattr(backend, name, recorder.wrapped(name, getattr(backend, name), is_step=name in STEPS))
        return backend

    return created


def recorded_replay(recorder: Recorder) -> Any:
    replay = torch.cuda.CUDAGraph.replay

    def timed(graph: Any) -> None:
        recorder.wrapped("replay", replay)(graph)

    return timed
