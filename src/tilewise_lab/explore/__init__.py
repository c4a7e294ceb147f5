"""`tilewise explore`: a page on which attention can be taken apart, drawn from what the library computes."""

from __future__ import annotations

import sys
import webbrowser
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tilewise_lab.cli import CALLED


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8017, help="where to serve (default: %(default)s; 0: any free)")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.add_argument(
        "--export", type=Path, metavar="DIR",
        help="write the page as one offline file instead: DIR/index.html, or the file if it ends in .html",
    )  # fmt: skip


def run(options: Namespace) -> int:
    from tilewise_lab.explore.export import export
    from tilewise_lab.explore.server import serve

    if options.export:
        path = export(options.export)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, needs no server and no network")
        return 0
    if not 0 <= options.port <= 65535:
        return _refuse(f"--port {options.port} is no port: 1 to 65535, or 0 for any free one")
    try:
        server = serve(options.port)
    except OSError as error:
        return _refuse(f"port {options.port} cannot be served ({error.strerror}): --port 0 takes any free one")
    with server:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        print(f"{url}  (Ctrl-C to stop)", flush=True)
        if not options.no_open:
            webbrowser.open(url)
        server.serve_forever()
    return 0


def _refuse(sentence: str) -> int:
    print(f"{CALLED} explore: {sentence}", file=sys.stderr)
    return 2
