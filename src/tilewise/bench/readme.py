"""Tables and plots of the documents, made from the kept results: `<!-- bench:NAME -->` to `<!-- /bench:NAME -->`.

The newest result of each device counts, GPUs before CPUs. A test renders them again and compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tilewise.bench import charts
from tilewise.bench.charts import label
from tilewise.bench.machine import slug
from tilewise.bench.page import memory_rows
from tilewise.bench.results import Cell, Results, Unit, load
from tilewise.bench.summary import bars, standings
from tilewise.demo.words import duration, tokens
from tilewise.spec import AttentionError

DOCUMENTS = ("README.md", "bench/README.md")
RESULTS = Path("bench/results")
PLOTS = Path("bench/plots")
MARKER = re.compile(r"(<!-- bench:([\w-]+) -->\n)(.*?)(<!-- /bench:\2 -->)", re.S)


def kept_name(results: Results) -> str:
    """2026-11-15-nvidia-h200.json"""
    return f"{results.machine['date'][:10]}-{slug(results.machine['device'])}.json"


def newest(path: Path, device: str) -> Path:
    """The file itself; of a folder, or of a LATEST.json that is not there, the newest result of the device in it."""
    if path.is_file():
        return path
    folder = path.parent if path.name == "LATEST.json" else path
    found = sorted(folder.glob(f"*-{slug(device)}.json"))
    if not found:
        raise AttentionError(
            f"results in {folder}", f"none of {device}", "a file that `tilewise bench --keep` wrote there"
        )
    return found[-1]


def latest(root: Path) -> list[Results]:
    """The newest result of every device."""
    by_device = {path.stem[11:]: path for path in kept(root)}
    found = [load(path) for path in by_device.values()]
    return sorted(found, key=lambda results: results.machine["kind"] != "cuda")


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
    for document in DOCUMENTS:
        path = root / document
        if path.exists():
            found[path] = fill(path.read_text(encoding="utf-8"), everything, document)
    return found


def plots(results: Results) -> dict[str, str]:
    return {f"{which}.svg": charts.figure(results, which) for which in ("forward", "backward") if results.of(which)}


def fill(text: str, everything: list[Results], document: str) -> str:
    def part(match: re.Match[str]) -> str:
        name = match[2]
        if name not in PARTS:
            raise AttentionError(
                f"marker in {document}", f"bench:{name}", " or ".join(f"bench:{part}" for part in PARTS)
            )
        body = PARTS[name](everything, document) if everything else "Nothing has been measured yet.\n"
        return f"{match[1]}{body}{match[4]}"

    return MARKER.sub(part, text)


def speed(everything: list[Results], document: str) -> str:
    """TFLOP/s of ours and the ratio to the fastest peer, on the first device."""
    results = everything[0]
    said, unit = [_measured(results)], results.unit()
    for which in ("forward", "backward"):
        panels = charts.panels(results, which)
        lengths = sorted({int(cell.case["seq"]) for _, cells in panels for cell in cells})
        rows = []
        for title, cells in panels:
            by_length = {int(cell.case["seq"]): cell for cell in cells}
            rows.append([title, *(_cell(by_length.get(n), unit) for n in lengths)])
        if rows:
            said.append(_table([which, *map(tokens, lengths)], rows, left=1))
    said.append(f"{unit.name} of tilewise, and how many times as fast as the fastest peer of that cell it is.\n")
    return "\n".join(said)


def plot(everything: list[Results], document: str) -> str:
    up = "../" * document.count("/")
    return "".join(f"![{name}]({up}{PLOTS.as_posix()}/{name})\n" for name in plots(everything[0]))


def peers(everything: list[Results], document: str) -> str:
    """The geometric mean against every peer, on every device."""
    head = ["cells", "tilewise backend", "peer", "times as fast", "worst", "best"]

    def rows(results: Results) -> Iterator[list[str]]:
        for s in standings(results):
            peer = "the fastest of each cell" if s.peer == "best" else label(s.peer)
            ratios = (f"{ratio:.2f}" for ratio in (s.ratio, s.worst, s.best))
            yield [f"{s.group} ({s.cells})", s.ours.removeprefix("tilewise-"), peer, *ratios]

    return _by_device(everything, lambda results: _table(head, rows(results), left=3))


def cases(everything: list[Results], document: str) -> str:
    """Everything beyond the grid: times, and the ratio to the fastest peer."""
    head = ["case", "size", "tilewise", "fastest peer", "times as fast"]

    def rows(results: Results) -> Iterator[list[str]]:
        for cell in results.cells:
            ours, best, ratio = cell.chosen(), cell.best_peer(), cell.ratio_to_best()
            if ours and best and ratio and cell.group not in ("forward", "backward"):
                theirs = f"{label(best)} {duration(cell.seconds(best).median)}"
                yield [cell.group, cell.name, duration(cell.seconds(ours).median), theirs, f"{ratio.median:.2f}"]

    return _by_device(everything, lambda results: _table(head, rows(results), left=2))


def memory(everything: list[Results], document: str) -> str:
    def part(results: Results) -> str:
        names = list(dict.fromkeys(peak.provider for peak in results.memory))
        return _table(["tokens", *names], memory_rows(results, names), left=0)

    return _by_device(everything, part)


def goals(everything: list[Results], document: str) -> str:
    verdicts = {None: "", True: "met", False: "missed"}

    def part(results: Results) -> str:
        rows = [[bar.what, bar.said, bar.wanted, verdicts[bar.met]] for bar in bars(results)]
        return _table(["what", "found", "goal", ""], rows, left=1)

    return _by_device(everything, part)


PARTS: dict[str, Callable[[list[Results], str], str]] = {
    part.__name__: part for part in (speed, plot, peers, cases, memory, goals)
}


def _by_device(everything: list[Results], part: Callable[[Results], str]) -> str:
    return "\n".join(f"{_measured(results)}\n{text}" for results in everything if (text := part(results)))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> str:
    """A Markdown table whose first columns are words and whose others are numbers; nothing where there are no rows.

    >>> print(_table(["a", "b"], [["x", "1"]], left=1), end="")
    | a | b |
    |---|---:|
    | x | 1 |
    """
    body = [f"| {' | '.join(row)} |\n" for row in rows]
    rule = "|" + "---|" * left + "---:|" * (len(head) - left)
    return f"| {' | '.join(head)} |\n{rule}\n{''.join(body)}" if body else ""


def _measured(results: Results) -> str:
    machine = results.machine
    return f"{machine['device']}, {results.settings['dtype']}, torch {machine['torch']}, {machine['date'][:10]}:\n"


def _cell(cell: Cell | None, unit: Unit) -> str:
    ours = cell.chosen() if cell else None
    if cell is None or ours is None:
        return "–"
    ratio = cell.ratio_to_best()
    return unit.say(cell.rate(ours)) + (f" ({ratio.median:.2f}×)" if ratio else "")
