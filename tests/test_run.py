"""./run: the decisions it takes, without taking them."""

from __future__ import annotations

import ast
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "run"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The script as a module, in a folder of its own."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = SourceFileLoader("run_script", str(SCRIPT))
    module = module_from_spec(spec_from_loader("run_script", loader))
    loader.exec_module(module)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/train_gpt.py").touch()
    (tmp_path / "pyproject.toml").write_bytes((SCRIPT.parent / "pyproject.toml").read_bytes())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    return module


@pytest.fixture
def steps(run, monkeypatch):
    """Records the commands of the set-up instead of running them; making a .venv leaves an empty one."""
    recorded = []

    def record(name, command):
        recorded.append((name, [str(word) for word in command]))
        if "venv" in command:
            (run.VENV / "bin").mkdir(parents=True, exist_ok=True)
            (run.VENV / "bin" / "python").touch()

    monkeypatch.setattr(run, "step", record)
    monkeypatch.setattr(run, "answers", lambda url: True)
    monkeypatch.setattr(run, "has_module", lambda python, name: False)
    return recorded


def test_old_pythons_reach_the_refusal():
    """Python 3.7 must parse the file and stop at the version check, before anything it does not have."""
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 7))
    check = next(position for position, node in enumerate(tree.body) if isinstance(node, ast.If))
    assert [ast.unparse(node) for node in tree.body[1:check]] == ["import sys"]
    imported = {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    assert imported <= set(sys.stdlib_module_names) | {"importlib.util", "urllib.request"}


def test_requirements_of_groups(run):
    pyproject = {
        "project": {"dependencies": ["torch>=2.10"], "optional-dependencies": {"cli": ["rich"]}},
        "dependency-groups": {"test": ["pytest>=8", "hypothesis"]},
    }
    assert run.requirements(pyproject, "cli", "test") == ["rich", "pytest>=8", "hypothesis"]
    assert run.requirements(pyproject, "dependencies") == ["torch>=2.10"]
    with pytest.raises(KeyError):
        run.requirements(pyproject, "docs")


def test_every_group_that_is_used_exists(run):
    for groups in run.TOOLS.values():
        assert run.requirements(run.project(), *groups)
    assert any(r.startswith("torch==") for r in run.requirements(run.project(), "cpu"))


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        ("numpy<2.4", "numpy"),
        ("triton==3.6.0; sys_platform == 'linux'", "triton"),
        ("PyTest-xdist [x] >=3", "pytest-xdist"),
    ],
)
def test_name_of(run, requirement, name):
    assert run.name_of(requirement) == name


def test_missing(run):
    assert run.missing(["pytest>=8", "no-such-thing==1"]) == ["no-such-thing==1"]


@pytest.mark.parametrize(
    ("installed", "fits"), [("2.13.0+cpu", True), ("2.10", True), ("2.9.1", False), ("3.0.0a0", True), (None, False)]
)
def test_torch_of_the_current_python(run, monkeypatch, installed, fits):
    def version(name):
        if installed is None:
            raise run.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(run.metadata, "version", version)
    assert run.fitting_torch({"project": {"dependencies": ["torch>=2.10"]}}) is fits


def test_current_python_with_torch_is_used(run, steps, monkeypatch):
    monkeypatch.setattr(run, "fitting_torch", lambda pyproject: True)
    monkeypatch.setattr(run, "missing", lambda requirements: [r for r in requirements if "xdist" in r])
    assert run.find_python("test") == sys.executable
    ((name, command),) = steps
    assert "xdist" in name
    assert command[0] == sys.executable
    assert [word for word in command if "==" in word or ">=" in word] == ["pytest-xdist>=3.6"]


def test_offline_goes_on_without_what_is_not_vital(run, monkeypatch, capsys):
    def fail(name, command):
        raise run.SetupError(name, "ERROR: no network")

    monkeypatch.setattr(run, "fitting_torch", lambda pyproject: True)
    monkeypatch.setattr(run, "step", fail)
    monkeypatch.setattr(run, "missing", lambda requirements: ["pytest-xdist"])
    assert run.find_python("test") == sys.executable
    assert "without pytest-xdist (ERROR: no network)" in capsys.readouterr().err
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(run.SetupError):
        run.find_python("test")


@pytest.mark.parametrize("gpu", [False, True])
def test_fresh_machine_gets_a_venv_once(run, steps, monkeypatch, gpu):
    monkeypatch.setattr(run, "fitting_torch", lambda pyproject: False)
    monkeypatch.setattr(run, "has_gpu", lambda: gpu)
    python = run.find_python("demo")
    assert Path(python).parent.parent == run.VENV
    making, torch, tools, package = (command for _, command in steps)
    assert making[1:] == ["-m", "venv", str(run.VENV)]
    assert ("torch>=2.10" if gpu else "torch==2.13.0") in torch
    assert (run.CPU_WHEELS in torch) is (not gpu)
    assert any(word.startswith("triton") for word in tools) is (not gpu)
    assert not any(word.startswith("torch") for word in tools)
    assert package[-3:] == ["--no-deps", "--editable", str(run.ROOT)]

    steps.clear()
    assert run.find_python("test") == python
    assert steps == []


def test_stamp_changes_with_what_it_covers(run, monkeypatch):
    stamps = {run.fingerprint(False), run.fingerprint(True)}
    monkeypatch.setattr(sys, "version", "3.99")
    stamps.add(run.fingerprint(False))
    (run.ROOT / "pyproject.toml").write_text("[project]")
    stamps.add(run.fingerprint(False))
    assert len(stamps) == 4


def test_venv_of_another_python_is_cleared(run, steps):
    run.VENV.mkdir()
    (run.VENV / "pyvenv.cfg").write_text("home = somewhere\nversion = 3.1.4\n")
    assert run.version_in(run.VENV) == "3.1.4"
    run.make_venv("python", gpu=False)
    assert "--clear" in steps[0][1]


def test_the_package_is_installed_where_its_build_backend_can_be_had(run, steps, monkeypatch, capsys):
    record = run.step

    def fail(name, command):
        if "--editable" in command:
            raise run.SetupError(name, "ERROR: no hatchling")
        record(name, command)

    monkeypatch.setattr(run, "step", fail)
    run.make_venv("python", gpu=False)
    assert "tilewise is not installed in .venv (ERROR: no hatchling)" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "tool"), [("notebook", "jupyterlab"), ("package", "twine")])
def test_some_tools_are_installed_when_they_are_first_wanted(run, steps, monkeypatch, command, tool):
    monkeypatch.setattr(run, "fitting_torch", lambda pyproject: False)
    run.find_python("python")
    assert not any(tool in " ".join(line) for _, line in steps)
    steps.clear()
    run.find_python(command)
    ((_, line),) = steps
    assert line[-1].startswith(tool)


TWO = ["-n", "2", "--dist", "worksteal"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [([], TWO), (["-k", "x"], TWO), (["-n0"], []), (["--pdb"], []), (["-n", "4"], [])],
)
def test_workers(run, args, expected):
    assert run.workers(args, xdist=True) == expected
    assert run.workers(args, xdist=False) == []


def test_plan(run, steps):
    assert run.plan("bench", ["--quick"], "python") == [(None, ["-m", "tilewise_lab", "bench", "--quick"])]
    assert [line[1] for _, line in run.plan("lint", [], "python")] == ["ruff", "ruff", "mypy"]
    assert run.plan("python", ["-c", "1"], "python") == [(None, ["-c", "1"])]
    gpt = str(run.ROOT / "examples/train_gpt.py")
    for name in ("train_gpt", "train_gpt.py"):
        assert run.plan("example", [name, "--steps", "3"], "python") == [(None, [gpt, "--steps", "3"])]


def test_notebooks_are_written_once(run, steps):
    """A reader's edits stay."""
    folder = run.ROOT / "notebooks"
    write, lab = run.plan("notebook", ["--no-browser"], "python")
    assert write == (run.ROOT, ["-m", "tilewise_lab", "learn", "--notebooks", "notebooks"])
    assert lab == (folder, ["-m", "jupyterlab", "--no-browser"])
    folder.mkdir()
    assert run.plan("notebook", [], "python") == [(folder, ["-m", "jupyterlab"])]


def test_packages_are_built_and_checked(run, steps, tmp_path):
    build, check = run.plan("package", [str(tmp_path / "x")], "python")
    assert build[1][-3:] == ["--outdir", str(tmp_path / "x"), "."]
    assert check[1] == ["-m", "twine", "check", "--strict", str(tmp_path / "x" / "tilewise-*")]
    assert str(run.ROOT / "dist") in run.plan("package", [], "python")[0][1]


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ([], ["-m", "not slow"]),
        (["-k", "window"], ["-m", "not slow", "-k", "window"]),
        (["--slow", "-x"], ["-x"]),
        (["-m", "slow"], ["-m", "slow"]),
        (["tests/test_run.py::test_plan"], ["tests/test_run.py::test_plan"]),
    ],
)
def test_slow_tests_are_left_out_unless_wanted(run, steps, typed, given):
    assert run.plan("test", typed, "python") == [(run.ROOT, ["-m", "pytest", *given])]


@pytest.mark.parametrize(
    ("typed", "rings"),
    [([], [False, True]), (["--slow", "--all"], [False, True]), (["-k", "window"], [False]), (["tests/gpu"], [True])],
)
def test_a_gpu_has_a_run_of_its_own(run, steps, monkeypatch, typed, rings):
    """Its tests see it; the others, in a process of theirs, do not, and hold on every machine."""
    monkeypatch.setattr(run, "has_gpu", lambda: True)
    assert ["tests/gpu" in line for _, line in run.plan("test", typed, "python")] == rings


def test_step_shows_output_only_on_failure(run, capfd):
    run.step("quiet", [sys.executable, "-c", "print('noise')"])
    assert "noise" not in "".join(capfd.readouterr())
    with pytest.raises(run.SetupError, match="loud") as failure:
        run.step("loud", [sys.executable, "-c", "raise SystemExit('the reason')"])
    assert run.explain(failure.value) == 1
    said = capfd.readouterr().err
    assert "the reason" in said
    assert "PIP_FIND_LINKS" in said


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("error: externally-managed-environment", "Make an environment of your own"),
        ("ensurepip is not available", "python3-venv"),
    ],
)
def test_advice_fits_the_failure(run, capsys, output, advice):
    run.explain(run.SetupError("a step", output))
    assert advice in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said"), [([], "./run example NAME, of:"), (["gtp"], "no example 'gtp'; there are:")]
)
def test_examples_are_listed(run, capsys, typed, said):
    with pytest.raises(SystemExit, match="2"):
        run.plan("example", typed, "python")
    assert said in (err := capsys.readouterr().err)
    assert "train_gpt" in err


def test_threads_sleep_unless_the_caller_says_how(run, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert run.environment()["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert run.environment()["OMP_WAIT_POLICY"] == "ACTIVE"
