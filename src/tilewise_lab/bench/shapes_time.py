"""Times one case: tilewise and its peers in turns, several calls in a CUDA graph, so that the host's time is hidden."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import AttentionError
from tilewise_lab.bench.cases import PASSES, Case
from tilewise_lab.bench.provider import OURS, Provider, first_line
from tilewise_lab.clock import Work, synchronize

TOLERANCE = 0.02  # of the norm of a result: some roundings of bfloat16
COPIES = 14  # of q, k, v and out that a case needs with three providers, gradients and float32 sums included
GRAPH_SECONDS = 2e-4  # of a graph of several calls, at least
MOST_CALLS = 8  # of a graph
PASS_SECONDS = 0.06  # of the rounds of one pass
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
LEFT_BYTES = 1 << 30  # of a case that is done; with more, cycles of references hold tensors
AHEAD = 200_000  # cycles of waiting in which the host queues a round
Row = dict[str, Any]


def needed_bytes(case: Case) -> int:
    """Memory for the inputs, results and workspaces of one case, roughly."""
    tokens = sum(case.lengths) if case.lengths else case.batch * case.seq
    return 2 * COPIES * tokens * (case.heads + case.kv_heads) * (case.dim + case.dv)


def time_case(case: Case, providers: Sequence[Provider], device: torch.device, seed: int = 0) -> Iterator[Row]:
    """A row for each pass: microseconds by provider, reasons of those that do not run it, and differences.

    Raises:
        AttentionError: the case does not fit into the device's free memory.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if needed_bytes(case) > free:
            found = f"about {needed_bytes(case) / 1e9:.0f} GB needed, {free / 1e9:.0f} GB free"
            raise AttentionError("memory", found, "a smaller case")
    with _own_stream(device):
        x = case.inputs(device, seed)
        for which in PASSES:
            row: Row = {"pass": which, "us": {}, "refused": {}}
            works: dict[str, Work] = {}
            results: dict[str, dict[str, Tensor]] = {}
            for provider in providers:
                if reason := provider.missing(device) or provider.refuses(case, which):
                    row["refused"][provider.name] = reason
                    continue
                try:
                    answer = provider.answer(case, which, x)
                    results[provider.name] = answer()
                    works[provider.name] = answer
                except Exception as error:
                    if "CUDA error" in str(error):  # the context is lost
                        raise
                    row["refused"][provider.name] = first_line(error)
            if wrong := differences(results):
                row["wrong"] = wrong
            row["us"] = {name: round(1e6 * t, 3) for name, t in in_turns(works, device).items()}
            works.clear()
            results.clear()
            yield row
    del x
    if device.type == "cuda":
        if torch.cuda.memory_allocated(device) > LEFT_BYTES:
            gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """A stream that graphs can be captured on: a backward runs on the stream of its forward."""
    with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
        yield
    synchronize(device)


def differences(results: Mapping[str, Mapping[str, Tensor]]) -> str:
    """How our results differ from those of the first peer beyond TOLERANCE; an empty string if they do not."""
    ours = results.get(OURS)
    peer = next((name for name in results if name != OURS), None)
    if ours is None or peer is None:
        return ""
    found = []
    for name, expected in results[peer].items():
        away = (torch.linalg.vector_norm(ours[name].float() - expected.float()) / expected.float().norm()).item()
        if not away <= TOLERANCE:  # NaN is also wrong
            found.append(f"{name} differs from {peer} by {away:.3g}")
    return ", ".join(found)


def in_turns(works: Mapping[str, Work], device: torch.device) -> dict[str, float]:
    """The median seconds of a call of each, in rounds in which each comes first in turn."""
    if not works:
        return {}
    if device.type != "cuda":
        return {
            name: statistics.median(_host_seconds(work) for _ in range(LEAST_ROUNDS)) for name, work in works.items()
        }
    # of each as many: the first calls of a graph cost more than the others
    once = min(_device_seconds([work], device)[0] for work in works.values())
    calls = max(1, min(MOST_CALLS, round(GRAPH_SECONDS / max(once, 1e-7))))
    graphs = {name: _captured(work, calls) for name, work in works.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names, count, turn = [*graphs], LEAST_ROUNDS, 0
    while turn < count:
        order = names[turn % len(names) :] + names[: turn % len(names)]
        measured = _device_seconds([graphs[name] for name in order], device)
        for name, seconds in zip(order, measured, strict=True):
            times[name].append(seconds / calls)
        turn += 1
        if turn == 1:
            count = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(PASS_SECONDS / sum(measured))))
    return {name: statistics.median(values) for name, values in times.items()}


def _captured(work: Work, calls: int) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # nothing may be freed by a collection while a graph is captured
    try:
        graph.capture_begin()
        for _ in range(calls):
            work()
        graph.capture_end()
    finally:
        gc.enable()
    return graph.replay


def _device_seconds(works: Sequence[Work], device: torch.device) -> list[float]:
    """Events around each of these, while the device waits for the host to queue them all."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in works]
    torch.cuda._sleep(AHEAD)
    for work, (begin, end) in zip(works, events, strict=True):
        begin.record()
        work()
        end.record()
    synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def _host_seconds(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
