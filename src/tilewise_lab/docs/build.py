"""The site: sources from all over the repository brought together, once for each language, and given to Sphinx."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tilewise.errors import AttentionError
from tilewise.version import __version__
from tilewise_lab.docs import lessons, results
from tilewise_lab.learn.course import lessons as all_lessons
from tilewise_lab.progress import Show

ROOT = Path(__file__).parents[3]  # of a clone; a wheel has no documents
LANGUAGES = {"en": "", "zh_CN": "zh/"}  # and where on the site each lies
# Pages without a Chinese version, to which Chinese pages link: facts about versions and GPUs, kernels, measurements.
ENGLISH_ONLY = (
    "benchmark.md",
    "compatibility.md",
    "explain.md",
    "hopper-backward-wide.md",
    "hopper-backward.md",
    "hopper-forward.md",
    "portable-kernels.md",
    "results/",
    "settings.md",
)
# Notes for developers, which the site has as text files, like the measurement notes.
NO_PAGES = ("docs/gotchas.md", "docs/upstream.md", "docs/wrong-results.md")
BELOW = {"benchmark.md": ("explain", "results/index")}  # what the menu has below a page that GitHub shows too
PICTURE = re.compile(
    r'<picture>\n<source [^>]*srcset="([^"]+)">\n<img src="([^"]+)" alt="([^"]+)">\n</picture>'
)  # a light and a dark file, as GitHub shows them
FENCED = re.compile(r"^(```+[^\n]*\n.*?^```+$)", re.M | re.S)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def build(
    out: Path, *, explorer: bool = True, outputs: bool = True, show: Show = lambda text, done=None, total=None: None
) -> int:
    """Write the site into a folder, which is emptied first; the number of pages. `outputs`: run the lessons."""
    if not (ROOT / "docs" / "conf.py").is_file():
        raise AttentionError("the documents", "a package without them", "a clone of the repository")
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        with sphinx(work, out) as process, ThreadPoolExecutor() as pool:  # which reads the sources meanwhile
            lessons_run = pool.submit(run_lessons, work / "lessons", show) if outputs else None
            extras(out, explorer, show)
            if lessons_run is not None:
                lessons_run.result()
            for language in LANGUAGES:
                stage(work / language, language, work / "lessons")
            follow(process, show)
    return len(list(out.rglob("*.html")))


def run_lessons(folder: Path, show: Show) -> None:
    command = [sys.executable, "-m", "tilewise_lab.docs.lessons", str(folder)]
    total = len(all_lessons())
    show("running the lessons", 0, total)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_env()) as process:
        assert process.stdout
        for done, number in enumerate(process.stdout, 1):
            show(f"ran lesson {number.strip()}", done, total)
    if process.returncode:
        raise AttentionError("the lessons", "one that failed", "lessons that run: see above")


def stage(folder: Path, language: str, recorded: Path) -> None:
    """A folder of Markdown that Sphinx can read, with links between what lay in many places of the repository."""
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("zh", "*.md"))
    if (recorded / "pictures").exists():
        shutil.copytree(recorded / "pictures", folder / "course" / "pictures")
    places = {source: page for source, page, _ in pages("en", recorded)}
    measured = ROOT / "bench" / "results"
    for source, page, text in pages(language, recorded):
        path = folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        root = "../" * (page.count("/") + bool(LANGUAGES[language]))
        text = text.replace("{root}", root).replace("{version}", release())
        text = text.replace("{repository}", repository(language))
        if page == "results/index.md":
            text += f"\n{results.list_of_reports(measured, root)}\n"
        if page in BELOW:
            text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(BELOW[page]) + "\n```\n"
        text = linked(themed(text), source, page, places, folder, root if language != "en" else None)
        path.write_text(tidied(text), encoding="utf-8")


def pages(language: str, recorded: Path) -> Iterator[tuple[str, str, str]]:
    """(source in the repository, page on the site, text) of every page in a language."""
    documents = {f"docs/{path.relative_to(ROOT / 'docs').as_posix()}" for path in (ROOT / "docs").rglob("*.md")}
    english = (path for path in documents if not path.startswith("docs/zh/") and path not in NO_PAGES)
    places = {path: path.removeprefix("docs/") for path in english}
    places |= {"bench/README.md": "benchmark.md", "bench/results/README.md": "results/index.md"}
    for source, page in sorted(places.items()):
        translated = f"docs/zh/{page}"
        if language == "en":
            yield source, page, (ROOT / source).read_text(encoding="utf-8")
        elif (ROOT / translated).is_file():
            yield translated, page, (ROOT / translated).read_text(encoding="utf-8")
        elif not is_english_only(page):
            raise AttentionError("Chinese pages", f"no {translated}", f"a translation of {source}")
    for lesson in all_lessons():
        text = lessons.markdown(lesson, lessons.printed(recorded, lesson.number, language[:2]), language[:2])
        yield f"course/{lesson.path.name}", f"course/{lesson.number:02}.md", text


def release() -> str:
    return "in development" if "unknown" in __version__ else __version__


def repository(language: str) -> str:
    """The link to the repository, if the environment has its address, as `.ci/release` sets it.

    >>> os.environ["TILEWISE_URL"] = "https://host.invalid/owner/tilewise"
    >>> repository("en")
    ' · [Repository](https://host.invalid/owner/tilewise)'
    >>> del os.environ["TILEWISE_URL"]
    >>> repository("en")
    ''
    """
    url = os.environ.get("TILEWISE_URL")
    return f" · [{'Repository' if language == 'en' else '代码仓库'}]({url})" if url else ""


def is_english_only(page: str) -> bool:
    """
    >>> is_english_only("explain.md"), is_english_only("results/index.md"), is_english_only("mods.md")
    (True, True, False)
    """
    return page.startswith(ENGLISH_ONLY)


def themed(text: str) -> str:
    """Replace each picture element by a light and a dark image. Furo shows the image of the active theme.

    >>> print(themed('<picture>\\n<source srcset="d.svg">\\n<img src="l.svg" alt="A chart.">\\n</picture>'))
    ![A chart.](l.svg){.only-light}
    ![A chart.](d.svg){.only-dark}
    """
    return PICTURE.sub(r"![\3](\2){.only-light}\n![\3](\1){.only-dark}", text)


def tidied(text: str) -> str:
    """Without the empty line that ends an example for doctest, and outside of code without the space that a line's end
    would be in Chinese.

    >>> tidied(">>> 1\\n1\\n\\n```\\n一行，\\n又一行\\n")
    '>>> 1\\n1\\n```\\n一行，又一行\\n'
    >>> tidied("如下：\\n\\n```\\n一行，\\n又一行\\n```\\n")
    '如下：\\n```\\n一行，\\n又一行\\n```\\n'
    """
    parts = FENCED.split(text.replace("\n\n```\n", "\n```\n"))
    for n in range(0, len(parts), 2):  # the others are blocks of code
        parts[n] = re.sub(r"(?<=[\u4e00-\u9fff])\n *(?=[\u4e00-\u9fff])", "", parts[n])
        parts[n] = re.sub(r"(?<=[，。：；、）？])\n *(?=(?!```)[\w`\[*（“])", "", parts[n])
    return "".join(parts)


def linked(text: str, source: str, page: str, places: dict[str, str], folder: Path, english: str | None = None) -> str:
    """The text with its links, made for the repository, leading to the same things on the site.

    english: in another language, the way from this page to the English site.
    """

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        there = places.get(target)
        if there is None and target.startswith("docs/") and target not in NO_PAGES:
            there = target.removeprefix("docs/").removeprefix("zh/")
        if there is None and (ROOT / target).is_file():  # to be looked at or downloaded; browsers show text
            there = f"files/{target}{'.txt' * target.endswith('.md')}"
            (folder / there).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / target, folder / there)
            return f"]({posixpath.relpath(there, posixpath.dirname(page) or '.')})"
        if there is None:
            return found[0]
        if english is not None and is_english_only(there):
            return f"]({english}{there.removesuffix('.md')}.html{found[2] or ''}){{.external}}"
        return f"]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{found[2] or ''})"

    return LINK.sub(link, text)


@contextlib.contextmanager
def sphinx(work: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """The process that will make the pages of all languages, once it is told to."""
    command = [sys.executable, "-m", "tilewise_lab.docs.languages", str(work), str(out)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=_env()) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def follow(process: subprocess.Popen[str], show: Show) -> None:
    """Tell it to begin, and show how far it is; warnings are errors."""
    assert process.stdin
    assert process.stdout
    process.stdin.write("go\n")
    process.stdin.close()
    done = dict.fromkeys(LANGUAGES, 0.0)
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if found := re.match(r"(\w+)\|(reading|writing).*\[ *(\d+)%\] (\S+)", line):
            done[found[1]] = int(found[3]) / 2 + (found[2] == "writing") * 50
            show(f"{found[1]}: {found[2]} {found[4]}", int(sum(done.values())), 100 * len(LANGUAGES))
    if process.wait():
        wrong = [line for line in said if re.search("WARNING|ERROR|Error|rror:", line)] or said
        raise AttentionError("the pages", "\n" + "".join(wrong), "none of these")


def extras(out: Path, explorer: bool, show: Show) -> None:
    """The pages that are made by other commands: the explorer, the benchmark's reports."""
    for name, file in results.reports(ROOT / "bench" / "results").items():
        results.write_report(file, out / "results" / f"report-{name}.html")
    if explorer:
        from tilewise_lab.explore.export import export

        show("the explorer")
        export(out / "explore")


def _env() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
