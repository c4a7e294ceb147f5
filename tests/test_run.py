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
            (run.VENV / "pyvenv.cfg").write_text(f"version = {run.platform.python_version()}\n")
            run.site_of(run.VENV).mkdir(parents=True)

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


def installed(steps):
    """The names that each call of pip installs."""
    for _, command in steps:
        if "pip" in command:
            yield [word.partition(">")[0].partition("=")[0] for word in command if "==" in word or ">=" in word]


@pytest.fixture
def with_torch(run, monkeypatch):
    """This Python has torch, and all but pytest-xdist."""
    monkeypatch.setattr(run, "fitting_torch", lambda pyproject: True)
    monkeypatch.setattr(run, "missing", lambda requirements: [r for r in requirements if "xdist" in r])


def test_a_python_that_lacks_nothing_is_used_as_it_is(run, steps, with_torch):
    assert run.find_python("demo") == sys.executable
    assert steps == []


def test_a_python_that_lacks_something_is_not_changed(run, steps, with_torch, capsys):
    """A .venv gets what is missing, and imports the rest from that Python."""
    python = run.find_python("test")
    assert Path(python).parent.parent == run.VENV
    assert list(installed(steps)) == [["pytest-xdist"], []]
    assert all(command[0] == python for _, command in steps if "pip" in command)
    assert next(path for path in sys.path if path.endswith("site-packages")) in run.lent_to(run.VENV)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"./run: making {run.VENV}")
    assert said[0].endswith(f"with the torch of {sys.prefix})")
    assert said[1] == "./run: adding to .venv: pytest-xdist"
    steps.clear()
    assert run.find_python("test") == python
    assert steps == []


def test_here_changes_this_python_and_says_so(run, steps, with_torch, capsys):
    assert run.find_python("test", here=True) == sys.executable
    ((_, command),) = steps
    assert command[0] == sys.executable
    assert capsys.readouterr().err == f"./run: adding to {sys.prefix}: pytest-xdist\n"


def test_here_is_an_option_of_run(run, monkeypatch):
    seen = []
    monkeypatch.setattr(run, "find_python", lambda *x: seen.append(x) or "python")
    monkeypatch.setattr(run.subprocess, "call", lambda line, **_: seen.append(line) or 0)
    assert run.main(["--here", "fuzz", "--here"]) == 0
    assert seen == [("fuzz", ["--here"], True), ["python", "-m", "tilewise_lab", "fuzz", "--here"]]


def test_its_own_venv_is_completed(run, steps, with_torch, monkeypatch):
    """Also where ./run is run by the Python in it."""
    monkeypatch.setattr(sys, "prefix", str(run.VENV))
    assert run.find_python("test") == sys.executable
    assert list(installed(steps)) == [["pytest-xdist"]]


def test_a_venv_of_somebody_else_is_left_alone(run, steps, monkeypatch):
    monkeypatch.setattr(run, "fitting_torch", lambda pyproject: False)
    (run.VENV / "bin").mkdir(parents=True)
    (run.VENV / "bin" / "python").touch()
    with pytest.raises(run.SetupError) as error:
        run.find_python("demo")
    assert "was not made by ./run" in error.value.output
    assert steps == []


def test_offline_goes_on_without_what_is_not_vital(run, with_torch, monkeypatch, capsys):
    def fail(name, command):
        raise run.SetupError(name, "ERROR: no network")

    monkeypatch.setattr(run, "step", fail)
    assert run.find_python("test") == sys.executable
    assert "without pytest-xdist (ERROR: no network)" in capsys.readouterr().err
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(run.SetupError):
        run.find_python("test")


@pytest.mark.parametrize("gpu", [False, True])
def test_a_fresh_machine_gets_what_each_command_needs(run, steps, monkeypatch, gpu):
    monkeypatch.setattr(run, "fitting_torch", lambda pyproject: False)
    monkeypatch.setattr(run, "has_gpu", lambda: gpu)
    python = run.find_python("demo")
    assert Path(python).parent.parent == run.VENV
    making, torch, tools, package = (command for _, command in steps)
    assert making[1:] == ["-m", "venv", str(run.VENV)]
    assert ("torch>=2.10" if gpu else "torch==2.13.0") in torch
    assert (run.CPU_WHEELS in torch) is (not gpu)
    assert {run.name_of(word) for word in tools if "=" in word or "<" in word} - {"--retries"} >= {"rich"}
    assert not any(word.startswith(("torch", "triton", "sphinx", "pytest")) for word in tools)
    assert package[-3:] == ["--no-deps", "--editable", str(run.ROOT)]

    steps.clear()
    assert run.find_python("demo") == python
    assert steps == []
    assert run.find_python("test") == python
    ((_, tests),) = steps
    assert any(word.startswith("pytest>=") for word in tests)
    assert any(word.startswith("triton") for word in tests) is (not gpu)
    assert not any(word.startswith("torch=") for word in tests)


def test_an_interrupted_or_old_venv_is_made_again(run, steps, monkeypatch):
    monkeypatch.setattr(run, "fitting_torch", lambda pyproject: False)
    run.VENV.mkdir()
    (run.VENV / ".tilewise").touch()
    for _ in range(2):
        run.find_python("demo")
        assert "venv" in steps[0][1]
        steps.clear()
        (run.VENV / "pyvenv.cfg").write_text("home = somewhere\nversion = 3.1.4\n")
        assert run.version_in(run.VENV) == "3.1.4"


def test_the_package_is_installed_where_its_build_backend_can_be_had(run, steps, monkeypatch, capsys):
    record = run.step

    def fail(name, command):
        if "--editable" in command:
            raise run.SetupError(name, "ERROR: no hatchling")
        record(name, command)

    monkeypatch.setattr(run, "fitting_torch", lambda pyproject: False)
    monkeypatch.setattr(run, "step", fail)
    run.find_python("demo")
    assert "tilewise is not installed in .venv (ERROR: no hatchling)" in capsys.readouterr().err


def test_examples_with_hugging_faces_models_need_them(run):
    (run.ROOT / "examples/hf.py").write_text("import transformers")
    assert any(name.startswith("transformers") for name in run.needs("example", ["hf", "--steps", "2"]))
    assert not any(name.startswith("transformers") for name in run.needs("example", ["train_gpt"]))


@pytest.mark.parametrize(
    ("command", "tool"), [("notebook", "jupyterlab"), ("package", "twine"), ("lint", "mypy"), ("docs", "sphinx")]
)
def test_tools_are_installed_when_they_are_first_wanted(run, steps, monkeypatch, command, tool):
    monkeypatch.setattr(run, "fitting_torch", lambda pyproject: False)
    monkeypatch.setattr(run, "missing", lambda requirements: requirements)
    run.find_python("python")
    assert not any(tool in name for names in installed(steps) for name in names)
    steps.clear()
    run.find_python(command)
    ((_, line),) = steps
    assert any(word.startswith(tool) for word in line)


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
        ([], ["-m", "not slow and not nightly"]),
        (["-k", "window"], ["-m", "not slow and not nightly", "-k", "window"]),
        (["--slow", "-x"], ["-m", "not nightly", "-x"]),
        (["--slow", "--all"], ["--all"]),
        (["-m", "slow"], ["-m", "slow"]),
        (["tests/test_run.py::test_plan"], ["tests/test_run.py::test_plan"]),
    ],
)
def test_slow_and_nightly_tests_are_left_out_unless_wanted(run, steps, typed, given):
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
