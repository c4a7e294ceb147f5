"""The shape of the package, as rules: who may import whom, what stays unimported, what the documents promise."""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "tilewise"


class Rule(NamedTuple):
    """What the modules of a unit may import: when they are imported, and, besides, inside their functions."""

    eager: str = ""
    lazy: str = ""


# A line covers a module, or a package and all below it that has no line of its own; "x.*" is below x only.
# Free for all: the standard library and torch. "tilewise" is the package as its users see it.
RULES = {
    "tilewise": Rule("api config dropout merge mods spec perf", lazy="reference"),
    "api": Rule("spec mods ops dropout"),
    "ops": Rule("spec dispatch", lazy="reference kernels"),
    "dispatch": Rule("spec config"),
    "spec": Rule(),
    "config": Rule(),
    "merge": Rule(),
    "dropout": Rule("spec"),
    "mods": Rule("mods spec"),
    "reference": Rule("reference merge spec mods dropout"),
    "kernels": Rule("kernels.launch kernels.terms"),
    "kernels.*": Rule("kernels.tile kernels.mods config triton"),
    "kernels.mods": Rule("mods triton"),
    "kernels.replay": Rule("spec triton"),
    "kernels.sums": Rule("kernels.tile kernels.backward triton"),
    "kernels.launch": Rule("kernels config dispatch dropout mods spec triton"),
    "kernels.terms": Rule("kernels mods spec triton"),
    "kernels.hopper.launch": Rule("kernels config spec triton"),
    "kernels.hopper.backward_launch": Rule("kernels config spec triton"),
    "emulator": Rule("emulator", lazy="kernels.hopper spec"),
    "kernels.hopper": Rule(
        "kernels.tile kernels.mods kernels.forward kernels.backward kernels.launch kernels.terms kernels.hopper config"
        " spec triton"
    ),
    "perf": Rule("perf mods spec config dispatch", lazy="api kernels triton"),
    "trace": Rule("trace reference spec", lazy="rich"),
    "machine": Rule("machine spec"),
    "learn": Rule("learn trace spec", lazy="tilewise kernels triton rich matplotlib"),
    "learn.kernels": Rule("kernels.tile triton"),
    "docs": Rule("docs tilewise markdown_it pygments", lazy="explore learn bench"),
    "explore": Rule("explore trace machine perf mods reference spec"),
    "explore.hopper": Rule("emulator kernels.hopper spec"),
    "perf.check": Rule("perf", lazy="tilewise dispatch spec bench triton"),
    "bench": Rule("bench demo perf tilewise spec dispatch rich", lazy="matplotlib"),
    "demo": Rule("demo tilewise rich"),
    "show_mask": Rule("tilewise mods spec"),
    "cli": Rule("tilewise"),
    "__main__": Rule("cli"),
}


class Import(NamedTuple):
    target: str
    lazy: bool
    line: int


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "tilewise"


MODULES = {module_name(path): path for path in sorted(SRC.rglob("*.py"))}


def unit_of(module: str) -> str:
    """The longest line of the table that covers a module."""
    covering = [unit for unit in RULES if module == unit or module.startswith(unit.removesuffix(".*") + ".")]
    assert covering, f"{module} has no line in RULES: say there what it may import"
    return max(covering, key=len)


def imports(module: str, source: str, is_package: bool) -> Iterator[Import]:
    tree = ast.parse(source)
    inside_function = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = list(from_import(node, module, is_package))
        else:
            continue
        for name in names:
            yield Import(internal(name), id(node) in inside_function, node.lineno)


def from_import(node: ast.ImportFrom, module: str, is_package: bool) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        package = ["tilewise", *(part for part in module.split(".") if module != "tilewise")]
        package = package[: len(package) - node.level + is_package]
        base = ".".join([*package, *([base] if base else [])])
    for alias in node.names:  # `from tilewise import spec` imports a module, `from tilewise import attention` a name
        full = f"{base}.{alias.name}"
        yield full if full.removeprefix("tilewise.") in MODULES else base


def internal(name: str) -> str:
    """Modules of the package without its name; anything else by its top-level name."""
    if name == "tilewise" or name.startswith("tilewise."):
        return name.removeprefix("tilewise.")
    top = name.partition(".")[0]
    return f"{top}, outside the package," if top in RULES else top


def allowed(target: str, rule: Rule, lazy: bool) -> bool:
    if target in sys.stdlib_module_names or target in ("torch", "__future__"):
        return True
    listed = (rule.eager + " " + rule.lazy if lazy else rule.eager).split()
    return any(target == entry or target.startswith(entry + ".") for entry in listed if entry != "tilewise") or (
        target == "tilewise" and "tilewise" in listed
    )


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    path = MODULES[module]
    unit = unit_of(module)
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {target}{' lazily' if lazy else ''}; {unit} may not"
        for target, lazy, line in imports(module, path.read_text(), path.name == "__init__.py")
        if not allowed(target, RULES[unit], lazy)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source", "verdict"),
    [
        ("spec", "import math", True),
        ("spec", "from tilewise import api", False),
        ("spec", "from . import merge", False),
        ("ops", "from tilewise.kernels import forward", False),
        ("ops", "def f():\n    from .kernels import forward", True),
        ("kernels.forward", "from .tile import band", True),
        ("kernels.forward", "from .backward import grad", False),
        ("kernels.forward", "from ..spec import Spec", False),
        ("kernels.hopper.forward", "from ..tile import band", True),
        ("demo.page", "import tilewise", True),
        ("demo.page", "from tilewise.ops import forward", False),
        ("api", "import triton", False),
        ("merge", "import bench.roofline", False),
        ("bench.judge", "import bench.roofline", False),
        ("bench.judge", "from .cases import Case", True),
    ],
)
def test_the_rules_can_tell(module, source, verdict):
    rule = RULES[unit_of(module)]
    assert all(allowed(i.target, rule, i.lazy) for i in imports(module, source, False)) is verdict


NO_EXAMPLES = ("kernels", "learn.kernels", "explore.hopper", "__main__")


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith(NO_EXAMPLES)])
def test_examples_in_docstrings_are_true(module):
    name = "tilewise" if module == "tilewise" else f"tilewise.{module}"
    assert doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


def test_import_stays_light():
    """In a fresh process, `import tilewise` brings in torch and tilewise, and nothing else that is not Python's own."""
    script = (
        "import sys, torch; before = set(sys.modules); import tilewise;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=SRC.parent)
    extra = set(loaded.stdout.split()) - set(sys.stdlib_module_names)
    assert extra <= {"tilewise", "torch"}
    assert "tilewise" in extra


def test_triton_is_no_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = chain(project["dependencies"], *project["optional-dependencies"].values())
    assert not [requirement for requirement in asked if requirement.startswith("triton")]


def committed() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


DOCUMENTS = [path for path in committed() if path.suffix == ".md"]
MENTION = re.compile(r"`(\.?[\w-]+(?:/[\w.-]+)*(?:\.(?:py|md|toml|html|json|sh)|/))`|\]\((?!\w+:)([^)#]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_name_files_that_exist(document):
    named = [a or b for a, b in MENTION.findall(document.read_text())]
    places = (document.parent, ROOT, SRC)
    made_by_users = set((ROOT / ".gitignore").read_text().split())
    gone = [name for name in named if name not in made_by_users and not any((p / name).exists() for p in places)]
    assert not gone


@pytest.mark.parametrize("document", ["README.md", "docs/mods.md"])
def test_examples_in_documents_are_true(document):
    results = doctest.testfile(str(ROOT / document), module_relative=False)
    assert results.attempted > 5
    assert results.failed == 0


def test_mentions_are_found():
    text = "see `src/tilewise/api.py`, `bench/` and [this](docs/x.md), not `q.dtype`, `a/b` or [that](https://a.b/c.md)"
    assert [a or b for a, b in MENTION.findall(text)] == ["src/tilewise/api.py", "bench/", "docs/x.md"]


# The home of a person or a build on some machine; the lookbehind leaves URLs and relative paths alone.
MACHINE_PATH = re.compile(r"(?<![\w.~)}-])/(?:work|root|home|Users|tmp|opt|mnt)/[\w.-]+")


def test_no_machine_paths():
    found = []
    for path in committed():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in MACHINE_PATH.finditer(text)]
    assert not found


@pytest.mark.parametrize(
    ("text", "is_machine"),
    [("see {}ann/x", True), ('"{}ann"', True), ("https://example.org{}page", False), ("src{}x", False)],
)
def test_machine_paths_are_told_from_urls(text, is_machine):
    assert bool(MACHINE_PATH.search(text.format("/home/"))) is is_machine
