"""Exercises: hand one out, grade an answer, show a solution."""

from __future__ import annotations

import importlib.util
import traceback
from pathlib import Path
from types import ModuleType

from tilewise.spec import AttentionError
from tilewise_lab.learn import progress
from tilewise_lab.learn.course import lesson


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
        return "not written yet: replace the `raise NotImplementedError`"
    except AttentionError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} (line {where.lineno} of {Path(where.filename).name})"
    return None


def grade(number: int, answer: Path) -> int:
    hint = verdict(number, answer)
    if hint is None:
        progress.note("solved", number)
        print(f"✓ right. Lesson {number} is solved.")
        return 0
    print(f"✗ not yet: {hint}")
    return 1


def hand_out(number: int, folder: Path | None = None) -> int:
    """Write the exercise to exercise_NN.py in the working directory; an answer in the making is not overwritten."""
    path = (folder or Path.cwd()) / f"exercise_{number:02}.py"
    if path.exists():
        print(f"{path.name} is here already; grade it with: tilewise learn --check {number} {path.name}")
        return 1
    path.write_text(lesson(number).beside("exercises").read_text(encoding="utf-8"), encoding="utf-8")
    print(f"{path.name} is yours to fill in; then: tilewise learn --check {number} {path.name}")
    return 0


def reveal(number: int) -> int:
    print(lesson(number).beside("solutions").read_text(encoding="utf-8"))
    return 0
