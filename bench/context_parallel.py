"""What cutting a causal call into the tiles of 8 ranks costs: one GPU is each of the ranks in turn.

    python bench/context_parallel.py --json bench/results/context-parallel-h200.json --cut      # a GPU; about a minute

The tiles of all ranks, one after the other, against the whole call: `forward` and `backward` are their kernels alone;
`with merges` and `with sums` are all that a rank does between its messages, which also puts the results together. Each
twice: what the GPU takes, the calls queued behind a pause that is longer than it takes to ask for them, as a rank that
runs ahead of its GPU has them; and with the host, from the first call until the GPU is done. Times are medians of
interleaved runs. --cut writes the ratios of the ring over the longest sequence (without merges and sums, which the
simulator counts itself) into src/tilewise_lab/costs/links.json, where the simulator finds them.
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

from tilewise.call.fields import ATTENTION
from tilewise.distributed import Plan, plan
from tilewise.distributed.execute import Backward, Forward, Saved
from tilewise.distributed.schedule import Compute, schedule
from tilewise.distributed.ulysses import Ulysses
from tilewise.plan_cache import CallPlan
from tilewise.request import BackwardInputs, Request
from tilewise.validation import dense as checks
from tilewise_lab.costs.context_parallel import LINKS
from tilewise_lab.progress import progress

BARS = {"forward": 1.06, "forward with merges": None, "backward": 1.08, "backward with sums": None}
RANKS = 8
CLOCK = 2e9  # cycles a second, at most
Calls = dict[str, Callable[[], Any]]


def host_and_device(call: Callable[[], Any], pause: float) -> tuple[float, float]:
    """Milliseconds with the host, and of the GPU alone, which first pauses for so many seconds."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return (1e3 * (time.perf_counter() - start),) * 2
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    with_host = 1e3 * (time.perf_counter() - start)
    while True:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(pause * CLOCK))  # type: ignore[no-untyped-call]
        first.record()  # type: ignore[no-untyped-call]
        call()
        last.record()  # type: ignore[no-untyped-call]
        ahead = not first.query()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        if ahead or pause > 2:
            return with_host, first.elapsed_time(last)  # type: ignore[no-untyped-call]
        pause *= 2


def measured(calls: Calls, runs: int, seconds: float, show: Any) -> dict[str, dict[str, float]]:
    """Medians, the calls in turns; fewer runs if they would take longer than so many seconds."""
    began = time.perf_counter()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for run in range(runs + 2):
        if run > 2 and time.perf_counter() - began > seconds:
            break
        for name, call in calls.items():
            show(f"{name}, run {run + 1} of {runs + 2}")
            took = host_and_device(call, 0.05)
            if run >= 2:
                found[name].append(took)
    return {
        name: dict(zip(("with host", "device"), map(statistics.median, zip(*times, strict=True)), strict=True))
        for name, times in found.items()
    }


def ranks_alone(made: Plan, whole: Request, saved: Saved, dout: Tensor) -> tuple[list[Forward], Callable[[], Any]]:
    """Every rank, with the keys of all others in this GPU's memory; and all of them at work on the backward, which
    gives the gradients of all keys."""
    parts = [[made.shard(x, rank=r) for x in (*saved[:4], dout)] for r in range(RANKS)]
    logs = [made.shard(saved.lse, dim=2, rank=r) for r in range(RANKS)]
    requests = [whole._replace(q=x[0], k=x[1], v=x[2]) for x in parts]
    shards = {r: (x[1], x[2]) for r, x in enumerate(parts)}
    ulysses = [Ulysses(made, r, saved.q.shape[2], saved.k.shape[2]) for r in range(RANKS)]

    def one(r: int) -> Forward:
        work = Forward(made, ulysses[r], requests[r], requests[r].q, shards[r])
        work.kv = shards
        return work

    def back() -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        dq: list[Tensor] = []
        dkv: dict[int, tuple[Tensor, Tensor]] = {}
        for r in range(RANKS):
            state = Saved(*parts[r][:4], logs[r])
            bwd_inputs = BackwardInputs(state.out, state.lse, parts[r][4], None)
            work = Backward(made, ulysses[r], requests[r], state, bwd_inputs, (False, False))
            work.kv = shards
            for sources in computed(made, r):
                work.compute(sources)
                for source, (dk, dv) in work.dkv.items():
                    total = dkv.get(source)
                    dkv[source] = (dk, dv) if total is None else (total[0].add_(dk), total[1].add_(dv))
                work.dkv.clear()
            dq.append(work.dq)
        return dq, [dkv[r] for r in range(RANKS)]

    return [one(r) for r in range(RANKS)], back


def computed(made: Plan, rank: int) -> list[tuple[int, ...]]:
    return [
        x.sources for x in schedule(made, rank) if isinstance(x, Compute) if made.pairs[rank, list(x.sources)].any()
    ]


def tiles_of(ranks: list[Forward], saved: Saved, dout: Tensor) -> list[tuple[Any, Request, BackwardInputs]]:
    """Every tile: how it runs, what it is asked, and the results and gradients of its rows."""
    found = []
    for r, rank in enumerate(ranks):
        results = [rank.plan.shard(x, dim=dim, rank=r) for x, dim in ((saved.out, 1), (saved.lse, 2), (dout, 1))]
        for sources in computed(rank.plan, r):
            for tile, request in rank.calls(sources, *rank.keys_of(sources)):
                bwd_inputs = BackwardInputs(
                    *(tile.queries.take(x, dim) for x, dim in zip(results, (1, 2, 1), strict=True)), None
                )
                found.append((CallPlan(request), request, bwd_inputs))
    return found


def measure(seqlen: int, shape: tuple[int, int, int], strategies: list[str], args: Any, show: Any) -> dict[str, Any]:
    heads, kv_heads, dim = shape
    options = {"device": args.device, "dtype": torch.bfloat16}
    q, k, v, dout = (torch.randn(1, seqlen, h, dim, **options) for h in (heads, kv_heads, kv_heads, heads))
    whole = checks.dense(q, k, v, ATTENTION.completed({"causal": True}))
    call = CallPlan(whole)
    out, lse = call.forward(whole.tensors())
    saved, bwd_inputs = Saved(q, k, v, out, lse), BackwardInputs(out, lse, dout, None)
    exact = out, *call.backward((*whole.tensors(), *bwd_inputs))
    calls: Calls = {
        "whole forward": lambda: call.forward(whole.tensors()),
        "whole backward": lambda: call.backward((*whole.tensors(), *bwd_inputs)),
    }
    told: dict[str, Any] = {}
    for strategy in strategies:
        made = plan(RANKS, seqlen=seqlen, causal=True, strategy=strategy)
        ranks, back = ranks_alone(made, whole, saved, dout)
        tiles = tiles_of(ranks, saved, dout)

        def forward(tiles: Any = tiles) -> None:
            for found, request, _ in tiles:
                found.forward(request.tensors())

        def backward(tiles: Any = tiles) -> None:
            for found, request, results in tiles:
                found.backward((*request.tensors(), *results))

        def merged(ranks: list[Forward] = ranks) -> list[Tensor]:
            for r, rank in enumerate(ranks):
                rank.is_first = True
                for sources in computed(rank.plan, r):
                    rank.compute(sources)
            return [rank.results()[0] for rank in ranks]

        dq, dkv = back()
        ours = [made.unshard(x) for x in (merged(), dq, *([x[n] for x in dkv] for n in (0, 1)))]
        errors = [float((x.float() - y.float()).abs().max()) for x, y in zip(ours, exact, strict=True)]
        names = sorted({found.backend.name for found, _, _ in tiles})
        told[strategy] = {"tiles": len(tiles), "backends": names, "errors of out, dq, dk, dv": errors}
        passes = dict(zip(BARS, (forward, merged, backward, back), strict=True))
        calls |= {f"{strategy} {name}": run for name, run in passes.items()}
    times = measured(calls, args.runs, args.seconds, show)
    for strategy in strategies:
        for name in BARS:
            one, tiles_time = times[f"whole {name.split()[0]}"], times[f"{strategy} {name}"]
            told[strategy][name] = {kind: tiles_time[kind] / one[kind] for kind in one}
    name = call.backend.name
    sizes = {"tokens": seqlen, "heads": heads, "kv_heads": kv_heads, "dim": dim, "backend": name}
    return sizes | {"milliseconds": times, "strategies": told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 16, 1 << 18])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--strategies", nargs="+", default=["ring", "allgather"], choices=("ring", "allgather"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=30, help="for the runs of each length, at most")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cut", action="store_true", help="write the ratios where the simulator finds them")
    args = parser.parse_args()
    found = []
    with progress() as show, torch.no_grad():
        for n in args.tokens:
            found.append(measure(n, (args.heads, args.kv_heads, args.dim), args.strategies, args, show))
            save(args, found)  # a run that is stopped keeps what it has
    print(f"{args.heads} heads on {args.kv_heads} of {args.dim}, {RANKS} ranks; ms of the GPU, over the whole call")
    print(f"{'tokens':>8}  {'strategy':10} {'pass':20} {'whole':>9} {'tiles':>9} {'ratio':>6}   bar   with host")
    for x in found:
        for strategy, told in x["strategies"].items():
            for name, bar in BARS.items():
                one, tiles = (
                    x["milliseconds"][key]["device"] for key in (f"whole {name.split()[0]}", f"{strategy} {name}")
                )
                ratios = told[name]
                print(f"{x['tokens']:8}  {strategy:10} {name:20} {one:9.2f} {tiles:9.2f} {ratios['device']:6.3f}"
                      f"  {f'{bar:.2f}' if bar else '   -'}  {ratios['with host']:6.3f}")  # fmt: skip


def save(args: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    last = found[-1]["strategies"][args.strategies[0]]
    cut = {name: round(last[name]["device"], 3) for name in ("forward", "backward")}
    if args.json:
        name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        told = {"gpu": name, "torch": torch.__version__, "cut": cut, "results": found}
        args.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if args.cut:
        text = re.sub(r'"cut": \{[^}]*\}', f'"cut": {json.dumps(cut)}', LINKS.read_text(encoding="utf-8"))
        LINKS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
