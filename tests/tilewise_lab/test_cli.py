from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import tilewise
from tilewise_lab import cli

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_help_lists_the_commands(capsys, argv):
    with pytest.raises(SystemExit, match="0"):
        cli.main(argv)
    said = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert name in said
        assert command.summary in said


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_keeps_the_contract(name):
    module = import_module(cli.COMMANDS[name].module)
    module.configure(ArgumentParser())
    assert callable(module.run)


@pytest.mark.parametrize(("typed", "said"), [("dmeo", "did you mean 'demo'?"), ("zzz", "there are: demo")])
def test_unknown_command(capsys, typed, said):
    with pytest.raises(SystemExit, match="2"):
        cli.main([typed])
    assert said in capsys.readouterr().err


def test_a_command_gets_its_arguments_and_gives_its_status(monkeypatch):
    seen = []
    fake = SimpleNamespace(
        configure=lambda parser: parser.add_argument("--size", type=int),
        run=lambda options: seen.append(options.size) or 7,
    )
    monkeypatch.setitem(sys.modules, "a_command", fake)
    monkeypatch.setitem(cli.COMMANDS, "fake", cli.Command("a_command", "does little"))
    assert cli.main(["fake", "--size", "3"]) == 7
    assert seen == [3]


@pytest.mark.parametrize(("lacking", "extra"), [("rich", "cli"), ("rich.table", "cli"), ("sphinx", "docs")])
def test_missing_extras_are_named(monkeypatch, capsys, lacking, extra):
    monkeypatch.setattr(cli, "import_module", lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name=lacking)))
    assert cli.main(["demo"]) == 2
    assert f"needs {lacking}: pip install 'tilewise[{extra}]'" in capsys.readouterr().err


def test_other_missing_modules_are_not_explained_away(monkeypatch):
    monkeypatch.setattr(cli, "import_module", lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name="numpy")))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["demo"])


def test_python_dash_m():
    command = [sys.executable, "-m", "tilewise_lab", "--version"]
    said = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, check=True)
    assert said.stdout == f"tilewise {tilewise.__version__}\n"
