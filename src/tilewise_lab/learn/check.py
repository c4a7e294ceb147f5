"""Exercises: hand one out, grade an answer, show a solution."""

from __future__ import annotations

import importlib.util
import traceback
from pathlib import Path
from types import ModuleType

from tilewise.errors import AttentionError
from tilewise_lab.cli import CALLED
from tilewise_lab.language import language, say
from tilewise_lab.learn import progress
from tilewise_lab.learn.course import chosen, lesson
from tilewise_lab.learn.tools import not_written


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
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        file = Path(where.filename).name
        place = say(f"line {where.lineno} of {file}", f"{file} 第 {where.lineno} 行")
        return f"{type(error).__name__}: {error} ({place})"
    return None


def grade(number: int, answer: Path) -> int:
    hint = verdict(number, answer)
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
