"""Shapes of models beside their peers, several calls in a CUDA graph, so that the host's time is hidden: all kernels
are compiled first, in several processes; results are compared with a peer's; a case that does not fit is listed."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from tilewise.backends import registry
from tilewise.call.fields import ATTENTION
from tilewise.request import Gpu, Request, gpu_of
from tilewise.validation import dense as checks
from tilewise_lab.bench.cases import PASSES, Case, grid, random_lengths
from tilewise_lab.bench.judge import Error, condemn, note
from tilewise_lab.bench.provider import OURS, Provider, first_line
from tilewise_lab.bench.results import Cell, Entry
from tilewise_lab.bench.shapes import Shape
from tilewise_lab.clock import Work, synchronize
from tilewise_lab.progress import progress

TOLERANCE = 0.02  # of the norm of a result: some roundings of bfloat16
COPIES = 14  # of q, k, v and out that a case needs with three providers, gradients and float32 sums included
GRAPH_SECONDS = 2e-4  # of a graph of several calls, at least
MOST_CALLS = 8  # of a graph
PASS_SECONDS = 0.06  # of the rounds of one pass
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
LEFT_BYTES = 1 << 30  # of a case that is done; with more, cycles of references hold tensors
AHEAD = 200_000  # cycles of waiting in which the host queues a round
PEERS = ("fa3", "cudnn")
K = 1024
ROWS = {  # calls of real models, one of each kind
    "GQA 32/8, 4 x 4k": Case(4, 4 * K, 32, 8, 128, True),
    "GQA 32/8, 1 x 16k": Case(1, 16 * K, 32, 8, 128, True),
    "GQA 64/8 D 64, 2 x 8k": Case(2, 8 * K, 64, 8, 64, True),
    "MQA 32/1, 4 x 4k": Case(4, 4 * K, 32, 1, 128, True),
    "GQA 16/8 D 256, 2 x 8k": Case(2, 8 * K, 16, 8, 256, True),
    "GQA 32/8, 1 x 2k": Case(1, 2 * K, 32, 8, 128, True),
    "documents, 16k tokens": Case(1, 0, 32, 8, 128, True, lengths=random_lengths(16, 2 * K)),
    "packed 16 x 1024 D 64": Case(1, 0, 12, 12, 64, True, lengths=(K,) * 16),
    "packed 8 x 2048 full": Case(1, 0, 16, 16, 128, lengths=(2 * K,) * 8),
    "window 1024 of 16k": Case(1, 16 * K, 32, 8, 128, True, window=K),
    "window 128 of 16k D 64": Case(1, 16 * K, 64, 8, 64, True, window=128),
    "D 96": Case(4, 4 * K, 16, 16, 96, True),
    "D 192": Case(4, 4 * K, 16, 16, 192, True),
    "192 by 128": Case(4, 4 * K, 16, 16, 192, True, value_dim=128),
    "D 80 full": Case(4, 4 * K, 16, 16, 80),
    "1024 queries on 16k": Case(1, 16 * K, 16, 16, 128, queries=K),
    "ViT 64 x 577 D 64": Case(64, 577, 16, 16, 64),
    "deterministic 4 x 4k": Case(4, 4 * K, 16, 16, 128, True, deterministic=True),
}


def named_shapes() -> list[Shape]:
    """ROWS, and the grid of the benchmark."""
    cells = grid((64, 128, 256), ("full", "causal"), tuple(K * 2**n // 2 for n in range(6)), tokens=16 * K,
                 hidden=2 * K, dtype="bfloat16")  # fmt: skip
    return [Shape(n, name, case) for n, (name, case) in enumerate([*ROWS.items(), *(("grid", case) for case in cells)])]


def needed_bytes(case: Case) -> int:
    """Memory for the inputs, results and workspaces of one case, roughly."""
    tokens = sum(case.lengths) if case.lengths else case.batch * case.seq
    return 2 * COPIES * tokens * (case.heads + case.kv_heads) * (case.dim + case.dv)


def cells(
    shape: Shape, providers: Sequence[Provider], device: torch.device, group: str, seed: int = 0
) -> Iterator[Cell]:
    """A cell for each pass. One that does not fit into the device's free memory has the reason in place of times."""
    case = shape.case
    about = asdict(case) | {"number": shape.number, "model": shape.model}
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if needed_bytes(case) > free:
            why = f"about {needed_bytes(case) / 1e9:.0f} GB needed, {free / 1e9:.0f} GB free"
            yield Cell(f"{group} memory", shape.key, about, None, OURS, {OURS: Entry("refused", why)})
            return
    with _own_stream(device):
        x = case.inputs(device, seed)
        for which in PASSES:
            entries: dict[str, Entry] = {}
            works: dict[str, Work] = {}
            results: dict[str, dict[str, Tensor]] = {}
            for provider in providers:
                if reason := provider.missing(device) or provider.refuses(case, which):
                    entries[provider.name] = Entry("missing" if provider.missing(device) else "refused", reason)
                    continue
                try:
                    answer = provider.answer(case, which, x)
                    results[provider.name] = answer()
                    works[provider.name], entries[provider.name] = answer, Entry("ok")
                except torch.OutOfMemoryError:
                    entries[provider.name] = Entry("out of memory")
                except Exception as error:
                    if "CUDA error" in str(error):  # the context is lost
                        raise
                    entries[provider.name] = Entry("failed", first_line(error))
            found = differences(results)
            if OURS in entries:
                note(entries[OURS], found)
            for name, times in in_turns(works, device).items():
                entries[name].times = [float(f"{t:.5g}") for t in times]
            if OURS in entries:
                condemn(entries[OURS], found)
            works.clear()
            results.clear()
            checked = "the norms of all results, beside a peer's" if found else None
            yield Cell(f"{group} {which}", shape.key, about, case.flops(which), OURS, entries, checked=checked)
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


def differences(results: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Error]:
    """How far our results are from those of the first peer; nothing if one of the two is missing."""
    ours = results.get(OURS)
    peer = next((name for name in results if name != OURS), None)
    if ours is None or peer is None:
        return {}
    found = {}
    for name, expected in results[peer].items():
        away = (torch.linalg.vector_norm(ours[name].float() - expected.float()) / expected.float().norm()).item()
        found[name] = Error(away if away < float("inf") else None, TOLERANCE)
    return found


def in_turns(works: Mapping[str, Work], device: torch.device) -> dict[str, list[float]]:
    """Seconds of a call of each in every round; in a round each comes first in turn."""
    if not works:
        return {}
    if device.type != "cuda":
        return {name: [_host_seconds(work) for _ in range(LEAST_ROUNDS)] for name, work in works.items()}
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
    return times


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


@dataclass(frozen=True)
class Compilation:
    """One kernel: the launch of this name in a call of `case`, forward and backward."""

    case: Case
    gpu: Gpu
    launch: str


def request_of(case: Case) -> Request:
    """The request of a case, of meta tensors."""
    dtype = getattr(torch, case.dtype)

    def some(tokens: int, heads: int, dim: int) -> Tensor:
        outer = (sum(case.lengths),) if case.lengths else (case.batch, tokens)
        return torch.empty(*outer, heads, dim, dtype=dtype, device="meta")

    q = some(case.n_q, case.heads, case.dim)
    k, v = some(case.seq, case.kv_heads, case.dim), some(case.seq, case.kv_heads, case.dv)
    options = ATTENTION.completed({"causal": case.causal, "window": None if case.window is None else (case.window, 0)})
    if not case.lengths:
        return checks.dense(q, k, v, options)  # type: ignore[no-any-return]
    cu = torch.empty(len(case.lengths) + 1, dtype=torch.int32, device="meta")
    return checks.packed(q, k, v, cu, cu, (case.longest, case.longest), options)  # type: ignore[no-any-return]


def compilations(cases: Sequence[Case], gpu: Gpu) -> list[Compilation]:
    """The kernels of these cases, each once, those that take longest first."""
    from tilewise.backends.common.offline import specialised

    binders: dict[int, Any] = {}
    found: dict[str, Compilation] = {}
    for case in cases:
        for name, made in registry.launches_of(request_of(case), gpu, True).items():
            found.setdefault(specialised(gpu.arch, made, binders), Compilation(case, gpu, name))
    return sorted(found.values(), key=lambda x: (x.launch.startswith("("), -x.case.dim))


def compile_kernel(x: Compilation) -> str:
    """Compiles one kernel; returns what went wrong, or an empty string."""
    from tilewise.backends.common.offline import binary_for

    try:
        made = registry.launches_of(request_of(x.case), x.gpu, True)[x.launch]
        binary_for(x.gpu.arch, made.kernel, made.args, made.options)
    except Exception as error:
        return f"{x.launch} of {x.case.key}: {type(error).__name__}: {error}"[:300]
    return ""


def compile_all(cases: Sequence[Case], gpu: Gpu, workers: int) -> Iterator[tuple[int, int, str]]:
    """Yields (done, total, what went wrong or "") after each kernel."""
    wanted = compilations(cases, gpu)
    with ProcessPoolExecutor(max(1, min(workers, len(wanted))), mp_context=get_context("spawn")) as pool:
        for done, future in enumerate(as_completed([pool.submit(compile_kernel, x) for x in wanted]), 1):
            yield done, len(wanted), future.result()


def compile_first(cases: Sequence[Case], device: torch.device) -> None:
    """Fills Triton's cache; says what could not be compiled."""
    gpu = gpu_of(device) if device.type == "cuda" else None
    if gpu is None:
        return
    with progress() as show:
        for done, total, fault in compile_all(cases, gpu, max(1, (os.cpu_count() or 2) - 1)):
            show(fault or "compiling", done, total)
