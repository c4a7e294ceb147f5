"""The page as one file that needs neither a server nor a network: style, script and answers are written into it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from tilewise.errors import AttentionError
from tilewise_lab.explore.data import GRID, answer, combinations
from tilewise_lab.explore.server import STATIC


def export(target: Path) -> Path:
    """Write the page to a file whose name ends in .html, or to index.html of a folder; returns its path."""
    path = target if target.suffix.lower() in (".html", ".htm") and not target.is_dir() else target / "index.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise AttentionError("--export", f"{str(path)!r}, a folder", "a file, or the folder that it is to be in")
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    style, script = ((STATIC / name).read_text(encoding="utf-8") for name in ("app.css", "app.js"))
    parts = {
        '<link rel="stylesheet" href="app.css">': f"<style>{style}</style>",
        '<script src="app.js"></script>': f"<script>window.TILEWISE = {answers()}</script>\n<script>{script}</script>",
    }
    for mark, text in parts.items():
        assert page.count(mark) == 1
        page = page.replace(mark, text)
    path.write_text(page, encoding="utf-8")
    return path


def answers() -> str:
    """{"endpoint?key=value&...": JSON} for a script; keys in alphabetical order, as the page asks."""
    found = {}
    for name in GRID:
        for query in combinations(name):
            text = {key: str(value) for key, value in query.items()}
            with contextlib.suppress(AttentionError):  # no Triton, no emulated kernel: the page says that it lacks it
                found[f"{name}?" + "&".join(f"{key}={text[key]}" for key in sorted(text))] = answer(name, text)
    return json.dumps(rounded(found), ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


def rounded(x: object) -> object:
    """Floats with more digits than are ever shown: a third of the file."""
    if isinstance(x, float):
        return float(f"{x:.7g}")
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [rounded(value) for value in x]
    return x
