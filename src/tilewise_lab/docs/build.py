"""Every page, and the site around them."""

from __future__ import annotations

import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import groupby, zip_longest
from pathlib import Path
from string import Template

from tilewise import __version__
from tilewise_lab.docs import api, text

ROOT = Path(__file__).parents[3]  # of a clone; an installed package has docstrings and the explorer only


@dataclass(frozen=True)
class Page:
    """`path` and `source` are relative, to the site and to the repository, with slashes."""

    path: str
    title: str
    group: str
    body: str
    source: str = ""


def build(out: Path, *, explorer: bool = True, outputs: bool = True) -> list[Page]:
    """Write the site; the folder is emptied first. `outputs`: run the lessons, and show what they print and draw."""
    shutil.rmtree(out, ignore_errors=True)
    pages = list(collect(run_lessons(out / "learn") if outputs else {}))
    template = Template((files("tilewise_lab.docs") / "page.html").read_text(encoding="utf-8"))
    style = (files("tilewise_lab.docs") / "style.css").read_text(encoding="utf-8") + text.style()
    _write(out / "style.css", style)
    for page in pages:
        whole = template.substitute(
            title=escape(page.title),
            version=__version__,
            root=posixpath.relpath(".", posixpath.dirname(page.path) or "."),
            explore=_explore(page) if explorer else "",
            nav=navigation(page, pages),
            body=page.body,
        )
        _write(out / page.path, whole)
    for folder, place in (("docs", "guide"), ("bench/plots", "bench/plots")):  # where the pages' links look for them
        for picture in sorted((ROOT / folder).glob("*.[sp][vn]g")):
            (out / place).mkdir(parents=True, exist_ok=True)
            shutil.copy(picture, out / place)
    if explorer:
        from tilewise_lab.explore.export import export

        export(out / "explore")
    _reports(out)
    return pages


def run_lessons(folder: Path) -> dict[int, list[str]]:
    """What the cells of each lesson print; what they draw lies in the folder."""
    from tilewise_lab.learn.course import lessons

    folder.mkdir(parents=True)
    env = os.environ | {"TILEWISE_PICTURES": str(folder), "COLUMNS": "100"}

    def one(number: int, work: str) -> list[str]:
        file = Path(work, f"{number}.json")
        command = [sys.executable, "-m", "tilewise_lab", "learn", str(number), "--record", str(file)]
        subprocess.run(command, env=env, check=True)
        found: list[str] = json.loads(file.read_text(encoding="utf-8"))
        return found

    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {
            lesson.number: pool.submit(one, lesson.number, work) for lesson in lessons() if ROOT in lesson.path.parents
        }
        return {number: result.result() for number, result in waiting.items()}


def collect(printed: Mapping[int, list[str]]) -> Iterator[Page]:
    """Every page; `printed`: what the cells of the lessons say."""
    places = dict(documents())
    places |= {f"course/{path.name}": f"learn/{path.name[:2]}.html" for path in _lessons()}

    def linker(source: str, path: str) -> text.Link:
        def link(target: str) -> str | None:
            if "://" in target or target.startswith(("#", "mailto:")):
                return target
            name, hash_, anchor = target.partition("#")
            file = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
            if file not in places:
                return target if name.endswith((".svg", ".png")) else None
            return posixpath.relpath(places[file], posixpath.dirname(path) or ".") + hash_ + anchor

        return link

    for source, path in documents().items():
        words = (ROOT / source).read_text(encoding="utf-8")
        group = "" if path == "index.html" else "Guide"
        yield Page(path, _title(words, source), group, text.markdown(words, linker(source, path)), source)
    if "README.md" not in documents():
        yield Page("index.html", "tilewise", "", "<h1>tilewise</h1><p>Exact attention for PyTorch, tile by tile.</p>")
    for lesson in _lessons():
        path = f"learn/{lesson.name[:2]}.html"
        yield from lesson_page(
            lesson, path, linker(f"course/{lesson.name}", path), printed.get(int(lesson.name[:2]), [])
        )
    for module in api.modules():
        path = f"api/{module.__name__}.html"
        yield Page(path, module.__name__, "Reference", api.body(module, linker("", path)))
    yield from results()


def documents() -> dict[str, str]:
    """Markdown files of the repository, and the pages they become."""
    known = {"README.md": "index.html"}
    known |= {f"docs/{path.name}": f"guide/{path.stem}.html" for path in sorted((ROOT / "docs").glob("*.md"))}
    known |= {"bench/README.md": "guide/benchmark.html", "course/COVERAGE.md": "learn/coverage.html"}
    known |= {"CONTRIBUTING.md": "guide/contributing.html", "CHANGELOG.md": "guide/changelog.html"}
    return {source: path for source, path in known.items() if (ROOT / source).exists()}


def _lessons() -> list[Path]:
    return sorted((ROOT / "course").glob("[0-9][0-9]_*.py"))


def lesson_page(file: Path, path: str, link: text.Link, printed: Sequence[str]) -> Iterator[Page]:
    """Words and code of a lesson, what the code prints and draws, its exercise, and a solution that is folded away."""
    from tilewise_lab.learn.course import Lesson

    lesson = Lesson(int(file.name[:2]), file)
    parts = []
    for cell, said in zip_longest(lesson.cells, printed, fillvalue=""):
        assert not isinstance(cell, str)
        parts.append(text.markdown(cell.text, link) if cell.kind == "markdown" else text.block(cell.text))
        parts += output(said)
    number = lesson.number
    parts.append(f"<p class='run'>Run it: <code>tilewise learn {number}</code></p>")
    for folder, title in (("exercises", "The exercise"), ("solutions", "A solution")):
        if lesson.beside(folder).exists():
            source = text.block(lesson.beside(folder).read_text(encoding="utf-8"))
            parts.append(f"<details><summary>{title}</summary>{source}</details>")
    yield Page(path, f"{number}. {lesson.title}", "Course", "\n".join(parts), f"course/{file.name}")


PICTURE = re.compile(r"^\(picture: .*?([\w-]+\.png)\)\n?", re.M)


def output(said: str) -> Iterator[str]:
    """
    >>> list(output("4\\n(picture: somewhere/07_waves.png)\\n"))
    ['<pre class="output">4</pre>', '<img src="07_waves.png" alt="what the cell draws">']
    """
    words = PICTURE.sub("", said).strip("\n")
    if words:
        yield f'<pre class="output">{escape(words, quote=False)}</pre>'
    for name in PICTURE.findall(said):
        yield f'<img src="{name}" alt="what the cell draws">'


def results() -> Iterator[Page]:
    """One page for every file of measurements that is a plain table; whole reports are drawn by `tilewise bench`."""
    items = []
    for file in sorted((ROOT / "bench" / "results").glob("*.json"), reverse=True):
        raw = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(raw, dict) and {"columns", "rows"} <= raw.keys():
            facts = " · ".join(str(raw[key]) for key in ("device", "date", "torch", "triton", "commit") if key in raw)
            head = "".join(f"<th>{escape(str(name))}</th>" for name in raw["columns"])
            rows = "".join("<tr>" + "".join(f"<td>{escape(str(x))}</td>" for x in row) + "</tr>" for row in raw["rows"])
            body = (
                f"<h1>{escape(file.stem)}</h1><p>{escape(facts)}</p><p>{escape(str(raw.get('method', '')))}</p>"
                f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
            )
            yield Page(f"results/{file.stem}.html", file.stem, "Measured", body, f"bench/results/{file.name}")
        elif _is_report(raw):
            items.append(f'<li><a href="report-{file.stem}.html">{escape(file.stem)}</a></li>')
    if items:
        body = f"<h1>Benchmark reports</h1><ul>{''.join(items)}</ul>"
        yield Page("results/index.html", "Benchmark reports", "Measured", body)


def _is_report(raw: object) -> bool:
    return isinstance(raw, dict) and {"machine", "cells"} <= raw.keys()


def _reports(out: Path) -> None:
    for file in (ROOT / "bench" / "results").glob("*.json"):
        if _is_report(json.loads(file.read_text(encoding="utf-8"))):
            from tilewise_lab.bench import page
            from tilewise_lab.bench import results as bench

            _write(out / "results" / f"report-{file.stem}.html", page.render(bench.load(file)))


def navigation(here: Page, pages: list[Page]) -> str:
    """Groups of links, relative to the page they are on."""
    start = posixpath.dirname(here.path) or "."

    def item(page: Page) -> str:
        mark = ' aria-current="page"' if page is here else ""
        return f'<li><a href="{posixpath.relpath(page.path, start)}"{mark}>{escape(page.title)}</a></li>'

    order = ["", "Guide", "Course", "Reference", "Measured"]
    grouped = groupby(sorted(pages, key=lambda page: order.index(page.group)), key=lambda page: page.group)
    return "\n".join(
        (f"<h2>{group}</h2>" if group else "") + f"<ul>{''.join(map(item, members))}</ul>" for group, members in grouped
    )


def _explore(page: Page) -> str:
    return f'<a href="{posixpath.relpath("explore/index.html", posixpath.dirname(page.path) or ".")}">Explorer</a>'


def _title(words: str, source: str) -> str:
    return next((line[2:].strip() for line in words.splitlines() if line.startswith("# ")), source)


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
