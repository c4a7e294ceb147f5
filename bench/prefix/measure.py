"""Times calls whose sequences share a prefix: shared and not shared, interleaved, L2 cold, host hidden (CUDA graphs).

    python bench/prefix/measure.py warm N    # compiles the kernels of part N
    python bench/prefix/measure.py check     # against float64
    python bench/prefix/measure.py time

Prediction before the first run (H200): 64 x (32k shared + 512): shared 190 us, the same pages unshared 1150 us (from
L2), distinct pages 1950 us; nothing shared, 64 x 4k: 2 to 4 us more with detection than without.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any
from unittest import mock

import torch

import tilewise
from tilewise.backends.common.kv import prefix_launches
from tilewise.backends.common.kv.kv_tiles import KvTile
from tilewise.plan_cache import plans

PAGE, HEADS, KV_HEADS, DIM = 16, 32, 8, 128
TILES = {
    "64x64": None,
    "128x64": KvTile(128, 64, 8, 3, 1),
    "128x128": KvTile(128, 128, 8, 2, 1),
}
DEVICE = "cuda"
started = time.time()


def say(*words: Any) -> None:
    print(f"{time.time() - started:6.1f}", *words, flush=True)


def call_of(
    groups: list[int], shared: int, own: int, queries: int = 1, distinct: bool = False, dtype: Any = None
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
    k, v = torch.randn(2, first, PAGE, KV_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16).unbind(0)
    options: dict[str, Any] = {"page_table": table, "backend": "triton"}
    if dtype is not None:
        k, v = (x.to(dtype) for x in (k, v))
        options |= {"k_scale": torch.ones(KV_HEADS, device=DEVICE), "v_scale": torch.ones(KV_HEADS, device=DEVICE)}
    q = torch.randn(batch, queries, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    lengths = torch.full((batch,), shared + own, dtype=torch.int32, device=DEVICE)
    return {"args": (q, k, v, lengths), "options": options}


def graphed(
    x: dict[str, Any],
    tile: str = "",
    early: bool = False,
    least: int | None = None,
    plans_too: bool = False,
    **more: Any,
) -> Any:
    """A graph of the call (with `plans_too` of its plan), and its result."""
    plans.clear()
    part = prefix_launches.Part
    patches = [mock.patch.object(prefix_launches, "prefix_tile", lambda *_: TILES[tile])] if tile else []
    if early:
        patches.append(mock.patch.object(prefix_launches, "Part", lambda concurrent=False, **y: part(False, **y)))
    if least is not None:
        patches += [mock.patch.object(prefix_launches, "MIN_SAVED", least)]
        patches += [mock.patch.object(prefix_launches, "MIN_SHARED", 64)] if least == 0 else []
    for p in patches:
        p.start()
    try:
        options = x["options"] | more
        plan = tilewise.plan_kv(*x["args"], **options)
        out = torch.full_like(x["args"][0], torch.nan)

        def work() -> None:
            if plans_too:
                tilewise.plan_kv(*x["args"], **options, plan=plan)
            else:
                tilewise.attention_kv(*x["args"], **options, plan=plan, out=out)

        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    finally:
        for p in patches:
            p.stop()
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
}
UNSHARED = {
    "64 x 4k": ([64], 0, 4096),
    "64 x 1k": ([64], 0, 1024),
    "16 x 4k": ([16], 0, 4096),
    "8 x 256": ([8], 0, 256),
}


def measure() -> None:
    print("| call | shared | unshared | ratio | plan | plan, unshared |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, row in ROWS.items():
        x = call_of(*row)
        graphs = {tile: graphed(x, tile, shared_prefix="auto") for tile in TILES}
        graphs["early"] = graphed(x, early=True, shared_prefix="auto")
        graphs["unshared"] = graphed(x)
        graphs["plan"], graphs["plan0"] = graphed(x, plans_too=True, shared_prefix="auto"), graphed(x, plans_too=True)
        if name.startswith("64 x (32k"):
            graphs["distinct"] = graphed(call_of(*row, distinct=True))
        t = times(graphs, 9 if "32k" in name else 15)
        mine = t["64x64"]
        print(
            f"| {name} | {mine:.1f} | {t['unshared']:.1f} | {t['unshared'] / mine:.2f} | {t['plan']:.1f} | {t['plan0']:.1f} |"
        )
        say({key: round(y, 1) for key, y in t.items()})
        del graphs, x
    for name, row in UNSHARED.items():
        x = call_of(*row)
        graphs = {"auto": graphed(x, shared_prefix="auto"), "off": graphed(x), "early": graphed(x, early=True, shared_prefix="auto"), "plan": graphed(x, plans_too=True, shared_prefix="auto"), "plan0": graphed(x, plans_too=True)}  # fmt: skip
        t = times(graphs, 31)
        print(
            f"| {name}, nothing shared | {t['auto']:.1f} | {t['off']:.1f} | {t['off'] / t['auto']:.3f} | {t['plan']:.1f} | {t['plan0']:.1f} |"
        )
        say({key: round(y, 1) for key, y in t.items()})
    x = call_of([64], 32768, 512, dtype=torch.float8_e4m3fn)
    t = times({"auto": graphed(x, shared_prefix="auto"), "off": graphed(x)}, 9)
    print(f"| 64 x (32k + 512), e4m3 | {t['auto']:.1f} | {t['off']:.1f} | {t['off'] / t['auto']:.2f} | | |")
    for name, row in SMALL.items():
        x = call_of(*row)
        t = times({"on": graphed(x, least=0, shared_prefix="auto"), "off": graphed(x), "detected": graphed(x, least=1 << 60, shared_prefix="auto")}, 31)  # fmt: skip
        saved = (row[0][0] - 1) * row[1] * 4096 / 2**20
        print(
            f"| {name}: {saved:.0f} MB saved | {t['on']:.1f} | {t['off']:.1f} | {t['off'] / t['on']:.3f} | not shared | {t['detected']:.1f} |"
        )


def check() -> None:
    for name, row in {
        "8 x (2k + 1k)": ([8], 2048, 1024),
        "6 in groups": ([3, 1, 2], 1024, 272),
        **{k: ROWS[k] for k in ("8 x (8k + 1k)", "32 x (8k + 512), 4 queries")},
    }.items():
        x = call_of(*row)
        x["args"][3].sub_(torch.arange(len(x["args"][3]), device=DEVICE, dtype=torch.int32) * 3)
        errors = {tile: error(x, graphed(x, tile, least=0, shared_prefix="auto")[1]) for tile in TILES}
        errors["unshared"] = error(x, graphed(x)[1])
        say(name, {key: f"{y:.1e}" for key, y in errors.items()})
    # a graph with its plan, replayed for other tables and lengths
    x, y = call_of([8], 2048, 1024), call_of([2, 4, 2], 1024, 2048)
    with mock.patch.object(prefix_launches, "MIN_SAVED", 0):
        plans.clear()
        pages = max(t["args"][1].shape[0] for t in (x, y))
        cache = [torch.zeros(pages, *t.shape[1:], dtype=t.dtype, device=DEVICE) for t in x["args"][1:3]]
        q, lengths, table = x["args"][0].clone(), x["args"][3].clone(), x["options"]["page_table"].clone()
        options = {"page_table": table, "backend": "triton", "shared_prefix": "auto"}
        out = torch.empty_like(q)
        step = lambda: (
            plan := tilewise.plan_kv(q, *cache, lengths, **options),
            tilewise.attention_kv(q, *cache, lengths, plan=plan, out=out, **options),
        )
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = step()
        for n, z in enumerate((x, y, x)):
            for mine, theirs in zip(cache, z["args"][1:3], strict=True):
                mine[: theirs.shape[0]] = theirs
            q.copy_(z["args"][0]), table.copy_(z["options"]["page_table"]), lengths.copy_(z["args"][3])
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            say("graph replay", n, f"{error({'args': (q, *cache, lengths), 'options': options}, out):.1e}")


def warm(n: int) -> None:
    tiles = [*TILES]
    with torch.no_grad():
        if n < 3:
            graphed(call_of([4], 1024, 256), tiles[n], least=0, shared_prefix="auto")
        elif n < 6:
            graphed(call_of([4], 1024, 256, 4), tiles[n - 3], least=0, shared_prefix="auto")
        elif n == 6:
            graphed(call_of([64], 1024, 256), "", least=0, shared_prefix="auto")
        elif n == 7:
            graphed(call_of([64], 1024, 256), "", early=True, shared_prefix="auto")
        elif n == 8:
            graphed(call_of([2], 1024, 256)), graphed(call_of([64], 1024, 256)), graphed(call_of([4], 1024, 256, 4))
        elif n == 9:
            graphed(call_of([64], 1024, 256, dtype=torch.float8_e4m3fn), shared_prefix="auto")
        elif n == 10:
            graphed(call_of([64], 1024, 256, dtype=torch.float8_e4m3fn))
        elif n == 11:
            graphed(call_of([2], 1024, 256), least=0, shared_prefix="auto")
        elif n == 12:
            graphed(call_of([128], 1024, 256), tiles[1], shared_prefix="auto"), graphed(call_of([128], 1024, 256))
        elif n == 13:
            graphed(call_of([128], 1024, 256), tiles[2], shared_prefix="auto")
        elif n == 14:
            graphed(call_of([16], 1024, 256), tiles[0], shared_prefix="auto"), graphed(call_of([16], 1024, 256))
    say("warm", n)


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1] == "warm":
        warm(int(sys.argv[2]))
    else:
        with torch.no_grad():
            {"check": check, "time": measure}[sys.argv[1]]()
