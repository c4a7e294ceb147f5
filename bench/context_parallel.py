"""What cutting a causal call into the tiles of 8 ranks costs: one GPU is each of the ranks in turn.

    python bench/context_parallel.py --json bench/results/context-parallel-h200.json --cut      # a GPU; about a minute

The tiles of all ranks, one after the other, against the whole call: `tiles` is their kernels alone, `with merges` also
puts their results together. Times are medians of interleaved runs. --cut writes the ratios of the longest sequence
(without the merges, which the simulator counts itself) into src/tilewise/distributed/links.json, where the simulator
finds them.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise import checks, dispatch
from tilewise.distributed import Plan, plan
from tilewise.distributed.execute import Forward
from tilewise.distributed.heads import Heads
from tilewise.distributed.rows import parts
from tilewise.distributed.simulate import LINKS
from tilewise.spec import Request, Upstream

BARS = (("forward", "forward", 1.06), ("forward with merges", "forward", 0.0), ("backward", "backward", 1.08))


def milliseconds(calls: dict[str, Callable[[], Any]], runs: int, device: str, seconds: float) -> dict[str, float]:
    """Medians, the calls in turns; fewer runs if they would take longer than so many seconds."""
    began = time.perf_counter()
    found: dict[str, list[float]] = {name: [] for name in calls}
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for run in range(runs + 2):
        if run > 2 and time.perf_counter() - began > seconds:
            break
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            if run >= 2:
                found[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in found.items()}


class Alone(Forward):
    """A rank that finds the keys of all others in this GPU's memory."""

    def __init__(self, made: Plan, rank: int, request: Request, shards: list[tuple[Tensor, Tensor]]) -> None:
        heads = Heads(made, rank, request.q.shape[2], request.k.shape[2])
        super().__init__(made, heads, request, request.q, shards[rank])
        self.shards = shards

    def run(self) -> None:
        for source in range(self.plan.stations):
            if self.plan.pairs[self.station, source]:
                self.keys[source] = self.shards[source]
                self.compute((source,))


def measure(seqlen: int, heads: int, kv_heads: int, dim: int, runs: int, device: str, seconds: float) -> dict[str, Any]:
    made = plan(8, seqlen=seqlen, causal=True, strategy="ring")
    shape = {"device": device, "dtype": torch.bfloat16}
    q, k, v, dout = (torch.randn(1, seqlen, h, dim, **shape) for h in (heads, kv_heads, kv_heads, heads))
    whole = checks.dense(q, k, v, checks.options_of({"causal": True}))
    out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
    split = [[made.shard(x, rank=r) for x in (q, k, v, out, dout)] for r in range(8)]
    logs = [made.shard(lse, dim=2, rank=r) for r in range(8)]
    requests = [whole._replace(q=x[0], k=x[1], v=x[2]) for x in split]
    shards = [(x[1], x[2]) for x in split]

    def tiles(back: bool) -> None:
        for r in range(8):
            for s in range(8):
                call = requests[r]._replace(k=shards[s][0], v=shards[s][1])
                for part in parts(made, r, (s,), call, 0):
                    found = dispatch.call_of(part.request)
                    if not back:
                        found.backend.forward(part.request, found.recordings)
                        continue
                    rows = part.rows
                    upstream = Upstream(rows.take(split[r][3]), rows.take(logs[r], 2), rows.take(split[r][4]), None)
                    found.backend.backward(part.request, upstream, found.recordings)

    def with_merges() -> None:
        for r in range(8):
            Alone(made, r, requests[r], shards).run()

    ranks = [Alone(made, r, requests[r], shards) for r in range(8)]
    for rank in ranks:
        rank.run()
    merged = made.unshard([rank.finished()[0] for rank in ranks])
    error = float((merged.float() - out.float()).abs().max())
    call = dispatch.call_of(whole)
    upstream = Upstream(out, lse, dout, None)
    times = milliseconds(
        {
            "whole forward": lambda: call.backend.forward(whole, call.recordings),
            "tiles forward": lambda: tiles(False),
            "tiles forward with merges": with_merges,
            "whole backward": lambda: call.backend.backward(whole, upstream, call.recordings),
            "tiles backward": lambda: tiles(True),
        },
        runs,
        device,
        seconds,
    )
    part = next(parts(made, 0, (0,), requests[0], 0)).request
    return {
        "tokens": seqlen, "heads": heads, "kv_heads": kv_heads, "dim": dim, "error": error, "milliseconds": times,
        "backend of the whole": dispatch.choose(whole).backend.name,
        "backend of a tile": dispatch.choose(part).backend.name,
        "forward": times["tiles forward"] / times["whole forward"],
        "forward with merges": times["tiles forward with merges"] / times["whole forward"],
        "backward": times["tiles backward"] / times["whole backward"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 16, 1 << 18])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=30, help="for the runs of each length, at most")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cut", action="store_true", help="write the ratios where the simulator finds them")
    args = parser.parse_args()
    shape = args.heads, args.kv_heads, args.dim, args.runs, args.device, args.seconds
    found = []
    for n in args.tokens:
        found.append(measure(n, *shape))
        save(args, found)  # a run that is stopped keeps what it has
    print(f"{'tokens':>8}  {'pass':20} {'whole ms':>9} {'tiles ms':>9} {'ratio':>6}   bar   backends")
    for x in found:
        for name, whole, bar in BARS:
            times = x["milliseconds"]
            tiles, one = times[f"tiles {name}"], times[f"whole {whole}"]
            backends = f"{x['backend of the whole']}, {x['backend of a tile']}"
            bar_text = f"{bar:.2f}" if bar else "   -"
            print(f"{x['tokens']:8}  {name:20} {one:9.2f} {tiles:9.2f} {tiles / one:6.3f}  {bar_text}   {backends}")


def save(args: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    cut = {name: round(found[-1][name], 3) for name in ("forward", "backward")}
    if args.json:
        name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        told = {"gpu": name, "torch": torch.__version__, "cut": cut, "results": found}
        args.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if args.cut:
        text = re.sub(r'"cut": \{[^}]*\}', f'"cut": {json.dumps(cut)}', LINKS.read_text(encoding="utf-8"))
        LINKS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
