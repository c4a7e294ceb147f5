"""Every lesson runs, every exercise can be solved, and a wrong answer is told what is wrong with it."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HAS_TRITON
from tilewise_lab import cli
from tilewise_lab.learn import check, lab, play, progress
from tilewise_lab.learn.course import home, lesson, lessons, parse

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
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_lesson_runs(number, tmp_path, monkeypatch):
    """With its assertions and its pictures; in a process of its own where the compiler is needed."""
    one = lesson(number)
    if one.needs == "compiler":
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "0"}
        command = [sys.executable, "-m", "tilewise_lab", "learn", str(number), "--quiet"]
        subprocess.run(command, env=env, check=True, cwd=tmp_path)
    else:
        if HAS_TRITON:
            monkeypatch.setenv("TRITON_INTERPRET", "1")
        play.run(one, quiet=True)
    pytest.importorskip("matplotlib")
    assert list((tmp_path / "pictures").glob(f"{number:02}_*.png"))


@pytest.mark.parametrize("number", CHECKED)
def test_the_solution_is_right_and_the_exercise_is_not(number):
    one = lesson(number)
    assert check.verdict(number, one.beside("solutions")) is None
    assert check.verdict(number, one.beside("exercises")).endswith(
        "not written yet: replace the `raise NotImplementedError`"
    )


WRONG = {
    1: (
        "def intensity(n, d, itemsize):\n    return 4 * n * n * d / (itemsize * (4 * n * d + 2 * n * n))",
        "four passes",
    ),
    2: ("import torch\ndef log_softmax(x):\n    return torch.softmax(x, -1).log()", "keep x_i outside the log"),
    3: ("def merge(a, b):\n    return max(a[0], b[0]), a[1] + b[1]", "different maxima"),
    4: ("def blocked_matmul(far, blocks, tile):\n    return far.matrices['a'] * far.matrices['b']", "elementwise"),
    5: (
        "import torch\ndef step(state, s, v):\n    m = torch.maximum(state[0], s.amax(-1))\n"
        "    p = torch.exp(s - m[:, None])\n    f = torch.exp(state[0] - m)\n"
        "    return m, f * state[1] + p.sum(-1), f[:, None] * state[2] + p @ v",
        "only masked keys",
    ),
    6: ("def hbm_bytes(n, d, rows, columns, order, itemsize=4):\n    return 4 * n * d * itemsize", "bytes, not"),
    7: ("def lines(columns, itemsize, lane_axis):\n    return 1", "a line of its own"),
    8: (
        "def split_heads(shape, strides, heads):\n    return [*shape[:-1], heads, shape[-1] // heads], [*strides, 1]",
        "strides",
    ),
    9: ("def finish(iterations, durations):\n    return iterations * sum(durations)", "nothing overlaps"),
    10: ("def best_batch(tokens, heads, tile, slots, limit):\n    return limit", "busy"),
    11: ("def span(first, rows, n_q, n_k, block):\n    return first // block, first // block", "the *last* row"),
    12: (
        "import math\nfrom tilewise_lab.trace.graph import Value\n"
        "def tanh(x):\n    return Value(math.tanh(x.value), made_from=((x, 1.0),))",
        "1 - tanh²",
    ),
    13: (
        "import torch\ndef block_gradients(q, k, v, do, lse, delta):\n    p = torch.exp(q @ k.mT / 2 - lse[:, None])\n"
        "    ds = p * (do @ v.mT - delta[:, None])\n    return ds @ k, ds.mT @ q, p.mT @ do",
        "belongs to dQ and dK",
    ),
    14: ("def phases(iteration, buffers):\n    return iteration % buffers, 0, 1", "completes phase"),
    15: (
        "import torch\ndef combine(parts):\n    o, lse = (torch.stack(x) for x in zip(*parts))\n"
        "    w = torch.softmax(lse, 0)\n    return (w[..., None] * o).sum(0), lse.logsumexp(0)",
        "0 · nan is nan",
    ),
    16: ("def rank_attention(q, k, v, ranks):\n    yield k, v\n    return q @ k.mT @ v, q[:, 0]", "merge with weights"),
    17: (
        "import tilewise\n"
        "tile_kinds = lambda seen, block: __import__('torch').tensor([[int(t.any()) + int(t.all())"
        " for t in band.split(block, 1)] for band in seen.split(block)])\n"
        "mask = tilewise.mask_mod(lambda b, h, q_idx, kv_idx, ids, shared: kv_idx <= q_idx)",
        "another document",
    ),
    18: (
        "import triton\nimport triton.language as tl\n@triton.jit\n"
        "def load_tile(x, first, n, D: tl.constexpr, BLOCK: tl.constexpr):\n"
        "    i = first + tl.arange(0, BLOCK)[:, None]\n    return tl.load(x + i * D + tl.arange(0, D)[None, :])",
        "step 1 of 6, load_tile: rows past n",
    ),
}


@pytest.mark.parametrize("number", CHECKED)
def test_a_usual_mistake_gets_a_hint(number, tmp_path):
    code, hint = WRONG[number]
    (tmp_path / "answer.py").write_text(code)
    assert hint in check.verdict(number, tmp_path / "answer.py")


KERNEL_MISTAKES = {
    "online_step": ("alpha * l + tl.sum(p, 1)", "l + tl.sum(p, 1)", "l must be corrected"),
    "forward": ("    hidden = j >= n\n", "    hidden = j < 0\n", "keys past n count"),
    "block_gradient": ("(dp - delta[:, None])", "dp", "δ is missing"),
    "backward_keys": (
        'tl.trans(ds), q_tile, input_precision="ieee") * scale',
        "tl.trans(ds), q_tile)",
        "lacks the scale",
    ),
    "backward_queries": ("acc += tl.dot(ds, k_tile", "acc = tl.dot(ds, k_tile", "dq is wrong"),
}


@needs_triton
@pytest.mark.parametrize("name", KERNEL_MISTAKES)
def test_a_kernel_is_graded_step_by_step(name, tmp_path):
    """A mistake in one step of lesson 18 is told as one in that step; so is a step that is not there yet."""
    old, new, hint = KERNEL_MISTAKES[name]
    source = lesson(18).beside("solutions").read_text("utf-8")
    assert old in source
    (tmp_path / "answer.py").write_text(source.replace(old, new), "utf-8")
    told = check.verdict(18, tmp_path / "answer.py")
    assert re.match(rf"step \d of 6, {name}: ", told)
    assert hint in told
    missing = re.sub(
        rf"(def {name}\(.*?:(?:  # fmt: skip)?\n)    ", r"\1    raise NotImplementedError\n    ", source, flags=re.S
    )
    (tmp_path / "answer.py").write_text(missing, "utf-8")
    assert re.match(rf"step \d of 6, {name}: not written yet", check.verdict(18, tmp_path / "answer.py"))


def test_errors_in_an_answer_are_reported(tmp_path):
    (tmp_path / "answer.py").write_text("def intensity(n, d, itemsize):\n    return 1 / 0")
    assert "ZeroDivisionError" in check.verdict(1, tmp_path / "answer.py")
    assert "line 2" in check.verdict(1, tmp_path / "answer.py")


def test_progress_is_kept(capsys, tmp_path):
    assert cli.main(["learn", "--check", "1", str(lesson(1).beside("solutions"))]) == 0
    assert cli.main(["learn", "--check", "2", str(lesson(2).beside("exercises"))]) == 1
    assert progress.load() == {"read": [], "solved": [1]}
    capsys.readouterr()
    assert cli.main(["learn"]) == 0
    said = capsys.readouterr().out
    assert f"1 of {len(NUMBERS)} exercises solved" in said
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
        assert "**Exercise.**" in words
        code = "\n".join(cell.text for cell in one.cells if cell.kind == "code")
        assert "assert " in code
        assert "picture(" in code


def test_a_lesson_is_shown_with_its_words(capsys, monkeypatch):
    monkeypatch.setattr(play, "lesson", lambda number: lesson(12))
    assert play.play(12) == 0
    said = capsys.readouterr().out
    assert "Derivatives" in said
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
        ("while True:\n    pass\n", "without an end", 2),
        ("import os\nos._exit(0)\n", "it ended the process before it was graded", 200),
        ("def f(:\n", "SyntaxError: invalid syntax (line 1 of answer.py)", 200),
    ],
)
def test_no_answer_takes_the_grader_along(answer, said, seconds, tmp_path, capsys):
    file = tmp_path / "answer.py"
    file.write_text(answer)
    assert check.grade(1, file, seconds=seconds) == 1
    assert said in capsys.readouterr().out
