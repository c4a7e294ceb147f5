"""The notebooks are the lessons, and they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HAS_TRITON
from tests.covering import cases
from tilewise_lab import cli
from tilewise_lab.learn.course import lessons
from tilewise_lab.learn.notebook import notebook

ROOT = Path(__file__).parents[3]
# What a kernel of Jupyter does: every cell in one namespace, its source kept where `inspect` finds it.
RUN = """
import json, linecache, sys
for book in sys.argv[1:]:
    space = {"__name__": "__main__"}
    for n, cell in enumerate(json.load(open(book, encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            source, name = "".join(cell["source"]), f"<{book}, cell {n}>"
            linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
            exec(compile(source, name, "exec"), space)
"""


@pytest.fixture(scope="module", params=["en", "zh"])
def folder(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWISE_LANG", "en")  # put back afterwards
        place = tmp_path_factory.mktemp(request.param)
        assert cli.main(["learn", "--notebooks", str(place), "--lang", request.param]) == 0
    return place


def test_there_is_a_notebook_for_every_lesson(folder):
    made = {path.stem: json.loads(path.read_text("utf-8")) for path in folder.glob("*.ipynb")}
    assert set(made) == {one.path.stem for one in lessons()}
    for one in lessons():
        book = made[one.path.stem]
        assert book["nbformat"] == 4
        assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
        code = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
        assert [cell.read_in(folder.name[:2]) for cell in one.cells if cell.kind == "code"] == [
            x for x in code if 'TRITON_INTERPRET"] = "0' not in x
        ]
        assert all(cell["outputs"] == [] for cell in book["cells"] if cell["cell_type"] == "code")
        folded = ["".join(cell["source"]) for cell in book["cells"] if "tags" in cell["metadata"]]
        assert folded == [cell.read_in(folder.name[:2]) for cell in one.cells if cell.tag]
        assert all(cell["metadata"]["jupyter"]["source_hidden"] for cell in book["cells"] if cell["metadata"])
        words = "".join("".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "markdown")
        assert one.title_in(folder.name[:2]) in words


# Triton decides at its import whether it interprets or compiles: those that need the same share a process.
RUNS = [[one for one in lessons() if one.needs == needs] for needs in ("compiler", "interpreter", "")]


@pytest.mark.slow
@cases("books", RUNS[1:2], [RUNS[0], RUNS[2]], ids=lambda books: "-".join(f"{one.number:02}" for one in books))
def test_notebooks_run(books, tmp_path):
    """One language is enough: the code is the same, but for its sentences."""
    if books[0].needs and not HAS_TRITON:
        pytest.skip("shows less without Triton, as the lesson does")
    for one in books:
        (tmp_path / f"{one.path.stem}.ipynb").write_text(json.dumps(notebook(one, "zh")), "utf-8")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT / "src"), "TILEWISE_PICTURES": str(tmp_path), "OMP_NUM_THREADS": "1"}
    names = [f"{one.path.stem}.ipynb" for one in books]
    subprocess.run([sys.executable, "-c", RUN, *names], env=env, check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)
