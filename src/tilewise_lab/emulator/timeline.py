"""The timeline of a run, as JSON for the explorer and as a picture for the docs.

>>> print("python -m tilewise_lab.emulator.timeline docs/hopper-forward.svg")  # or docs/hopper-backward.svg
python -m tilewise_lab.emulator.timeline docs/hopper-forward.svg
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from html import escape
from itertools import chain, cycle, islice
from pathlib import Path

from .machine import Span

LEFT, ROW, WIDTH = 120, 34, 1240
LEGEND = {  # what, as a span's text begins or ends: colour and words
    "load q": ("#5b8def", "load Q"),
    "load k": ("#2f6fd6", "load K"),
    "load v": ("#8fb4f7", "load V"),
    "store o": ("#9b8afb", "store O"),
    " S": ("#e4572e", "S = Q Kᵀ"),
    " O": ("#f3a712", "O += P V"),
    "compute": ("#4caf7d", "compute"),
    "wait": ("#e3e3e3", "wait"),
}
BACKWARD = {
    "load k": ("#2f6fd6", "load K, V"),
    "load q": ("#5b8def", "load Q, lse"),
    "load do": ("#8fb4f7", "load dO, delta"),
    "store d": ("#9b8afb", "store dK, dV"),
    " S": ("#e4572e", "Sᵀ = K Qᵀ"),
    " dP": ("#b5369b", "dPᵀ = V dOᵀ"),
    " dV": ("#f3a712", "dV += Pᵀ dO"),
    " dK": ("#c9d327", "dK += dSᵀ Q"),
    " dQ": ("#3a3f8f", "dQ = dS K"),
    "compute": ("#4caf7d", "compute"),
    "wait": ("#e3e3e3", "wait"),
}
SAME = {"load v": "load k", "load lse2": "load q", "load delta": "load do", "store dq_acc_desc": "reduce"}


def to_json(spans: Iterable[Span]) -> str:
    return json.dumps([span._asdict() for span in spans])


def colour(what: str, legend: dict[str, tuple[str, str]] = LEGEND) -> str:
    what = SAME.get(what, what) if legend is BACKWARD else what
    return next((shade for key, (shade, _) in legend.items() if what.startswith(key) or what.endswith(key)), "#888")


def svg(spans: Iterable[Span], names: dict[str, str], legend: dict[str, tuple[str, str]] = LEGEND) -> str:
    """One row for each unit of program 0; copies that overlap lie beneath one another."""
    shown = sorted((s for s in spans if s.program == 0 and s.unit in names), key=lambda s: s.start)
    end = max(s.end for s in shown)
    scale = (WIDTH - LEFT - 10) / end
    height = ROW * len(names) + 48
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11"'
        f' viewBox="0 0 {WIDTH} {height}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for row, name in enumerate(names.values()):
        parts.append(f'<text x="6" y="{25 + ROW * row}">{escape(name)}</text>')
    lanes = [0, 0, 0, 0]
    for span in shown:
        top, deep = 8 + ROW * list(names).index(span.unit), ROW - 8
        if span.unit == "copies":
            lane = min(range(4), key=lambda n: (lanes[n] > span.start, n))
            lanes[lane] = span.end
            top, deep = top + 7 * lane, 6
        parts.append(
            f'<rect x="{LEFT + span.start * scale:.1f}" y="{top}" width="{(span.end - span.start) * scale:.1f}"'
            f' height="{deep}" fill="{colour(span.what, legend)}">'
            f"<title>{escape(span.what)}: cycles {span.start} to {span.end}</title></rect>"
        )
    for tick in range(0, end, 2000):
        parts.append(f'<text x="{LEFT + tick * scale:.1f}" y="{height - 28}" fill="#666">{tick}</text>')
    apart = min(120, (WIDTH - LEFT) // len(legend))
    for n, (shade, words) in enumerate(legend.values()):
        parts.append(f'<rect x="{LEFT + apart * n}" y="{height - 18}" width="10" height="10" fill="{shade}"/>')
        parts.append(f'<text x="{LEFT + 14 + apart * n}" y="{height - 9}">{words}</text>')
    return "\n".join([*parts, "</svg>"])


def forward() -> tuple[list[Span], dict[str, str]]:
    """A causal head of 512 queries and keys, four tiles, on one SM where nothing is late."""
    import torch

    from tilewise.backends.common.launch import DeviceMemory
    from tilewise.backends.hopper.launches import forward_launches, new_state
    from tilewise.request import Request, Spec

    from .launch import launch

    q, k, v = (torch.randn(1, 512, 1, 128, dtype=torch.bfloat16) for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(1, 1, 512)
    request = Request(q, k, v, Spec(128**-0.5, None, 0))
    (job,) = forward_launches(request, out, lse, new_state(DeviceMemory(q.device), request), 1)
    spans = launch(job.kernel, job.programs, job.args, job.options, latencies=(1.0,)).timeline
    return spans, {"produce 2": "producer"}


def backward() -> tuple[list[Span], dict[str, str]]:
    """512 queries that see 128 keys, one tile, on one SM where nothing is late."""
    import torch

    from tilewise.backends.common.kernel_call import call_shape
    from tilewise.backends.common.launch import DeviceMemory
    from tilewise.backends.hopper.backward_launches import backward_launches, new_workspace
    from tilewise.request import BackwardInputs, Request, Spec

    from .launch import launch

    q, out, dout, dq = (torch.randn(1, 512, 1, 128, dtype=torch.bfloat16) for _ in range(4))
    k, v, dk, dv = (torch.randn(1, 128, 1, 128, dtype=torch.bfloat16) for _ in range(4))
    lse = torch.full((1, 1, 512), 9.0)
    request = Request(q, k, v, Spec(128**-0.5, None, None))
    space = new_workspace(DeviceMemory(torch.device("cpu")), call_shape(request), None)
    space.lse2.fill_(13.0)
    for x in (space.delta, space.dq_acc, space.counters):
        x.zero_()
    launches = backward_launches(request, BackwardInputs(out, lse, dout, None), (dq, dk, dv), space, 1)
    job = launches["hopper backward"]
    spans = launch(job.kernel, job.programs, job.args, job.options, latencies=(1.0,)).timeline
    return named(spans), {"produce 2": "producer"}


def named(spans: list[Span]) -> list[Span]:
    """The products by their names: each warpgroup asks for them in one order, and ends with dQ of its last block."""
    places: dict[str, list[int]] = defaultdict(list)
    for n, span in enumerate(spans):
        if span.unit == "tensor cores":
            places[span.what.rpartition(" ")[0]].append(n)
    shown = list(spans)
    for who, own in places.items():
        words = chain(("S", "dP", "dV", "dK", "S"), cycle(("dP", "dV", "dQ", "dQ", "dK", "S")))
        for n, word in zip(own, chain(islice(words, len(own) - 2), ("dQ", "dQ")), strict=True):
            shown[n] = spans[n]._replace(what=f"{who} {word}")
    return shown


def main(path: str) -> None:
    is_backward = "backward" in Path(path).stem
    spans, more = backward() if is_backward else forward()
    rows = {"copies": "TMA", "tensor cores": "tensor cores", "consume 0": "warpgroup 0", "consume 1": "warpgroup 1"}
    Path(path).write_text(svg(spans, rows | more, BACKWARD if is_backward else LEGEND) + "\n")
    Path(path).with_suffix(".json").write_text(to_json(spans) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
