"""Prediction against measurement: `tilewise explain --check FILE` on a GPU, `--fit FILE` anywhere.

The model is fitted to a result of `tilewise bench` and checked with calls that no benchmark makes. Times are of the
device: the host is ahead, and the cache is emptied before each call.

FILE is JSON: {"device", "torch", "triton", "when", "host": seconds of a tiny call by pass, "calls": [{"call":
Call.to_dict(), "backend", "pass", "seconds", "spread"}]}; pass is "forward" or "backward" (alone), seconds the median
of some calls, spread their interquartile range over the median.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilewise_lab.clock import CudaClock
from tilewise_lab.costs.cost import Call
from tilewise_lab.costs.devices import Device, device
from tilewise_lab.costs.predict import FITTED, MODEL, Model, plan, predict

SECONDS = 0.01  # of each pass of each call
# least and most of what is fitted beside efficiencies: noise in the times must not buy a meaningless number
LIMITS = {"prologue": (5e-7, 5e-6), "edge": (0.2, 1.0), "gap": (2e-6, 15e-6), "bandwidth": (0.75, 0.95)}
LENGTHS = (128, 4096, 37, 1000, 2048, 512, 6000, 2563, 1, 777, 3333)


class Measured(NamedTuple):
    call: Call
    backend: str
    which: str
    seconds: float
    spread: float

    def predicted(self, on: Device, model: Model = MODEL) -> float:
        return predict(self.call, self.backend, on, only_backward=self.which == "backward", model=model).device

    def error(self, on: Device, model: Model = MODEL) -> float:
        return abs(self.predicted(on, model) / self.seconds - 1)

    def to_dict(self) -> dict[str, Any]:
        shape = {name: x for name, x in self.call.to_dict().items() if name != "terms"}
        return {
            "call": shape, "backend": self.backend, "pass": self.which, "seconds": float(f"{self.seconds:.4g}"),
            "spread": round(self.spread, 3),
        }  # fmt: skip


def calls() -> Iterator[Call]:
    """What is measured, each forward and backward: sizes of every kind that the benchmark's grid does not have."""

    def sizes(d: int, *rows: tuple[int, int, int], **more: Any) -> Iterator[Call]:
        for batch, n, heads in rows:
            yield Call(batch, n, n, heads, heads, d, d, **more)

    yield from sizes(128, (1, 3000, 16), (3, 1500, 16), (2, 6144, 16), (1, 24576, 16), (7, 777, 32), (1, 10000, 5))
    yield from sizes(128, (1, 3000, 16), (6, 2500, 16), (1, 32768, 8), (12, 1024, 12), (1, 1024, 16), after=0)
    yield from sizes(64, (2, 3000, 24), (1, 12000, 12), (16, 700, 16))
    yield from sizes(64, (3, 5000, 20), (1, 20000, 8), (24, 600, 16), after=0)
    yield from sizes(256, (2, 3000, 8), (5, 2000, 16))
    yield from sizes(256, (1, 12000, 4), (6, 1500, 8), after=0)
    yield from sizes(128, (1, 12000, 16), (4, 4096, 16), before=511, after=0)
    yield from sizes(128, (2, 8192, 16), before=255, after=255)
    for d, dv, heads in ((96, 96, 16), (32, 32, 32), (100, 100, 16), (192, 128, 16)):
        yield Call(4, 3000, 3000, heads, heads, d, dv, after=0)
    yield Call(2, 4000, 4000, 20, 20, 80, 80)
    yield Call(8, 512, 4096, 16, 16, 128, 128)
    yield Call(4, 512, 8192, 16, 16, 128, 128, after=0)
    yield Call(2, 4000, 4000, 32, 8, 128, 128, after=0)
    yield Call(1, 12288, 12288, 32, 8, 128, 128, after=0)
    yield Call(1, 6000, 6000, 64, 8, 128, 128, after=0)
    yield Call(2, 5000, 5000, 16, 16, 128, 128, "float16", after=0)
    yield Call(1, 3000, 3000, 8, 8, 64, 64, "float32", after=0)
    lengths = tuple((n, n) for n in LENGTHS)
    total = sum(LENGTHS)
    yield Call(len(lengths), total, total, 16, 16, 128, 128, after=0, lengths=lengths)
    yield Call(len(lengths), total, total, 32, 32, 64, 64, lengths=lengths)


def run(path: Path) -> int:
    if not torch.cuda.is_available():
        print(
            "tilewise explain --check measures a GPU, and none is here. Kept measurements: bench/results/",
            file=sys.stderr,
        )
        return 2
    began = time.monotonic()
    todo = list(calls())
    if (os.cpu_count() or 1) > 2:
        with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
            list(pool.map(compile_ahead, distinct(todo)))
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    import triton

    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "when": datetime.date.today().isoformat(),
        "host": host_seconds(),
    }
    measured: list[Measured] = []
    for one in measure(todo):
        measured.append(one)
        write(path, record, measured)
    print(compare(measured, device("cuda")))
    print(f"the host takes {record['host']}; {time.monotonic() - began:.0f} s")
    return 0


def write(path: Path, record: dict[str, Any], measured: list[Measured]) -> None:
    """One line per call."""
    lines = ",\n  ".join(json.dumps(m.to_dict()) for m in measured)
    body = json.dumps(record, indent=1).removesuffix("\n}")
    path.write_text(f'{body},\n "calls": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


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
    """The grid, and the deterministic backward."""
    passes = {"forward": "forward", "backward": "backward", "deterministic backward": "backward"}
    for cell in cells:
        case = cell["case"]
        if cell["group"] not in passes:
            continue
        sizes = case["batch"], case["seq"], case["seq"], case["heads"], case["kv_heads"], case["dim"], case["dim"]
        deterministic = case.get("deterministic", False)
        call = Call(*sizes, dtype=case["dtype"], after=0 if case["causal"] else None, deterministic=deterministic)
        for backend in ("triton", "hopper"):
            entry = cell["entries"].get(f"tilewise-{backend}", {})
            if entry.get("status") == "ok" and entry.get("times"):
                times = entry["times"]
                yield Measured(call, backend, passes[cell["group"]], statistics.median(times), spread(times))


def _call(fields: dict[str, Any]) -> Call:
    lengths = fields["lengths"]
    return Call(**fields | {"lengths": lengths and tuple(map(tuple, lengths))})


def distinct(todo: list[Call]) -> list[Call]:
    """One of the calls that share their kernels, as far as the sizes tell."""
    kinds = {
        (
            c.d, c.dv, c.dtype, c.before is None, c.after is None, c.heads // c.kv_heads, c.heads % 16 == 0,
            c.n_q == c.n_k, c.lengths is None, c.n_k <= 1024,
        ): c
        for c in todo
    }  # fmt: skip
    return list(kinds.values())


def compile_ahead(call: Call) -> None:
    """Fill Triton's cache from another process; what fails here fails again, with its reason, when it is measured."""
    try:
        for work in passes(call)[1]:
            work()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{call}: {type(error).__name__}: {error}", flush=True)


def passes(call: Call) -> tuple[str, list[Any]]:
    """The backend that runs a call by default, and the work of its forward and of its backward."""
    import tilewise
    from tilewise.backends.registry import choose
    from tilewise.request import Request, Spec

    batch = () if call.lengths else (call.batch,)
    shapes = (call.n_q, call.heads, call.d), (call.n_k, call.kv_heads, call.d), (call.n_k, call.kv_heads, call.dv)
    dtype = getattr(torch, call.dtype)
    q, k, v = inputs = [torch.randn(*batch, *shape, device="cuda", dtype=dtype) for shape in shapes]
    leaves = [x.detach().requires_grad_() for x in inputs]
    attention: Any = tilewise.attention
    if call.lengths is not None:
        ends = torch.tensor([0, *(n for n, _ in call.lengths)], device="cuda").cumsum(0, dtype=torch.int32)
        attention = partial(tilewise.attention_varlen, cu_seqlens_q=ends, cu_seqlens_k=ends)
    attention = partial(attention, window=(call.before, call.after))
    out = attention(*leaves)
    backend = choose(Request(q, k, v, Spec(1 / math.sqrt(call.d), call.before, call.after))).backend.name
    backward = partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)
    return backend, [partial(attention, *inputs), backward]


def measure(todo: Iterable[Call]) -> Iterator[Measured]:
    clock = CudaClock(torch.device("cuda"))
    for call in todo:
        backend, works = passes(call)
        for which, work in zip(("forward", "backward"), works, strict=True):
            once = min(clock.start([work] * 2)())
            times = clock.start([work] * max(3, min(20, int(SECONDS / once))))()
            yield Measured(call, backend, which, statistics.median(times), spread(times))


def host_seconds(times: int = 200) -> dict[str, float]:
    """What a tiny call keeps the host, by pass."""
    found = {}
    for which, work in zip(("forward", "backward"), passes(Call(1, 64, 64, 1, 1, 64, 64))[1], strict=True):
        work()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            work()
        found[which] = float(f"{(time.perf_counter() - began) / times:.3g}")
        torch.cuda.synchronize()
    return found


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


def show_fit(paths: list[Path]) -> int:
    """Fit the model to results of `tilewise bench`, write it down, compare."""
    loaded = [load(path) for path in paths]
    name, measured = loaded[0][0], [m for _, found in loaded for m in found]
    model = fit(measured, device(name))
    host = [host for path in paths if (host := _host(path))]
    if host:
        model = replace(model, host=host[0])
    model.save()
    print(compare(measured, device(name), model))
    print(f"written: {FITTED.name}")
    return 0


def _host(path: Path) -> float | None:
    """Seconds of a tiny eager call, in a result of `tilewise bench` that has them."""
    for cell in json.loads(path.read_text()).get("cells", []):
        times = cell["entries"].get("tilewise", {}).get("times")
        if cell["group"] == "overhead" and times:
            return float(statistics.median(times))
    return None


def fit(measured: list[Measured], on: Device, model: Model = MODEL, rounds: int = 3) -> Model:
    """The model, one number at a time set to the value with the least sum of absolute log errors."""

    def loss(candidate: Model, touched: list[Measured] = measured) -> float:
        return sum(abs(math.log(m.predicted(on, candidate) / m.seconds)) for m in touched)

    used = {id(m): _kernels(m, on) for m in measured}
    for _ in range(rounds):
        for key, row in model.efficiency.items():
            for d in row:
                touched = [m for m in measured if (*key, d) in used[id(m)]]
                if not touched:
                    continue
                model = min(
                    (_with(model, key, d, value) for value in around(model.efficiency[key][d])),
                    key=lambda candidate: loss(candidate, touched),
                )
        for name, (least, most) in LIMITS.items():
            values = (value for value in around(getattr(model, name)) if least <= value <= most)
            model = min((_constant(model, name, value) for value in values), key=loss)
        ordered = [m for m in measured if m.call.deterministic]
        if ordered:
            values = (value for value in around(model.ordered) if value <= 1)
            model = min((_constant(model, "ordered", value) for value in values), key=lambda c: loss(c, ordered))
    return model


def _kernels(m: Measured, on: Device) -> set[tuple[str, int, int]]:
    """The rows of the table of efficiencies that a call uses."""
    kernels = plan(m.call, m.backend, on, backward=m.which == "backward", only_backward=m.which == "backward")
    return {(k.name, m.call.itemsize, k.profile.width) for k in kernels if k.profile is not None}


def _with(model: Model, key: tuple[str, int], d: int, value: float) -> Model:
    return replace(model, efficiency={**model.efficiency, key: {**model.efficiency[key], d: value}})


def _constant(model: Model, name: str, value: float) -> Model:
    changed: dict[str, Any] = {name: value}
    return replace(model, **changed)


def around(value: float) -> list[float]:
    return [value * 1.03**i for i in (-16, -6, -2, -1, 0, 1, 2, 6, 16)]
