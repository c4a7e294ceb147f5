"""Charts as SVG. chart.css gives every provider a colour, which its elements read from the custom property --c."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources

from tilewise_lab.bench.results import Cell, Results, Spread, Unit
from tilewise_lab.demo.charts import WIDTH, Axis, apart, svg, text, tip
from tilewise_lab.demo.words import tokens

HEIGHT = 250
Scale = Callable[[float], float]
LABELS = {
    "tilewise-hopper": "tilewise", "tilewise-triton": "tilewise (Triton)", "tilewise-reference": "tilewise (reference)",
    "tilewise-torch": "tilewise",
    "cudnn": "cuDNN", "fa2": "FA2", "fa3": "FA3", "fa4": "FA4", "sdpa": "SDPA", "flash-attn": "flash-attn",
}  # fmt: skip
THEMES = "light", "dark"
DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{\n(.*?)\n\}\n", re.S)
OVERVIEW = {"dim": 128, "causal": True}  # the panels of the README's picture


def style(theme: str | None = None) -> str:
    """The style sheet; with a theme, its colours only. Without one, the reader's browser chooses."""
    sheet = resources.files("tilewise_lab.bench").joinpath("chart.css").read_text(encoding="utf-8")
    return sheet if theme is None else DARK.sub(r"\1\n" if theme == "dark" else "", sheet)


def label(name: str) -> str:
    """
    >>> label("cudnn"), label("naive")
    ('cuDNN', 'naive')
    """
    return LABELS.get(name, name)


def colour(name: str) -> str:
    return f'style="--c:var(--{name})"'


def scale(peak: float) -> tuple[float, float]:
    """The top of a linear axis and its step: four to six round steps.

    >>> scale(0.61), scale(655.0)
    ((0.8, 0.2), (800.0, 200.0))
    """
    power = 10.0 ** math.floor(math.log10(peak))
    step = next(s for n in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if peak / (s := n * power) <= 6)
    return round(math.ceil(peak / step) * step, 12), step


def panels(results: Results, which: str) -> list[tuple[str, list[Cell]]]:
    """The cells of one pass, one list for each mask and head dim, by length."""
    found: dict[str, list[Cell]] = {}
    for cell in sorted(results.of(which), key=lambda cell: (cell.case["causal"], cell.case["dim"], cell.case["seq"])):
        found.setdefault(f"D {cell.case['dim']}, {'causal' if cell.case['causal'] else 'full'}", []).append(cell)
    return list(found.items())


def columns(drawn: Sequence[tuple[str, list[Cell]]]) -> int:
    """A row for each mask where there are several head dims; else one row."""
    dims = len({cells[0].case["dim"] for _, cells in drawn})
    return dims if dims > 1 else len(drawn)


def top(results: Results) -> float:
    """One vertical scale for all panels: the fastest thing measured, in FLOP/s."""
    cells = results.of("forward", "backward")
    rates = [cell.rate(name).high for cell in cells for name in cell.timed()]
    roofs = [roof.median for cell in cells if (roof := cell.ceiling("matmul"))]
    return max([*rates, *roofs], default=1e12)


def margin(names: Sequence[str]) -> float:
    """Room for the labels at the ends of lines, in bold letters of at most 7.2 px.

    >>> round(margin(["cudnn", "tilewise-hopper"]))
    76
    """
    return 18 + 7.2 * max(len(label(name)) for name in names)


def speed(title: str, cells: Sequence[Cell], peak: float, unit: Unit, names: Sequence[str] | None = None) -> str:
    """The rate over length: one line for each provider, its quartiles as a band, and the rate of matmul dotted.

    Args:
        title: What the panel shows, for screen readers.
        cells: Cells of one mask and head dim, by length.
        peak: The largest rate of the vertical axis, in FLOP/s.
        unit: Unit of the vertical axis.
        names: The providers to draw; all that were timed if None.
    """
    chosen = {cell.chosen() for cell in cells}
    timed = {name for cell in cells for name in cell.timed() if names is None or name in names}
    left, right, upper, lower = 46, margin([*timed, "matmul"]), 12, 38
    limit, step = scale(peak / unit.size)
    lengths = [int(cell.case["seq"]) for cell in cells]
    log = Axis(lengths[0], max(lengths[-1], 2 * lengths[0]), left + 6, WIDTH - right)

    def y(rate: float) -> float:
        return HEIGHT - lower - rate / limit * (HEIGHT - lower - upper)

    def draw() -> Iterator[str]:
        for n in range(round(limit / step) + 1):
            yield f'<path class="grid" d="M{left} {y(n * step):.1f}H{WIDTH - right}"/>'
            yield text(left - 8, y(n * step) + 4, f"{n * step:g}", "tick end")
        for length in lengths:
            yield text(log(length), HEIGHT - lower + 18, tokens(length), "tick middle")
        yield text((left + WIDTH - right) / 2, HEIGHT - 3, "sequence length", "tick middle")
        found = {n: cell.ceiling("matmul") for n, cell in zip(lengths, cells, strict=True)}
        roofs = [(log(n), y(unit(roof).median)) for n, roof in found.items() if roof]
        if roofs:
            yield f'<path class="roof" d="M{path(roofs)}"><title>matmul, in the same rounds</title></path>'
        ends = {}
        for name in sorted(timed, key=lambda name: (name in chosen, name)):
            rates = {n: unit(cell.rate(name)) for n, cell in zip(lengths, cells, strict=True) if name in cell.timed()}
            yield _line(name, rates, (log, y), unit.name, name in chosen)
            last = max(rates)
            ends[name] = log(last), y(rates[last].median)
        if roofs:
            ends["matmul"] = roofs[-1]
        places = apart({n: end[1] for n, end in enumerate(ends.values())}, gap=14)
        for n, (name, (px, _)) in enumerate(ends.items()):
            kind = "tick" if name == "matmul" else "name"
            yield f"<g {colour(name)}>{text(px + 9, places[n] + 4, label(name), kind)}</g>"

    return svg(title, HEIGHT, draw())


def _line(name: str, rates: Mapping[int, Spread], axes: tuple[Scale, Scale], unit: str, thick: bool) -> str:
    x, y = axes
    kind, radius = ("series ours", 4) if thick else ("series", 2.5)
    band = [*((x(n), y(r.high)) for n, r in rates.items()), *reversed([(x(n), y(r.low)) for n, r in rates.items()])]
    drawn = [f'<path class="band" d="M{path(band)}Z"/>']
    drawn.append(f'<path class="{kind}" d="M{path([(x(n), y(r.median)) for n, r in rates.items()])}"/>')
    for n, r in rates.items():
        hint = f"{label(name)}, {n} tokens: {r.median:.3g} {unit} ({r.low:.3g} to {r.high:.3g})"
        drawn.append(f'<circle class="point" cx="{x(n):.1f}" cy="{y(r.median):.1f}" r="{radius}">{tip(hint)}</circle>')
    return f"<g {colour(name)}>{''.join(drawn)}</g>"


def path(points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def figure(results: Results, which: str, theme: str) -> str:
    """All panels of one pass as one picture that stands alone, in the colours of a theme."""
    words = f"{which}, {unit_of(results)}; D is the head dim"
    peak, unit = top(results), results.unit()
    drawn = panels(results, which)
    return _sheet(words, [(title, speed(title, cells, peak, unit)) for title, cells in drawn], columns(drawn), theme)


def overview(results: Results, theme: str) -> str:
    """Forward and backward of one head dim and mask, tilewise and its peers: the picture of the README."""
    peak, unit = top(results), results.unit()
    drawn = []
    for which, cells in overview_cells(results).items():
        names = [*dict.fromkeys(name for cell in cells for name in [*cell.peers(), cell.chosen()] if name)]
        drawn.append((which.capitalize(), speed(which, cells, peak, unit, names)))
    words = f"{unit_of(results)}, causal, head dim {OVERVIEW['dim']}"
    return _sheet(words, drawn, len(drawn), theme)


def overview_cells(results: Results) -> dict[str, list[Cell]]:
    """The cells of the README's picture, by pass and length."""
    found = {}
    for which in ("forward", "backward"):
        cells = [cell for cell in results.of(which) if all(cell.case[key] == x for key, x in OVERVIEW.items())]
        if any(cell.timed() for cell in cells):
            found[which] = sorted(cells, key=lambda cell: cell.case["seq"])
    return found


def unit_of(results: Results) -> str:
    """What the numbers of a figure are: "TFLOP/s, NVIDIA H200, bfloat16"."""
    return f"{results.unit().name}, {results.machine['device']}, {results.settings['dtype']}"


def _sheet(heading: str, drawn: Sequence[tuple[str, str]], across: int, theme: str) -> str:
    """Titled panels in rows, as an SVG file."""
    gap, head = 20, 34
    width = across * (WIDTH + gap)
    height = head + math.ceil(len(drawn) / across) * (HEIGHT + 34)

    def parts() -> Iterator[str]:
        yield f'<rect class="paper" width="{width}" height="{height}"/>'
        yield text(14, 22, heading, "title")
        for n, (title, panel) in enumerate(drawn):
            x, y = n % across * (WIDTH + gap) + 6, head + n // across * (HEIGHT + 34)
            yield text(x + 8, y + 16, title, "title")
            yield panel.replace("<svg ", f'<svg x="{x}" y="{y + 24}" width="{WIDTH}" height="{HEIGHT}" ', 1)

    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    return f"{opening}<style>{escape(style(theme), quote=False)}</style>{''.join(parts())}</svg>\n"
