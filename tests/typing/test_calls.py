"""`calls.py` has calls as the documentation makes them: both type checkers accept it, and it runs."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise
from tests.typing import calls

CALLS = Path(calls.__file__)
SRC = Path(tilewise.__file__).parents[1]
SECTIONS = (
    calls.dense,
    calls.of_mods,
    calls.with_a_cache,
    calls.on_many_gpus,
    calls.sparsely,
    calls.of_other_libraries,
    calls.explained,
)


def checker(name: str) -> list[str]:
    """The command of a type checker, which is skipped where it is not installed."""
    if importlib.util.find_spec(name):
        return [sys.executable, "-m", name]
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: the group `test` of pyproject.toml has it")
    return [name]


def mypy(folder: Path, file: Path) -> str:
    """What mypy --strict says of a file, as users run it: without this project's settings."""
    (folder / "mypy.ini").write_text(f"[mypy]\nmypy_path = {SRC}\nfollow_imports = silent\n")
    options = ("--strict", f"--config-file={folder}/mypy.ini", f"--python-executable={sys.executable}")
    found = subprocess.run([*checker("mypy"), *options, str(file)], cwd=SRC.parent, capture_output=True, text=True)
    assert found.returncode in (0, 1), found.stdout + found.stderr
    return found.stdout


def pyright(folder: Path, file: Path) -> list[str]:
    """What pyright reports of a file, by line."""
    folder = folder / file.stem  # pyright reads files below its settings
    folder.mkdir()
    shutil.copy(file, folder)
    settings = {"extraPaths": [str(SRC)], "reportUnnecessaryTypeIgnoreComment": "error"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    options = ("--outputjson", f"--pythonpath={sys.executable}", "-p", "pyrightconfig.json")
    found = subprocess.run([*checker("pyright"), *options], cwd=folder, capture_output=True, text=True)
    assert found.returncode in (0, 1), found.stdout + found.stderr
    report = json.loads(found.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    return [f"{x['range']['start']['line'] + 1}: {x['message']}" for x in report["generalDiagnostics"]]


def test_there_are_sixty_calls():
    assert len(re.findall(r"^    assert_type\(", CALLS.read_text(encoding="utf-8"), re.M)) >= 60


@pytest.mark.parametrize("section", SECTIONS, ids=lambda x: x.__name__)
def test_the_calls_run(section):
    section()


WRONG = """
from typing import assert_type
import tilewise
from torch import Tensor

def f(q: Tensor) -> None:
    assert_type(tilewise.attention(q, q, q, return_lse=True), Tensor)
    tilewise.attention(q, q, q, layout="bsdh")
"""


@pytest.mark.slow
def test_mypy(tmp_path):
    assert mypy(tmp_path, CALLS).startswith("Success")
    (tmp_path / "wrong.py").write_text(WRONG)
    said = mypy(tmp_path, tmp_path / "wrong.py")
    assert [int(line) for line in re.findall(r"wrong\.py:(\d+): error", said)] == [7, 8], said


@pytest.mark.slow
def test_pyright(tmp_path):
    assert pyright(tmp_path, CALLS) == []
    (tmp_path / "wrong.py").write_text(WRONG)
    found = pyright(tmp_path, tmp_path / "wrong.py")
    assert sorted({int(x.partition(":")[0]) for x in found}) == [7, 8]  # it says two things of line 8
