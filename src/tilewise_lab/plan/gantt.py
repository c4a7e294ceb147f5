"""A simulated pass as a picture: a line for each rank, a bar for each tile, gaps where it waits."""

from __future__ import annotations

from html import escape

from tilewise_lab.costs.context_parallel import Simulation

WIDTH, LEFT, LINE, BAR, TOP, BOTTOM = 760, 64, 22, 16, 40, 30
COLOURS = ("#2563a5", "#d97706")  # own and others' keys
STYLE = "text{font:12px system-ui,sans-serif;fill:#333}.t{font-weight:600}.g{stroke:#ddd}"


def gantt(found: Simulation, ranks: int = 16) -> str:
    """The first so many stations, as an SVG."""
    told = found.to_dict(ranks)
    count = min(ranks, found.start.shape[1])
    end = max(found.time, 1e-12)
    height = TOP + count * LINE + BOTTOM

    def x(seconds: float) -> float:
        return LEFT + seconds / end * (WIDTH - LEFT - 10)

    def text(at: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{at:.1f}" y="{y}"{more}>{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(told['plan'])}</title><style>{STYLE}</style>",
        text(4, 16, told["plan"].strip("<>"), ' class="t"'),
        text(4, 32, f"{told['machine']}: {found.time * 1e3:.2f} ms, {found.efficiency:.0%} of ideal"),
    ]
    for n in range(5):
        at, anchor = x(end * n / 4), ("start", "middle", "middle", "middle", "end")[n]
        parts.append(f'<path class="g" d="M{at:.1f} {TOP}V{TOP + count * LINE}"/>')
        parts.append(text(at, height - 10, f"{end * n / 4 * 1e3:.2f} ms", f' text-anchor="{anchor}"'))
    name = "node" if found.plan.ulysses_size > 1 else "rank"
    parts += [text(4, TOP + s * LINE + 15, f"{name} {s}") for s in range(count)]
    for bar in told["bars"]:
        a, b, y = x(bar["start"]), x(bar["end"]), TOP + bar["station"] * LINE + 3
        look = f'fill="{COLOURS[bar["step"] > 0]}" opacity="{1.0 if bar["step"] % 2 else 0.8}"'
        hint = f"keys {bar['step']} hops away, {(bar['end'] - bar['start']) * 1e3:.3f} ms"
        box = f'x="{a:.2f}" y="{y}" width="{max(b - a, 0.3):.2f}" height="{BAR}"'
        parts.append(f"<rect {box} {look}><title>{hint}</title></rect>")
    return "".join([*parts, "</svg>"])
