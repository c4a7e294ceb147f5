"""The exercises of a lesson: hand them out, grade answers, show solutions.

A lesson has three, of rising difficulty, in one file. `checks/NN.py` has `EXERCISES`: a function for each, named as
what the learner writes, that raises AssertionError with a hint.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from tilewise.errors import AttentionError
from tilewise_lab.cli import CALLED
from tilewise_lab.language import language, say, use
from tilewise_lab.learn import progress
from tilewise_lab.learn.course import chosen, lesson
from tilewise_lab.learn.tools import not_written

Check = FunctionType  # of a loaded answer
LIMIT = 30.0  # seconds that the exercises of a lesson may take together; --limit changes it


def load(path: Path, name: str) -> ModuleType:
    if not path.exists():
        raise AttentionError("file", path, "a Python file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Verdict(NamedTuple):
    """On one exercise: `hint` is empty if the answer is right, None if it is not written yet."""

    name: str
    hint: str | None

    @property
    def words(self) -> str:
        return not_written() if self.hint is None else self.hint


def verdicts(number: int, answer: Path, tell: Callable[[str, Any], None] | None = None) -> list[Verdict]:
    """One for each exercise of the lesson, in order; one alone if the file cannot be run. `tell` gets ("exercises",
    names) once the file has run, and ("verdict", verdict) after each exercise."""
    tell = tell or (lambda kind, value: None)
    checks: Sequence[Check] = load(lesson(number).beside("checks"), f"check_{number}").EXERCISES
    answers: list[ModuleType] = []
    hint = told(lambda: answers.append(load(answer, "answer")), answer)
    if hint != "":
        return [Verdict(answer.name, hint)]
    tell("exercises", [check.__name__ for check in checks])
    found = []
    for check in checks:
        found.append(Verdict(check.__name__, told(lambda: check(answers[0]), answer)))  # noqa: B023
        tell("verdict", found[-1])
    return found


def told(run: Callable[[], object], answer: Path) -> str | None:
    """What is wrong with an answer: nothing, something, or (None) that it is not written yet."""
    try:
        run()
    except AssertionError as error:
        return str(error) or traceback.format_exc(limit=-1)
    except NotImplementedError:
        return None
    except AttentionError:
        raise
    except SyntaxError as error:
        return f"{type(error).__name__}: {error.msg} ({_place(error.lineno, error.filename or str(answer))})"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({_place(where.lineno, where.filename)})"
    return ""


def _place(line: int | None, path: str) -> str:
    file = Path(path).name
    return say(f"line {line} of {file}", f"{file} 第 {line} 行")


def verdicts_within(number: int, answer: Path, seconds: float) -> list[Verdict]:
    """`verdicts`, found in a process of its own, which is stopped after these seconds: the answer may loop forever, or
    end the process. Then the exercise that ran has a verdict that says so, and those after it have none."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "verdicts.jsonl")
        command = [sys.executable, "-m", __spec__.name, str(number), str(answer), str(written), language()]
        places = os.pathsep.join(str(Path(x).resolve()) for x in sys.path)
        late = False
        try:
            subprocess.run(command, timeout=seconds, check=False, env=os.environ | {"PYTHONPATH": places})
        except subprocess.TimeoutExpired:
            late = True
        lines = written.read_text(encoding="utf-8").splitlines() if written.exists() else []
    said = [json.loads(line) for line in lines]
    last = dict(said)
    if "error" in last:
        raise AttentionError(*last["error"])
    if "all" in last:
        return [Verdict(*one) for one in last["all"]]
    graded = [Verdict(*value) for kind, value in said if kind == "verdict"]
    names = last.get("exercises", [answer.name])
    return [*graded, Verdict(names[len(graded)], _too_long(seconds) if late else _gone())]


def _too_long(seconds: float) -> str:
    more = f"--limit {2 * seconds:.0f}"
    return say(
        f"stopped after {seconds:.0f} s. Is there a loop that does not end? If it only needs more time, add {more}",
        f"{seconds:.0f} 秒后停止。是否有不会结束的循环？如果只是需要更多时间，请加上 {more}",
    )


def _gone() -> str:
    return say("it ended the process before it was graded", "它在批改之前就结束了进程")


def main(number: str, answer: str, written: str, lang: str) -> None:
    """Write what `verdicts` tells to a file, a line of JSON each; last ("all", verdicts) or ("error", arguments)."""
    use(lang)
    with Path(written).open("w", encoding="utf-8") as file:

        def tell(kind: str, value: Any) -> None:
            print(json.dumps([kind, value]), file=file, flush=True)

        try:
            tell("all", verdicts(int(number), Path(answer), tell))
        except AttentionError as error:
            tell("error", list(map(str, error.args)))


def grade(number: int, answer: Path, seconds: float = LIMIT) -> int:
    """Print a line for each exercise; 0 if all are right."""
    lesson(number)
    if not answer.exists():
        raise AttentionError("file", answer, "a Python file")
    if not seconds > 0:
        raise AttentionError("--limit", seconds, "seconds, above 0")
    found = verdicts_within(number, answer, seconds)
    for n, one in enumerate(found, 1):
        where = say(f"exercise {n} of 3, {one.name}", f"练习 {n} / 3，{one.name}")
        where = answer.name if one.name == answer.name else where  # the whole file
        mark = "✓" if one.hint == "" else "·" if one.hint is None else "✗"
        print(f"{mark} {where}" + (say(": ", "：") + one.words if one.words else ""))
    if any(one.hint != "" for one in found):
        return 1
    progress.note("solved", number)
    print(say(f"Lesson {number} is solved.", f"第 {number} 课完成。"))
    return 0


def hand_out(number: int, folder: Path | None = None) -> int:
    """Write the exercises to exercise_NN.py in the working directory; an answer in the making is not overwritten."""
    path = (folder or Path.cwd()) / f"exercise_{number:02}.py"
    grading = f"{CALLED} learn --check {number} {path.name}"
    if path.exists():
        print(say(f"{path.name} is here already; grade it with: {grading}", f"{path.name} 已经在这里；批改：{grading}"))
        return 1
    path.write_text(exercise(number, language()), encoding="utf-8")
    print(
        say(
            f"{path.name} has three exercises to fill in; then: {grading}",
            f"{path.name} 有三道练习；批改：{grading}",
        )
    )
    return 0


def exercise(number: int, lang: str) -> str:
    """The file of a lesson's exercises, as a reader of that language gets it."""
    return chosen(lesson(number).beside("exercises").read_text(encoding="utf-8"), lang)


def reveal(number: int) -> int:
    print(lesson(number).beside("solutions").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
