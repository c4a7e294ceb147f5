"""Two kinds of picture as inline SVG, coloured by the style sheet of the page: class s0, s1, ... is a series."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from tilewise_lab.demo.measure import BUDGET, Error
from tilewise_lab.demo.words import NOTHING, ratio, tokens

WIDTH = 430
Points = Sequence[tuple[int, float | None]]


@dataclass(frozen=True)
class Axis:
    """A logarithmic scale from `low` to `high`, drawn between two coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, x: float) -> float:
        share = math.log(x / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def lines(title: str, series: Mapping[str, Points], form: Callable[[float], str], base: int) -> str:
    """One line per series over the number of tokens, both axes logarithmic; ticks at powers of the base."""
    height, left, right, top, bottom = 290, 68, 72, 22, 44
    lengths = sorted({x for points in series.values() for x, _ in points})
    found = [y for points in series.values() for _, y in points if y is not None]
    marks = ticks(min(found), max(found), base)
    x = Axis(lengths[0], lengths[-1], left, WIDTH - right)
    y = Axis(marks[0], marks[-1], height - bottom, top)

    def draw() -> Iterator[str]:
        for mark in marks:
            yield f'<path class="grid" d="M{left} {y(mark):.1f}H{WIDTH - right}"/>'
            yield text(left - 8, y(mark) + 4, form(mark), "tick end")
        for length in lengths:
            yield text(x(length), height - bottom + 20, tokens(length), "tick middle")
        yield text((left + WIDTH - right) / 2, height - 6, "tokens", "tick middle")
        ends = {}
        for number, (name, points) in reversed(list(enumerate(series.items()))):
            at = [(x(length), y(value), length, value) for length, value in points if value is not None]
            yield f'<path class="line s{number}" d="M{"L".join(f"{px:.1f} {py:.1f}" for px, py, *_ in at)}"/>'
            for px, py, length, value in at:
                yield dot(f"s{number}", px, py, f"{name}, {length} tokens: {form(value)}")
            lost = [length for length, value in points if value is None]
            for length in lost:
                hint = f"{name}, {length} tokens: {NOTHING}"
                yield f'<g class="lost s{number}">{tip(hint)}{text(x(length), top + 5, "✕", "middle")}</g>'
            if lost:
                yield text(x(lost[-1]) + 8, top - 8, f"{name}: {NOTHING}", "tick end")
            ends[number] = at[-1]
        for px in {end[0] for end in ends.values()}:
            for number, py in apart({n: end[1] for n, end in ends.items() if end[0] == px}).items():
                yield text(px + 10, py + 4, list(series)[number], f"name s{number}")

    return svg(title, height, draw())


def dots(title: str, errors: Sequence[Error]) -> str:
    """One row per error: a dot at its ratio to naive attention's, the budget a line it must not cross."""
    step, left, right, top = 19, 122, 54, 30
    rows = [(top + step * (n + n // 5 * 0.5), error) for n, error in enumerate(errors)]
    height = int(rows[-1][0]) + 52
    x = Axis(0.05, 4, left, WIDTH - right)

    def draw() -> Iterator[str]:
        floor = height - 36
        yield f'<path class="within" d="M{left} {top - 14}H{x(BUDGET):.1f}V{floor}H{left}z"/>'
        for mark in (0.1, 0.5, 1, 2, 4):
            kind = "limit" if mark == BUDGET else "grid"
            yield f'<path class="{kind}" d="M{x(mark):.1f} {top - 14}V{floor}"/>'
            yield text(x(mark), floor + 16, f"{mark:g}x", "tick middle")
        yield text(x(BUDGET), top - 20, "budget", "tick middle")
        yield text(
            (left + WIDTH - right) / 2, height - 4, "error, as a multiple of that of naive attention", "tick middle"
        )
        for n, (py, error) in enumerate(rows):
            if n % 5 == 0:
                yield text(0, py + 4, error.dtype, "name")
            px = x(min(max(error.ratio, x.low), x.high))
            hint = f"{error.dtype} {error.tensor}: {error.ours:.2e}, naive {error.naive:.2e}"
            yield text(left - 10, py + 4, error.tensor, "tick end")
            yield f'<path class="grid" d="M{left} {py:.1f}H{WIDTH - right}"/>'
            yield f'<path class="stem" d="M{left} {py:.1f}H{px:.1f}"/>'
            yield dot("s0" if error.ok else "bad", px, py, hint)
            yield text(WIDTH - right + 8, py + 4, ratio(error.ratio), "tick")

    return svg(title, height, draw())


def ticks(low: float, high: float, base: int) -> list[float]:
    """Powers of the base around the range, at most six of them.

    >>> ticks(0.003, 0.5, 10)
    [0.001, 0.01, 0.1, 1.0]
    >>> ticks(5, 900, 2)
    [4.0, 16.0, 64.0, 256.0, 1024.0]
    """
    first, last = math.log(low, base), math.log(high, base)
    step = max(1, math.ceil((last - first) / 5.5))
    bottom = math.floor(first / step)
    top = max(math.ceil(last / step), bottom + 1)
    return [float(base) ** (step * n) for n in range(bottom, top + 1)]


def apart(wanted: Mapping[int, float], gap: float = 15) -> dict[int, float]:
    """Positions for labels, near where they are wanted and no closer than the gap.

    >>> apart({0: 10.0, 1: 12.0, 2: 80.0})
    {0: 3.5, 1: 18.5, 2: 80.0}
    """
    placed: dict[int, float] = dict(sorted(wanted.items(), key=lambda item: item[1]))
    keys = list(placed)
    for _ in keys:
        for upper, lower in pairwise(keys):
            overlap = gap - (placed[lower] - placed[upper])
            if overlap > 0:
                placed[upper] -= overlap / 2
                placed[lower] += overlap / 2
    return placed


def text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def dot(kind: str, x: float, y: float, hint: str) -> str:
    return f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">{tip(hint)}</circle>'


def tip(words: str) -> str:
    return f"<title>{escape(words)}</title>"


def svg(title: str, height: float, parts: Iterator[str]) -> str:
    box = f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}"'
    return f"<svg {box}>{''.join(parts)}</svg>"
