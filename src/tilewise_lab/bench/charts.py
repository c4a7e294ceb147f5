"""The pictures as inline SVG. A provider is the custom property --c; chart.css gives every provider its colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources

from tilewise_lab.bench.results import OURS, Cell, Results, Spread, Unit
from tilewise_lab.demo.charts import WIDTH, Axis, apart, svg, text, tip
from tilewise_lab.demo.words import duration, tokens

HEIGHT = 250
LABELS = {
    "tilewise-hopper": "hopper", "tilewise-triton": "triton", "tilewise-reference": "tilewise", "cudnn": "cuDNN",
    "fa2": "FA2", "fa3": "FA3", "fa4": "FA4", "sdpa": "SDPA", "flash-attn": "flash-attn",
}  # fmt: skip


def style() -> str:
    return resources.files("tilewise_lab.bench").joinpath("chart.css").read_text(encoding="utf-8")


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


def speed(title: str, cells: Sequence[Cell], peak: float, unit: Unit) -> str:
    """The rate over length, a line for each provider with its quartiles as a band, the matmul's rate dotted above."""
    left, right, upper, lower = 40, 74, 12, 38
    limit, step = scale(peak / unit.size)
    lengths = [int(cell.case["seq"]) for cell in cells]
    log = Axis(lengths[0], max(lengths[-1], 2 * lengths[0]), left + 6, WIDTH - right)

    def y(rate: float) -> float:
        return HEIGHT - lower - rate / limit * (HEIGHT - lower - upper)

    def draw() -> Iterator[str]:
        for n in range(round(limit / step) + 1):
            yield f'<path class="grid" d="M{left} {y(n * step):.1f}H{WIDTH - right}"/>'
            yield text(left - 8, y(n * step) + 4, f"{n * step:.3g}", "tick end")
        for length in lengths:
            yield text(log(length), HEIGHT - lower + 18, tokens(length), "tick middle")
        yield text((left + WIDTH - right) / 2, HEIGHT - 3, "tokens in a sequence", "tick middle")
        found = {n: cell.ceiling("matmul") for n, cell in zip(lengths, cells, strict=True)}
        roofs = [(log(n), y(unit(roof).median)) for n, roof in found.items() if roof]
        if roofs:
            yield f'<path class="roof" d="M{path(roofs)}"><title>matmul, in the same rounds</title></path>'
        ends = {}
        for name in sorted(
            {name for cell in cells for name in cell.timed()}, key=lambda name: (name.startswith(OURS), name)
        ):
            rates = {n: unit(cell.rate(name)) for n, cell in zip(lengths, cells, strict=True) if name in cell.timed()}
            yield _line(name, rates, log, y, unit.name)
            last = max(rates)
            ends[name] = log(last), y(rates[last].median)
        if roofs:
            ends["matmul"] = roofs[-1]
        places = apart({n: end[1] for n, end in enumerate(ends.values())}, gap=14)
        for n, (name, (px, _)) in enumerate(ends.items()):
            kind = "tick" if name == "matmul" else "name"
            yield f"<g {colour(name)}>{text(px + 9, places[n] + 4, label(name), kind)}</g>"

    return svg(title, HEIGHT, draw())


def _line(
    name: str, rates: Mapping[int, Spread], x: Callable[[float], float], y: Callable[[float], float], unit: str
) -> str:
    kind, radius = ("series ours", 4) if name.startswith(OURS) else ("series", 3)
    band = [*((x(n), y(r.high)) for n, r in rates.items()), *reversed([(x(n), y(r.low)) for n, r in rates.items()])]
    drawn = [f'<path class="band" d="M{path(band)}Z"/>']
    drawn.append(f'<path class="{kind}" d="M{path([(x(n), y(r.median)) for n, r in rates.items()])}"/>')
    for n, r in rates.items():
        hint = f"{label(name)}, {n} tokens: {r.median:.3g} {unit} ({r.low:.3g} to {r.high:.3g})"
        drawn.append(f'<circle class="point" cx="{x(n):.1f}" cy="{y(r.median):.1f}" r="{radius}">{tip(hint)}</circle>')
    return f"<g {colour(name)}>{''.join(drawn)}</g>"


def path(points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def times(cell: Cell) -> str:
    """A bar for each provider, as long as its time."""
    left, right, row = 88, 110, 26
    most = max(cell.seconds(name).median for name in cell.timed())

    def draw() -> Iterator[str]:
        for n, name in enumerate(cell.timed()):
            spread, y = cell.seconds(name), row * n
            long = spread.median / most * (WIDTH - left - right)
            hint = f"{label(name)}: {duration(spread.median)} ({duration(spread.low)} to {duration(spread.high)})"
            words = duration(spread.median)
            if not name.startswith(OURS) and (ours := cell.chosen()):
                words += f"  ({cell.ratio(ours, name).median:.2f}x)"
            yield text(left - 10, y + 17, label(name), "end")
            box = f'x="{left}" y="{y + 4}" width="{long:.1f}" height="18" rx="3"'
            yield f'<rect class="bar" {colour(name)} {box}>{tip(hint)}</rect>'
            yield text(left + long + 8, y + 17, words, "tick")

    return svg(f"{cell.key}: time of one call", row * len(cell.timed()), draw())


def figure(results: Results, which: str) -> str:
    """All panels of one pass as one picture that stands alone, for documents."""
    drawn = panels(results, which)
    across, gap, head = columns(drawn), 34, 30
    width = across * (WIDTH + gap)
    height = head + math.ceil(len(drawn) / across) * (HEIGHT + gap)
    peak, unit = top(results), results.unit()

    def parts() -> Iterator[str]:
        yield f'<rect class="paper" width="{width}" height="{height}"/>'
        yield text(12, 20, f"{which}, {unit.name}, {results.machine['device']}, {results.settings['dtype']}", "title")
        for n, (title, cells) in enumerate(drawn):
            x, y = n % across * (WIDTH + gap), head + n // across * (HEIGHT + gap)
            yield text(x + 12, y + 16, title, "title")
            panel = speed(title, cells, peak, unit).replace(
                "<svg ", f'<svg x="{x}" y="{y + 24}" width="{WIDTH}" height="{HEIGHT}" ', 1
            )
            yield panel

    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    return f"{opening}<style>{escape(style(), quote=False)}</style>{''.join(parts())}</svg>\n"
