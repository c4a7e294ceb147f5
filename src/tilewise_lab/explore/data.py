"""What the page asks for, and the part of the library that answers: the page itself computes nothing.

>>> answer("softmax", {"x": "3,2,5,1"})["right"]["lse"]
5.18518...

An endpoint is a function whose annotated keyword arguments are the query; its value is JSON. `GRID` lists, for every
endpoint, what an exported copy of the page holds.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

import torch

from tilewise import mods
from tilewise.costs import cost, devices, explain, predict, roofline
from tilewise.costs import waves as wave
from tilewise.reference import attention as rung
from tilewise.reference import gradient
from tilewise.spec import AttentionError
from tilewise_lab import trace
from tilewise_lab.machine import coalesce, pipeline
from tilewise_lab.machine.layout import Layout
from tilewise_lab.trace.plain import plain

Json = dict[str, Any]
Numbers = Sequence[float]
ENDPOINTS: dict[str, Callable[..., Json]] = {}


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
        raise AttentionError(f"parameters of {name}", ", ".join(unknown), ", ".join(known))
    return function(**{key: _read(key, known[key].annotation, text) for key, text in query.items()})


def _read(key: str, kind: Any, text: str) -> Any:
    try:
        return [float(part) for part in text.split(",") if part.strip()] if kind == Numbers else kind(text)
    except ValueError:
        expected = "numbers, with commas between them" if kind == Numbers else f"a number ({kind.__name__})"
        raise AttentionError(key, repr(text), expected) from None


def _within(key: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise AttentionError(key, value, f"{low} to {high}")


def _one_of(key: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise AttentionError(key, repr(value), " or ".join(map(repr, known)))


@endpoint
def softmax(*, x: Numbers) -> Json:
    _within("how many numbers", len(x), 1, 16)
    return trace.softmax(x)


@endpoint
def tiles(
    *, n: int = 8, rows: int = 2, columns: int = 2, order: str = "fa2", mask: str = "none", width: int = 2,
    backward: int = 0,
) -> Json:  # fmt: skip
    """One head of n queries and n keys, head dim 4, in 16 bit. mask: none, causal, window (`width` keys each side)."""
    for key, value, high in (("n", n, 64), ("rows", rows, n), ("columns", columns, n)):
        _within(key, value, 1, high)
    _within("tiles", -(-n // rows) * -(-n // columns), 1, 1024)
    _one_of("mask", mask, ("none", "causal", "window"))
    traced = trace.attention(
        n, n, d=4, rows=rows, columns=columns, order=order, causal=mask == "causal",
        window=(width, width) if mask == "window" else None, backward=bool(backward), itemsize=2,
    )  # fmt: skip
    head = ("order", "rows", "columns", "sq", "sk", "before", "after", "backward", "skipped", "totals", "error")
    kept = ("phase", "i", "j", "loads", "stores", "resident", "sram", "loaded", "stored", "flops")
    call = cost.Call(1, n, n, 1, 1, 4, 4, "float16")
    return {
        **{key: traced[key] for key in head},
        "steps": [{key: _words(step[key]) for key in kept} for step in traced["steps"]],
        "naive": cost.traffic(call, backward=bool(backward), masked=mask != "none").naive,
    }


def _words(x: Any) -> Any:
    """[["q", 0], ["k", 1]] as "q0 k1": loads and stores are most of a trace."""
    return " ".join(f"{name}{block}" for name, block in x) if isinstance(x, list) else x


@endpoint
def roof(
    *, device: str = "H200", b: int = 4, s: int = 4096, h: int = 16, d: int = 128, causal: int = 0, backward: int = 0
) -> Json:
    """The roofline of a device, where a bfloat16 call lies on it, and the calls that were measured there."""
    shape = b, s, h, d
    told = explain.explain(shape, shape, shape, causal=bool(causal), backward=bool(backward), device=device)
    found = told.to_dict()
    kernels = [
        {key: k[key] for key in ("name", "programs", "slots", "waves", "wave_efficiency")} for k in found["kernels"]
    ]
    kept = ("flops", "bytes", "intensity", "roofs", "binding", "seconds", "advice")
    return {
        **{key: found[key] for key in kept},
        "kernels": kernels,
        "backend": told.backend,
        "peak": told.device.flops(told.call.dtype),
        "bandwidth": told.device.bandwidth,
        "attainable": roofline.attainable(found["intensity"]["naive"], told.device, told.call.dtype),
        "curve": roofline.curve(told.device, told.call.dtype, lo=0.5, hi=16384.0, points=2),
    }


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
def waves(*, device: str = "A100", tile: str = "256x128") -> Json:
    """For n from 256 to 4096: blocks of an n × n product, waves, efficiency; only where one of them changes."""
    sms = devices.device(device).sms
    rows, columns = (int(size) for size in tile.split("x"))
    sizes = range(256, 4097)
    found = [wave.waves(wave.matmul_blocks(n, n, (rows, columns)), sms) for n in sizes]
    steps = [
        [n, w.blocks, w.waves, w.efficiency]
        for i, (n, w) in enumerate(zip(sizes, found, strict=True))
        if i == 0 or w != found[i - 1]
    ]
    cliffs = wave.cliffs(sizes, (rows, columns), sms)
    return {"sms": sms, "tile": [rows, columns], "low": 256, "high": 4096, "steps": steps, "cliffs": cliffs}


@endpoint
def grid(*, device: str = "H200", heads: int = 16) -> Json:
    """The same for the grid of attention: a forward of one sequence of n tokens, head dim 128."""
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
def layout(*, shape: str = "2x3", view: str = "same") -> Json:
    """A row-major tensor, and a view of the same memory: same, transpose (its last two axes), or a shape like 3x2."""
    sizes = [int(size) for size in shape.split("x")]
    before = Layout.row_major(sizes)
    if view == "transpose" and len(sizes) < 2:
        raise AttentionError("view", "a transpose of one axis", "two axes or more")
    if view == "transpose":
        after = before.transpose(len(sizes) - 2, len(sizes) - 1)
    else:
        after = before if view == "same" else before.reshape([int(size) for size in view.split("x")])
    made = torch.empty(sizes).as_strided(after.shape, after.strides)
    return {
        "before": {"shape": before.shape, "strides": before.strides},
        "shape": after.shape, "strides": after.strides, "offsets": after.offsets(), "contiguous": after.contiguous,
        "torch": {"contiguous": made.is_contiguous(), "copies": made.reshape(-1).data_ptr() != made.data_ptr()},
    }  # fmt: skip


@endpoint
def coalescing(*, pattern: str = "warp", columns: int = 64, itemsize: int = 4, instant: int = 0) -> Json:
    """One load of a warp from a row-major matrix: its lanes share a row, or each thread has a row of its own."""
    _one_of("pattern", pattern, ("warp", "thread"))
    _within("columns", columns, 1, 1 << 20)
    _one_of("itemsize", str(itemsize), ("1", "2", "4", "8"))
    lanes = (coalesce.row_per_warp if pattern == "warp" else coalesce.row_per_thread)(columns, instant)
    return {"elements": lanes, "line": coalesce.LINE, "sector": coalesce.SECTOR} | coalesce.touched(
        lanes, itemsize
    )._asdict()


@endpoint
def loop(*, iterations: int = 7, stages: int = 4) -> Json:
    """A loop of stages, one after the other and overlapped."""
    _within("iterations", iterations, 1, 32)
    _within("stages", stages, 1, 4)
    plans = {"sequential": pipeline.sequential(iterations, stages), "pipelined": pipeline.pipelined(iterations, stages)}
    return {name: _plan(plan) for name, plan in plans.items()} | {"names": pipeline.STAGES[-stages:]}


@endpoint
def gpus(*, count: int = 4, batches: int = 4) -> Json:
    """Pipeline parallelism: all forwards, then all backwards."""
    _within("GPUs", count, 1, 8)
    _within("batches", batches, 1, 32)
    return _plan(pipeline.forward_backward(count, batches)) | {
        "bubble": pipeline.bubble(count, batches),
        "batches": batches,
    }


def _plan(plan: list[pipeline.Slot]) -> Json:
    return {
        "slots": [[slot.unit, slot.iteration, slot.start, slot.length, slot.phase] for slot in plan],
        "length": pipeline.slots(plan),
        "utilisation": pipeline.utilisation(plan),
        "in_flight": pipeline.in_flight(plan),
    }


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


@endpoint
def autograd(*, a: float = 2.0, w: float = 3.0, b: float = 1.0) -> Json:
    return trace.notes_example(a, w, b)


@endpoint
def flash(*, n: int = 4, d: int = 2, seed: int = 0) -> Json:
    """Every matrix of attention and of its gradient, for n queries and keys, from the reference."""
    _within("n", n, 1, 8)
    _within("d", d, 1, 8)
    made = torch.Generator().manual_seed(seed)
    q, k, v, do = torch.randn(4, n, d, generator=made, dtype=torch.float64)
    o, lse = rung.fa2(q, k, v, rows=n, columns=n)
    s, delta = rung.scores(q, k), (do * o).sum(-1)
    p, ds = gradient.block(q, k, v, do, lse, delta)
    dq, dk, dv = gradient.tiled(q, k, v, o, lse, do, rows=2, columns=2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = torch.autograd.grad(rung.naive(leaves[0], leaves[1], leaves[2]), leaves, do)
    values = {
        "q": q, "k": k, "v": v, "s": s, "lse": lse[:, None], "p": p, "o": o, "do": do, "delta": delta[:, None],
        "dp": do @ v.mT, "ds": ds, "dq": dq, "dk": dk, "dv": dv,
    }  # fmt: skip
    error = max(float((x - y).abs().max()) for x, y in zip((dq, dk, dv), exact, strict=True))
    return {"values": plain(values), "error": error}


def _document(n: int) -> mods.Mod:
    ends = torch.tensor([0, n * 3 // 8, n * 5 // 8, n], dtype=torch.int32)
    return mods.document(cu_seqlens=ends, tokens=n)


# Each mask at length n, with one size of its own.
MASKS: dict[str, Callable[[int, int], mods.Mod]] = {
    "causal": lambda n, size: mods.window_with_globals(n, 0),
    "window": lambda n, size: mods.window_with_globals(size, 0),
    "globals": lambda n, size: mods.window_with_globals(size, 4),
    "document": lambda n, size: _document(n),
    "prefix": lambda n, size: mods.prefix_lm(torch.tensor([2 * size])),
    "dilated": lambda n, size: mods.dilated_window(size, 3),
    "image": lambda n, size: mods.neighbourhood_2d(16, max(1, size // 4)),
    "blocks": lambda n, size: mods.block_diagonal(2 * size),
    "strided": lambda n, size: mods.strided_sparse(size),
}


@endpoint
def mask(*, kind: str = "causal", n: int = 128, block: int = 16, size: int = 16, causal: int = 0) -> Json:
    """Who sees whom, and what each tile is: 0 nobody, 1 partly, 2 full. Rows of pairs as hexadecimal digits."""
    _one_of("kind", kind, tuple(MASKS))
    _within("n", n, 16, 512)
    _within("size", size, 1, n)
    mod = MASKS[kind](n, size)
    causal = causal or kind == "causal"
    tiles = mods.block_mask(mod, n, n, block=(block, block), causal=bool(causal)).tiles[0, 0]
    i, j = torch.arange(n)[:, None], torch.arange(n)
    seen = torch.as_tensor(mod(0, 0, i, j)).expand(n, n)
    if causal:
        seen = seen & (j <= i)
    digits = (seen.view(n, n // 4, 4).int() * torch.tensor([8, 4, 2, 1])).sum(-1).tolist()
    return {
        "n": n,
        "block": block,
        "pairs": int(seen.sum()),
        "kinds": [int((tiles == kind).sum()) for kind in range(3)],
        "tiles": tiles.tolist(),
        "rows": ["".join(f"{digit:x}" for digit in row) for row in digits],
    }


# What a copy holds: for each endpoint, lists of values whose every combination is answered.
ORDERS, SWITCH = ("fa1", "fa2"), (0, 1)
GRID: dict[str, dict[str, Sequence[Any]]] = {
    "softmax": {"x": ("3,2,5,1", "1,2,3,4,5,6", "6,5,4,3,2,1", "100,101,99", "-2,-1,-4", "2,2,2,2,2,2,2,2")},
    "tiles": {
        "n": (8, 12), "rows": (2, 4), "columns": (2, 4), "order": ORDERS, "mask": ("none", "causal", "window"),
        "width": (2,), "backward": SWITCH,
    },
    "roof": {
        "device": tuple(devices.DEVICES), "b": (4,), "s": (256, 1024, 4096), "h": (16,), "d": (64, 128),
        "causal": SWITCH, "backward": SWITCH,
    },
    "measured": {"device": tuple(devices.DEVICES)},
    "waves": {"device": tuple(devices.DEVICES), "tile": ("256x128", "128x128", "128x64", "64x64")},
    "grid": {"device": tuple(devices.DEVICES), "heads": (8, 16, 32)},
    "layout": {"shape": ("7", "2x3", "2x4x3", "4x6"), "view": ("same",)},
    "coalescing": {
        "pattern": ("warp", "thread"), "columns": (8, 16, 32, 64, 4096), "itemsize": (2, 4), "instant": (0, 1, 2, 3),
    },
    "loop": {"iterations": tuple(range(1, 9)), "stages": (2, 3, 4)},
    "gpus": {"count": (2, 3, 4), "batches": (1, 2, 4, 8)},
    "hopper": {},
    "autograd": {"a": (1, 2), "w": (-1, 3), "b": (0, 1)},
    "flash": {"n": (4,), "d": (2,), "seed": (0, 1, 2)},
    "mask": {"kind": tuple(MASKS), "n": (128,), "block": (16, 32), "size": (8, 16), "causal": SWITCH},
}  # fmt: skip
VIEWS = {"2x3": ("transpose", "3x2", "6"), "2x4x3": ("transpose", "8x3", "4x6"), "4x6": ("transpose", "6x4", "24")}


def combinations(name: str) -> Iterator[dict[str, Any]]:
    grid = GRID[name]
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))
    if name == "layout":
        yield from ({"shape": shape, "view": view} for shape, views in VIEWS.items() for view in views)
