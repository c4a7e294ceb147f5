"""Every lesson runs, every exercise can be solved, and a wrong answer is told what is wrong with it."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import HAS_TRITON
from tests.forks import python
from tests.tilewise_lab.course.wrong_answers import WRONG
from tilewise_lab import cli
from tilewise_lab.learn import check, lab, play, progress
from tilewise_lab.learn.course import COLUMNS, home, lesson, lessons, parse, width

ROOT = Path(__file__).parents[3]
learn_folder = Path(check.__file__).parent
NUMBERS = [one.number for one in lessons()]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="the answer is a Triton kernel")
CHECKED = [pytest.param(n, marks=needs_triton) if n == 18 else n for n in NUMBERS]


@pytest.fixture(autouse=True)
def own_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setenv("TILEWISE_PICTURES", str(tmp_path / "pictures"))
    monkeypatch.setenv("TILEWISE_LANG", "en")
    monkeypatch.setenv("TRITON_INTERPRET", "")  # the checks of lesson 18 set it
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_lesson_runs(number, tmp_path, monkeypatch):
    """With its assertions and its pictures; in a process of its own where the compiler is needed."""
    one = lesson(number)
    if one.needs == "compiler":
        done = python("-m", "tilewise_lab", "learn", str(number), "--quiet")
        assert done.returncode == 0, done.stderr
    else:
        if HAS_TRITON:
            monkeypatch.setenv("TRITON_INTERPRET", "1")
        play.run(one, quiet=True)
    pytest.importorskip("matplotlib")
    assert list((tmp_path / "pictures").glob(f"{number:02}_*.png"))


@pytest.mark.parametrize("number", CHECKED)
def test_the_solutions_are_right_and_the_exercises_are_not(number):
    one = lesson(number)
    solved = check.verdicts(number, one.beside("solutions"))
    assert [verdict.hint for verdict in solved] == ["", "", ""]
    handed = check.verdicts(number, one.beside("exercises"))
    assert all(verdict.words for verdict in handed)
    assert handed[2].words.endswith("not written yet: replace the `raise NotImplementedError`")


@pytest.mark.parametrize("number", CHECKED)
def test_a_usual_mistake_is_named(number, tmp_path):
    """Every exercise knows two or more; they are mistakes in the lesson's solution."""
    source = lesson(number).beside("solutions").read_text("utf-8")
    checks = check.load(lesson(number).beside("checks"), "checks").EXERCISES
    assert [one.__name__ for one in checks] == list(WRONG[number])
    for one in checks:
        mistakes = WRONG[number][one.__name__]
        assert len(mistakes) >= 2
        for n, (old, new, hint) in enumerate(mistakes):
            assert source.count(old) == 1, old
            answer = tmp_path / f"{one.__name__}_{n}.py"
            answer.write_text(source.replace(old, new), "utf-8")
            told = check.told(lambda: one(check.load(answer, "answer")), answer)  # noqa: B023
            assert hint in str(told), f"{one.__name__}: {new}"


@needs_triton
@pytest.mark.parametrize("name", ["online_step", "block_gradient"])
def test_a_kernel_is_graded_step_by_step(name, tmp_path):
    """A step of lesson 18 that is not there yet is named."""
    source = lesson(18).beside("solutions").read_text("utf-8")
    missing = re.sub(
        rf"(def {name}\(.*?:(?:  # fmt: skip)?\n)    ", r"\1    raise NotImplementedError\n    ", source, flags=re.S
    )
    (tmp_path / "answer.py").write_text(missing, "utf-8")
    told = "\n".join(verdict.words for verdict in check.verdicts(18, tmp_path / "answer.py"))
    assert re.search(rf"step \d of 6, {name}: not written yet", told)


def test_errors_in_an_answer_are_reported(tmp_path):
    (tmp_path / "answer.py").write_text("def intensity(n, d, itemsize):\n    return 1 / 0")
    attention, intensity, _ = check.verdicts(1, tmp_path / "answer.py")
    assert "AttributeError" in attention.words
    assert "ZeroDivisionError" in intensity.words
    assert "line 2" in intensity.words


def test_every_exercise_gets_a_line_and_progress_is_kept(capsys, tmp_path):
    assert cli.main(["learn", "--check", "1", str(lesson(1).beside("solutions"))]) == 0
    assert capsys.readouterr().out.endswith("✓ exercise 3 of 3, seconds\nLesson 1 is solved.\n")
    source = lesson(3).beside("solutions").read_text("utf-8").replace("l * math.exp(m - m_new) + ", "l + ")
    unwritten = (
        source[: source.index("def weighted_mean")] + "def weighted_mean(pairs):\n    raise NotImplementedError\n"
    )
    (tmp_path / "answer.py").write_text(unwritten, "utf-8")
    assert cli.main(["learn", "--check", "3", "answer.py"]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "✓ exercise 1 of 3, merge"
    assert second.startswith("✗ exercise 2 of 3, denominator: denominator([3, 2, 5, 1]): your l equals the sum without")
    assert third.startswith("· exercise 3 of 3, weighted_mean: not written yet")
    assert progress.load() == {"read": [], "solved": [1]}
    assert cli.main(["learn"]) == 0
    said = capsys.readouterr().out
    assert f"1 of {len(NUMBERS)} lessons solved" in said
    assert "`tilewise learn 2` goes on" in said
    (tmp_path / "progress.json").write_text("not json")
    assert progress.load() == {"read": [], "solved": []}


def test_an_exercise_is_handed_out_once(capsys, tmp_path):
    assert cli.main(["learn", "3", "--exercise"]) == 0
    (tmp_path / "exercise_03.py").write_text("mine")
    assert cli.main(["learn", "3", "--exercise"]) == 1
    assert (tmp_path / "exercise_03.py").read_text() == "mine"
    assert cli.main(["learn", "3", "--solution"]) == 0
    assert "def merge" in capsys.readouterr().out


def test_what_there_is_not(capsys):
    assert cli.main(["learn", "99"]) == 2
    assert "lesson: found 99" in capsys.readouterr().err
    assert cli.main(["learn", "--check", "x", "answer.py"]) == 2
    assert "--check: found 'x'; expected the number of a lesson" in capsys.readouterr().err
    assert cli.main(["learn", "--check", "1", "nowhere.py"]) == 2


def test_hints_are_in_the_words_that_were_typed(capsys, monkeypatch):
    monkeypatch.setattr(check, "CALLED", "./run")
    assert check.hand_out(1) == 0
    assert "./run learn --check 1 exercise_01.py" in capsys.readouterr().out


def test_lessons_are_numbered_titled_and_complete():
    assert list(range(1, len(NUMBERS) + 1)) == NUMBERS
    for one in lessons():
        assert one.title
        assert one.path.read_text().splitlines()[1] == f"# # {one.number}. {one.title}"
        assert one.needs in ("", "interpreter", "compiler")
        words = "\n".join(cell.text for cell in one.cells if cell.kind == "markdown")
        assert "**Exercises.**" in words
        checks = [cell.text for cell in one.cells if cell.check]
        code = [cell.text for cell in one.cells if cell.kind == "code" and not cell.check]
        assert any("assert " in text for text in checks)
        assert not [text for text in code if re.search(r"^ *assert ", text, re.M)]
        figures = [cell.text for cell in one.cells if cell.tag == "figure"]
        assert figures
        assert all("picture(" in text for text in figures)
        assert {cell.tag for cell in one.cells} == {"", "check", "figure"}


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_code_fits_in_a_terminal_of_80_columns(lang):
    """Of a lesson as it is shown, indented by two; of exercises and solutions as files."""
    wide = []
    for one in lessons():
        shown = [cell.read_in(lang) for cell in one.cells if cell.kind == "code"]
        files = [check.exercise(one.number, lang), one.beside("solutions").read_text("utf-8")]
        for text, columns in [*((text, COLUMNS) for text in shown), *((text, 80) for text in files)]:
            wide += [f"{one.number}: {line}" for line in text.splitlines() if width(line) > columns]
    assert wide == []


def test_no_line_of_code_is_broken_in_the_terminal(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "80")
    cells = [cell for cell in lesson(6).cells if cell.kind == "code"]
    for cell in cells:
        play.display(cell)
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    for line in "\n".join(cell.read_in("en") for cell in cells).splitlines():
        assert f"  {line}".rstrip() in shown


def test_checks_run_and_are_shown_on_demand(capsys):
    wrong = replace(lesson(12), path=Path("lesson.py"))
    wrong.__dict__["all_cells"] = parse('# %%\nx = 1\n# %% tags=["check"]\nassert x == 1\nprint("ran")\n')
    play.run(wrong)
    assert "assert" not in (said := capsys.readouterr().out)
    assert "ran" in said
    play.run(wrong, checks=True)
    assert "assert" in capsys.readouterr().out


def test_pictures_say_what_they_show():
    """In both languages, in sentences; not as the name of a file."""
    for one in lessons():
        found = [node for node in ast.walk(ast.parse(one.path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        for call in (node for node in found if isinstance(node.func, ast.Name) and node.func.id == "picture"):
            (alt,) = [word.value for word in call.keywords if word.arg == "alt"]
            assert isinstance(alt, ast.Call)
            assert alt.func.id == "say"
            en, zh = (argument.value for argument in alt.args)
            assert len(en.split()) >= 12, en
            assert len(re.findall(r"[\u4e00-\u9fff]", zh)) >= 12, zh
            for words, end in ((en, "."), (zh, "。")):
                assert words.endswith(end), words
                assert not re.search(r"\.png|_|[\[\]]", words.replace("backward_", "")), words


def test_a_lesson_is_shown_with_its_words(capsys, monkeypatch):
    monkeypatch.setattr(play, "lesson", lambda number: lesson(12))
    assert cli.main(["learn", "12", "--checks"]) == 0
    said = capsys.readouterr().out
    assert "Derivatives" in said
    assert "assert torch.allclose(" in said
    assert "tilewise learn 12 --exercise" in said


def test_cells_know_their_lines():
    (cell,) = [c for c in parse("# %% [markdown]\n# words\n# %%\n\nx = 1\n") if c.kind == "code"]
    assert (cell.line, cell.text) == (4, "x = 1") or cell.text == "x = 1"


def test_kept_measurements_are_those_the_lessons_ask_for():
    kept = json.loads((home() / "measured" / "nvidia-h200.json").read_text(encoding="utf-8"))["found"]
    asked = set(re.findall(r'measured\("(\w+)"\)', "\n".join(one.path.read_text("utf-8") for one in lessons())))
    assert asked == set(lab.EXPERIMENTS)
    assert set(kept) <= asked
    assert len(kept) >= 15
    assert kept["divergence"]["by lane"] > max(kept["divergence"]["left"], kept["divergence"]["right"])
    assert kept["waves"]["2049"] < 0.7 * kept["waves"]["2048"]
    assert kept["coalescing"]["1"] > 4 * kept["coalescing"]["8"]


@pytest.mark.parametrize(
    ("number", "name"), [(4, "matmul_naive"), (4, "matmul_tiled"), (7, "vector_add"), (10, "chain")]
)
def test_a_kernel_that_a_lesson_writes_is_the_one_that_is_measured(number, name):
    """`learn.kernels` has it for the measurements and their tests; the lesson has it to be read and changed."""
    found = []
    for path in (lesson(number).path, Path(learn_folder, "kernels.py")):
        tree = ast.parse(path.read_text("utf-8"))
        (kernel,) = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name == name]
        found.append(" ".join(ast.unparse(kernel).split()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("answer", "said", "seconds"),
    [
        ("while True:\n    pass\n", "✗ answer.py: stopped after 5 s. Is there a loop that does not end?", 5),
        ("import os\nos._exit(0)\n", "it ended the process before it was graded", 200),
        ("def f(:\n", "SyntaxError: invalid syntax (line 1 of answer.py)", 200),
    ],
)
def test_no_answer_takes_the_grader_along(answer, said, seconds, tmp_path, capsys):
    file = tmp_path / "answer.py"
    file.write_text(answer)
    assert check.grade(1, file, seconds=seconds) == 1
    assert said in capsys.readouterr().out


def test_an_endless_loop_in_one_exercise(tmp_path, capsys):
    """It is named with what was graded before it, within the limit that was given."""
    file = tmp_path / "answer.py"
    file.write_text("def attention(*args):\n    ...\n\ndef intensity(*args):\n    while True:\n        pass\n")
    assert cli.main(["learn", "--check", "1", str(file), "--limit", "15"]) == 1
    first, *_, second = capsys.readouterr().out.splitlines()
    assert first.startswith("✗ exercise 1 of 3, attention: ")
    assert second.startswith("✗ exercise 2 of 3, intensity: stopped after 15 s.")
    assert second.endswith("add --limit 30")
    assert cli.main(["learn", "--check", "1", str(file), "--limit", "0"]) == 2
    assert "--limit: found 0.0; expected seconds, above 0" in capsys.readouterr().err
