"""`tilewise docs`: the whole of tilewise as a site, made by Sphinx, that needs no network to be read."""

from __future__ import annotations

import webbrowser
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path


def configure(parser: ArgumentParser) -> None:
    help_out = "the folder of the site, emptied first (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("build/docs"), metavar="FOLDER", help=help_out)
    parser.add_argument("--open", action="store_true", help="open the site in a browser when it is done")
    parser.add_argument("--without-explorer", action="store_true", help="leave out the explorer page")
    parser.add_argument("--without-outputs", action="store_true", help="do not run the lessons: words and code only")


def run(options: Namespace) -> int:
    for needed in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):  # to say what is missing before anything runs
        import_module(needed)

    from tilewise_lab import asked
    from tilewise_lab.docs.build import build
    from tilewise_lab.progress import progress

    out = asked.folder(options.out, "objects.inv")
    with progress() as show:
        pages = build(out, explorer=not options.without_explorer, outputs=not options.without_outputs, show=show)
    index = out / "index.html"
    print(f"{index}: {pages} pages, in English and Chinese")
    if options.open:
        webbrowser.open(index.resolve().as_uri())
    return 0
