"""Every command that the documents name is run, as small as its arguments allow, or stands here with the reason why
it is not."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentError, ArgumentParser
from importlib import import_module
from pathlib import Path

import pytest

from tests.conftest import HAS_TRITON
from tilewise_lab import cli
from tilewise_lab.learn.course import lesson

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/README.md")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
PROGRAM = r"(?:tilewise [a-z]|\./run|python3? [\w-]|torchrun |pip install |bash )"


def commands() -> list[str]:
    """In blocks of a shell, and alone between backticks."""
    found: set[str] = set()
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for block in re.findall(r"^```(?:sh|console|dockerfile)\n(.*?)^```$", text, re.M | re.S):
            found |= set(re.findall(rf"^(?:\$ |RUN )?({PROGRAM}.*?)(?:  +#.*)?$", block, re.M))
        found |= set(re.findall(rf"`({PROGRAM}[^`\n]*)`", text))
    return sorted(line for line in found - {"python -c"} if line.isascii())


# What is added to a command, or put in place of its capitals, so that it takes seconds.
RUN = {
    "./run": "demo --quick --device cpu",
    "./run bench --help": "",
    "./run fuzz": "--cases 2 --seed 3",
    "./run learn": "",
    "./run plan": "",
    "./run plan --seqlen 1M --ranks 256 --causal": "",
    "./run explore": "--export page",
    "tilewise demo": "--quick --device cpu",
    "tilewise explore": "--export page",
    "tilewise explain 64 1 32 128 --hk 8 --kv-lengths 4096 --page 16 --device H200 --backend triton": "",
    "tilewise explain B S H D ...": "B=1 S=128 H=2 D=16 ...=",
    "tilewise learn": "",
    "tilewise learn --check 3 answer.py": "",
    "tilewise learn --notebooks FOLDER": "FOLDER=books",
    "tilewise learn 3": "",
    "tilewise learn 3 --checks": "",
    "tilewise learn 3 --exercise": "",
    "tilewise learn 3 --lang zh": "",
    "./run selftest": "--calls 1 --seconds 2 --device cpu",
    "tilewise selftest": "--calls 1 --seconds 2 --device cpu",
    "tilewise show-mask FILE.py:NAME": "FILE.py:NAME=own.py:near --queries 64",
    "tilewise show-mask NAME": "NAME=causal",
    "tilewise show-mask document": "",
    "tilewise warm --help": "",
}
SLOW = {
    "./run",
    "tilewise demo",
    "./run explore",
    "tilewise explore",
}  # the demo, the page: tested where they live, too

BENCH = "measures for minutes; tests/tilewise_lab/bench runs every target, tiny"
COMPILES = "compiles for half a minute; tests/tilewise/test_warmup.py compiles one kernel"
BUILDS = "tests/tilewise_lab/docs/test_site.py builds the site, at night"
GENERATES = "writes files of the sources; tests compare them with what it would write"
NETWORK = "needs PyPI; tests/wheel installs the wheel into an empty environment"
ITSELF = "is what runs this"
GPU = "needs a GPU"
PICTURE = "emulates a whole kernel for a picture; tests/tilewise_lab/emulator draws a small one"
EXAMPLE = "./run example train_gpt --steps 20"
NOT_RUN = {
    "./run --here": "adds packages to the Python of the tests; tests/test_run.py",
    "./run bench": BENCH,
    "./run bench --readme": "writes the documents; tests/tilewise_lab/bench/test_readme.py",
    "./run notebook": "starts JupyterLab; tests/test_run.py",
    "./run package": NETWORK,
    "./run python": "a prompt",
    "bash .ci/release 0.2.0": "publishes; tests/test_release.py runs it in a repository of its own",
    "tilewise bench": BENCH,
    "tilewise bench models-shapes": BENCH,
    "./run warm": COMPILES,
    "tilewise warm --head-dim 128 --heads 32 --kv-heads 8 --gpu sm_90": COMPILES,
    "tilewise warm --head-dim 64 --no-backward --gpu sm_90": COMPILES,
    "./run docs": BUILDS,
    "./run docs --open": BUILDS,
    "tilewise docs": BUILDS,
    "./run python -m tilewise_lab.generate": GENERATES,
    "python -m tilewise_lab.generate": GENERATES,
    "python -m tests.covering": GENERATES,
    "python -m tests.errors": GENERATES,
    "./run lint": "a step of .ci/run",
    "./run test": ITSELF,
    "./run test --slow": ITSELF,
    "./run test --slow --all": ITSELF,
    "./run test -k window --pdb": ITSELF,
    "./run test tests/gpu": GPU,
    "bash .ci/run": ITSELF,
    "bash .ci/nightly": ITSELF,
    "torchrun --standalone --nproc-per-node 4 examples/train_context_parallel.py": (
        "tests/test_train_context_parallel.py runs it, in the slow ring"
    ),
    EXAMPLE: "test_an_example_runs_by_its_name, in the slow ring",
    "./run fuzz --seconds 600": "`./run fuzz` is run",
    "./run python -m tests.tilewise.backends.compile_calls --seconds 600 --seed 3": (
        "tests/tilewise/backends/test_calls.py translates some of these calls"
    ),
    "tilewise bench flex": BENCH,
    "python -m tests.mutations": "takes hours; tests/test_mutations.py checks its table",
    "python -m tilewise_lab.emulator.timeline docs/hopper-forward.svg": PICTURE,
    "python -m tilewise_lab.emulator.timeline docs/hopper-backward.svg": PICTURE,
}
NOT_RUN |= {line: NETWORK for line in commands() if line.startswith("pip install ")}


def test_every_command_of_the_documents_is_run_or_has_a_reason():
    assert {*RUN} | {*NOT_RUN} == {*commands()}
    assert not {*RUN} & {*NOT_RUN}


OF_THE_SCRIPT = "--here|test|lint|example|python|notebook|package"  # commands of ./run itself


def test_commands_that_are_not_run_are_understood():
    wrong = []
    for line in NOT_RUN:
        if re.match(rf"tilewise|\./run (?!{OF_THE_SCRIPT})", line):
            name, *arguments = shlex.split(line)[1:]
            parser = ArgumentParser(exit_on_error=False)
            import_module(cli.COMMANDS[name].module).configure(parser)
            try:
                parser.parse_args(arguments)
            except (ArgumentError, SystemExit) as error:
                wrong.append(f"{line}: {error}")
    assert not wrong, "\n".join(wrong)


def typed(line: str, changes: str) -> list[str]:
    """
    >>> typed("tilewise explain B S ...", "B=1 S=2 ...= --json x")
    ['explain', '1', '2', '--json', 'x']
    """
    words = shlex.split(line)[1:]
    for change in shlex.split(changes):
        old, _, new = change.partition("=")
        words = [new if word == old else word for word in words] if _ else [*words, change]
    return [word for word in words if word]


@pytest.mark.parametrize("line", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in RUN])
def test_a_command_of_the_documents_does_what_it_says(line, tmp_path, monkeypatch, capsys):
    if "--backend triton" in line and not HAS_TRITON:
        pytest.skip("no Triton")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWISE_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setenv("TILEWISE_PICTURES", str(tmp_path / "pictures"))
    monkeypatch.setenv("TILEWISE_LANG", "en")  # put back after the test, whatever --lang makes of it
    shutil.copy(lesson(3).beside("solutions"), "answer.py")
    mod = (
        "import tilewise\n\n\n@tilewise.mask_mod\ndef near(b, h, q_idx, kv_idx):\n    return abs(q_idx - kv_idx) < 8\n"
    )
    Path("own.py").write_text(mod, encoding="utf-8")
    try:
        status = cli.main(typed(line, RUN[line]))
    except SystemExit as done:  # --help
        status = done.code
    assert status == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_an_example_runs_by_its_name(tmp_path):
    """From any folder, in a clone where nothing is installed: ./run brings the sources along."""
    tiny = shlex.split("--steps 1 --dims 16 --width 32 --layers 1 --length 32 --batch 1 --device cpu")
    command = [sys.executable, str(ROOT / "run"), *shlex.split(EXAMPLE)[1:], *tiny]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tilewise" in done.stdout
