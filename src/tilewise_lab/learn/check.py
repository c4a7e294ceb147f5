"""Exercises: hand one out, grade an answer, show a solution."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewise.errors import AttentionError
from tilewise_lab.cli import CALLED
from tilewise_lab.language import language, say, use
from tilewise_lab.learn import progress
from tilewise_lab.learn.course import chosen, lesson
from tilewise_lab.learn.tools import not_written

LIMIT = 300.0  # seconds that an answer may take; the slowest lesson's solution takes some tens


def load(path: Path, name: str) -> ModuleType:
    if not path.exists():
        raise AttentionError("file", path, "a Python file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verdict(number: int, answer: Path) -> str | None:
    """None if the answer is right, else a hint."""
    check = load(lesson(number).beside("checks"), f"check_{number}")
    try:
        check.check(load(answer, "answer"))
    except AssertionError as error:
        return str(error) or traceback.format_exc(limit=-1)
    except NotImplementedError:
        return not_written()
    except AttentionError:
        raise
    except SyntaxError as error:
        return f"{type(error).__name__}: {error.msg} ({_place(error.lineno, error.filename or str(answer))})"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({_place(where.lineno, where.filename)})"
    return None


def _place(line: int | None, path: str) -> str:
    file = Path(path).name
    return say(f"line {line} of {file}", f"{file} 第 {line} 行")


def verdict_within(number: int, answer: Path, seconds: float) -> str | None:
    """`verdict`, found in a process of its own: the answer may loop forever, or end the process."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "verdict.json")
        command = [sys.executable, "-m", __spec__.name, str(number), str(answer), str(found), language()]
        places = os.pathsep.join(str(Path(x).resolve()) for x in sys.path)
        try:
            subprocess.run(command, timeout=seconds, check=False, env=os.environ | {"PYTHONPATH": places})
        except subprocess.TimeoutExpired:
            told = f"it ran for {seconds:.0f} s without an end: is there a loop that does not stop?"
            return say(told, f"运行了 {seconds:.0f} 秒还没有结束：是否有停不下来的循环？")
        if not found.exists():
            return say("it ended the process before it was graded", "它在批改之前就结束了进程")
        kind, value = json.loads(found.read_text(encoding="utf-8"))
    if kind == "error":
        raise AttentionError(*value)
    return None if value is None else str(value)


def main(number: str, answer: str, found: str, lang: str) -> None:
    """Write the verdict to the file `found`, as JSON."""
    use(lang)
    try:
        told: tuple[str, Any] = "verdict", verdict(int(number), Path(answer))
    except AttentionError as error:
        told = "error", list(map(str, error.args))
    Path(found).write_text(json.dumps(told), encoding="utf-8")


def grade(number: int, answer: Path, seconds: float = LIMIT) -> int:
    lesson(number)
    if not answer.exists():
        raise AttentionError("file", answer, "a Python file")
    hint = verdict_within(number, answer, seconds)
    if hint is None:
        progress.note("solved", number)
        print(say(f"✓ right. Lesson {number} is solved.", f"✓ 正确。第 {number} 课完成。"))
        return 0
    print(say(f"✗ not yet: {hint}", f"✗ 还不对：{hint}"))
    return 1


def hand_out(number: int, folder: Path | None = None) -> int:
    """Write the exercise to exercise_NN.py in the working directory; an answer in the making is not overwritten."""
    path = (folder or Path.cwd()) / f"exercise_{number:02}.py"
    grading = f"{CALLED} learn --check {number} {path.name}"
    if path.exists():
        print(say(f"{path.name} is here already; grade it with: {grading}", f"{path.name} 已经在这里；批改：{grading}"))
        return 1
    path.write_text(exercise(number, language()), encoding="utf-8")
    print(say(f"{path.name} is yours to fill in; then: {grading}", f"{path.name} 已写好，填完之后批改：{grading}"))
    return 0


def exercise(number: int, lang: str) -> str:
    """Its file, as a reader of that language gets it."""
    return chosen(lesson(number).beside("exercises").read_text(encoding="utf-8"), lang)


def reveal(number: int) -> int:
    print(lesson(number).beside("solutions").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
