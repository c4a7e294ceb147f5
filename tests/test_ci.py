"""The checks of a change: which of them .ci/run makes, in a repository of its own, with ./run replaced."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("torches", "triton", "site")
RUN = """#!/bin/sh
echo "$@" | sed "s| /.*||" >> ../calls
[ "$1" != "${FAIL:-}" ]
"""
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git")


def files(part: str) -> list[str]:
    command = ["bash", ".ci/nightly", "--files", part]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def test_the_files_that_parts_depend_on_exist():
    found = {part: files(part) for part in PARTS}
    assert all(found.values())
    assert [name for names in found.values() for name in names if not (ROOT / name).exists()] == []


@pytest.fixture
def clone(tmp_path, monkeypatch):
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "x")
        monkeypatch.setenv(f"{name}_EMAIL", "x@x.invalid")
    programs = tmp_path / "programs"  # in place of a browser
    programs.mkdir()
    (programs / "chromium").write_text("#!/bin/sh")
    (programs / "chromium").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    (folder / "run").write_text(RUN)
    (folder / "run").chmod(0o755)
    for name in ("README.md", "src/tilewise/autograd.py", "src/tilewise/backends/hopper/forward.py", "other"):
        change(folder, name)
    commit(folder)
    return folder


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


def change(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "a", encoding="utf-8") as file:
        file.write("x\n")


def commit(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "a change")


def checked(folder: Path) -> tuple[int, set[str], list[str]]:
    """The status, the parts of .ci/nightly, and all calls of ./run."""
    calls = folder.parent / "calls"
    calls.unlink(missing_ok=True)
    done = subprocess.run(["bash", ".ci/run"], cwd=folder, capture_output=True, text=True)
    found = [line.removeprefix("== bash .ci/nightly ") for line in done.stdout.splitlines() if "== bash" in line]
    return done.returncode, set(found), calls.read_text().splitlines()


EVERY_TIME = ["lint", "package", "test --slow", "fuzz --cases 60 --seed 1"]


def test_parts_whose_files_changed_are_checked(clone):
    assert checked(clone)[1] == {*PARTS}  # without an earlier commit
    change(clone, "other")
    commit(clone)
    assert checked(clone) == (0, set(), EVERY_TIME)
    change(clone, "src/tilewise/autograd.py")
    assert checked(clone)[1] == {"torches"}  # not committed yet
    commit(clone)
    assert checked(clone)[1] == {"torches"}
    git(clone, "update-ref", "refs/remotes/origin/main", "HEAD")
    change(clone, "src/tilewise/backends/hopper/forward.py")
    commit(clone)
    change(clone, "README.md")
    commit(clone)
    assert checked(clone)[1] == {"triton", "site"}  # of the whole branch


def test_a_check_that_fails_fails_the_run_and_the_others_are_made(clone, monkeypatch):
    change(clone, "other")
    commit(clone)
    for name in ("lint", "fuzz"):
        monkeypatch.setenv("FAIL", name)
        assert checked(clone) == (1, set(), EVERY_TIME)
