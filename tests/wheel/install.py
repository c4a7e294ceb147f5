"""The wheel in an environment that has torch and nothing else: python tests/wheel/install.py

Builds the wheel (pip fetches hatchling and hatch-vcs), makes a venv, puts the torch of this Python and what that torch
requires into it, installs the wheel, and runs smoke.py and the commands from there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("tilewise-*.whl")
    return wheel


def torch_alone() -> set[str]:
    """torch and all that it requires here, by name."""
    found: set[str] = set()
    todo = ["torch"]
    while todo:
        name = todo.pop()
        try:
            asked = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another system
            continue
        if name not in found:
            found.add(name)
            todo += [re.split(r"[^A-Za-z0-9._-]", r, maxsplit=1)[0].lower() for r in asked if "extra ==" not in r]
    return found


def environment(folder: Path) -> Path:
    """A venv whose site-packages has links to the packages of `torch_alone`; returns its bin."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    paths = sysconfig.get_paths("venv", vars={"base": str(folder), "platbase": str(folder)})
    site = Path(paths["purelib"])
    for name in torch_alone():
        files = metadata.distribution(name).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            there = Path(str(metadata.distribution(name).locate_file(top)))
            if there.exists() and not (site / top).exists():
                (site / top).symlink_to(there)
    return Path(paths["scripts"])


def install(folder: Path) -> Path:
    """The bin of an environment with the wheel and torch."""
    wheel = build(folder / "wheel")
    scripts = environment(folder / "venv")
    pip = [sys.executable, "-m", "pip", "--python", str(scripts / "python"), "install", "--quiet", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, env=clean())
    return scripts


def clean() -> dict[str, str]:
    """The variables of this process without those that would lend it packages, and what other tests told Triton."""
    others = "PYTHON", "VIRTUAL_ENV", "PIP_", "TRITON", "TILEWISE"
    return {name: x for name, x in os.environ.items() if not name.startswith(others)}


def say(scripts: Path, *line: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment, away from the sources."""
    command = [str(scripts / line[0]), *line[1:]]
    return subprocess.run(command, capture_output=True, text=True, cwd=scripts.parent, env=clean(), timeout=600)


def check(scripts: Path) -> None:
    """The library works, and every command does its work or says in one sentence what it lacks."""
    smoke = say(scripts, "python", str(Path(__file__).with_name("smoke.py")))
    assert smoke.returncode == 0, smoke.stdout + smoke.stderr
    told = say(scripts, "tilewise", "--version")
    assert re.fullmatch(r"tilewise \d+\.\d+(\.\d+)?(\.dev\d+)?(\+[\w.]+)?\n", told.stdout), told
    for line in WORK_ALONE:
        told = say(scripts, "tilewise", *line)
        assert told.returncode == 0, (line, told)
        assert len(told.stdout) > 20, (line, told)
    commands = re.findall(r"^  ([a-z]\S*)  ", say(scripts, "tilewise", "--help").stdout, re.M)
    assert {"demo", "explain", "fuzz"} <= set(commands)
    for name in set(commands) - {line[0] for line in NEED_EXTRAS}:
        told = say(scripts, "tilewise", name, "--help")
        assert (told.returncode, told.stdout.partition(" [")[0]) == (0, f"usage: tilewise {name}"), told
    for line in NEED_EXTRAS:
        told = say(scripts, "tilewise", *line)
        assert lacks(told), (line, told)


def lacks(told: subprocess.CompletedProcess[str]) -> bool:
    """Whether a command said what it needs, and nothing else; torch warns that it has no numpy."""
    *warnings, said = told.stderr.splitlines() or [""]
    sentence = re.fullmatch(r"tilewise \S+ needs \w+: pip install 'tilewise\[(cli|docs)\]'", said)
    return told.returncode == 2 and sentence is not None and "Traceback" not in "".join(warnings)


NEED_EXTRAS = (("demo",), ("docs",))
WORK_ALONE = (
    ("explain", "1", "512", "4", "64", "--device", "H200"),
    ("trace", "softmax", "1", "2"),
    ("learn", "1"),
    ("fuzz", "--cases", "1"),
)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        check(install(Path(folder)))
    print("the wheel works beside torch alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
