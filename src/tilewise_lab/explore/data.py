"""What the page asks the library for; the arithmetic of one small example it does itself, by the rules of the traces.

>>> answer("roof", {"device": "A100", "s": "1024"})["binding"]
'matrix units'

An endpoint is a function whose annotated keyword arguments are the query; its value is JSON. `GRID` lists, for every
endpoint, the choices that the page offers: a copy of the page has the same choices.
"""

from __future__ import annotations

import inspect
import itertools
import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

from tilewise.backends.common.kv.partition import decode_tile
from tilewise.errors import AttentionError
from tilewise_lab.costs import cost, devices, explain, predict
from tilewise_lab.plan import command as plan_command

Json = dict[str, Any]
ENDPOINTS: dict[str, Callable[..., Json]] = {}
SHOWN = 8  # ranks whose work is drawn
WIDE = 2048  # heads times their dim, of the calls under the roofline


def endpoint(function: Callable[..., Json]) -> Callable[..., Json]:
    ENDPOINTS[function.__name__] = function
    return function


def answer(name: str, query: Mapping[str, str]) -> Json:
    """The endpoint's value, its arguments read from text; an AttentionError says what was wrong with them."""
    if name not in ENDPOINTS:
        raise AttentionError("endpoint", repr(name), ", ".join(ENDPOINTS))
    function = ENDPOINTS[name]
    known = inspect.signature(function, eval_str=True).parameters
    unknown = [key for key in query if key not in known]
    if unknown:
        raise AttentionError(f"parameters of {name}", ", ".join(unknown), ", ".join(known) or "none")
    return function(**{key: _read(key, known[key].annotation, text) for key, text in query.items()})


def _read(key: str, kind: Any, text: str) -> Any:
    expected = "a word" if kind is str else f"a number ({kind.__name__})"
    try:
        if text.strip():
            return kind(text)
    except ValueError:
        pass
    raise AttentionError(key, repr(text), expected)


def _within(key: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise AttentionError(key, value, f"{low} to {high}")


@endpoint
def gpus() -> Json:
    """The devices of the page: processors, peak in bfloat16, bytes per second, and how a KV cache is divided there."""
    found = {}
    for name, one in devices.DEVICES.items():
        tile = decode_tile(one.capability, 2, 128, 4)
        found[name] = {
            "sms": one.sms, "peak": one.flops("bfloat16"), "bandwidth": one.bandwidth,
            "unit": tile.block_n, "programs": one.sms * tile.programs_per_sm,
            "factor": tile.splits, "quarters": 2 if tile.programs_per_sm > 1 else 3,
        }  # fmt: skip
    return found


@endpoint
def roof(*, device: str = "H200", b: int = 4, s: int = 4096, d: int = 128, causal: int = 0, backward: int = 0) -> Json:
    """Where a bfloat16 call of a model 2048 wide lies under the roofline of a device, and what would help."""
    _within("d", d, 1, 512)
    shape = b, s, WIDE // d, d
    told = explain.explain(shape, shape, shape, causal=bool(causal), backward=bool(backward), device=device)
    first = told.kernels[0]
    return {
        "flops": told.flops, "naive": told.traffic.naive, "tiled": told.traffic.tiled, "binding": told.binding,
        "seconds": told.prediction.call, "backend": told.backend,
        "grid": [first.programs, first.slots, first.waves.waves, first.waves.efficiency],
        "advice": [[one.text, one.gain] for one in told.advice],
    }  # fmt: skip


@endpoint
def measured(*, device: str = "H200") -> Json:
    """Forward calls that were timed on a device, each where its FLOPs, bytes and seconds put it."""
    kept = json.loads((files("tilewise_lab.explore") / "measured.json").read_text(encoding="utf-8"))
    where = devices.device(device)
    points = []
    if devices.device(kept["device"]) == where:
        for one in kept["calls"]:
            call = cost.Call(**one["call"])
            told = explain.estimate(call, False, where, one["backend"])
            seconds, flops = one["seconds"], call.flops()
            points.append({
                "b": call.batch, "s": call.n_q, "h": call.heads, "d": call.d, "causal": int(call.after == 0),
                "seconds": seconds, "rate": flops / seconds, "intensity": flops / told.traffic.tiled,
                "backend": one["backend"], "predicted": told.prediction.device,
            })  # fmt: skip
    return {"points": points, "source": kept["source"], "when": kept["when"]}


@endpoint
def grid(*, device: str = "H200", heads: int = 16) -> Json:
    """Waves of attention's own grid, for n from 256 to 4096: a forward of one sequence of n tokens, head dim 128."""
    _within("heads", heads, 1, 256)
    where = devices.device(device)
    shape = 1, 4096, heads, 128
    backend = explain.explain(shape, shape, shape, device=device).backend

    def launch(n: int) -> predict.Kernel:
        return predict.plan(cost.Call(1, n, n, heads, heads, 128, 128), backend, where, backward=False)[0]

    block = launch(4096).tile.block_m
    starts = [256, *(n + 1 for n in range(256, 4096) if n % block == 0)]
    found = [(n, launch(n).waves) for n in starts]
    cliffs = [[n, old.blocks, new.blocks] for (_, old), (n, new) in pairwise(found) if new.waves > old.waves]
    return {
        "sms": launch(4096).slots, "tile": [block, launch(4096).tile.block_n], "low": 256, "high": 4096,
        "steps": [[n, w.blocks, w.waves, w.efficiency] for n, w in found], "cliffs": cliffs,
    }  # fmt: skip


@endpoint
@cache
def hopper() -> Json:
    """What tilewise's own Hopper kernel does, in the emulator: one program, 384 queries and keys, head dim 128."""
    try:
        from tilewise_lab.explore.hopper import timeline

        return timeline(tokens=384, d=128)
    except Exception as error:  # no Triton; or a word in the kernel that the emulator does not know yet
        found = f"{type(error).__name__}: {error}"
        raise AttentionError("emulated kernel", found, "Triton, and a kernel that the emulator can run") from error


MASKS = {"full": (), "causal": ("--causal",), "window": ("--window", "4096", "0")}


@endpoint
@cache
def plans(*, tokens: str = "128k", ranks: int = 16, mask: str = "causal", machine: str = "8xH200+400G") -> Json:
    """Every strategy to divide a sequence among GPUs, simulated: what `tilewise plan` prints, and when each rank
    works."""
    if mask not in MASKS:
        raise AttentionError("mask", repr(mask), " or ".join(map(repr, MASKS)))
    _within("ranks", ranks, 2, 1024)
    parser = ArgumentParser()
    plan_command.configure(parser)
    options = parser.parse_args(MASKS[mask])
    try:
        options.seqlen = plan_command.number(tokens)
    except ArgumentTypeError as error:
        raise AttentionError("tokens", repr(tokens), "a number like 4096, 128k or 1M") from error
    options.ranks, options.machine = ranks, machine
    found = plan_command.compare(options)
    best = plan_command.advised(found)
    return {
        "advice": best.plan.strategy,
        "strategies": [
            {
                "name": one.plan.strategy, "layout": one.plan.layout, "refusal": one.refusal, "time": one.time,
                "efficiency": one.efficiency, "exposed": one.exposed, "sent": one.sent, "memory": one.memory,
                "width": one.plan.ulysses_size,
                "passes": [{"time": x.time, "bars": _bars(x.to_dict(SHOWN)["bars"])} for x in one.passes],
            }
            for one in found
        ],
    }  # fmt: skip


def _bars(bars: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """[station, hops, microseconds from, to]: what is drawn, with the digits that are."""
    return [[x["station"], x["step"], round(x["start"] * 1e6, 1), round(x["end"] * 1e6, 1)] for x in bars]


SWITCH, DEVICES = (0, 1), tuple(devices.DEVICES)
GRID: dict[str, dict[str, Sequence[Any]]] = {
    "gpus": {},
    "roof": {
        "device": DEVICES, "s": (256, 1024, 4096, 16384), "b": (1, 4), "d": (64, 128),
        "causal": SWITCH, "backward": SWITCH,
    },
    "measured": {"device": DEVICES},
    "grid": {"device": DEVICES, "heads": (8, 16, 32)},
    "hopper": {},
    "plans": {
        "tokens": ("128k", "1M"), "ranks": (8, 16, 64), "mask": tuple(MASKS), "machine": ("8xH200+400G", "8xH100+200G"),
    },
}  # fmt: skip


def combinations(name: str) -> Iterator[dict[str, Any]]:
    grid = GRID[name]
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))
