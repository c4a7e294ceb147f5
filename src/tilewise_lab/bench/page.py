"""The report as one page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from string import Template

from tilewise_lab.bench import charts
from tilewise_lab.bench.charts import label
from tilewise_lab.bench.judge import BUDGET
from tilewise_lab.bench.results import Cell, Results, Spread, Unit, geometric_mean
from tilewise_lab.bench.summary import absent, against, bars, standings
from tilewise_lab.demo.charts import lines
from tilewise_lab.demo.words import binary, duration, tokens

PASSES = ("forward", "backward")
ERRORS = ("out", "lse", "dq", "dk", "dv")
SPEED = """{unit} against length, {tokens} tokens and hidden size {hidden}, however they are cut. The band
around a line holds half of the rounds; the dotted line is a matrix product in the same rounds."""
RATIOS = """How many times as fast as a peer, the median over the rounds; blue is faster than the peer, orange
slower. Each round calls every provider in turn, again and again in random order, and a ratio compares times of the same
round."""
OTHERS = """Time of one call; shorter is better. In brackets: how many times as fast as that peer tilewise is.
The overhead is what a tiny call keeps the host, whatever the device still has to do."""
MEMORY = """The most that torch's allocator had handed out at once during one forward and backward, beyond the
inputs: causal, {heads} heads of {dim}, {dtype}."""
WRONG = f"""The largest error against float64 over all cells, as a share of what is allowed: {BUDGET:g} times
the error that the textbook formula makes in the same dtype, plus one rounding. 100 % or less is right; a wrong
answer gets no speed. The call that is compared is the call that is timed: before the rounds, after each, and after
all. Compared in each cell: {{checked}}; the rest must be finite, and stay where it was found right."""
METHOD = """Random normal inputs in {dtype}. First every provider's answer is compared with float64. Then
{rounds} rounds: in each, every provider that was right, a large matrix product and a copy are called in turn, in
an order shuffled for every pass, as often as gives each about {burst_ms:g} ms, the cache emptied before every call.
A GPU at its power limit changes its clock within milliseconds; in turns, all have the same clock. Rates and ratios
are medians over the rounds, with their quartiles. FLOPs: 4·B·H·S²·D forward, half of that causal, 2.5 times that
backward; 2·(D + Dv) and 2·(3 D + 2 Dv) for each pair where values have a head dim Dv of their own. Backward times hold
no forward."""


def render(results: Results) -> str:
    template = Template(resources.files("tilewise_lab.bench").joinpath("page.html").read_text(encoding="utf-8"))
    machine = results.machine
    versions = [f"{name} {machine[name]}" for name in ("torch", "triton", "cuda", "cudnn") if machine[name]]
    facts = [*versions, f"commit {machine['commit'] or 'unknown'}", machine["date"], f"{results.seconds:.0f} s"]
    return template.substitute(
        chart_css=charts.style(),
        device=escape(machine["device"]),
        facts=escape(" · ".join(facts)),
        claims="".join(claims(results)),
        sections="\n".join(sections(results)),
    )


def claims(results: Results) -> Iterator[str]:
    entries = [entry for cell in results.cells for entry in cell.entries.values()]
    answers = sum(entry.status in ("ok", "wrong") for entry in entries)
    right = sum(entry.status == "ok" for entry in entries)
    yield claim(
        f"{right} of {answers}",
        f"answers are within {BUDGET:g}× the rounding error of the textbook formula, judged against float64",
        "pass" if right == answers else "fail",
    )
    for which in ("forward", "backward"):
        ratios = [ratio.median for cell in results.of(which) if (ratio := cell.ratio_to_best())]
        mean = geometric_mean(ratios)
        if mean is not None:
            words = f"the speed of the fastest peer, {which}: the geometric mean of {len(ratios)} cells"
            yield claim(f"{mean:.2f}×", f"{words}, from {min(ratios):.2f} to {max(ratios):.2f}")
    shares = [(share.median, cell.case) for cell in results.of(*PASSES) if (share := cell.share_of_ceiling())]
    if shares:
        most, case = max(shares, key=lambda pair: pair[0])
        where = f"head dim {case['dim']}, {'causal' if case['causal'] else 'full'}, {case['seq']} tokens"
        yield claim(f"{100 * most:.0f} %", f"of the speed of a large matrix product, at best: {where}")


def claim(number: str, words: str, kind: str = "") -> str:
    return f'<div class="card {kind}"><strong>{escape(number)}</strong><span>{escape(words)}</span></div>'


def sections(results: Results) -> Iterator[str]:
    peak, unit = charts.top(results), results.unit()
    for which in PASSES:
        panels = [(title, cells) for title, cells in charts.panels(results, which) if any(c.timed() for c in cells)]
        if panels:
            drawn = [card(title, charts.speed(title, cells, peak, unit)) for title, cells in panels]
            body = cards(drawn, f"across{charts.columns(panels)}")
            yield section(f"Speed, {which}", SPEED.format(unit=unit.name, **results.settings), body)
    yield from ratio_section(results)
    yield from other_section(results)
    yield from memory_section(results)
    yield errors_section(results)
    yield goals_section(results)
    yield section("Who did not run, and why", "", card("", table(("who", "where", "why"), absent(results), "words")))
    yield method_section(results)
    yield numbers_section(results)


def section(title: str, words: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{f'<p>{escape(words)}</p>' if words else ''}{body}"


def card(title: str, body: str) -> str:
    return f'<div class="card">{f"<h3>{escape(title)}</h3>" if title else ""}{body}</div>'


def cards(drawn: Iterable[str], kind: str = "") -> str:
    return f'<div class="cards {kind}">{"".join(drawn)}</div>'


def ratio_section(results: Results) -> Iterator[str]:
    grids = [which for which in PASSES if any(cell.ratio_to_best() for cell in results.of(which))]
    if not grids:
        return
    best = [card(f"{which}, against the fastest peer", heat(results, which, None, "best")) for which in grids]
    more = []
    for s in standings(results):
        if s.group in grids and s.peer != "best":
            title = f"{s.group}, {label(s.ours)} against {label(s.peer)}: {s.ratio:.2f}× on average"
            more.append(card(title, heat(results, s.group, s.ours, s.peer)))
    folded = f"<details><summary>Against each peer</summary>{cards(more, 'wide')}</details>"
    yield section("Ratio to the peers", RATIOS, cards(best, "wide") + folded)


def heat(results: Results, which: str, ours: str | None, peer: str) -> str:
    """Rows of head dim and mask, columns of length. ours None: whatever tilewise chooses."""
    rows = charts.panels(results, which)
    lengths = sorted({int(cell.case["seq"]) for _, cells in rows for cell in cells})
    body = []
    for title, cells in rows:
        by_length = {int(cell.case["seq"]): cell for cell in cells}
        body.append([title, *(heat_cell(by_length[n], ours, peer) if n in by_length else "<td></td>" for n in lengths)])
    return heat_table([tokens(n) for n in lengths], body)


def heat_table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """The first of a row is its name, the others are finished cells."""
    top = "".join(f"<th>{escape(word)}</th>" for word in head)
    body = "".join(f"<tr><td>{escape(name)}</td>{''.join(cells)}</tr>" for name, *cells in rows)
    return f'<div class="scroll"><table class="heat"><tr><th></th>{top}</tr>{body}</table></div>'


def heat_cell(cell: Cell, ours: str | None, peer: str) -> str:
    who = ours or cell.chosen()
    ratio = against(cell, who, peer) if who else None
    if ratio is None:
        status = cell.entries[cell.ours].status if who is None and cell.ours in cell.entries else "–"
        return f'<td class="{"badcell" if status == "wrong" else ""}">{status}</td>'
    strength = min(1.0, abs(math.log(ratio.median)) / math.log(1.6))
    kind, depth = "up" if ratio.median >= 1 else "down", f"{8 + 62 * strength:.0f}%"
    best = cell.best_peer()
    note = f"<small>{escape(label(best))}</small>" if peer == "best" and best else ""
    hint = escape(f"{cell.name}: {ratio.low:.3f} to {ratio.high:.3f} in half of the rounds")
    return f'<td class="{kind}" style="--a:{depth}" title="{hint}">{ratio.median:.2f}{note}</td>'


def other_section(results: Results) -> Iterator[str]:
    cells = [cell for cell in results.cells if cell.group not in PASSES and cell.timed()]
    if cells:
        drawn = [card(cell.group, f"<p>{escape(cell.name)}</p>{charts.times(cell)}{silent(cell)}") for cell in cells]
        yield section("Other cases", OTHERS, cards(drawn))


def silent(cell: Cell) -> str:
    """Who is on this machine and gave no time here."""
    words = [f"{label(n)}: {e.status}" for n, e in cell.entries.items() if not e.times and e.status != "missing"]
    return f"<p>{escape(', '.join(words))}</p>" if words else ""


def memory_section(results: Results) -> Iterator[str]:
    names = list(dict.fromkeys(peak.provider for peak in results.memory))
    if names:
        series = {name: [(p.length, p.bytes) for p in results.memory if p.provider == name] for name in names}
        plot = lines("peak memory against length", series, binary, 2)
        drawn = card("", plot), card("", table(["tokens", *names], memory_rows(results, names)))
        yield section("Memory against length", MEMORY.format_map(results.settings["memory"]), cards(drawn, "wide"))


def memory_rows(results: Results, names: Sequence[str]) -> Iterator[list[str]]:
    for length in dict.fromkeys(peak.length for peak in results.memory):
        found = {peak.provider: binary(peak.bytes) for peak in results.memory if peak.length == length}
        yield [str(length), *(found.get(name, "") for name in names)]


def errors_section(results: Results) -> str:
    """The worst share of the limit over all cells, for each provider and tensor."""
    worst: dict[str, dict[str, float]] = {}
    for cell in results.cells:
        for name, entry in cell.entries.items():
            for tensor, (found, limit) in entry.errors.items():
                share = math.inf if found is None or not limit else found / limit
                row = worst.setdefault(label(name), {})
                row[tensor] = max(row.get(tensor, 0.0), share)
    rows = [[name, *(error_cell(row.get(tensor)) for tensor in ERRORS)] for name, row in worst.items()]
    checked = next((cell.checked for cell in results.cells if cell.checked), "nothing")
    return section("Errors", WRONG.format(checked=checked), cards([card("", heat_table(ERRORS, rows))], "wide"))


def error_cell(share: float | None) -> str:
    if share is None:
        return "<td>–</td>"
    if share > 1:
        return f'<td class="badcell">{"not finite" if math.isinf(share) else f"{100 * share:.0f} %"}</td>'
    return f'<td class="up" style="--a:{40 * share:.0f}%">{100 * share:.0f} %</td>'


def goals_section(results: Results) -> str:
    rows = []
    for bar in bars(results):
        verdict = {None: "", True: "met", False: "missed"}[bar.met]
        cells = "".join(f"<td>{escape(words)}</td>" for words in (bar.what, bar.said, bar.wanted))
        rows.append(f'<tr>{cells}<td class="{verdict}">{verdict}</td></tr>')
    profiler = results.notes.get("profiler_us", {})
    each = ", ".join(f"{label(name)} {duration(us / 1e6)}" for name, us in profiler.items())
    words = f"Under torch's profiler, its own cost included, one tiny call takes {each}." if each else ""
    head = "<tr><th>what</th><th>found</th><th>goal</th><th></th></tr>"
    return section(
        "Goals", words, card("", f'<div class="scroll"><table class="goals">{head}{"".join(rows)}</table></div>')
    )


def method_section(results: Results) -> str:
    rows = [(name, str(value)) for name, value in results.machine.items() if value is not None]
    rows += [
        (name, facts["version"]) for name, facts in results.providers.items() if facts["asked"] and facts["version"]
    ]
    body = card("", table(("what", "value"), rows, "words"))
    return section("How it was measured", METHOD.format_map(results.settings), body)


def numbers_section(results: Results) -> str:
    names, unit = list(dict.fromkeys(name for cell in results.cells for name in cell.timed())), results.unit()
    rows = []
    for cell in results.cells:
        ratio, share = cell.ratio_to_best(), cell.share_of_ceiling()
        sensed = [f"{cell.sensors[name][1]:.0f}" if name in cell.sensors else "" for name in ("sm_mhz", "watts")]
        said = ranged(ratio) if ratio else "", f"{100 * share.median:.0f} %" if share else ""
        rows.append([cell.group, cell.name, *(number(cell, name, unit) for name in names), *said, *sensed])
    head = ["pass", "case", *map(label, names), "ours / best peer", "of matmul", "MHz", "W"]
    title = f"All numbers ({unit.name}, or time where there are no FLOPs)"
    return f"<details><summary>{title}</summary>{card('', table(head, rows))}</details>"


def number(cell: Cell, name: str, unit: Unit) -> str:
    entry = cell.entries.get(name)
    if entry is None or not entry.times:
        return entry.status if entry else ""
    return duration(cell.seconds(name).median) if cell.flops is None else unit.say(cell.rate(name))


def ranged(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    top = "".join(f"<th>{escape(word)}</th>" for word in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}"><tr>{top}</tr>{body}</table></div>'
