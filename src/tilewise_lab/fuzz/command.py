"""`tilewise fuzz`: random calls for a while; each must give a right answer, or one AttentionError."""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tilewise import __version__
from tilewise.backends.registry import NAMES
from tilewise.errors import AttentionError
from tilewise_lab import asked
from tilewise_lab.fuzz.child import Child
from tilewise_lab.fuzz.draw import Where
from tilewise_lab.fuzz.search import Finding, Search
from tilewise_lab.progress import progress


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: %(default)g)")
    parser.add_argument("--cases", type=int, help="how many cases, instead of how long")
    parser.add_argument("--seed", type=int, default=0, help="which cases (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=NAMES, default="auto", help="triton on a cpu runs in Triton's interpreter")
    parser.add_argument("--json", type=Path, help="a file for the findings")


def run(options: Namespace) -> int:
    asked.device(options.device)
    if options.json is not None:
        asked.place(options.json, "--json")
    where = Where(options.backend, options.device)
    if where.interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    child = Child()
    search = Search(options.seed, where, child)
    began = time.monotonic()
    for name in ("cases", "seconds"):
        if (limit := getattr(options, name)) is not None and limit <= 0:
            raise AttentionError(f"--{name}", limit, "1 or more")
    seconds = None if options.cases is not None else options.seconds
    try:
        with progress() as show:
            for found in search.run(seconds, options.cases):
                if found is not None:
                    print(f"\n# finding {len(search.findings)}\n{found.text()}\n", flush=True)
                show(status(search, time.monotonic() - began))
    finally:
        child.close()
        if options.json is not None:
            options.json.write_text(json.dumps(summary(search, options), indent=1) + "\n")
    print(status(search, time.monotonic() - began))
    for n, finding in enumerate(search.findings, 1):
        print(f"{n:3}. {finding.count:4} x {finding.verdict.words.strip().splitlines()[-1]}")
    return 1 if search.findings else 0


def status(search: Search, seconds: float) -> str:
    kinds = ", ".join(f"{n} {kind}" for kind, n in search.kinds.most_common())
    return f"seed {search.seed}, {seconds:.0f} s: {search.cases} calls ({kinds}), {len(search.findings)} findings"


def summary(search: Search, options: Namespace) -> dict[str, object]:
    findings: list[Finding] = search.findings
    return {
        "tilewise": __version__, "seed": options.seed, "backend": options.backend, "device": options.device,
        "cases": search.cases, "kinds": dict(search.kinds), "findings": [f.dict() for f in findings],
    }  # fmt: skip
