"""The command: its arguments, the comparison, the advice."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from tilewise.distributed import plan
from tilewise.distributed.partition import Strategy
from tilewise_lab import asked
from tilewise_lab.costs.context_parallel import Estimate, advised, estimate
from tilewise_lab.costs.devices import ITEMSIZE
from tilewise_lab.plan.gantt import gantt

__all__ = ["advised", "compare", "configure", "number", "run"]
MAX_RANKS, MAX_TOKENS = 1024, 1 << 40
STRATEGIES: tuple[Strategy, ...] = ("ring", "two-level", "halo", "allgather", "ulysses")


def number(text: str) -> int:
    """
    >>> number("128k"), number("1M"), number("4096")
    (131072, 1048576, 4096)
    """
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    unit = units.get(text[-1:].lower(), 1)
    try:
        return int(float(text[:-1]) * unit) if unit > 1 else int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r}: a number like 4096, 128k or 1M") from None


def side(text: str) -> int | None:
    return None if text == "all" else number(text)


def configure(parser: ArgumentParser) -> None:
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.description = sys.modules["tilewise_lab.plan"].__doc__
    parser.add_argument("--seqlen", type=number, default=1 << 20, metavar="N", help="tokens: 4096, 128k, 1M (default)")
    parser.add_argument("--documents", type=number, nargs="+", metavar="N", help="instead: lengths of packed documents")
    parser.add_argument("--ranks", type=number, default=64, help="GPUs (default: 64)")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=side, nargs=2, metavar=("LEFT", "RIGHT"), help="keys to each side, or 'all'")
    parser.add_argument("--machine", default="8xH200+400G", help="GPUs of a node, their kind and the network between")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=ITEMSIZE)
    parser.add_argument("--forward", action="store_true", help="the forward alone, without the backward")
    parser.add_argument("--links", type=Path, help="a file like src/tilewise_lab/costs/links.json, with your figures")
    parser.add_argument("--svg", type=Path, help="write a picture of the advised plan's first ranks at work")
    parser.add_argument("--json", type=Path, help="write everything that was found")


def run(options: Namespace) -> int:
    for name, path in ("--svg", options.svg), ("--json", options.json):
        if path is not None:
            asked.place(path, name)
    if options.links:
        asked.file(options.links, "--links")
    asked.count("--ranks", options.ranks, MAX_RANKS, "; every pair of ranks is simulated")
    for n in options.documents or [options.seqlen]:
        asked.count("--documents" if options.documents else "--seqlen", n, MAX_TOKENS)
    found = compare(options)
    best = advised(found)
    show(options, found, best)
    if options.svg:
        options.svg.write_text(gantt(best.passes[0]), encoding="utf-8")
    if options.json:
        told = [{"refusal": x.refusal, "passes": [p.to_dict() for p in x.passes]} for x in found]
        text = json.dumps({"advice": best.plan.strategy, "strategies": told})
        options.json.write_text(text, encoding="utf-8")
    return 0


def compare(options: Namespace) -> list[Estimate]:
    """Every strategy that fits the question, each with the layout that suits it: the advised one, then by time."""
    ends = [0]
    for n in options.documents or ():
        ends.append(ends[-1] + n)
    given = {"cu_seqlens": ends} if options.documents else {"seqlen": options.seqlen}
    links = json.loads(options.links.read_text(encoding="utf-8")) if options.links else None
    head, _, _ = options.machine.partition("x")
    node = min(options.ranks, int(head)) if head.isdigit() else 1
    found = []
    for strategy in STRATEGIES:
        if strategy == "two-level" and (node == 1 or options.ranks <= node or options.ranks % node):
            continue
        made = plan(options.ranks, **given, causal=options.causal, window=options.window, strategy=strategy, node=node)
        if strategy == "halo" and not options.window and not options.documents:
            continue  # as the gather
        shape = {name: getattr(options, name) for name in ("heads", "kv_heads", "dim", "batch", "dtype", "forward")}
        found.append(estimate(made, options.machine, links=links, **shape))
    best = advised(found)
    return sorted(found, key=lambda x: (x is not best, x.refusal is not None, x.time))


def reason_of(found: list[Estimate], best: Estimate) -> str | None:
    """Why a strategy is advised although another one is faster; None if none is."""
    able = [x for x in found if x.refusal is None] or found
    first = min(able, key=lambda x: x.time)
    if first is best:
        return None
    slower = best.time / first.time - 1 if first.time else 0.0
    words = f"{best.plan.strategy} is advised: {slower:.1%} slower than {first.plan.strategy}"
    return f"{words}, holds {best.memory / 1e9:.2f} GB, not {first.memory / 1e9:.2f}"


def show(options: Namespace, found: list[Estimate], best: Estimate) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=80, highlight=False)
    what = f"{len(options.documents)} documents" if options.documents else f"{options.seqlen:,} tokens"
    what += f", {options.heads}/{options.kv_heads} heads of {options.dim}, {options.dtype}"
    console.print(f"{what}, on {options.ranks} x {options.machine}: {'forward' if options.forward else 'a step'}")
    table = Table(box=None, pad_edge=False)
    for name in ("strategy", "layout", "ms", "of ideal", "wait ms", "sent GB", "held GB", ""):
        table.add_column(name, justify="left" if name in ("strategy", "layout", "") else "right", no_wrap=True)
    for x in found:
        numbers = f"{x.time * 1e3:.1f}", f"{x.efficiency:.0%}", f"{x.exposed * 1e3:.1f}"
        sizes = f"{x.sent / 1e9:.2f}", f"{x.memory / 1e9:.2f}"
        mark = "advised" if x is best else "no" if x.refusal else ""
        style = "bold" if x is best else "dim" if x.refusal else ""
        table.add_row(x.plan.strategy, x.plan.layout, *numbers, *sizes, mark, style=style)
    console.print(table)
    for x in found:
        if x.refusal:
            console.print(f"{x.plan.strategy}: {x.refusal}")
    if (reason := reason_of(found, best)) is not None:
        console.print(reason)
    console.print(f"sent and held by the rank with most; work of the busiest {best.plan.imbalance():+.1%} of the mean")
    words = f'strategy="{best.plan.strategy}", layout="{best.plan.layout}"'
    console.print(f"tilewise.distributed.plan(mesh, ..., {words})")
