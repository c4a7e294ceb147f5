"""Prediction against measurement: `tilewise explain --check FILE` on a GPU, `--fit FILE` anywhere.

FILE is JSON: {"device", "torch", "triton", "when", "calls": [{"call": Call.to_dict(), "backend", "pass", "seconds",
"spread"}]}; pass is "forward" or "backward" (alone), seconds the median of rounds, spread their interquartile range
over the median.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilewise.perf.cost import Call
from tilewise.perf.devices import Device, device
from tilewise.perf.predict import MODEL, Model, padded, predict

TOKENS, WIDTH = 16384, 2048
ROUNDS, SECONDS = 3, 0.01


class Measured(NamedTuple):
    call: Call
    backend: str
    which: str
    seconds: float
    spread: float

    def predicted(self, on: Device, model: Model = MODEL) -> float:
        return predict(self.call, self.backend, on, only_backward=self.which == "backward", model=model).call

    def error(self, on: Device, model: Model = MODEL) -> float:
        return abs(self.predicted(on, model) / self.seconds - 1)


def calls() -> Iterator[Call]:
    """The calls that are measured, each forward and backward: the usual grid, then everything that is unusual."""
    for d in (64, 128, 256):
        for s in (512, 2048, 8192):
            for after in (None, 0):
                yield Call(TOKENS // s, s, s, WIDTH // d, WIDTH // d, d, d, after=after)
    usual = Call(4, 4096, 4096, 16, 16, 128, 128, after=0)
    yield replace(usual, dtype="float16")
    yield replace(usual, kv_heads=4)
    yield replace(usual, before=1023)
    yield replace(usual, batch=1, n_q=16384, n_k=16384, before=1023)
    yield replace(usual, n_q=512)
    yield replace(usual, n_q=2049, n_k=2049, after=None)
    yield replace(usual, batch=1, n_q=2049, n_k=2049, after=None)
    yield replace(usual, batch=1, n_q=2048, n_k=2048, after=None)
    yield replace(usual, n_q=1000, n_k=1000)
    yield replace(usual, batch=1, n_q=512, n_k=512)
    yield replace(usual, batch=1, n_q=128, n_k=128, heads=8, kv_heads=8)
    yield replace(usual, d=100, dv=100)
    yield replace(usual, d=96, dv=96)
    yield replace(usual, d=32, dv=32, heads=64, kv_heads=64, batch=1)
    yield replace(usual, d=192, dv=128)
    yield replace(usual, dtype="float32", n_q=2048, n_k=2048, d=64, dv=64)
    yield replace(usual, dtype="float32", n_q=2048, n_k=2048)
    lengths = tuple((n, n) for n in (128, 4096, 37, 1000, 2048, 512, 6000, 2563))
    total = sum(n for n, _ in lengths)
    yield replace(usual, batch=len(lengths), n_q=total, n_k=total, lengths=lengths)


def run(path: Path) -> int:
    if not torch.cuda.is_available():
        print(
            "tilewise explain --check measures a GPU, and none is here. Kept measurements: bench/results/",
            file=sys.stderr,
        )
        return 2
    major, minor = torch.cuda.get_device_capability()
    todo = [(call, backend) for call in calls() for backend in backends(call)]
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(compile_ahead, capability=major * 10 + minor), *zip(*distinct(todo), strict=True)))
    measured = measure(todo)
    import triton

    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "when": datetime.date.today().isoformat(),
        "calls": [
            {"call": m.call.to_dict(), "backend": m.backend, "pass": m.which, "seconds": m.seconds, "spread": m.spread}
            for m in measured
        ],
    }
    path.write_text(json.dumps(record, indent=1))
    print(compare(measured, device("cuda")))
    return 0


def load(path: Path) -> tuple[str, list[Measured]]:
    """The device's name, and what was measured on it: a file of `--check`, or a result of `tilewise bench`."""
    record = json.loads(path.read_text())
    if "cells" in record:
        return record["machine"]["device"], list(_from_bench(record["cells"]))
    return record["device"], [
        Measured(_call(entry["call"]), entry["backend"], entry["pass"], entry["seconds"], entry["spread"])
        for entry in record["calls"]
    ]


def _from_bench(cells: list[dict[str, Any]]) -> Iterator[Measured]:
    for cell in cells:
        case = cell["case"]
        if cell["group"] not in ("forward", "backward") or case["lengths"]:
            continue
        before, after = case["window"] or (None, None)
        sizes = case["batch"], case["seq"], case["seq"], case["heads"], case["kv_heads"], case["dim"], case["dim"]
        call = Call(*sizes, dtype=case["dtype"], before=before, after=0 if case["causal"] else after)
        for backend in ("triton", "hopper"):
            entry = cell["entries"].get(f"tilewise-{backend}", {})
            if entry.get("status") == "ok" and entry.get("times"):
                times = entry["times"]
                yield Measured(call, backend, cell["group"], statistics.median(times), spread(times))


def _call(fields: dict[str, Any]) -> Call:
    lengths = fields["lengths"]
    return Call(**fields | {"lengths": lengths and tuple(map(tuple, lengths))})


def tensors(call: Call, where: str) -> list[torch.Tensor]:
    """q, k, v of a call."""
    batch = () if call.lengths else (call.batch,)
    shapes = (call.n_q, call.heads, call.d), (call.n_k, call.kv_heads, call.d), (call.n_k, call.kv_heads, call.dv)
    make = torch.empty if where == "meta" else torch.randn
    return [make(*batch, *shape, dtype=getattr(torch, call.dtype), device=where) for shape in shapes]


def backends(call: Call) -> list[str]:
    """The portable kernels, and what would run by default where that is something else."""
    from tilewise.dispatch import choose

    q, k, v = (torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in tensors(call, "meta"))
    return sorted({"triton", choose(q, k, v, spec_of(call)).backend})


def spec_of(call: Call) -> Any:
    from tilewise.spec import Spec

    return Spec(1 / math.sqrt(call.d), call.before, call.after)


def distinct(todo: list[tuple[Call, str]]) -> list[tuple[Call, str]]:
    """One of the calls that share their kernels, the slowest to compile first."""
    kinds = {
        (
            backend, c.d, c.dv, c.dtype, c.before is None, c.after is None, c.heads // c.kv_heads,
            c.n_q % 128 == 0, c.n_k % 128 == 0, c.lengths is None, c.n_k <= 2048,
        ): (c, backend)
        for c, backend in todo
    }  # fmt: skip
    return sorted(kinds.values(), key=lambda one: one[1] != "hopper")


def compile_ahead(call: Call, backend: str, capability: int) -> None:
    """Fill Triton's cache from another process; what fails here fails again, with its reason, when it is launched."""
    from tilewise.perf.explain import compile_kernels

    q, k, v = tensors(call, "meta")
    with contextlib.suppress(Exception):
        list(compile_kernels(q, k, v, call.lengths, spec_of(call), capability, backward=True, backend=backend))


def measure(todo: Iterable[tuple[Call, str]]) -> list[Measured]:
    """Rounds in shuffled order; in each, a call repeats back to back for some milliseconds between two events."""
    found: dict[tuple[Call, str, str], list[float]] = defaultdict(list)
    todo = list(todo)
    for _ in range(ROUNDS):
        random.shuffle(todo)
        for call, backend in todo:
            forward, backward = once(call, backend)
            found[call, backend, "forward"].append(forward)
            found[call, backend, "backward"].append(backward)
    return [
        Measured(call, backend, which, statistics.median(times), spread(times))
        for (call, backend, which), times in found.items()
    ]


def once(call: Call, backend: str) -> tuple[float, float]:
    """Seconds of one forward call and of one backward."""
    import tilewise

    inputs = tensors(call, "cuda")
    options: dict[str, Any] = {"window": (call.before, call.after), "backend": backend}
    attention: Any = tilewise.attention
    if call.lengths is not None:
        ends = torch.tensor([0, *(n for n, _ in call.lengths)], device="cuda").cumsum(0, dtype=torch.int32)
        attention = partial(tilewise.attention_varlen, cu_seqlens_q=ends, cu_seqlens_k=ends)
    forward = clock(partial(attention, *inputs, **options))
    for x in inputs:
        x.requires_grad_()
    out = attention(*inputs, **options)
    return forward, clock(partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True))


def clock(work: Any) -> float:
    """Seconds of one call in a row of calls long enough to be timed."""
    work()
    once = _events(work, 1)
    return _events(work, max(2, min(200, int(SECONDS / max(once, 1e-6)))))


def _events(work: Any, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def spread(times: list[float]) -> float:
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle


def compare(measured: list[Measured], on: Device, model: Model = MODEL) -> str:
    """Every call with its prediction, and the median of the errors."""
    rows = []
    for m in sorted(measured, key=lambda m: (m.which, m.call.d, m.seconds)):
        c, expected = m.call, m.predicted(on, model)
        shape = f"{c.batch}x{c.n_q}x{c.n_k} H{c.heads}/{c.kv_heads} D{c.d}" + (f"/{c.dv}" if c.dv != c.d else "")
        rows.append(
            f"{m.backend:9} {m.which:8} {shape:34} {c.dtype:8} {(c.before, c.after)!s:14} {m.seconds * 1e6:9.1f} us"
            f"  predicted {expected * 1e6:9.1f} us  {expected / m.seconds - 1:+6.0%}"
        )
    errors = [m.error(on, model) for m in measured]
    within = sum(e <= 0.2 for e in errors) / len(errors)
    return "\n".join(
        [*rows, f"{len(errors)} calls: median error {statistics.median(errors):.1%}, {within:.0%} within 20 %"]
    )


def show_fit(path: Path) -> int:
    name, measured = load(path)
    model = fit(measured, device(name))
    for field in fields(model):
        if field.name != "efficiency":
            print(f"    {field.name}={getattr(model, field.name):.3g},")
    for key, row in model.efficiency.items():
        print(f"        {key!r}: {{{', '.join(f'{d}: {e:.2f}' for d, e in row.items())}}},")
    print(compare(measured, device(name), model))
    return 0


def fit(measured: list[Measured], on: Device, model: Model = MODEL, rounds: int = 3) -> Model:
    """The model, one number at a time set to the value with the least sum of absolute log errors."""

    def loss(candidate: Model, touched: list[Measured] = measured) -> float:
        return sum(abs(math.log(m.predicted(on, candidate) / m.seconds)) for m in touched)

    for _ in range(rounds):
        for key, row in model.efficiency.items():
            for d in row:
                touched = [m for m in measured if _uses(m, *key, d)]
                if not touched:
                    continue
                model = min(
                    (_with(model, key, d, value) for value in around(model.efficiency[key][d])),
                    key=lambda candidate: loss(candidate, touched),
                )
        for name in ("prologue", "edge", "gap", "host", "host_backward"):
            model = min((_constant(model, name, value) for value in around(getattr(model, name))), key=loss)
    return model


def _uses(m: Measured, kernel: str, itemsize: int, d: int) -> bool:
    same_pass = (m.which == "forward") == kernel.endswith("forward")
    same_backend = (m.backend == "hopper") == kernel.startswith("hopper")
    return same_pass and same_backend and m.call.itemsize == itemsize and padded(max(m.call.d, m.call.dv)) == d


def _with(model: Model, key: tuple[str, int], d: int, value: float) -> Model:
    return replace(model, efficiency={**model.efficiency, key: {**model.efficiency[key], d: value}})


def _constant(model: Model, name: str, value: float) -> Model:
    changed: dict[str, Any] = {name: value}
    return replace(model, **changed)


def around(value: float) -> list[float]:
    return [value * 1.03**i for i in (-16, -8, -4, -2, -1, 0, 1, 2, 4, 8, 16)]
