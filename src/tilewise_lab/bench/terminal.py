"""The run in the terminal: progress with each result as it comes, then the tables."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tilewise_lab.bench.compare import Agreement, Comparison
from tilewise_lab.bench.judge import BUDGET
from tilewise_lab.bench.parts import parts
from tilewise_lab.bench.results import OURS, Cell, Peak, Results, Spread, Unit
from tilewise_lab.bench.runner import Run
from tilewise_lab.bench.summary import absent, bars, standings
from tilewise_lab.demo.words import binary, duration, tokens

COLOURS = {"ok": "green", "wrong": "bold red", "failed": "red"}


def watch(run: Run, targets: Sequence[str], save: Path) -> Results:
    """Do all of it behind a progress bar; save after every step, so that nothing measured is lost."""
    results = run.start()
    todo = parts(run, targets, results)
    console = Console(stderr=True)
    began = time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # torch tells how it multiplies on this CPU
        task = progress.add_task("", total=len(todo))
        for name, part in todo:
            progress.update(task, description=name)
            for found in part():
                if isinstance(found, Peak):
                    results.memory.append(found)
                else:
                    results.cells.append(found)
                    console.print(line(found, results.unit()), highlight=False)
            progress.advance(task)
            results.seconds = round(time.monotonic() - began, 1)
            results.save(save)
    return results


def line(cell: Cell, unit: Unit) -> str:
    """One cell in one line, as it is finished."""
    shown = "  ".join(
        f"{short(name)} {_said(cell, name, unit)}" for name in cell.entries if cell.entries[name].status != "missing"
    )
    ratio = cell.ratio_to_best()
    return f"[dim]{cell.group}[/] {cell.name}  {shown}" + (f"  [bold]{ratio.median:.2f}x[/]" if ratio else "")


def short(name: str) -> str:
    """
    >>> short("tilewise-triton"), short("fa3")
    ('triton', 'fa3')
    """
    return name.removeprefix(f"{OURS}-")


def _said(cell: Cell, name: str, unit: Unit) -> str:
    entry = cell.entries[name]
    if not entry.times:
        return f"[{COLOURS.get(entry.status, 'yellow')}]{entry.status}[/]"
    return duration(cell.seconds(name).median) if cell.flops is None else unit.say(cell.rate(name))


def show(results: Results, files: Sequence[Path]) -> None:
    console = Console()
    device, commit = results.machine["device"], results.machine["commit"] or "installed"
    console.print(
        f"\n[bold]tilewise bench[/] on {device}, torch {results.machine['torch']}, commit {commit}\n", highlight=False
    )
    for title, cells in groups(results):
        console.print(fitting_table(title, cells, results.unit(), console.width), "")
    if results.memory:
        console.print(memory_table(results), "")
    console.print(standings_table(results), "")
    console.print(bars_table(results), "")
    console.print(absent_table(results), "")
    wrong = results.wrong(ours=True)
    answers = sum(entry.status in ("ok", "wrong") for cell in results.cells for entry in cell.entries.values())
    bad = len(wrong) + len(results.wrong(ours=False))
    colour = "red" if bad else "green"
    console.print(
        f"[bold {colour}]{answers - bad} of {answers} answers right[/] (against float64, within {BUDGET:g}x the error "
        f"of torch's formula in the same dtype); {results.seconds:.0f} s",
        highlight=False,
    )
    for path in files:
        console.print(f"  {path}", highlight=False)


def groups(results: Results) -> Iterator[tuple[str, list[Cell]]]:
    """The grid pass by pass, then everything else together."""
    for which in ("forward", "backward"):
        if results.of(which):
            yield f"{which}, {results.unit().name}", results.of(which)
    other = [cell for cell in results.cells if cell.group not in ("forward", "backward")]
    if other:
        yield "other cases, time of one call", other


def fitting_table(title: str, cells: Sequence[Cell], unit: Unit, width: int) -> Table:
    """With a column for each provider, or if that is too wide for the terminal, our fastest and the best peer."""
    table = speed_table(title, cells, unit)
    wide = Console(width=1000).measure(table).maximum > width
    return speed_table(f"{title}; the page has all providers", cells, unit, everyone=False) if wide else table


def speed_table(title: str, cells: Sequence[Cell], unit: Unit, *, everyone: bool = True) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    is_grid = cells[0].group in ("forward", "backward")
    for head in ("D", "mask", "S") if is_grid else ("case", "size"):
        table.add_column(head, justify="right" if head in ("D", "S") else "left")
    names = list(
        dict.fromkeys(name for cell in cells for name in cell.entries if cell.entries[name].status != "missing")
    )
    names = names if everyone else []
    for name in names or ("ours", "peer"):
        table.add_column(short(name), justify="right", no_wrap=True)
    for head in ("best", "ours / best", "of mm"):
        table.add_column(head, justify="right", no_wrap=True)
    for number, cell in enumerate(cells):
        lead = [str(cell.case["dim"]), mask(cell), tokens(cell.case["seq"])] if is_grid else [cell.group, cell.name]
        ratio, share = cell.ratio_to_best(), cell.share_of_ceiling()
        last = number + 1 == len(cells) or (is_grid and _block(cells[number + 1]) != _block(cell))
        best = cell.best_peer()
        fastest = min(cell.timed(), key=lambda name: cell.seconds(name).median, default=None)
        table.add_row(
            *lead,
            *(
                _bold(_shown(cell, name, unit if is_grid else None), name == fastest) if name else ""
                for name in names or (_our_best(cell), best)
            ),
            best or "",
            _coloured(ratio) if ratio else "",
            f"{100 * share.median:.0f} %" if share else "",
            end_section=last,
        )
    return table


def _our_best(cell: Cell) -> str | None:
    ours = [name for name in cell.timed() if name.startswith(OURS)]
    return min(ours, key=lambda name: cell.seconds(name).median, default=None)


def mask(cell: Cell) -> str:
    return "causal" if cell.case["causal"] else "full"


def _block(cell: Cell) -> tuple[int, bool]:
    return cell.case["dim"], cell.case["causal"]


def _shown(cell: Cell, name: str, unit: Unit | None) -> str:
    entry = cell.entries.get(name)
    if entry is None:
        return ""
    if not entry.times:
        return f"[{COLOURS.get(entry.status, 'dim')}]{entry.status}[/]"
    return unit.say(cell.rate(name)) if unit else duration(cell.seconds(name).median)


def _bold(words: str, yes: bool) -> str:
    return f"[bold]{words}[/]" if yes else words


def _coloured(ratio: Spread) -> str:
    colour = "green" if ratio.low > 1 else "red" if ratio.high < 1 else "yellow"
    return f"[{colour}]{ratio.median:.2f}x[/] [dim]{ratio.low:.2f}–{ratio.high:.2f}[/]"


def memory_table(results: Results) -> Table:
    table = Table(title="peak memory of forward + backward, beyond the inputs", title_justify="left", box=SIMPLE_HEAD)
    names = list(dict.fromkeys(peak.provider for peak in results.memory))
    table.add_column("length", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    for length in dict.fromkeys(peak.length for peak in results.memory):
        row = {peak.provider: peak for peak in results.memory if peak.length == length}
        table.add_row(str(length), *(binary(row[name].bytes) if name in row else "" for name in names))
    return table


def standings_table(results: Results) -> Table:
    table = Table(
        title="geometric mean of the ratios (above 1: tilewise is faster)", title_justify="left", box=SIMPLE_HEAD
    )
    for head in ("cells", "ours", "peer"):
        table.add_column(head)
    for head in ("ratio", "worst", "best", "n"):
        table.add_column(head, justify="right")
    for s in standings(results):
        words = f"{s.ratio:.2f}x", f"{s.worst:.2f}", f"{s.best:.2f}", str(s.cells)
        table.add_row(s.group, short(s.ours), f"[bold]{s.peer}[/]" if s.peer == "best" else s.peer, *words)
    return table


def bars_table(results: Results) -> Table:
    table = Table(title="goals", title_justify="left", box=SIMPLE_HEAD)
    for head in ("what", "found", "goal", ""):
        table.add_column(head, justify="left" if head == "what" else "right")
    for bar in bars(results):
        verdict = {None: "", True: "[green]met[/]", False: "[red]missed[/]"}[bar.met]
        table.add_row(bar.what, bar.said, bar.wanted, verdict)
    return table


def absent_table(results: Results) -> Table:
    table = Table(title="who did not run, and why", title_justify="left", box=SIMPLE_HEAD)
    for head in ("who", "where", "why"):
        table.add_column(head, overflow="fold")
    for who, where, why in absent(results):
        table.add_row(who, where, why)
    return table


def show_comparison(comparison: Comparison) -> None:
    console = Console()
    table = Table(title="ratios that changed by more than their noise", title_justify="left", box=SIMPLE_HEAD)
    for head in ("cell", "ours / peer", "before", "after", "change", "noise"):
        table.add_column(head, justify="left" if head in ("cell", "ours / peer") else "right")
    changed = [change for change in comparison.changes if change.faster or change.slower]
    for change in sorted(changed, key=lambda change: change.factor):
        colour = "green" if change.faster else "red"
        table.add_row(
            change.cell,
            f"{short(change.ours)} / {change.peer}",
            f"{change.before.median:.3f}",
            f"{change.after.median:.3f}",
            f"[{colour}]{100 * (change.factor - 1):+.1f} %[/]",
            f"± {100 * change.noise:.1f} %",
        )
    if changed:
        console.print(table)
    for loss in comparison.losses:
        console.print(f"[red]lost[/] {loss.cell}: {loss.ours} is now {loss.status} ({loss.reason})", highlight=False)
    for where, keys in ("the first", comparison.only_before), ("the second", comparison.only_after):
        if keys:
            console.print(f"[dim]only in {where}: {len(keys)} cells, such as {keys[0]}[/]", highlight=False)
    if comparison.other_company:
        some = f"{len(comparison.other_company)} cells, such as {comparison.other_company[0]}, were timed among others"
        console.print(f"[yellow]{some}: at a power limit that alone moves ratios[/]", highlight=False)
    faster, slower = sum(c.faster for c in changed), sum(c.slower for c in changed)
    said = f"{len(comparison.changes)} ratios compared: {faster} faster, {slower} slower, the rest within noise"
    if comparison.changes:
        widest = comparison.widest
        where = f"{widest.cell}, {short(widest.ours)} / {widest.peer}"
        said += f"; the widest change is {100 * (widest.factor - 1):+.1f} % ({where})"
        said += f"\nthe two runs are {Agreement.of(comparison.changes)}"
    console.print(f"[bold]{said}[/]", highlight=False)
