"""Tables and plots of the documents, made from the kept results: `<!-- bench:NAME -->` to `<!-- /bench:NAME -->`.
Single numbers are made by `tilewise_lab.bench.kept_rows`.

The newest result of each device counts, GPUs before CPUs. A test renders them again and compares.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tilewise.errors import AttentionError
from tilewise_lab.bench import charts, kept_rows, report
from tilewise_lab.bench.charts import label
from tilewise_lab.bench.machine import slug
from tilewise_lab.bench.results import Cell, Results, Unit, geometric_mean, load
from tilewise_lab.costs import explanation
from tilewise_lab.costs.cost import Call
from tilewise_lab.costs.explain import explain as told
from tilewise_lab.demo.words import tokens

DOCUMENTS = ("README.md", "bench/README.md", "docs/explain.md", "docs/index.md")
RESULTS = Path("bench/results")
PLOTS = Path("bench/plots")
EXPLORER = Path("src/tilewise_lab/explore/measured.json")
LATEST = "LATEST.json"  # stands for the newest of a folder
MARKER = re.compile(r"(<!-- bench:([\w-]+) -->\n)(.*?)(<!-- /bench:\2 -->)", re.S)


def kept_name(results: Results) -> str:
    """2026-11-15-nvidia-h200.json; of a run without the grid, with what it has: 2026-11-16-nvidia-h200-gpt-cold.json"""
    what = [] if results.of("forward", "backward") else dict.fromkeys(x.group.split()[0] for x in results.cells)
    return "-".join([results.machine["date"][:10], slug(results.machine["device"]), *what]) + ".json"


def newest(path: Path, device: str) -> Path:
    """The file itself; of a folder, or of a LATEST.json that is not there, the newest result of the device in it."""
    if path.is_file():
        return path
    folder = path.parent if path.name == LATEST else path
    found = sorted(folder.glob(f"*-{slug(device)}.json"))
    if not found:
        raise AttentionError(
            f"results in {folder}", f"none of {device}", "a file that `tilewise bench --keep` wrote there"
        )
    return found[-1]


def latest(root: Path) -> list[Results]:
    """The newest result of every device, and of what was measured apart from the grid: GPUs first, grids first."""
    by_device = {path.stem[11:]: path for path in kept(root)}
    found = [load(path) for path in by_device.values()]
    return sorted(found, key=lambda results: (results.machine["kind"] != "cuda", not results.of("forward")))


def kept(root: Path) -> list[Path]:
    """The results of this command, by date; other measurements may lie beside them."""
    return [path for path in sorted((root / RESULTS).glob("*.json")) if "schema" in json.loads(path.read_text())]


def write(root: Path) -> list[Path]:
    """Rewrite what is generated; returns the files that changed."""
    changed = []
    for path, text in expected(root).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def expected(root: Path) -> dict[Path, str]:
    """Every generated file, and every document with its generated parts, as they should be."""
    everything = latest(root)
    found = {}
    if everything:
        for name, text in plots(everything[0]).items():
            found[root / PLOTS / name] = text
        if (root / EXPLORER).exists():
            found[root / EXPLORER] = measured_calls(everything[0])
    for document in DOCUMENTS:
        path = root / document
        if path.exists():
            found[path] = fill(path.read_text(encoding="utf-8"), everything, document, root)
    rows = kept_rows.load(root)
    for path in kept_rows.documents(root) if rows else ():
        text = found.get(path) or path.read_text(encoding="utf-8")
        if kept_rows.has_markers(text):
            found[path] = kept_rows.fill(text, path.relative_to(root).as_posix(), root, rows)
    return found


def plots(results: Results) -> dict[str, str]:
    """Every chart, light and dark, by file name."""
    drawn = {}
    for theme in charts.THEMES:
        if charts.overview_cells(results):
            drawn[f"overview-{theme}.svg"] = charts.overview(results, theme)
        for which in ("forward", "backward"):
            if results.of(which):
                drawn[f"{which}-{theme}.svg"] = charts.figure(results, which, theme)
    return drawn


def measured_calls(results: Results) -> str:
    """Forward calls of the grid for the explorer's roofline: JSON, one line each."""
    lines = []
    for cell in results.of("forward"):
        ours, case = cell.chosen(), cell.case
        if ours and case["seq"] in (1024, 4096, 16384):
            n, heads, d = case["seq"], case["heads"], case["dim"]
            call = Call(case["batch"], n, n, heads, heads, d, d, case["dtype"], after=0 if case["causal"] else None)
            shape = {name: x for name, x in call.to_dict().items() if name != "terms"}
            seconds = float(f"{cell.seconds(ours).median:.4g}")
            point = {
                "call": shape,
                "backend": ours.split("-")[-1],
                "pass": "forward",
                "seconds": seconds,
                "spread": 0.0,
            }
            lines.append(json.dumps(point))
    source = (RESULTS / kept_name(results)).as_posix()
    facts = {"device": results.machine["device"], "when": results.machine["date"][:10], "source": source}
    return json.dumps(facts, indent=1).removesuffix("\n}") + ',\n "calls": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def fill(text: str, everything: list[Results], document: str, root: Path = Path()) -> str:
    def part(match: re.Match[str]) -> str:
        name = match[2]
        if name not in PARTS:
            raise AttentionError(
                f"marker in {document}", f"bench:{name}", " or ".join(f"bench:{part}" for part in PARTS)
            )
        body = PARTS[name](everything, root / document) if everything else "Nothing has been measured yet.\n"
        return f"{match[1]}{body}{match[4]}"

    return MARKER.sub(part, text)


def named(name: str) -> Callable[[list[Results], Path], str]:
    """The tables of this name, of every device."""

    def part(results: Results) -> str:
        return "\n".join(report.markdown(table) for table in report.tables(results) if table.name == name)

    return lambda everything, document: _by_device(everything, part)


def standing(everything: list[Results], document: Path) -> str:
    """A sentence for each pass: the chosen backend beside the fastest peer of every cell."""
    results = everything[0]
    said = []
    for which in ("forward", "backward"):
        cells = results.of(which)
        ratios = [ratio.median for cell in cells if (ratio := cell.ratio_to_best())]
        mean = geometric_mean(ratios)
        if mean is not None:
            peers = " or ".join(sorted({label(best) for cell in cells if (best := cell.best_peer())}))
            said.append(
                f"The {which} runs at {mean:.2f} times the speed of the fastest peer ({peers}): the geometric mean of "
                f"{len(ratios)} cases, from {min(ratios):.2f} to {max(ratios):.2f}."
            )
    cells = results.of("forward", "backward")
    dims, lengths = ({int(cell.case[key]) for cell in cells} for key in ("dim", "seq"))
    if not said:
        return ""
    head = _measured(results).removesuffix(":\n")
    where = f"head dims {', '.join(map(str, sorted(dims)))}, full and causal, {_span(lengths)}"
    source = _link(document, RESULTS / kept_name(results))
    return "\n".join([f"{head}, {where} ([all times]({source})):", "", *(f"- {line}" for line in said), ""])


def _span(lengths: Iterable[int]) -> str:
    """
    >>> _span([512, 16384, 1024])
    '512 to 16k tokens'
    """
    return f"{tokens(min(lengths))} to {tokens(max(lengths))} tokens"


def _link(document: Path, target: Path) -> str:
    """A path of the repository, as seen from a document."""
    return ("" if document.parent == _root(document) else "../") + target.as_posix()


def overview(everything: list[Results], document: Path) -> str:
    """The README's picture: forward and backward of one head dim and mask."""
    results = everything[0]
    drawn = charts.overview_cells(results)
    if not drawn:
        return ""
    said = ". ".join(_shown(which, cells, results.unit()) for which, cells in drawn.items())
    span = _span([cell.case["seq"] for cells in drawn.values() for cell in cells])
    words = f"Line charts of {charts.unit_of(results)}, causal, head dim {charts.OVERVIEW['dim']}, {span}. {said}."
    return _picture("overview", words, document)


def plot(everything: list[Results], document: Path) -> str:
    """The charts of both passes: every head dim and mask."""
    results, said = everything[0], ""
    for which in ("forward", "backward"):
        cells = results.of(which)
        ratios = [ratio.median for cell in cells if (ratio := cell.ratio_to_best())]
        if cells:
            dims = ", ".join(str(dim) for dim in sorted({cell.case["dim"] for cell in cells}))
            beside = f" tilewise is at {min(ratios):.2f} to {max(ratios):.2f} times the fastest peer." if ratios else ""
            words = f"Line charts of the {which} by sequence length, for head dims {dims}, full and causal: "
            words += f"{charts.unit_of(results)}.{beside}"
            said += _picture(which, words, document)
    return said


def _shown(which: str, cells: Sequence[Cell], unit: Unit) -> str:
    """The text of one panel: the value of every line at the longest sequence.

    "Forward at 16k tokens: tilewise 716, FA3 740"
    """
    last = cells[-1]
    names = [name for name in [last.chosen(), *last.peers()] if name]
    rates = ", ".join(f"{label(name)} {unit.say(last.rate(name))}" for name in names)
    return f"{which.capitalize()} at {tokens(last.case['seq'])} tokens: {rates}"


def _picture(name: str, words: str, document: Path) -> str:
    """HTML for GitHub, which shows the file of the reader's theme."""
    light, dark = (_link(document, PLOTS / f"{name}-{theme}.svg") for theme in charts.THEMES)
    return (
        f'<picture>\n<source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'<img src="{light}" alt="{words}">\n</picture>\n'
    )


def example(everything: list[Results], document: Path) -> str:
    """What `tilewise explain` says of a call that could be better, abridged."""
    shape = (1, 2049, 16, 100)
    lines = explanation.text(told(shape, shape, shape, device="H200", backend="triton")).splitlines()
    kept = [line for line in lines if line.startswith(("work", "memory", "roofs", "forward", "advice"))]
    command = "$ tilewise explain 1 2049 16 100 --device H200 --backend triton --no-compile"
    indent = " " * (len(kept[0]) - len(kept[0].partition(" ")[2].lstrip()))
    wrapped = [part for line in kept for part in textwrap.wrap(line, 80, subsequent_indent=indent)]
    return "\n".join(["```", command, *wrapped, "```", ""])


def _root(document: Path) -> Path:
    """The repository that a document lies in."""
    return document.parent if (document.parent / RESULTS).is_dir() else document.parents[1]


PARTS: dict[str, Callable[[list[Results], Path], str]] = {
    **{part.__name__: part for part in (standing, overview, plot, example)},
    **{name: named(name) for name in ("speed", "peers", "cases", "memory")},
}


def _by_device(everything: list[Results], part: Callable[[Results], str]) -> str:
    return "\n".join(f"{_measured(results)}\n{text}" for results in everything if (text := part(results)))


def _measured(results: Results) -> str:
    machine = results.machine
    return f"{machine['device']}, {results.settings['dtype']}, torch {machine['torch']}, {machine['date'][:10]}:\n"
