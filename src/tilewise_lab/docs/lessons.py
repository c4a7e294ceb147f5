"""The lessons of the course as pages: their words and code, what the code prints and draws, exercise and solution.

python -m tilewise_lab.docs.lessons FOLDER    run them all; FOLDER/NN.json says what each cell printed
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tilewise_lab.language import BOTH, only, using
from tilewise_lab.learn.course import Lesson, chosen, lessons

PICTURE = re.compile(r"^(?:\(picture: |（图：).*?([\w-]+\.png)(?:: |：)(.*)[)）]\n?", re.M)


def markdown(lesson: Lesson, printed: Sequence[str], lang: str = "en") -> str:
    """The page of a lesson; `printed`: what its cells print, if they were run."""
    run, exercise, solution, check, figure = {
        "en": ("Run it: ", "The exercises", "Solutions", "Checks", "The code of the figure"),
        "zh": ("运行：", "练习", "解法", "检查", "画图的代码"),
    }[lang]
    titles = {"check": check, "figure": figure}
    parts: list[str] = []
    for cell, said in zip_longest(lesson.cells_in(lang), printed, fillvalue=""):
        assert not isinstance(cell, str)
        code = cell.text if cell.kind == "markdown" else fenced(cell.read_in(lang))
        parts.append(folded(titles[cell.tag], code) if cell.tag else code)
        parts += output(said)
    parts.append(f"{run}`tilewise learn {lesson.number}{' --lang zh' if lang == 'zh' else ''}`")
    for folder, title in (("exercises", exercise), ("solutions", solution)):
        if lesson.beside(folder).exists():
            source = fenced(chosen(lesson.beside(folder).read_text(encoding="utf-8"), lang))
            parts.append(folded(title, source))
    return "\n\n".join(parts) + "\n"


def folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def fenced(source: str, language: str = "python") -> str:
    return f"````{language}\n{source.rstrip()}\n````"


def output(said: str) -> Iterator[str]:
    """
    >>> list(output("4\\n(picture: somewhere/07_waves.png: Two waves.)\\n"))
    [':::{container} output\\n````text\\n4\\n````\\n:::', '![Two waves.](pictures/07_waves.png)']
    """
    words = PICTURE.sub("", said).strip("\n")
    if words:
        yield f":::{{container}} output\n{fenced(words, 'text')}\n:::"
    for name, alt in PICTURE.findall(said):
        yield f"![{alt}](pictures/{name})"


def record(number: int, folder: str) -> None:
    """Run a lesson, in a process of its own: Triton decides at its import whether it interprets or compiles."""
    from tilewise_lab.learn import play

    one = next(lesson for lesson in lessons() if lesson.number == number)
    os.environ |= {"TRITON_INTERPRET": str(int(one.needs == "interpreter")), "TILEWISE_PICTURES": f"{folder}/pictures"}
    with using(BOTH):
        play.play(number, record=Path(folder, f"{number:02}.json"))


def record_all(folder: Path) -> Iterator[int]:
    """Run them side by side; yields the number of each when it is done. Where there is fork, torch is imported once."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    os.environ["COLUMNS"] = "100"
    fork = "fork" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if fork else "spawn")
    todo = [lesson.number for lesson in sorted(lessons(), key=lambda lesson: not lesson.needs)]  # the long ones first
    running: dict[int, tuple[int, Any]] = {}
    while todo or running:
        while todo and len(running) < (os.cpu_count() or 1):
            number = todo.pop(0)
            process = context.Process(target=record, args=(number, str(folder)))
            process.start()
            running[process.sentinel] = (number, process)
        for sentinel in wait(list(running)):
            assert isinstance(sentinel, int)
            number, process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                raise SystemExit(f"lesson {number} failed: tilewise learn {number} says where")
            yield number


def printed(folder: Path, number: int, lang: str = "en") -> list[str]:
    """What each cell printed, to readers of one language."""
    file = folder / f"{number:02}.json"
    found: list[str] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return [only(said, lang) for said in found]


def main() -> None:
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(ModuleNotFoundError):
        import matplotlib.pyplot  # noqa: F401 - once, for all lessons
    for done in record_all(Path(sys.argv[1])):
        print(done, flush=True)


if __name__ == "__main__":
    main()
