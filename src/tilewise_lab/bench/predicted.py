"""What `tilewise explain` predicts against what was measured, for its document: a table, and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from tilewise_lab.bench import charts
from tilewise_lab.costs.devices import Device, device
from tilewise_lab.demo.charts import Axis, text, tip
from tilewise_lab.demo.words import duration
from tilewise_lab.explain import check
from tilewise_lab.explain.check import Measured

SIZE, LEFT, RIGHT, TOP, BOTTOM = 520, 70, 20, 44, 46
COLOURS = {"forward": "--up", "backward": "--down"}


def newest(folder: Path) -> Path | None:
    """The newest file that `tilewise explain --check` wrote and that is kept."""
    return max(folder.glob("*-calls.json"), default=None)


def rows(path: Path) -> Iterator[list[str]]:
    """Of each pass and backend: how many calls, the median error, how many are within a fifth."""
    name, measured = check.load(path)
    on = device(name)
    kinds = sorted({(m.which, m.backend) for m in measured}, reverse=True)
    for which, backend in kinds:
        some = [m for m in measured if (m.which, m.backend) == (which, backend)]
        yield [which, backend, *_summary(some, on)]
    yield ["all", "", *_summary(measured, on)]


def _summary(measured: Sequence[Measured], on: Device) -> list[str]:
    errors = [m.error(on) for m in measured]
    within = sum(error <= 0.2 for error in errors)
    return [str(len(errors)), f"{statistics.median(errors):.1%}", f"{within / len(errors):.0%}"]


def figure(path: Path, fitted: Path | None) -> str:
    """Predicted over measured time, both logarithmic; small dots are the calls the model was fitted to."""
    name, measured = check.load(path)
    on = device(name)
    known = check.load(fitted)[1] if fitted else []
    times = [m.seconds for m in (*measured, *known)]
    low, high = min(times) / 1.5, max(times) * 1.5
    x, y = Axis(low, high, LEFT, SIZE - RIGHT), Axis(low, high, SIZE - BOTTOM, TOP)

    def draw() -> Iterator[str]:
        yield f'<rect class="paper" width="{SIZE}" height="{SIZE}"/>'
        yield text(LEFT, 20, f"explain against {name}", "title")
        yield from _legend(measured, known)
        for power in range(-7, 3):
            tick = 10.0**power
            if low < tick < high:
                lines = f"M{x(tick):.1f} {TOP}V{SIZE - BOTTOM}M{LEFT} {y(tick):.1f}H{SIZE - RIGHT}"
                yield f'<path class="grid" d="{lines}"/>'
                yield text(x(tick), SIZE - BOTTOM + 18, duration(tick), "tick middle")
                yield text(LEFT - 8, y(tick) + 4, duration(tick), "tick end")
        yield text((LEFT + SIZE - RIGHT) / 2, SIZE - 8, "measured", "tick middle")
        yield text(LEFT, TOP - 6, "predicted", "tick end")
        for factor, kind in ((1.0, "series"), (0.8, "roof"), (1.2, "roof")):
            ends = [(t, t * factor) for t in (max(low, low / factor), min(high, high / factor))]
            yield f'<path class="{kind}" style="--c:var(--soft)" d="M{charts.path([(x(a), y(b)) for a, b in ends])}"/>'
        for m in known:
            yield f'<circle cx="{x(m.seconds):.1f}" cy="{y(m.predicted(on)):.1f}" r="1.5" fill="var(--soft)"/>'
        for m in measured:
            c, guess = m.call, m.predicted(on)
            said = f"{m.which}, {m.backend}, {c.batch} x {c.n_q} x {c.n_k}, {c.heads}/{c.kv_heads} heads of {c.d}"
            said += f": {duration(m.seconds)}, predicted {duration(guess)} ({guess / m.seconds - 1:+.0%})"
            at = f'cx="{x(m.seconds):.1f}" cy="{y(guess):.1f}" r="4"'
            yield f'<circle class="point" style="--c:var({COLOURS[m.which]})" {at}>{tip(said)}</circle>'

    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" width="{SIZE}" role="img">'
    body = "\n".join(draw())
    return f"{opening}<style>{escape(charts.style(), quote=False)}</style>\n{body}\n</svg>\n"


def _legend(measured: Sequence[Measured], known: Sequence[Measured]) -> Iterator[str]:
    counts = {which: sum(m.which == which for m in measured) for which in COLOURS}
    at = LEFT
    for which, n in counts.items():
        yield f'<circle class="point" style="--c:var({COLOURS[which]})" cx="{at + 12}" cy="34" r="4"/>'
        yield text(at + 20, 38, f"{n} {which}", "tick")
        at += 110
    if known:
        yield f'<circle cx="{at + 12}" cy="34" r="1.5" fill="var(--soft)"/>'
        yield text(at + 20, 38, f"{len(known)} the model was fitted to", "tick")
