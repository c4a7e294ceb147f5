"""Times calls whose sequences share a prefix: shared and not shared, interleaved, L2 cold, host hidden (CUDA graphs).

    python bench/prefix/measure.py warm N    # compiles the kernels of part N
    python bench/prefix/measure.py check     # against float64
    python bench/prefix/measure.py time

Prediction before the first run (H200): 64 x (32k shared + 512): shared 190 us, the same pages unshared 1150 us (from
L2), distinct pages 1950 us; nothing shared, 64 x 4k: 2 to 4 us more with detection than without. Before the second
run, with one wave of programs for prefixes and their results combined 16 rows at a time: nothing shared 1.5 us more;
8 x (8k + 1k) 40 us (was 55); the first row as before.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

import tilewise
from tilewise.backends.common.kv import partition, prefix_launches
from tilewise.backends.common.kv.launches import Part
from tilewise.backends.common.kv.partition import KvTile
from tilewise.plan_cache import plans

PAGE, HEADS, KV_HEADS, DIM = 16, 32, 8, 128
TILES = {
    "64x64": None,
    "128x64": KvTile(128, 64, 8, 3, 1),
}
DEVICE = "cuda"
started = time.time()


def say(*words: Any) -> None:
    print(f"{time.time() - started:6.1f}", *words, flush=True)


def call_of(
    groups: list[int],
    shared: int,
    own: int,
    queries: int = 1,
    distinct: bool = False,
    dtype: Any = None,
    width: int = 0,
) -> dict[str, Any]:
    """Sequences in groups that share `shared` keys; `distinct`: each has pages of its own."""
    batch, pages = sum(groups), (shared + own) // PAGE
    table = torch.empty(batch, pages, dtype=torch.int64)
    first, b = 0, 0
    for n in groups:
        for m in range(n):
            fresh = torch.arange(first, first + pages)
            if m == 0 or distinct:
                table[b] = fresh
                first += pages
            else:
                table[b, : shared // PAGE] = table[b - m, : shared // PAGE]
                table[b, shared // PAGE :] = fresh[: own // PAGE]
                first += own // PAGE
            b += 1
    order = torch.randperm(first)
    table = order[table].int().to(DEVICE)
    if width:
        table = torch.nn.functional.pad(table, (0, width - pages))
    k, v = torch.randn(2, first, PAGE, KV_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16).unbind(0)
    options: dict[str, Any] = {"page_table": table, "backend": "triton"}
    if dtype is not None:
        k, v = (x.to(dtype) for x in (k, v))
        options |= {"k_scale": torch.ones(KV_HEADS, device=DEVICE), "v_scale": torch.ones(KV_HEADS, device=DEVICE)}
    q = torch.randn(batch, queries, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    lengths = torch.full((batch,), shared + own, dtype=torch.int32, device=DEVICE)
    return {"args": (q, k, v, lengths), "options": options}


def patches_of(tile: str, early: bool, least: int | None) -> list[Any]:
    """What a variant changes: the tile of prefixes; the other keys wait for them; bytes that are worth sharing."""
    found = []
    if tile:
        found.append(mock.patch.object(prefix_launches, "PREFIX_TILE", TILES[tile]))
    if early:
        found.append(mock.patch.object(prefix_launches, "Part", early_part))
    if least is not None:
        found.append(mock.patch.object(partition, "MIN_SAVED", least))
    if least == 0:
        found.append(mock.patch.object(partition, "MIN_SHARED", 64))
    return found


def early_part(concurrent: bool = False, **fields: Any) -> Any:
    return Part(False, **fields)


def graphed(
    x: dict[str, Any],
    tile: str = "",
    early: bool = False,
    least: int | None = None,
    plan_too: bool = False,
    **more: Any,
) -> Any:
    """A graph of the call, or with `plan_too` of its plan alone, and its result."""
    plans.clear()
    with ExitStack() as stack:
        for patch in patches_of(tile, early, least):
            stack.enter_context(patch)
        options = x["options"] | more
        plan = tilewise.plan_kv(*x["args"], **options)
        out = torch.full_like(x["args"][0], torch.nan)

        def work() -> None:
            if plan_too:
                tilewise.plan_kv(*x["args"], **options, plan=plan)
            else:
                tilewise.attention_kv(*x["args"], **options, plan=plan, out=out)

        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    return graph, out, plan


SCRUB: list[torch.Tensor] = []


def times(graphs: dict[str, Any], rounds: int = 15) -> dict[str, float]:
    if not SCRUB:
        SCRUB.append(torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE))
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, (graph, *_) in graphs.items():
            SCRUB[0].fill_(1)
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            graph.replay()
            b.record()
            found[name].append((a, b))  # type: ignore[arg-type]
    torch.cuda.synchronize()
    return {name: 1000 * statistics.median(a.elapsed_time(b) for a, b in x[2:]) for name, x in found.items()}  # type: ignore


def exact(x: dict[str, Any], b: int, heads: tuple[int, ...] = (0, 5, 31)) -> torch.Tensor:
    q, k, v, lengths = x["args"]
    n, n_q = int(lengths[b]), q.shape[1]
    pages = x["options"]["page_table"][b].long()
    found = []
    for h in heads:
        keys, values = (t[pages][:, :, h // (HEADS // KV_HEADS)].flatten(0, 1)[:n].double() for t in (k, v))
        s = q[b, :, h].double() @ keys.T * DIM**-0.5
        at = torch.arange(n_q, device=DEVICE)[:, None] + n - n_q
        s = s.masked_fill(torch.arange(n, device=DEVICE)[None] > at, -torch.inf)
        found.append(s.softmax(-1) @ values)
    return torch.stack(found, 1)


def error(x: dict[str, Any], out: torch.Tensor) -> float:
    batch = out.shape[0]
    worst = 0.0
    for b in sorted({0, 1, batch // 2 - 1, batch // 2, batch - 1}):
        truth = exact(x, b)
        worst = max(worst, ((out[b][:, [0, 5, 31]].double() - truth).abs().max() / truth.abs().max()).item())
    return worst if bool(out.isfinite().all()) else float("nan")


SMALL = {
    "2 x (4k + 512)": ([2], 4096, 512), "2 x (16k + 512)": ([2], 16384, 512), "4 x (2k + 512)": ([4], 2048, 512),
    "8 x (1k + 1k)": ([8], 1024, 1024), "8 x (2k + 1k)": ([8], 2048, 1024), "16 x (512 + 512)": ([16], 512, 512),
    "16 x (1k + 512)": ([16], 1024, 512), "32 x (512 + 512)": ([32], 512, 512), "64 x (512 + 512)": ([64], 512, 512),
}  # fmt: skip
ROWS: dict[str, Any] = {
    "64 x (32k + 512)": ([64], 32768, 512),
    "8 x (8k + 1k)": ([8], 8192, 1024),
    "128 in 2 groups x (8k + 1k)": ([64, 64], 8192, 1024),
    "16 in pairs x (16k + 1k)": ([2] * 8, 16384, 1024),
    "32 x (8k + 512), 4 queries": ([32], 8192, 512, 4),
    "256 x (2k + 256)": ([256], 2048, 256),
    "32 x (2k + 512)": ([32], 2048, 512),
    "4 x (32k + 512)": ([4], 32768, 512),
}
BAR = "64 x (32k + 512)"
UNSHARED = {
    "64 x 4k": ([64], 0, 4096), "64 x 1k": ([64], 0, 1024), "16 x 4k": ([16], 0, 4096), "8 x 256": ([8], 0, 256),
    "8 x 256 of 32k": ([8], 0, 256, 1, False, None, 2048),
}  # fmt: skip


def row(name: str, t: dict[str, float], last: str = "") -> None:
    """A line of the table, and all variants behind it."""
    print(f"| {name} | {t['auto']:.1f} | {t['off']:.1f} | {t['off'] / t['auto']:.3f} | {last} |", flush=True)
    say({key: round(y, 1) for key, y in t.items()})


def measure() -> None:
    print("| call | shared | unshared | ratio | plan; unshared |")
    print("|---|---:|---:|---:|---:|")
    auto = {"shared_prefix": "auto"}
    for name, sizes in ROWS.items():
        x = call_of(*sizes)
        graphs = {"auto": graphed(x, **auto), "off": graphed(x), "early": graphed(x, early=True, **auto)}
        graphs |= {tile: graphed(x, tile, **auto) for tile in TILES if TILES[tile]}
        graphs |= {"plan": graphed(x, plan_too=True, **auto), "plan off": graphed(x, plan_too=True)}
        if name == BAR:
            graphs["distinct"] = graphed(call_of(*sizes, distinct=True))
        t = times(graphs, 9 if name == BAR else 15)
        row(name, t, f"{t['plan']:.1f}; {t['plan off']:.1f}")
    for name, sizes in UNSHARED.items():
        x = call_of(*sizes)
        graphs = {"auto": graphed(x, **auto), "off": graphed(x), "early": graphed(x, early=True, **auto)}
        graphs |= {"plan": graphed(x, plan_too=True, **auto), "plan off": graphed(x, plan_too=True)}
        t = times(graphs, 31)
        row(f"{name}, nothing shared", t, f"{t['plan']:.1f}; {t['plan off']:.1f}")
    x = call_of([64], 32768, 512, dtype=torch.float8_e4m3fn)
    row("64 x (32k + 512), e4m3", times({"auto": graphed(x, **auto), "off": graphed(x)}, 9))
    for name, sizes in SMALL.items():
        x = call_of(*sizes)
        graphs = {"auto": graphed(x, least=0, **auto), "off": graphed(x), "not": graphed(x, least=1 << 60, **auto)}
        row(f"{name}: {(sizes[0][0] - 1) * sizes[1] * 4096 / 2**20:.0f} MB saved", times(graphs, 31))


CHECKED = {
    "8 x (2k + 1k)": ([8], 2048, 1024), "6 in groups": ([3, 1, 2], 1024, 272), "8 x (8k + 1k)": ([8], 8192, 1024),
    "32 x (8k + 512), 4 queries": ([32], 8192, 512, 4),
}  # fmt: skip


def check() -> None:
    for name, sizes in CHECKED.items():
        x = call_of(*sizes)
        x["args"][3].sub_(torch.arange(len(x["args"][3]), device=DEVICE, dtype=torch.int32) * 3)
        errors = {tile: error(x, graphed(x, tile, least=0, shared_prefix="auto")[1]) for tile in TILES}
        errors["unshared"] = error(x, graphed(x)[1])
        say(name, {key: f"{y:.1e}" for key, y in errors.items()})


def warm(n: int) -> None:
    """Compiles the kernels of the calls above: their batches and queries."""
    batch, queries, shares, tile, dtype = [
        *((batch, 1, True, "", None) for batch in (2, 8, 16, 64, 256)),
        *((batch, 1, False, "", None) for batch in (2, 8, 16, 64, 256)),
        (32, 4, True, "", None), (32, 4, False, "", None),
        (64, 1, True, "", torch.float8_e4m3fn), (64, 1, False, "", torch.float8_e4m3fn),
        (64, 1, True, "128x64", None), (32, 4, True, "128x64", None),
    ][n]  # fmt: skip
    x = call_of([batch], 1024, 256, queries, dtype=dtype)
    with torch.no_grad():
        if not shares:
            graphed(x)
        else:
            graphed(x, tile, least=0, shared_prefix="auto")
        if batch == 64 and shares and not tile and dtype is None:
            graphed(x, early=True, least=0, shared_prefix="auto")
    say("warm", n)


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1] == "warm":
        warm(int(sys.argv[2]))
    else:
        with torch.no_grad():
            {"check": check, "time": measure}[sys.argv[1]]()
