"""Run a lesson in the terminal: its words, its code, what the code prints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tilewise_lab.cli import CALLED
from tilewise_lab.language import language, say
from tilewise_lab.learn import progress
from tilewise_lab.learn.course import Cell, Lesson, lesson, lessons
from tilewise_lab.learn.formulas import for_terminal


def contents() -> int:
    """The table of contents, with what has been read (·) and solved (✓)."""
    from tilewise_lab.trace.show import table

    done = progress.load()
    rows = []
    for one in lessons():
        mark = "✓" if one.number in done["solved"] else "·" if one.number in done["read"] else ""
        rows.append([one.number, one.title_in(language()), mark])
    title = say("How FlashAttention works, in lessons that run", "FlashAttention 是怎样工作的：可以运行的课程")
    table(title, ["", say("lesson", "课"), ""], rows)
    solved, following = len(done["solved"]), min(next_one(done), len(rows))
    print()
    print(
        say(
            f"{solved} of {len(rows)} lessons solved. `{CALLED} learn {following}` goes on.",
            f"已完成 {solved} / {len(rows)} 课的练习。接着学：`{CALLED} learn {following}`",
        )
    )
    return 0


def next_one(done: dict[str, list[int]]) -> int:
    return next((n for n in range(1, 100) if n not in done["solved"]), 1)


def play(
    number: int, *, quiet: bool = False, pause: bool = False, checks: bool = False, record: Path | None = None
) -> int:
    one = lesson(number)
    if wrong_triton(one):
        # Triton decides at import whether it interprets or compiles: this lesson needs a process of its own.
        flags = ["--quiet"] * quiet + ["--pause"] * pause + ["--checks"] * checks
        flags += [] if record is None else ["--record", str(record)]
        env = os.environ | {"TRITON_INTERPRET": "1" if one.needs == "interpreter" else "0"}
        return subprocess.call([sys.executable, "-m", "tilewise_lab", "learn", str(number), *flags], env=env)
    if record is not None:
        printed: list[str] = []
        run(one, quiet=True, printed=printed)
        record.write_text(json.dumps(printed), encoding="utf-8")
        return 0
    run(one, quiet=quiet, pause=pause, checks=checks)
    progress.note("read", number)
    if not quiet:
        ran = sum(cell.check for cell in one.cells)
        if not checks:
            print(
                "\n"
                + say(
                    f"{ran} cells of checks ran; --checks shows them.", f"运行了 {ran} 个检查单元；--checks 显示它们。"
                )
            )
        command = f"{CALLED} learn {number} --exercise"
        print(say(f"Three exercises come with this lesson: {command}", f"这一课有三道练习：{command}"))
    return 0


def wrong_triton(one: Lesson) -> bool:
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    return (one.needs == "interpreter" and not interprets) or (one.needs == "compiler" and interprets)


def run(
    one: Lesson, *, quiet: bool = False, pause: bool = False, checks: bool = False, printed: list[str] | None = None
) -> dict[str, Any]:
    """Execute the cells in one namespace, which is returned; errors point into the lesson's file.

    checks: show the folded cells, checks and the code of figures, too; they run in any case.
    printed: takes what each cell prints, in place of the terminal.
    """
    space: dict[str, Any] = {"__name__": "__main__", "__file__": str(one.path)}
    for cell in one.cells_in("zh" if language() == "zh" else "en"):
        shown = not quiet and (checks or not cell.tag)
        if shown:
            display(cell)
        if cell.kind == "code":
            code = compile("\n" * (cell.line - 1) + cell.text, str(one.path), "exec")
            heard = io.StringIO()
            with contextlib.nullcontext() if printed is None else contextlib.redirect_stdout(heard):
                exec(code, space)
        if printed is not None:
            printed.append(heard.getvalue() if cell.kind == "code" else "")
        if pause and shown:
            input("⏎ ")
    return space


def display(cell: Cell) -> None:
    words = cell.read_in(language())
    try:
        from rich.console import Console
        from rich.markdown import Markdown
        from rich.padding import Padding
        from rich.syntax import Syntax
    except ModuleNotFoundError:
        code = "\n".join(f"  {x}" for x in words.splitlines())
        print(f"\n{for_terminal(words)}\n" if cell.kind == "markdown" else code)
        return
    console = Console()
    if cell.kind == "markdown":
        console.print(Markdown(for_terminal(words)))
    else:
        console.print(
            Padding(
                Syntax(words, "python", theme="ansi_dark", background_color="default", word_wrap=True), (1, 0, 1, 2)
            )
        )
