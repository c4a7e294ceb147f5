"""`tilewise trace`: watch the algorithm at work, step by step.

tilewise trace softmax 3 2 5 1
tilewise trace attention --sq 8 --sk 8 --block 2 --order fa1
tilewise trace attention --causal --backward --json
tilewise trace autograd
"""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import Any

from tilewise.errors import AttentionError
from tilewise_lab import asked
from tilewise_lab.language import say
from tilewise_lab.trace.show import NOTE, RIGHT, WRONG, number, numbers, table

STEPS = 4096  # more are nothing to read


def configure(parser: ArgumentParser) -> None:
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.description = __doc__
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("softmax", help="online softmax of some numbers, right and wrong")
    one.add_argument("x", nargs="+", type=float)
    two = kinds.add_parser("attention", help="one head, tile by tile, with every load and store")
    two.add_argument("--sq", type=int, default=8)
    two.add_argument("--sk", type=int, default=8)
    two.add_argument("--d", type=int, default=4)
    two.add_argument("--block", type=int, default=2, help="rows of a block of Q, K and V")
    two.add_argument("--order", choices=["fa1", "fa2"], default="fa2")
    two.add_argument("--causal", action="store_true")
    two.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"))
    two.add_argument("--backward", action="store_true")
    two.add_argument("--owners", choices=["one", "two"], default="two", help="of the backward's sums")
    two.add_argument("--sram", type=int, help="bytes that SRAM holds")
    three = kinds.add_parser("autograd", help="the gradient of (a·w1 + b1)², node by node")
    three.add_argument("values", nargs="*", type=float, metavar="a w1 b1", default=[2.0, 3.0, 1.0])
    for kind in (one, two, three):
        kind.add_argument("--json", action="store_true")


def run(options: Namespace) -> int:
    from tilewise_lab import trace

    if options.kind == "softmax":
        for x in options.x:
            if not math.isfinite(x):
                raise AttentionError("x", x, "finite numbers, for example 3 2 5 1")
        found, show = trace.softmax(options.x), show_softmax
    elif options.kind == "autograd":
        if len(options.values) != 3:
            raise AttentionError("values", f"{len(options.values)} of them", "three, a w1 b1, for example 2 3 1")
        found, show = trace.notes_example(*options.values), show_graph
    else:
        for name in ("sq", "sk", "d", "block"):
            asked.count(f"--{name}", getattr(options, name))
        steps = math.ceil(options.sq / options.block) * math.ceil(options.sk / options.block)
        if steps > STEPS:
            raise AttentionError("tiles to show", steps, f"at most {STEPS}: a smaller --sq and --sk, a larger --block")
        window = options.window and tuple(options.window)
        found = trace.attention(
            options.sq, options.sk, d=options.d, rows=options.block, columns=options.block, order=options.order,
            causal=options.causal, window=window, backward=options.backward, owners=options.owners,
            sram=options.sram,
        )  # fmt: skip
        show = show_attention
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    return 0


def show_softmax(trace: dict[str, Any]) -> None:
    headers = say(
        ["i", "x", "m", "factor", "kept", "new term", "l", ""], ["i", "x", "m", "因子", "保留", "新的一项", "l", ""]
    )
    for name, title in (
        ("right", say("Online softmax", "在线 softmax") + ": l ← l·exp(m_old - m) + exp(x - m)"),
        ("wrong", say("The same without the correction", "同样的，但不修正") + ": l ← l + exp(x - m)"),
    ):
        steps = trace[name]["steps"]
        rows = [
            [
                *(number(step[key]) for key in ("i", "x", "m", "factor", "kept", "term", "l")),
                "" if step["ok"] else say("wrong", "错"),
            ]
            for step in steps
        ]
        table(title, headers, rows, [RIGHT if step["ok"] else WRONG for step in steps])
        out = trace[name]["out"]
        total = number(sum(out))
        print(f"softmax = {numbers(out, 6)}" + say(f", which sums to {total}", f"，总和 {total}") + "\n")
    print(f"logsumexp = {number(trace['right']['lse'])}")
    safe, online = trace["loads"]["safe"], trace["loads"]["online"]
    print(
        say(
            f"each element is read {safe:.0f} times by safe softmax, {online:.0f} times by online softmax",
            f"每个元素，安全 softmax 读 {safe:.0f} 次，在线 softmax 读 {online:.0f} 次",
        )
    )


def show_attention(trace: dict[str, Any]) -> None:
    title = f"{trace['order'].upper()} order, {trace['sq']} queries and {trace['sk']} keys in blocks of {trace['rows']}"
    rows, styles = [], []
    for step in trace["steps"]:
        rows.append(
            [
                step["phase"],
                "" if step["i"] is None else step["i"],
                "" if step["j"] is None else step["j"],
                blocks(step["loads"]),
                blocks(step["stores"]),
                *(numbers(step[key]) if key in step else "" for key in ("m", "l", "factor")),
                step["loaded"] + step["stored"],
                step["sram"],
            ]
        )
        styles.append(NOTE if step["phase"] == "finish" else "")
    headers = ["phase", "i", "j", "HBM → SRAM", "SRAM → HBM", "m", "l", "factor", "HBM bytes", "SRAM"]
    table(title, headers, rows, styles)
    total = trace["totals"]
    loaded, stored = total["loaded"], total["stored"]
    moved = {name: loaded.get(name, 0) + stored.get(name, 0) for name in loaded | stored}
    print(f"\n{total['visited']} tiles visited, {total['skipped']} skipped; {total['flops']} FLOPs")
    print(f"SRAM holds at most {total['peak']} bytes at once")
    print(f"{sum(moved.values())} bytes to and from HBM: {', '.join(f'{name} {size}' for name, size in moved.items())}")
    print(f"largest difference to the reference: {trace['error']:.1e}")


def blocks(moved: list[list[Any]]) -> str:
    return " ".join(f"{name}{index}" for name, index in moved)


def show_graph(trace: dict[str, Any]) -> None:
    names = {node["id"]: node["name"] or f"#{node['id']}" for node in trace["nodes"]}
    rows = []
    for node in trace["nodes"]:
        made = f" {node['op']} ".join(names[parent["id"]] for parent in node["inputs"]) or "given"
        if len(node["inputs"]) == 1:
            made = f"{names[node['inputs'][0]['id']]} {node['op']}"
        local = ", ".join(f"∂/∂{names[parent['id']]} = {number(parent['local'])}" for parent in node["inputs"])
        rows.append([names[node["id"]], made, number(node["value"]), local, number(node["gradient"])])
    table("Forward downwards, backward upwards", ["", "made as", "value", "local derivatives", "∂φ/∂·"], rows)
