"""The report: a list of tables, which the terminal shows as text, the page as HTML and the documents as Markdown, and
the chart of the grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import NamedTuple

from tilewise_lab.bench import charts
from tilewise_lab.bench.charts import label
from tilewise_lab.bench.compare import Agreement, Comparison
from tilewise_lab.bench.judge import BUDGET
from tilewise_lab.bench.results import OURS, Cell, Results, Unit, absent, standings
from tilewise_lab.demo.words import binary, duration, tokens

PASSES = ("forward", "backward")
LOWEST = 20  # ratios that are listed, of a run with at least twice as many
METHOD = f"""Random normal inputs. First every provider's answer is compared with float64: an error may be {BUDGET:g}
times that of the textbook formula in the same dtype, plus one rounding; a wrong answer gets no speed. Then rounds: in
each, every provider that was right, a large matrix product and a copy are called in turn, in an order shuffled for
every pass, the cache emptied before every call. Rates and ratios are medians over the rounds, with their quartiles.
FLOPs: 4·B·H·S²·D forward, half of that causal, 2.5 times that backward. Backward times hold no forward. Bands around
lines hold half of the rounds; the dotted line is the matrix product."""


class Table(NamedTuple):
    """The first `words` columns are words, the others numbers."""

    name: str
    title: str
    head: Sequence[str]
    rows: list[list[str]]
    words: int = 1


def tables(results: Results) -> list[Table]:
    """Every table that has rows."""
    unit = results.unit()
    found = [grid(results, which, unit) for which in PASSES]
    found += [
        Table("peers", "Geometric means of the ratios; above 1 tilewise is faster",
              ["cells", "tilewise backend", "peer", "times as fast", "worst", "best"], _peers(results), 3),
        Table("cases", "Beyond the grid", ["case", "size", "tilewise", "fastest peer", "times as fast"],
              _cases(results), 2),
        Table("lowest", f"The {LOWEST} lowest ratios", ["case", "size", "times as fast", "tilewise", "fastest peer"],
              _lowest(results), 2),
        memory(results),
        Table("absent", "Who did not run, and why", ["who", "where", "why"], [list(x) for x in absent(results)], 3),
        everything(results, unit),
    ]  # fmt: skip
    return [table for table in found if table.rows]


def grid(results: Results, which: str, unit: Unit) -> Table:
    """Rows of head dim and mask, columns of length: the rate, and the ratio to the fastest peer."""
    panels = charts.panels(results, which)
    lengths = sorted({int(cell.case["seq"]) for _, cells in panels for cell in cells})
    rows = []
    for title, cells in panels:
        by_length = {int(cell.case["seq"]): cell for cell in cells}
        rows.append([title, *(_rate(by_length.get(n), unit) for n in lengths)])
    return Table("speed", f"{which.capitalize()}, {unit.name}", [which, *map(tokens, lengths)], rows)


def _rate(cell: Cell | None, unit: Unit) -> str:
    ours = cell.chosen() if cell else None
    if cell is None or ours is None:
        return "–"
    ratio = cell.ratio_to_best()
    return unit.say(cell.rate(ours)) + (f" ({ratio.median:.2f}×)" if ratio else "")


def _peers(results: Results) -> list[list[str]]:
    return [
        [f"{s.group} ({s.cells})", short(s.ours), "the fastest of each cell" if s.peer == "best" else label(s.peer),
         *(f"{x:.2f}" for x in (s.ratio, s.worst, s.best))]
        for s in standings(results) if s.group in PASSES or s.peer == "best"
    ]  # fmt: skip


def _cases(results: Results) -> list[list[str]]:
    rows = []
    for cell in results.cells:
        ours, best, ratio = cell.chosen(), cell.best_peer(), cell.ratio_to_best()
        if ours and cell.group not in PASSES:
            theirs = f"{label(best)} {duration(cell.seconds(best).median)}" if best else "–"
            rows.append([cell.group, cell.name, _time(cell, ours), theirs, f"{ratio.median:.2f}" if ratio else "–"])
    return rows


def _lowest(results: Results) -> list[list[str]]:
    ranked = [(ratio.median, cell) for cell in results.cells if (ratio := cell.ratio_to_best())]
    if len(ranked) < 2 * LOWEST:
        return []
    rows = []
    for speed, cell in sorted(ranked, key=lambda pair: pair[0])[:LOWEST]:
        ours, best = cell.chosen(), cell.best_peer()
        assert ours
        assert best
        theirs = f"{label(best)} {duration(cell.seconds(best).median)}"
        rows.append([cell.group, cell.name, f"{speed:.3f}", _time(cell, ours), theirs])
    return rows


def _time(cell: Cell, name: str) -> str:
    """The time; and bytes per second, where a cell counts bytes."""
    seconds = cell.seconds(name).median
    moved = cell.case.get("bytes")
    return duration(seconds) + (f" ({moved / seconds / 1e9:.3g} GB/s)" if moved else "")


def memory(results: Results) -> Table:
    names = list(dict.fromkeys(peak.provider for peak in results.memory))
    rows = []
    for length in dict.fromkeys(peak.length for peak in results.memory):
        found = {peak.provider: binary(peak.bytes) for peak in results.memory if peak.length == length}
        rows.append([str(length), *(found.get(name, "") for name in names)])
    return Table("memory", "Peak memory of forward and backward, beyond the inputs", ["tokens", *names], rows, 0)


def everything(results: Results, unit: Unit) -> Table:
    """Every provider in every cell: its rate (or time), or why it has none; the ratio with its quartiles; how large the
    largest error is; the clock and the power."""
    names = list(dict.fromkeys(n for cell in results.cells for n, e in cell.entries.items() if e.status != "missing"))
    rows = []
    for cell in results.cells:
        ratio, share = cell.ratio_to_best(), cell.share_of_ceiling()
        sensed = [f"{cell.sensors[name][1]:.0f}" if name in cell.sensors else "" for name in ("sm_mhz", "watts")]
        said = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else ""
        error = max((x for e in cell.entries.values() if (x := e.share_of_limit()) is not None), default=None)
        rows.append([
            cell.group, cell.name, *(_number(cell, name, unit) for name in names), said,
            "" if error is None else f"{error:.0%}", f"{share.median:.0%}" if share else "", *sensed,
        ])  # fmt: skip
    head = ["case", "size", *map(label, names), "ours / best peer", "error / limit", "of matmul", "MHz", "W"]
    return Table("all", f"All numbers ({unit.name}, or time where no FLOPs are counted)", head, rows, 2)


def _number(cell: Cell, name: str, unit: Unit) -> str:
    entry = cell.entries.get(name)
    if entry is None or not entry.times:
        return entry.status if entry else ""
    return duration(cell.seconds(name).median) if cell.flops is None else unit.say(cell.rate(name))


def markdown(table: Table) -> str:
    """
    >>> print(markdown(Table("t", "", ["a", "b"], [["x", "1"]])), end="")
    | a | b |
    |---|---:|
    | x | 1 |
    """
    rule = "|" + "---|" * table.words + "---:|" * (len(table.head) - table.words)
    return "".join(f"{line}\n" for line in (_line(table.head), rule, *map(_line, table.rows)))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def text(table: Table) -> str:
    """
    >>> print(text(Table("t", "Title", ["a", "b"], [["x", "10"]])))
    Title
    a   b
    x  10
    """
    lines = [list(table.head), *table.rows]
    width = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        [x.ljust(w) if n < table.words else x.rjust(w) for n, (x, w) in enumerate(zip(line, width, strict=True))]
        for line in lines
    )
    return "\n".join([table.title, *("  ".join(line).rstrip() for line in padded)])


def html(table: Table) -> str:
    top = "".join(f"<th>{escape(word)}</th>" for word in table.head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    kind = ' class="words"' if table.words == len(table.head) else ""
    return f'<div class="scroll"><table{kind}><tr>{top}</tr>{body}</table></div>'


def short(name: str) -> str:
    """
    >>> short("tilewise-triton"), short("fa3")
    ('triton', 'fa3')
    """
    return name.removeprefix(f"{OURS}-")


def line(cell: Cell, unit: Unit) -> str:
    """One cell with all its providers, as it is finished."""
    shown = (f"{short(n)} {_number(cell, n, unit)}" for n, e in cell.entries.items() if e.status != "missing")
    ratio = cell.ratio_to_best()
    return "  ".join([f"{cell.group}: {cell.name}", *shown, *([f"{ratio.median:.2f}x"] if ratio else [])])


def verdict(results: Results) -> str:
    entries = [entry for cell in results.cells for entry in cell.entries.values()]
    answers = sum(entry.status in ("ok", "wrong") for entry in entries)
    right = sum(entry.status == "ok" for entry in entries)
    return f"{right} of {answers} answers right"


def show(results: Results) -> Iterator[str]:
    """What the terminal shows of a run, beside the lines of its cells."""
    machine = results.machine
    commit = machine["commit"] or "installed"
    yield f"\ntilewise bench on {machine['device']}, torch {machine['torch']}, commit {commit}\n"
    for table in tables(results):
        if table.name != "all":
            yield text(table) + "\n"
    yield f"{verdict(results)}; {results.seconds:.0f} s"


def show_comparison(comparison: Comparison) -> Iterator[str]:
    changed = sorted((x for x in comparison.changes if x.faster or x.slower), key=lambda change: change.factor)
    rows = [
        [x.cell, f"{short(x.ours)} / {x.peer}", f"{x.before.median:.3f}", f"{x.after.median:.3f}",
         f"{100 * (x.factor - 1):+.1f} %", f"± {100 * x.noise:.1f} %"]
        for x in changed
    ]  # fmt: skip
    if rows:
        head = ["cell", "ours / peer", "before", "after", "change", "noise"]
        yield text(Table("changes", "ratios that changed by more than their noise", head, rows, 2))
    for loss in comparison.losses:
        yield f"lost: {loss.cell}: {loss.ours} is now {loss.status} ({loss.reason})"
    for where, keys in ("the first", comparison.only_before), ("the second", comparison.only_after):
        if keys:
            yield f"only in {where}: {len(keys)} cells, such as {keys[0]}"
    if comparison.other_company:
        some = f"{len(comparison.other_company)} cells, such as {comparison.other_company[0]}, were timed among others"
        yield f"{some}: at a power limit that alone moves ratios"
    faster, slower = sum(c.faster for c in changed), sum(c.slower for c in changed)
    yield f"{len(comparison.changes)} ratios compared: {faster} faster, {slower} slower, the rest within noise"
    if comparison.changes:
        widest = comparison.widest
        yield (
            f"the widest change is {100 * (widest.factor - 1):+.1f} % ({widest.cell}, {short(widest.ours)} / "
            f"{widest.peer}); the two runs are {Agreement.of(comparison.changes)}"
        )


def render(results: Results) -> str:
    """The page, which needs nothing else: no script, no font, no network."""
    template = Template(resources.files("tilewise_lab.bench").joinpath("page.html").read_text(encoding="utf-8"))
    machine = results.machine
    versions = [f"{name} {machine[name]}" for name in ("torch", "triton", "cuda", "cudnn") if machine[name]]
    facts = [*versions, f"commit {machine['commit'] or 'unknown'}", machine["date"], f"{results.seconds:.0f} s"]
    return template.substitute(
        chart_css=charts.style(),
        device=escape(machine["device"]),
        facts=escape(" · ".join(facts)),
        verdict=escape(verdict(results)),
        method=escape(METHOD),
        sections="".join(
            [*_charts(results), *(_section(x.title, html(x)) for x in [*tables(results), _facts(results)])]
        ),
    )


def _charts(results: Results) -> Iterator[str]:
    peak, unit = charts.top(results), results.unit()
    for which in PASSES:
        panels = [(title, cells) for title, cells in charts.panels(results, which) if any(c.timed() for c in cells)]
        if panels:
            drawn = (f"<div><h3>{title}</h3>{charts.speed(title, cells, peak, unit)}</div>" for title, cells in panels)
            yield _section(
                f"{which.capitalize()}, {unit.name} by length", f'<div class="charts">{"".join(drawn)}</div>'
            )


def _facts(results: Results) -> Table:
    told = (results.machine | results.settings).items()
    rows = [[name, str(value)] for name, value in told if value is not None and not isinstance(value, dict)]
    rows += [[n, x["version"]] for n, x in results.providers.items() if x["asked"] and x["version"]]
    rows += [[name, str(value)] for name, value in results.notes.items()]
    return Table("facts", "How it was measured", ["what", "value"], rows, 2)


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}"
