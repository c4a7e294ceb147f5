"""`tilewise bench`: attention checked, then timed against other libraries, in turns; reports, comparison, gate."""

from __future__ import annotations

import os
import shutil
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilewise.errors import AttentionError
from tilewise_lab import asked
from tilewise_lab.bench.settings import MODES, Settings, check, settings
from tilewise_lab.progress import progress

if TYPE_CHECKING:
    from tilewise_lab.bench.results import Results

OUT = Path("bench/out")
KEPT = Path("bench/results")


def configure(parser: ArgumentParser) -> None:
    from tilewise_lab.bench.rows import DEFAULT, TARGETS

    width = max(map(len, TARGETS))
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = "targets:\n" + "\n".join(f"  {name:<{width}}  {x.about}" for name, x in TARGETS.items())
    parser.add_argument("targets", nargs="*", metavar="target", help=f"default: {' '.join(DEFAULT)}; or: all")
    parser.add_argument("--quick", action="store_true", help="small sizes, and a look at every kind of case")
    parser.add_argument("--dims", type=int, nargs="+", help="head dims of the grid")
    parser.add_argument("--seqs", type=int, nargs="+", help="sequence lengths of the grid")
    parser.add_argument("--masks", nargs="+", choices=("full", "causal"))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--tokens", type=int, help="batch times length, everywhere in the grid")
    parser.add_argument("--models", type=int, nargs="+", metavar="N", help="gpt: which of its sizes, from 1")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="gpt: how it is run")
    parser.add_argument("--peers", nargs="+", help="peers by name, or: all")
    parser.add_argument("--fa3", type=Path, metavar="DIR", help="FlashAttention-3 with its fa3.py (or TILEWISE_FA3)")
    parser.add_argument("--groups", nargs="+", help="kv: groups of cases (large, medium, small, ragged, ...)")
    parser.add_argument(
        "--tiles",
        nargs="+",
        metavar="MxNxWARPSxSTAGESxPER",
        help="kv: tiles to measure beside each other; `table` for our own",
    )
    parser.add_argument(
        "--serving", type=Path, metavar="DIR", help="kv: peers with their serving.py (TILEWISE_SERVING)"
    )
    parser.add_argument("--count", type=int, help="models-shapes: how many (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="models-shapes: another seed draws other shapes")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="models-shapes: every N-th shape, from the I-th on"
    )
    parser.add_argument("--seconds", type=float, help="after so many no new row begins")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--burst", type=float, metavar="MS", help="milliseconds of a provider in a round, on average")
    parser.add_argument("--device", help="where to run (default: cuda if there is one, else cpu)")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="where reports go (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help=f"also keep the results in {KEPT}, by date and device")
    parser.add_argument("--report", type=Path, metavar="JSON", help="measure nothing: report on earlier results")
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar=("A", "B"), help="what changed from A to B beyond noise"
    )
    parser.add_argument("--gate", type=Path, metavar="JSON", help="fail if a ratio fell since this result (or folder)")
    parser.add_argument("--noise", type=float, metavar="PERCENT", help="least change that --compare and --gate believe")
    parser.add_argument("--readme", action="store_true", help="rewrite the tables and plots of the documents")


def run(options: Namespace) -> int:
    """0 if all is well, 1 if tilewise was wrong or the gate is shut, 2 if the request cannot be met."""
    from tilewise_lab.bench import readme, report
    from tilewise_lab.bench.compare import FLOOR, compare
    from tilewise_lab.bench.results import load

    floor = FLOOR if options.noise is None else options.noise / 100
    if options.readme:
        for path in readme.write(Path()):
            print(path)
        return 0
    if options.compare:
        before, after = (load(asked.file(path, "--compare")) for path in options.compare)
        print(*report.show_comparison(compare(before, after, floor)), sep="\n")
        return 0
    if options.gate and not options.gate.exists() and options.gate.name != readme.LATEST:
        raise AttentionError("--gate", f"{str(options.gate)!r}, which does not exist", "a result or a folder of them")
    if options.report:
        results = load(asked.file(options.report, "--report"))
        print(*(report.line(cell, results.unit()) for cell in results.cells), sep="\n")
    else:
        results = _measure(options)
    print(*report.show(results), *(f"  {path}" for path in _write(results, options.out, keep=options.keep)), sep="\n")
    if options.gate:
        comparison = compare(load(readme.newest(options.gate, results.machine["device"])), results, floor)
        print(*report.show_comparison(comparison), sep="\n")
        if not comparison.passed:
            return 1
    return 1 if results.wrong(ours=True) else 0


def _measure(options: Namespace) -> Results:
    from tilewise_lab.bench.measure import sensors
    from tilewise_lab.bench.providers import roster
    from tilewise_lab.bench.rows import chosen, measure
    from tilewise_lab.bench.runner import Run

    device = asked.device(options.device)
    folder = options.fa3 or os.environ.get("TILEWISE_FA3")
    peers = tuple(options.peers) if options.peers else None
    everyone = roster(device, peers, Path(folder).resolve() if folder else None)
    options.wanted, sizes = chosen(options.targets, quick=options.quick), settings_of(options, device)
    options.out.mkdir(parents=True, exist_ok=True)
    with sensors(device) as sensed, progress() as show, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # torch tells how it multiplies on this CPU
        return measure(Run.of(sizes, everyone, sensed), options, options.out / "results.json", show)


def settings_of(options: Namespace, device: torch.device) -> Settings:
    chosen = settings(device, quick=options.quick, dtype=options.dtype)
    lists = ("dims", "seqs", "masks", "modes")
    given: dict[str, Any] = {name: tuple(x) for name in lists if (x := getattr(options, name))}
    given |= {name: x for name in ("tokens", "rounds") if (x := getattr(options, name)) is not None}
    if options.models:
        for n in options.models:
            if not 1 <= n <= len(chosen.gpt):
                raise AttentionError("--models", n, f"1 to {len(chosen.gpt)}")
        given["gpt"] = tuple(chosen.gpt[n - 1] for n in options.models)
    if options.burst is not None:
        given["burst"] = options.burst / 1e3
    chosen = replace(chosen, **given)
    check(chosen)
    return chosen


def _write(results: Results, out: Path, *, keep: bool) -> list[Path]:
    from tilewise_lab.bench import readme, report

    out.mkdir(parents=True, exist_ok=True)
    data, page = out / "results.json", out / "report.html"
    results.save(data)
    page.write_text(report.render(results), encoding="utf-8")
    files = [page, data]
    if keep:
        kept = KEPT / readme.kept_name(results)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(data, kept)
        files.append(kept)
    return files
