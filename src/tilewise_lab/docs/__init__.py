"""`tilewise docs`: the whole of tilewise as a small static site, from docstrings, lessons, documents and results."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("build/docs"), help="the folder (default: %(default)s)")
    parser.add_argument("--without-explorer", action="store_true", help="leave out the explorer page")
    parser.add_argument("--without-outputs", action="store_true", help="do not run the lessons: words and code only")


def run(options: Namespace) -> int:
    from tilewise_lab.docs.build import build

    pages = build(options.out, explorer=not options.without_explorer, outputs=not options.without_outputs)
    print(f"{options.out / 'index.html'}: {len(pages)} pages")
    return 0
