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
import torch

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PACKAGES = ("tilewise", "tilewise_lab")


class Rule(NamedTuple):
    """What the modules of a unit may import: when they are imported, and, besides, inside their functions."""

    eager: str = ""
    lazy: str = ""


# A line covers a module, or a package and all below it that has no line of its own; "x.*" is below x only.
# Free for all: the standard library and torch. The library is named without `tilewise.`; `lab` is tilewise_lab, and
# "tilewise" the library as its users see it. No line of the library may name the laboratory.
RULES = {
    "tilewise": Rule("api cache kv_spec merge mods spec costs compat integrations"),
    "api": Rule("spec checks ops dispatch"),
    "cache": Rule("cache checks dispatch kv_spec mods ops.flops spec torch_private"),
    "cache.memory": Rule("dispatch.memory kv_spec torch_private"),
    "checks": Rule("checks spec mods torch_private"),
    "ops": Rule("ops spec dispatch torch_private", lazy="ops"),
    "ops.dtensor": Rule("mods spec torch_private"),
    "dispatch": Rule(
        "dispatch.memory spec torch_private kernels.gpu kernels.profile kernels.hopper.limits kernels.hopper.profile"
        " kernels.portable.limits kernels.portable.profile kernels.portable.kv_profile"
    ),
    "dispatch.memory": Rule("spec torch_private"),
    "merge": Rule("spec"),
    "spec": Rule("torch_private"),
    "kv_spec": Rule("spec"),
    "torch_private": Rule(),
    "mods": Rule("mods spec torch_private"),
    "reference": Rule("reference merge spec mods"),
    "reference.threads": Rule("torch_private"),
    "reference.kv": Rule("reference kv_spec mods spec"),
    "kernels": Rule(),
    "kernels.gpu": Rule(),
    "kernels.profile": Rule(),
    "kernels.tile": Rule("kernels.tile.tuples triton"),
    "kernels.tile.tuples": Rule("triton"),
    "kernels.tile.product": Rule("kernels.tile.memory triton"),
    "kernels.tile.score": Rule("kernels.tile.sight triton"),
    "kernels.mods": Rule("mods triton"),
    "kernels.triton_private": Rule("triton"),
    "kernels.launch": Rule("kernels.gpu torch_private triton"),
    "kernels.compiling": Rule("kernels.offline kernels.triton_private"),
    "kernels.cuda": Rule(),
    "kernels.offline": Rule("kernels.gpu", lazy="spec triton"),
    "kernels.replay": Rule("kernels.compiling kernels.cuda kernels.launch kernels.triton_private spec torch_private"),
    "kernels.shapes": Rule("kernels.tile spec triton"),
    "kernels.terms": Rule("kernels.gpu kernels.launch kernels.mods kernels.tile mods spec"),
    "kernels.overlap": Rule("triton"),
    "kernels.join": Rule("kernels.launch kernels.tile triton"),
    "kernels.portable": Rule("kernels.tile kernels.overlap kernels.portable triton"),
    "kernels.portable.limits": Rule("spec kernels.gpu"),
    "kernels.portable.tiles": Rule(),
    "kernels.portable.profile": Rule("kernels.gpu kernels.profile kernels.portable.limits kernels.portable.tiles"),
    "kernels.portable.options": Rule("kernels spec"),
    "kernels.portable.repair_launch": Rule("kernels"),
    "kernels.portable.backward_launch": Rule("kernels spec"),
    "kernels.portable.launch": Rule("kernels spec triton"),
    "kernels.portable.kv_tiles": Rule("kernels.portable.tiles"),
    "kernels.portable.kv_profile": Rule("kernels.gpu kernels.profile kernels.portable.kv_tiles"),
    "kernels.portable.kv_launch": Rule("kernels kv_spec spec torch_private triton"),
    "kernels.portable.sinks": Rule("kernels spec triton"),
    "kernels.portable.term_gradients": Rule("kernels mods spec"),
    "kernels.hopper": Rule("kernels.tile kernels.overlap kernels.portable.backward kernels.hopper triton"),
    "kernels.hopper.careful": Rule("kernels.launch kernels.shapes kernels.tile"),
    "kernels.hopper.descriptors": Rule("kernels.hopper kernels.shapes spec"),
    "kernels.hopper.limits": Rule("mods spec torch_private kernels.gpu kernels.portable.tiles"),
    "kernels.hopper.tiles": Rule(),
    "kernels.hopper.kv_launch": Rule("kernels kv_spec"),
    "kernels.hopper.profile": Rule(
        "kernels.gpu kernels.profile kernels.hopper.limits kernels.hopper.tiles kernels.portable.profile"
        " kernels.portable.tiles"
    ),
    "kernels.hopper.launch": Rule("kernels spec torch_private"),
    "kernels.hopper.backward_launch": Rule("kernels spec"),
    "costs": Rule("costs checks dispatch mods spec kernels.gpu kernels.offline kernels.profile", lazy="triton"),
    "costs.kv": Rule("costs cache checks dispatch kv_spec mods spec"),
    "costs.warm": Rule(
        "checks dispatch spec kernels.gpu kernels.offline", lazy="kernels.offline kernels.triton_private triton"
    ),
    "integrations": Rule("integrations api checks mods spec"),
    "integrations.flash_registry": Rule("api checks spec"),
    "integrations.hf_masks": Rule("integrations distributed mods spec transformers"),
    "integrations.hf_sharded": Rule("distributed spec"),
    "integrations.transformers": Rule("integrations api checks distributed spec transformers"),
    "integrations.hf_cache": Rule("cache"),
    "integrations.steps": Rule("cache"),
    "integrations.vllm": Rule("checks", lazy="vllm"),
    "integrations.vllm_backend": Rule("integrations mods spec vllm"),
    "integrations.sglang": Rule("checks", lazy="integrations sglang"),
    "integrations.sglang_backend": Rule("integrations spec sglang"),
    "integrations.diffusers": Rule("integrations checks spec diffusers"),
    "compat": Rule("compat api cache checks kv_spec merge mods spec"),
    "distributed": Rule("distributed checks costs dispatch mods spec torch_private"),
    "distributed.rows": Rule("distributed mods spec", lazy="kernels.join"),
    "lab": Rule(),
    "lab.__main__": Rule("lab.cli"),
    "lab.cli": Rule("tilewise spec"),
    "lab.asked": Rule("spec"),
    "lab.clock": Rule(),
    "lab.language": Rule(""),
    "lab.picture": Rule("mods"),
    "lab.progress": Rule("", lazy="rich"),
    "lab.show_mask": Rule("lab.asked lab.picture tilewise mods spec"),
    "lab.machine": Rule("lab.machine spec"),
    "lab.emulator": Rule("lab.emulator", lazy="kernels.hopper kernels.shapes spec"),
    "lab.trace": Rule("lab.asked lab.language lab.trace reference spec tilewise", lazy="rich"),
    "lab.explain": Rule(
        "lab.clock lab.explain lab.language costs", lazy="lab.asked tilewise dispatch kernels.gpu spec triton"
    ),
    "lab.learn": Rule("lab.cli lab.language lab.learn lab.trace spec", lazy="tilewise kernels triton rich matplotlib"),
    "lab.learn.kernels": Rule("kernels.tile triton"),
    "lab.explore": Rule("lab.cli lab.explore lab.plan costs kernels.portable.kv_tiles spec"),
    "lab.explore.hopper": Rule("lab.emulator kernels.hopper spec"),
    "lab.plan": Rule("lab.plan distributed costs spec", lazy="rich"),
    "lab.demo": Rule("lab.asked lab.demo lab.progress tilewise rich", lazy="lab.asked"),
    "lab.bench": Rule(
        "lab.asked lab.bench lab.clock lab.demo lab.explain costs tilewise spec dispatch rich", lazy="matplotlib"
    ),
    "lab.warm": Rule("costs.warm lab.progress spec"),
    "lab.interpreter": Rule("numpy triton"),
    "lab.guard": Rule("numpy triton"),
    "lab.fuzz": Rule("dispatch lab.asked lab.fuzz lab.progress tilewise spec", lazy="lab.interpreter"),
    "lab.docs": Rule(
        "lab.docs lab.language lab.progress lab.learn spec tilewise",
        lazy="lab.explore lab.bench matplotlib sphinx",
    ),
}


class Import(NamedTuple):
    target: str
    lazy: bool
    line: int


def short(name: str) -> str:
    """A module as the rules name it: `tilewise.ops` is ops, `tilewise_lab.cli` lab.cli; others by their top name."""
    top, _, rest = name.partition(".")
    if top == "tilewise_lab":
        return f"lab.{rest}" if rest else "lab"
    if top == "tilewise":
        return rest or "tilewise"
    return f"{top}, outside the package," if top in RULES else top


def long(module: str) -> str:
    """The reverse."""
    if module == "lab" or module.startswith("lab."):
        return "tilewise_lab" + module.removeprefix("lab")
    return module if module == "tilewise" else f"tilewise.{module}"


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return short(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


MODULES = {module_name(path): path for package in PACKAGES for path in sorted((SRC / package).rglob("*.py"))}


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
            yield Import(short(name), id(node) in inside_function, node.lineno)


def from_import(node: ast.ImportFrom, module: str, is_package: bool) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        package = long(module).split(".")
        package = package[: len(package) - node.level + is_package]
        base = ".".join([*package, *([base] if base else [])])
    for alias in node.names:  # `from tilewise import spec` imports a module, `from tilewise import attention` a name
        full = f"{base}.{alias.name}"
        yield full if short(full) in MODULES else base


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
        ("ops", "from tilewise.kernels.portable import forward", False),
        ("dispatch", "from .kernels.portable.launch import forward", False),
        ("kernels.portable.forward", "from ..tile.walk import band", True),
        ("kernels.tile.walk", "from ..portable.forward import attend", False),
        ("kernels.portable.forward", "from ..hopper.forward import attend", False),
        ("kernels.portable.forward", "from ...spec import Spec", False),
        ("kernels.hopper.forward", "from ..tile.walk import band", True),
        ("lab.demo.page", "import tilewise", True),
        ("lab.demo.page", "from tilewise.ops import forward", False),
        ("api", "import triton", False),
        ("api", "import tilewise_lab", False),
        ("costs.cost", "from tilewise_lab.bench import cases", False),
        ("merge", "import bench.roofline", False),
        ("lab.bench.judge", "import bench.roofline", False),
        ("lab.bench.judge", "from .cases import Case", True),
    ],
)
def test_the_rules_can_tell(module, source, verdict):
    rule = RULES[unit_of(module)]
    assert all(allowed(i.target, rule, i.lazy) for i in imports(module, source, False)) is verdict


Arrows = dict[str, set[str]]  # what each imports: when it is imported, inside its functions, or for its types alone


def arrows_of(module: str, source: str, is_package: bool) -> set[str]:
    return {target for target, *_ in imports(module, source, is_package) if target in MODULES} - {module}


ARROWS: Arrows = {
    module: arrows_of(module, path.read_text(), path.name == "__init__.py") for module, path in MODULES.items()
}
FOLDERS = [module for module, path in MODULES.items() if path.name == "__init__.py"]


def circles(arrows: Arrows) -> list[tuple[str, ...]]:
    """Those that lead to one another, each circle once."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        todo = [start]
        while todo:
            new = arrows[todo.pop()] - found
            found |= new
            todo += new
        return found

    far = {name: reached(name) for name in arrows}
    return sorted({tuple(sorted(x for x in far[name] if name in far[x])) for name in arrows if name in far[name]})


def inside(folder: str, arrows: Arrows) -> Arrows:
    """The arrows between the things in a folder: files, and folders with all that is in them."""

    def thing(module: str) -> str | None:
        name, start = long(module), long(folder) + "."
        return name.removeprefix(start).partition(".")[0] if name.startswith(start) else None

    found: Arrows = {}
    for module, targets in arrows.items():
        if (here := thing(module)) is not None:
            found.setdefault(here, set()).update({x for x in map(thing, targets) if x is not None} - {here})
    return found


def test_no_circle_of_files():
    assert not circles(ARROWS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_circle_of_folders(folder):
    assert not circles(inside(folder, ARROWS))


@pytest.mark.parametrize(
    "source",
    ["from .{} import x", "def f():\n    from .{} import x", "if TYPE_CHECKING:\n    from .{} import x"],
    ids=["at once", "in a function", "for types"],
)
def test_circles_are_seen(source):
    above = {"merge": {"spec"}, "kernels.mods": {"spec"}, "kernels.gpu": set()}
    arrows = above | {"spec": arrows_of("spec", source.format("merge"), False)}
    assert circles(arrows) == [("merge", "spec")]
    arrows = above | {"spec": arrows_of("spec", source.format("kernels.gpu"), False)}  # which imports nothing itself
    assert not circles(arrows)
    assert circles(inside("tilewise", arrows)) == [("kernels", "spec")]


BACKENDS = {"hopper": "kernels.hopper", "portable": "kernels.portable"}


def strings(source: str) -> Iterator[tuple[str, int]]:
    """Text that a program may act on: no docstrings."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value, node.lineno


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_known_to_its_folder_and_to_the_table_alone(name):
    """One folder and one row make a backend; the folder of another may use its kernels."""
    found = []
    for module, path in MODULES.items():
        if module.startswith(("lab", "kernels.hopper", BACKENDS[name])) or module == "dispatch":
            continue
        source = path.read_text()
        found += [f"{module}:{line} {text!r}" for text, line in strings(source) if name in text]
        found += [
            f"{module}:{line} imports {target}"
            for target, _, line in imports(module, source, path.name == "__init__.py")
            if target.startswith(BACKENDS[name])
        ]
    assert not found, "\n".join(found)


NO_EXAMPLES = (
    "kernels", "lab.interpreter", "lab.learn.kernels", "lab.explore.hopper", "lab.__main__",
    "integrations.vllm_backend", "integrations.sglang_backend",
)  # fmt: skip


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith(NO_EXAMPLES)])
def test_examples_in_docstrings_are_true(module):
    assert doctest.testmod(import_module(long(module)), optionflags=doctest.ELLIPSIS).failed == 0


def test_import_stays_light():
    """In a fresh process, `import tilewise` brings in torch and tilewise, and nothing else that is not Python's own."""
    script = (
        "import sys, torch; before = set(sys.modules); import tilewise;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=SRC)
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
    places = (document.parent, ROOT, SRC, *(SRC / package for package in PACKAGES))
    made_by_users = set((ROOT / ".gitignore").read_text().split())
    gone = [name for name in named if name not in made_by_users and not any((p / name).exists() for p in places)]
    assert not gone


# Translations have the code of the original, to the letter: tests/tilewise_lab/docs compares them.
WITH_EXAMPLES = [
    path.relative_to(ROOT).as_posix()
    for path in DOCUMENTS
    if ">>> " in path.read_text() and "docs/zh/" not in path.as_posix()
]


@pytest.mark.parametrize("document", WITH_EXAMPLES)
def test_examples_in_documents_are_true(document, monkeypatch):
    if "hugging-face" in document:
        pytest.importorskip("transformers", reason="transformers is not installed: pip install tilewise[hf]")
    if "from-sdpa" in document and not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        pytest.skip("torch 2.10 does not put its own flash attention back")
    installed = [name for name in ("flash_attn", "flash_attn_interface") if name not in sys.modules]
    text = (ROOT / document).read_text(encoding="utf-8")
    examples = doctest.DocTestParser().get_doctest(text, {}, document, document, 0)
    results = doctest.DocTestRunner().run(examples, clear_globs=False)  # what torch has compiled looks at them later
    assert results.attempted > 2
    assert results.failed == 0
    for name in list(sys.modules):
        if name.partition(".")[0] in installed:  # by the example that says how
            monkeypatch.delitem(sys.modules, name)


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
