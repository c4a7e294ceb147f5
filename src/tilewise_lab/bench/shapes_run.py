"""`tilewise bench models-shapes`: shapes of published models, forward and backward, beside FlashAttention-3 and cuDNN.

Prints the mean and the rows with the lowest ratio to the best peer, each with what its time goes into; writes all rows
to models-shapes.json. Ratios are the peer's time over ours.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tilewise.errors import AttentionError
from tilewise.request import Gpu, gpu_of
from tilewise_lab import asked
from tilewise_lab.bench import machine
from tilewise_lab.bench.cases import Case
from tilewise_lab.bench.model_shapes import Shape, part_of, shapes
from tilewise_lab.bench.provider import OURS, Provider, Tilewise
from tilewise_lab.bench.providers import roster
from tilewise_lab.bench.shapes_causes import causes, sentence
from tilewise_lab.bench.shapes_compile import compile_all, spills
from tilewise_lab.bench.shapes_time import Row, time_case
from tilewise_lab.costs.devices import Device
from tilewise_lab.costs.devices import device as known_device
from tilewise_lab.progress import progress

COUNT = 200
PEERS = ("fa3", "cudnn")
WORST = 20


def run(options: Namespace) -> int:
    """0, or 1 if a result of tilewise differs from a peer's."""
    device = asked.device(options.device)
    if options.report:
        found = json.loads(asked.file(options.report, "--report").read_text(encoding="utf-8"))
        print(report(found))
        return 1 if any("wrong" in row for row in found["rows"]) else 0
    drawn = shapes(
        asked.count("--count", COUNT if options.count is None else options.count), options.seed, part_of(options.part)
    )
    folder = options.fa3 or os.environ.get("TILEWISE_FA3")
    known = roster(device, None, Path(folder).resolve() if folder else None).known
    for name in options.peers or ():
        if name not in known:
            raise AttentionError("--peers", name, f"of: {', '.join(known)}")
    providers = [Tilewise(OURS, "tilewise, as auto chooses"), *(known[name] for name in options.peers or PEERS)]
    options.out.mkdir(parents=True, exist_ok=True)
    found = sweep(drawn, providers, device, options.out / "models-shapes.json", options.seconds)
    print(report(found))
    return 1 if any("wrong" in row for row in found["rows"]) else 0


def sweep(
    drawn: Sequence[Shape], providers: Sequence[Provider], device: torch.device, path: Path, seconds: float | None
) -> dict[str, Any]:
    """Compiles, then times every shape, and explains the worst rows. The file is written after each shape.

    Args:
        drawn: the shapes.
        providers: tilewise and its peers.
        device: where to run.
        path: the JSON file to be written.
        seconds: after so many no new shape begins; None for no limit.

    Returns:
        What was written.
    """
    began = time.monotonic()
    found: dict[str, Any] = {"machine": machine.facts(device), "shapes": len(drawn), "skipped": [], "rows": []}
    gpu = gpu_of(device) if device.type == "cuda" else None
    with progress() as show:
        if gpu is not None:
            for done, total, fault in compile_all([x.case for x in drawn], gpu, max(1, (os.cpu_count() or 2) - 1)):
                show(fault or "compiling", done, total)
            found["compile_seconds"] = round(time.monotonic() - began, 1)
        for done, shape in enumerate(drawn, 1):
            if seconds is not None and time.monotonic() - began > seconds:
                found["skipped"].append(f"{len(drawn) - done + 1} shapes, for lack of time (--seconds)")
                break
            show(shape.key, done, len(drawn))
            try:
                found["rows"] += rows(shape, providers, device)
            except (AttentionError, torch.OutOfMemoryError) as error:
                found["skipped"].append(f"{shape.key}: {error}")
            path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if gpu is not None and gpu.kind == "cuda" and gpu.capability == 90:
        explain_worst(found["rows"], known_device("cuda"), gpu)
    found["seconds"] = round(time.monotonic() - began, 1)
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def rows(shape: Shape, providers: Sequence[Provider], device: torch.device) -> Iterator[Row]:
    about = {"number": shape.number, "model": shape.model, "key": shape.key, "case": asdict(shape.case)}
    for row in time_case(shape.case, providers, device):
        yield about | row | {"tflops": _tflops(shape.case, row), "ratio": ratio(row)}


def _tflops(case: Case, row: Row) -> dict[str, float]:
    return {name: round(case.flops(row["pass"]) / us / 1e6, 1) for name, us in row["us"].items()}


def ratio(row: Row) -> float | None:
    """The best peer's time over ours; None where either is missing.

    >>> ratio({"us": {"tilewise": 10.0, "fa3": 9.0, "cudnn": 12.0}})
    0.9
    """
    peers = [us for name, us in row["us"].items() if name != OURS]
    return round(min(peers) / row["us"][OURS], 4) if peers and OURS in row["us"] else None


def worst(found: Sequence[Row], count: int = WORST) -> list[Row]:
    """The rows with the lowest ratios, lowest first."""
    return sorted((row for row in found if row["ratio"] is not None), key=lambda row: row["ratio"])[:count]


def explain_worst(found: Sequence[Row], device: Device, gpu: Gpu | None) -> None:
    """Adds "why" to the worst rows. Spills are known with a `gpu` to compile for."""
    slow = worst(found)
    cases = [_case(row) for row in slow]
    spilled = [0] * len(slow)
    if gpu is not None and slow:
        with ProcessPoolExecutor(min(len(slow), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
            spilled = list(pool.map(spills, cases, [gpu] * len(cases), [row["pass"] for row in slow]))
    for row, case, count in zip(slow, cases, spilled, strict=True):
        row["why"] = sentence(causes(case, row["pass"], row["us"][OURS] / 1e6, device, count))


def _case(row: Row) -> Case:
    given = row["case"]
    return Case(**given | {"lengths": tuple(given["lengths"])})


def report(found: dict[str, Any]) -> str:
    """The means, the worst rows with their causes, and what was left out."""
    timed = [row for row in found["rows"] if row["ratio"] is not None]
    lines = [f"{found['shapes']} shapes, {len(timed)} rows with a peer, on {found['machine']['device']}"]
    for which in ("forward", "backward"):
        ratios = sorted(row["ratio"] for row in timed if row["pass"] == which)
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            below = sum(x < 0.93 for x in ratios)
            lines.append(
                f"{which:8}  mean {mean:.3f}  median {statistics.median(ratios):.3f}  worst {ratios[0]:.3f}"
                f"  {below} of {len(ratios)} below 0.93"
            )
    lines += _worst_lines(worst(timed))
    lines += [f"wrong: {row['pass']} {row['key']}: {row['wrong']}" for row in found["rows"] if "wrong" in row]
    refused = Counter((name, row["pass"], why) for row in found["rows"] for name, why in row["refused"].items())
    lines += [f"{name} {which}, {n} rows: {why}" for (name, which, why), n in refused.most_common()]
    lines += [f"skipped: {what}" for what in found["skipped"]]
    return "\n".join(lines)


def _worst_lines(slow: Sequence[Row]) -> Iterator[str]:
    if not slow:
        return
    yield f"the {len(slow)} lowest ratios (the best peer's time over ours):"
    for row in slow:
        peer = min((name for name in row["us"] if name != OURS), key=row["us"].__getitem__)
        times = f"{row['us'][OURS]:.0f} us, {peer} {row['us'][peer]:.0f}"
        yield f"{row['ratio']:.3f} {row['pass']:8} {row['key']}  {times}"
        if "why" in row:
            yield f"      {row['why']}"
