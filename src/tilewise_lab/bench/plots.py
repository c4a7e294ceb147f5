"""The report's pictures as PNG files, where matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tilewise_lab.bench.charts import columns, label, panels
from tilewise_lab.bench.results import Results

COLOURS = {
    "tilewise": "#2f5bd8", "tilewise-hopper": "#2f5bd8", "tilewise-reference": "#2f5bd8", "tilewise-triton": "#1795c9",
    "cudnn": "#3d8b2f", "fa2": "#c2670c", "fa3": "#b3306e", "fa4": "#7a4bc2", "sdpa": "#0f8f83", "naive": "#8a6d4b",
}  # fmt: skip


def write(results: Results, folder: Path) -> list[Path]:
    if find_spec("matplotlib") is None:
        return []
    drawings: dict[str, Callable[[Results, Any], bool]] = {
        "speed-forward": lambda r, figure: speed(r, "forward", figure),
        "speed-backward": lambda r, figure: speed(r, "backward", figure),
        "ratio": ratio,
        "errors": errors,
        "memory": memory,
    }
    from matplotlib.figure import Figure

    files = []
    for name, draw in drawings.items():
        figure = Figure(layout="constrained", dpi=130)
        if draw(results, figure):
            figure.suptitle(
                f"{results.machine['device']}, torch {results.machine['torch']}", fontsize=9, color="#5d636d"
            )
            files.append(folder / f"{name}.png")
            figure.savefig(files[-1])
    return files


def speed(results: Results, which: str, figure: Any) -> bool:
    drawn = [(title, cells) for title, cells in panels(results, which) if any(cell.timed() for cell in cells)]
    if not drawn:
        return False
    across, unit = columns(drawn), results.unit()
    rows = math.ceil(len(drawn) / across)
    figure.set_size_inches(4.6 * across, 3 * rows + 0.4)
    axes = figure.subplots(rows, across, squeeze=False, sharey=True).flat
    for axis, (title, cells) in zip(axes, drawn, strict=False):
        for name in dict.fromkeys(name for cell in cells for name in cell.timed()):
            points = [(cell.case["seq"], unit(cell.rate(name))) for cell in cells if name in cell.timed()]
            x, y = [n for n, _ in points], [rate.median for _, rate in points]
            style = {
                "color": COLOURS.get(name),
                "label": label(name),
                "linewidth": 2.6 if name in {cell.chosen() for cell in cells} else 1.4,
            }
            axis.plot(x, y, marker="o", markersize=3.5, **style)
        _lengths(axis, [cell.case["seq"] for cell in cells])
        axis.set_title(f"{which}, {title}", fontsize=10)
        axis.set_ylabel(unit.name)
    most = max(cell.rate(name).median for _, cells in drawn for cell in cells for name in cell.timed())
    figure.axes[0].set_ylim(0, 1.1 * most / unit.size)
    figure.axes[0].legend(fontsize=8, frameon=False, ncols=2)
    return True


def ratio(results: Results, figure: Any) -> bool:
    passes = [which for which in ("forward", "backward") if any(cell.ratio_to_best() for cell in results.of(which))]
    if not passes:
        return False
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("ratio", ["#c2670c", "#ffffff", "#2f5bd8"])  # slower, as fast, faster
    figure.set_size_inches(5.6 * len(passes), 1.4 + 0.45 * max(len(panels(results, which)) for which in passes))
    for axis, which in zip(figure.subplots(1, len(passes), squeeze=False).flat, passes, strict=True):
        rows = panels(results, which)
        lengths = sorted({cell.case["seq"] for _, cells in rows for cell in cells})
        found = {(title, cell.case["seq"]): cell.ratio_to_best() for title, cells in rows for cell in cells}
        logs = [
            [math.log(r.median) if (r := found.get((title, n))) else math.nan for n in lengths] for title, _ in rows
        ]
        axis.imshow(logs, cmap=colours, vmin=-math.log(1.6), vmax=math.log(1.6), aspect="auto")
        for i, (title, _) in enumerate(rows):
            for j, n in enumerate(lengths):
                if r := found.get((title, n)):
                    axis.text(j, i, f"{r.median:.2f}", ha="center", va="center", fontsize=9)
        axis.set_xticks(range(len(lengths)), [str(n) for n in lengths], fontsize=8)
        axis.set_yticks(range(len(rows)), [title for title, _ in rows], fontsize=8)
        axis.set_title(f"{which}: times as fast as the fastest peer", fontsize=10)
    return True


def errors(results: Results, figure: Any) -> bool:
    worst: dict[str, float] = {}
    for cell in results.cells:
        for name, entry in cell.entries.items():
            share = entry.share_of_limit()
            if share is not None:
                worst[name] = max(worst.get(name, 0.0), share)
    if not worst:
        return False
    figure.set_size_inches(6, 1 + 0.35 * len(worst))
    axis = figure.subplots()
    axis.barh(
        [label(name) for name in worst], list(worst.values()), color=[COLOURS.get(name, "#56657a") for name in worst]
    )
    axis.axvline(1, color="#c4302b", linestyle="--", linewidth=1)
    axis.set_xlabel("largest error against float64, as a share of what is allowed")
    axis.invert_yaxis()
    return True


def memory(results: Results, figure: Any) -> bool:
    if not results.memory:
        return False
    figure.set_size_inches(6, 3.8)
    axis = figure.subplots()
    for name in dict.fromkeys(peak.provider for peak in results.memory):
        points = [(p.length, p.bytes / 2**20) for p in results.memory if p.provider == name and p.bytes is not None]
        axis.plot(
            [n for n, _ in points], [y for _, y in points], marker="o", label=label(name), color=COLOURS.get(name)
        )
    axis.set_yscale("log")
    _lengths(axis, sorted({peak.length for peak in results.memory}))
    axis.set_ylabel("peak memory, MiB")
    axis.legend(fontsize=8, frameon=False)
    return True


def _lengths(axis: Any, lengths: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(n) for n in lengths], fontsize=8)
    axis.set_xlabel("sequence length")
    axis.grid(alpha=0.25)
