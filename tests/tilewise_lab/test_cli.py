from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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


def test_the_version_is_said_without_importing_torch():
    command = [sys.executable, "-X", "importtime", "-m", "tilewise_lab", "--version"]
    said = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, check=True)
    assert said.stdout == f"tilewise {tilewise.__version__}\n"
    imported = {line.rpartition("|")[2].strip() for line in said.stderr.splitlines()}
    assert "tilewise_lab" in imported
    assert not imported & {"torch", "tilewise"}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("demo --quick --device cuda:99", "--device: found 'cuda:99'"),
        ("demo --device tpu", "--device: found 'tpu'; expected cpu"),
        ("demo --out no/such/page.html", "--out: found 'no/such/page.html', whose folder does not exist"),
        ("demo --out .", "--out: found '.', a folder"),
        ("bench --device cuda:99", "--device: found 'cuda:99'"),
        ("bench --report no.json", "--report: found 'no.json', which does not exist"),
        ("trace attention --sq 0", "--sq: found 0; expected 1 or more"),
        ("trace attention --block -1", "--block: found -1"),
        ("trace attention --sq 100000", "tiles to show: found 200000; expected at most 4096"),
        ("trace softmax nan inf", "x: found nan; expected finite numbers"),
        ("trace autograd 1", "expected three, a w1 b1"),
        ("explain 1 16 8 1000", "head dim of q: found 1000; expected 1 to 512"),
        ("explain 1 0 8 64", "shape: found 1 0 8 64"),
        ("explain --device tpu", "device: found 'tpu'"),
        ("show-mask nofile.py:x", "mod: found 'nofile.py', which does not exist"),
        ("show-mask causal --block 0", "--block: found 0"),
        ("plan --seqlen 0", "--seqlen: found 0; expected 1 to"),
        ("plan --ranks 0", "--ranks: found 0; expected 1 to 1024"),
        ("plan --seqlen 1M --ranks 100000", "--ranks: found 100000; expected 1 to 1024"),
        ("plan --documents 4096 0", "--documents: found 0"),
        ("plan --svg no/such/plan.svg", "--svg: found 'no/such/plan.svg', whose folder does not exist"),
        ("plan --json no/such/plan.json", "--json: found 'no/such/plan.json', whose folder does not exist"),
        ("bench nosuchcase", "kv, mla, rows, models-shapes"),
        ("explain 1 100000000000 16 64 --device H200", "tiles of the call: found 8,333,333,"),
        ("fuzz --cases -1", "--cases: found -1; expected 1 or more"),
        ("bench --out /dev/null/x", "/dev/null/x: Not a directory"),
        ("explore --export /dev/null/x", "/dev/null/x: Not a directory"),
    ],
)
def test_a_mistake_is_one_sentence_and_2(typed, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(typed.split()) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith(f"tilewise {typed.split()[0]}: ")
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU that is here is taken")
def test_warming_nothing_is_a_mistake(capsys, monkeypatch):
    assert cli.main(["warm", "--head-dim", "64"]) == 2
    assert "--gpu: found none, and no GPU here" in capsys.readouterr().err
    monkeypatch.setattr("tilewise_lab.warm.warmup", lambda *_, **__: SimpleNamespace(kernels=0, compiled=0))
    assert cli.main(["warm", "--head-dim", "64", "--gpu", "sm_12"]) == 2
    assert "'sm_12', for which no kernel takes such a call" in capsys.readouterr().err


def test_docs_do_not_empty_a_folder_of_other_files(capsys, tmp_path, monkeypatch):
    """And say so before anything is built."""
    pytest.importorskip("sphinx")
    monkeypatch.setattr("tilewise_lab.docs.build.build", lambda *_, **__: pytest.fail("it was built"))
    note, folder = tmp_path / "note.txt", tmp_path / "folder"
    note.write_text("mine")
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    page = tmp_path / "x.html"
    for out, said in (
        (note, "a file; expected a folder"),
        (folder, "a folder with other files"),
        (page, f"the name of a page; expected the folder of the pages, for example --out {tmp_path / 'x'}"),
    ):
        assert cli.main(["docs", "--out", str(out)]) == 2
        assert said in capsys.readouterr().err
    assert not page.exists()
    assert note.read_text() == (folder / "mine.txt").read_text() == "mine"


def test_commands_name_themselves_as_they_were_called(capsys, monkeypatch):
    monkeypatch.setattr(cli, "CALLED", "./run")
    assert cli.main(["plan", "--ranks", "0"]) == 2
    assert capsys.readouterr().err.startswith("./run plan: --ranks")


def test_explore_exports_to_a_file_or_into_a_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tilewise_lab.explore.export.answers", lambda: "{}")
    for target, file in ("new/page.html", "new/page.html"), ("site", "site/index.html"):
        assert cli.main(["explore", "--export", str(tmp_path / target)]) == 0
        assert (tmp_path / file).is_file()
        assert capsys.readouterr().out.startswith(str(tmp_path / file))
