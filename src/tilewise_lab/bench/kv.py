"""Rows of attention over a KV cache beside FlashAttention-3 and vLLM's Triton kernel, checked, then timed.

Every call is recorded in a CUDA graph with its plan made before, as engines do; rounds call all providers in turn, the
cache emptied before each call.
"""

from __future__ import annotations

import os
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise.errors import AttentionError
from tilewise_lab.bench.judge import Error, condemn, note
from tilewise_lab.bench.kv_cases import GROUPS, KvCase, KvInputs, exact, inputs, small
from tilewise_lab.bench.measure import rounds
from tilewise_lab.bench.results import OURS, Cell, Entry
from tilewise_lab.bench.runner import Run
from tilewise_lab.clock import HostClock, Work, clock_for, synchronize

SERVING = ".serving"
TILE = "TILEWISE_KV_TILE"
MANY = 64  # queries of a sequence, from which Hopper has a kernel of its own
TOLERANCE = 0.02  # of the largest result: some roundings of bfloat16


def rows(run: Run, options: Namespace) -> Iterator[tuple[str, Callable[[], Iterator[Cell]]]]:
    """A row for every case of the groups that are asked for, and for the host's time and for appending."""
    device = run.device
    groups = options.groups or [*GROUPS, *OTHERS]
    for name in groups:
        if name not in GROUPS and name not in OTHERS:
            raise AttentionError("--groups", name, f"of: {', '.join((*GROUPS, *OTHERS))}")
    peers = _peers(Path(options.serving or os.environ.get("TILEWISE_SERVING", SERVING)), device)
    tiles = ["" if tile == "table" else tile for tile in options.tiles or [os.environ.get(TILE, "table")]]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for group in groups:
        if group in OTHERS:
            yield f"kv {group}", partial(OTHERS[group], device, dtype)
            continue
        for case in GROUPS[group]():
            case = small(case) if options.quick or device.type == "cpu" else case
            yield f"kv {group}: {case.name}", partial(_cells, case, tiles, peers, device, dtype, run.settings.rounds)


def _cells(
    case: KvCase, tiles: list[str], peers: dict[str, Any], device: torch.device, dtype: torch.dtype, count: int
) -> Iterator[Cell]:
    x = inputs(case, device, dtype)
    entries: dict[str, Entry] = {}
    works: dict[str, Work] = {}
    for name, make in _callers(case, x, tiles, peers).items():
        told, work = _admit(make, case, x, device)
        name = name if name in peers or name.startswith(OURS) else f"{OURS} {name}"
        entries[name] = Entry("ok") if work is not None else Entry("refused", told["refused"])
        if work is None:
            continue
        errors = {"out": Error(told["error"] if told["error"] < float("inf") else None, TOLERANCE)}
        note(entries[name], errors)
        condemn(entries[name], errors)
        if entries[name].status == "ok":
            works[name] = work
    if works:
        times = rounds(
            works, clock_for(device), count=count, burst=0.003, limit=4.0, rng=random.Random(0),
            least=7 if device.type == "cuda" else 1,
        )  # fmt: skip
        _write(entries, times)
    about = {"bytes": case.bytes}
    yield Cell(f"kv {case.group}", case.name, about, case.flops, OURS, entries, checked="two heads of three sequences")
    del x, works
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _write(entries: dict[str, Entry], times: dict[str, list[float]]) -> None:
    for name, found in times.items():
        if entries[name].status == "ok":
            entries[name].times = [float(f"{t:.5g}") for t in found]


def _admit(
    make: Callable[[], Work], case: KvCase, x: KvInputs, device: torch.device
) -> tuple[dict[str, Any], Work | None]:
    """What is known of a caller before it is timed, and how to call it: recorded in a graph where that is possible."""
    try:
        work = make()
        out = work()
        synchronize(device)
    except Exception as error:
        if "CUDA error" in str(error):
            raise
        return {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:200]}, None
    off = _error(case, x, out)
    entry: dict[str, Any] = {"error": off} | ({"wrong": True} if not off <= TOLERANCE else {})
    return entry, graphed(work) if device.type == "cuda" else work


@dataclass(frozen=True)
class Graphed:
    """A call recorded in a CUDA graph, which holds addresses: it owns what was allocated while it recorded, and nothing
    that was there before. A plan, gathered keys, a peer's buffers live as long as `work`; the next recording gives back
    freed memory, and a replay would read it."""

    graph: torch.cuda.CUDAGraph
    work: Work

    def __call__(self) -> None:
        self.graph.replay()


def graphed(work: Work) -> Graphed:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return Graphed(graph, work)


def _error(case: KvCase, x: KvInputs, out: Tensor) -> float:
    """Largest error over the largest result, of the first, the last and the longest sequence that has any keys."""
    some = [b for b, n in enumerate(case.lengths) if n]
    worst = 0.0
    for b in {some[0], some[-1], max(some, key=lambda b: case.lengths[b])}:
        start, count = int(x.cu_q[b]), case.counts[b]
        for head in {0, case.heads - 1}:
            truth = exact(case, x, b, head)
            error = (out[start : start + count, head].double() - truth).abs().max() / truth.abs().max()
            worst = max(worst, error.item()) if error.isfinite() else float("inf")
    return worst


def _callers(case: KvCase, x: KvInputs, tiles: list[str], peers: dict[str, Any]) -> dict[str, Callable[[], Work]]:
    found: dict[str, Callable[[], Work]] = {tile or "tilewise": partial(_ours, case, x, tile) for tile in tiles}
    if case.sharing:
        found["unshared"] = partial(_ours, case, x, "", shared=False)
    if x.most > MANY and x.q.is_cuda:
        found["portable"] = partial(_ours, case, x, "", "triton")
    even = len(set(case.lengths)) == 1 and isinstance(case.queries, int)
    if (
        even
        and case.window is None
        and not case.sinks
        and not case.tree
        and case.split is None
        and not case.sharing
        and not case.stored
    ):
        found["dense"] = lambda: _dense(case, x)
    window = (-1, -1) if case.window is None else (case.window, 0)
    if x.table is not None and x.tree is None and case.split is None and x.scale is None:
        shared: dict[str, Any] = {
            "cu_q": x.cu_q, "max_q": x.most, "max_k": max(case.lengths), "window": window, "sinks": x.sinks,
        }  # fmt: skip
        for name, peer in peers.items():
            found[name] = partial(peer, case, x, shared)
    return found


def _ours(case: KvCase, x: KvInputs, tile: str, backend: str = "auto", shared: bool = True) -> Work:
    if tile:
        os.environ[TILE] = tile
    else:
        os.environ.pop(TILE, None)
    regular = isinstance(case.queries, int)
    q = x.q.unflatten(0, (len(case.lengths), -1)) if regular else x.q
    options: dict[str, Any] = {
        "page_table": x.table, "cu_seqlens_q": None if regular else x.cu_q, "tree": x.tree, "sinks": x.sinks,
        "window": None if case.window is None else (case.window, 0), "split": case.split, "max_seqlen_q": x.most,
        "backend": "triton" if tile else backend, "shared_prefix": "auto" if case.sharing and shared else None,
        "k_scale": x.scale, "v_scale": x.scale,
    }  # fmt: skip
    with torch.no_grad():
        plan = tilewise.plan_kv(q, x.k, x.v, x.lengths, **options)

    def work() -> Tensor:
        if tile:
            os.environ[TILE] = tile
        else:
            os.environ.pop(TILE, None)
        out: Tensor = tilewise.attention_kv(q, x.k, x.v, x.lengths, plan=plan, **options)
        return out.flatten(0, -3)

    return work


def _dense(case: KvCase, x: KvInputs) -> Work:
    """Our call without a cache, on the same keys one after the other."""
    q, k, v = x.q.unflatten(0, (len(case.lengths), -1)), x.k, x.v
    if x.table is not None:
        k, v = (t[x.table.long()].flatten(1, 2)[:, : case.lengths[0]] for t in (k, v))
    return lambda: tilewise.attention(q, k, v, causal=True).flatten(0, 1)


def _peers(folder: Path, device: torch.device) -> dict[str, Any]:
    if device.type != "cuda" or not (folder / "serving.py").exists():
        print(f"no peers: {folder / 'serving.py'} is not there (--serving)", file=sys.stderr)
        return {}
    sys.path.insert(0, str(folder.resolve()))
    serving = import_module("serving")

    def fa3(case: KvCase, x: KvInputs, shared: dict[str, Any]) -> Work:
        timing = {name: shared[name] for name in ("cu_q", "max_q", "max_k", "window")}
        plan = serving.fa3_plan(x.q, x.k, x.lengths, **timing)
        return lambda: serving.fa3(x.q, x.k, x.v, x.lengths, x.table, plan=plan, **shared)

    def vllm(case: KvCase, x: KvInputs, shared: dict[str, Any]) -> Work:
        buffers: dict[str, Any] = {}
        out = torch.empty_like(x.q)
        return lambda: serving.vllm_triton(x.q, x.k, x.v, x.lengths, x.table, buffers=buffers, out=out, **shared)

    return {"fa3": fa3, "vllm": vllm}


def _host(device: torch.device, dtype: torch.dtype) -> Iterator[Cell]:
    """The time an eager call keeps its caller, with the plan made before; and a step in a graph, with append. Beside
    them, what the least of kernels takes on the same clock."""
    case = KvCase("host", "B8 256", (256,) * 8)
    x = inputs(case, device, dtype)
    q = x.q.unflatten(0, (8, 1))
    new = torch.randn(8, 1, case.kv_heads, case.dim, device=device).to(dtype)
    seen: dict[str, Any] = {"page_table": x.table}
    given = seen | {"k_new": new, "v_new": new}
    before = x.lengths - 1
    with torch.no_grad():
        plan = tilewise.plan_kv(q, x.k, x.v, x.lengths, **seen)
        planned = tilewise.plan_kv(q, x.k, x.v, before, **given)
        works: dict[str, Work] = {
            "attend": lambda: tilewise.attention_kv(q, x.k, x.v, x.lengths, **seen, plan=plan),
            "append": lambda: tilewise.attention_kv(q, x.k, x.v, before, plan=planned, **given),
            "plan": lambda: tilewise.plan_kv(q, x.k, x.v, x.lengths, **seen, plan=plan),
            "a sum of two numbers": lambda: before + 1,
        }
        for name, clock in (("host", HostClock(device)), ("graph", clock_for(device))):
            timed = {
                key: graphed(work) if name == "graph" and device.type == "cuda" else work for key, work in works.items()
            }
            times = rounds(timed, clock, count=5, burst=0.003, limit=4.0, rng=random.Random(0), least=20)
            for key, found in times.items():
                entries = {OURS: Entry("ok")}
                _write(entries, {OURS: found})
                yield Cell(f"kv {name}", f"{case.name}, {key}", {}, None, OURS, entries)


def _append(device: torch.device, dtype: torch.dtype) -> Iterator[Cell]:
    """Writing new tokens with rotary, beside a copy of as many bytes."""
    for batch, each in ((256, 1), (8, 1024)):
        new_k, new_v = (torch.randn(batch, each, 8, 128, device=device).to(dtype) for _ in range(2))
        pages = batch * -(-(each + 16) // 16)
        k, v = (torch.empty(pages, 16, 8, 128, device=device, dtype=dtype) for _ in range(2))
        table = torch.randperm(pages).int().view(batch, -1).to(device)
        lengths = torch.full((batch,), 5, dtype=torch.int32, device=device)
        cos = torch.rand(each + 16, 64, device=device)
        rotary = tilewise.Rotary(cos, cos)
        room = torch.empty_like(new_k)
        given: dict[str, Any] = {"page_table": table, "rotary": rotary}
        works: dict[str, Work] = {
            OURS: lambda: tilewise.append_kv(new_k, new_v, k, v, lengths, **given),  # noqa: B023
            "copy": lambda: (room.copy_(new_k), room.copy_(new_v)),  # noqa: B023
        }
        moved = 4 * new_k.numel() * new_k.element_size()
        timed = {name: graphed(work) if device.type == "cuda" else work for name, work in works.items()}
        times = rounds(timed, clock_for(device), count=5, burst=0.003, limit=4.0, rng=random.Random(0), least=20)
        entries = {name: Entry("ok") for name in works}
        _write(entries, times)
        yield Cell("kv append", f"{batch * each} tokens", {"bytes": moved}, None, OURS, entries)


OTHERS = {"host": _host, "append": _append}
