"""`tilewise demo`: attention on this machine, checked against float64, measured beside torch, drawn on one page."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("tilewise-demo.html"), help="the page (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small sizes: a look in a few seconds, not a measurement")
    parser.add_argument("--device", help="where to run (default: cuda if there is one, else cpu)")


def run(options: Namespace) -> int:
    """0 if every error is within its budget, else 1."""
    from tilewise_lab import asked
    from tilewise_lab.demo import measure, page, report

    asked.place(options.out)
    setting = measure.Setting.choose(asked.device(options.device), quick=options.quick)
    results = report.watch(setting)
    options.out.write_text(page.render(results, options.out.parent), encoding="utf-8")
    report.show(results, options.out)
    return 0 if results.passed else 1
