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


# The layers of the library, the highest first; a line may hold several. A module imports from its own unit and from
# lower lines, at once or inside its functions. The units of one line do not import each other.
LAYERS = (
    "tilewise",
    "compat",
    "integrations",
    "distributed nn sparse",
    "mla",
    "api debug kv_cache warmup kv_warmup",
    "autograd",
    "ops",
    "plan_cache",
    "validation",
    "options merge",
    "backends.registry",
    "backends.hopper backends.triton backends.reference",
    "backends.protocol",
    "backends.common backends",
    "mods",
    "kv_request",
    "kv_formats",
    "request",
    "errors torch_internals backends.common.device version",
)
RANK = {unit: rank for rank, line in enumerate(LAYERS) for unit in line.split()}

# Units that not every higher layer may import.
ONLY_FOR = {
    "backends.hopper": "backends.registry sparse.topk sparse.block_ops",
    "backends.triton": "backends.registry",
    "backends.reference": "backends.registry autograd debug",  # torch differentiates the reference itself
    "backends.common": "backends.registry backends.hopper backends.triton backends.reference"
    " warmup kv_warmup distributed.calls sparse.topk sparse.block_ops sparse.nsa sparse.packed"
    " sparse.moba",
    "backends.common.device": "backends.common backends.hopper backends.triton",
}

# Packages that are not torch's or Python's own, and who imports them: at once, or, after a ~, inside functions alone.
OUTSIDE = {
    "triton": "backends.common backends.common.device backends.hopper backends.triton warmup~",
    "cuda": "backends.common.launch",
    "transformers": "integrations",
    "diffusers": "integrations.diffusers",
    "vllm": "integrations.vllm_backend integrations.vllm~",
    "sglang": "integrations.sglang_backend integrations.sglang~",
}

# The laboratory imports the library, and these; the library does not import the laboratory,
LAB_OUTSIDE = ("triton", "numpy", "rich", "matplotlib", "sphinx", "babel")
# except for what a call costs: `explain`, `explain_kv` and `Plan.simulate` import it when they are called.
LAB_INSIDE = {"tilewise": "lab.costs", "distributed.plan": "lab.costs"}


class Import(NamedTuple):
    """`lazy`: inside a function, or for types alone."""

    target: str
    lazy: bool
    line: int


def short(name: str) -> str:
    """A module as the rules name it: `tilewise.ops.dense` is ops.dense, `tilewise_lab.cli` lab.cli; others by their
    first name."""
    top, _, rest = name.partition(".")
    if top == "tilewise_lab":
        return f"lab.{rest}" if rest else "lab"
    if top == "tilewise":
        return rest or "tilewise"
    return f"{top}, outside the package," if top in RANK else top


def long(module: str) -> str:
    """The reverse."""
    if module == "lab" or module.startswith("lab."):
        return "tilewise_lab" + module.removeprefix("lab")
    return module if module == "tilewise" else f"tilewise.{module}"


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return short(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


MODULES = {module_name(path): path for package in PACKAGES for path in sorted((SRC / package).rglob("*.py"))}


def is_in(module: str, unit: str) -> bool:
    return module == unit or module.startswith(unit + ".")


def unit_of(module: str) -> str | None:
    """The smallest unit of the layers that covers a module."""
    covering = [unit for unit in RANK if is_in(module, unit)]
    return max(covering, key=len) if covering else None


def imports(module: str, source: str, is_package: bool) -> Iterator[Import]:
    tree = ast.parse(source)
    lazy = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        or (isinstance(outer, ast.If) and ast.unparse(outer.test) == "TYPE_CHECKING")
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = list(from_import(node, module, is_package))
        else:
            continue
        for name in names:
            yield Import(short(name), id(node) in lazy, node.lineno)


def from_import(node: ast.ImportFrom, module: str, is_package: bool) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        package = long(module).split(".")
        package = package[: len(package) - node.level + is_package]
        base = ".".join([*package, *([base] if base else [])])
    for alias in node.names:  # `from tilewise import spec` imports a module, `from tilewise import attention` a name
        full = f"{base}.{alias.name}"
        yield full if short(full) in MODULES else base


def is_allowed(module: str, target: str, lazy: bool) -> bool:
    if target in sys.stdlib_module_names or target in ("torch", "__future__"):
        return True
    unit, wanted = unit_of(module), unit_of(target)
    if is_in(module, "lab"):
        return is_in(target, "lab") or wanted is not None or target in LAB_OUTSIDE
    assert unit is not None, f"{module} has no line in LAYERS"
    if is_in(target, "lab"):
        return lazy and module in LAB_INSIDE and is_in(target, LAB_INSIDE[module])
    if wanted is None:
        listed = OUTSIDE.get(target, "").split()
        return any(is_in(module, entry.rstrip("~")) and (lazy or not entry.endswith("~")) for entry in listed)
    if unit == wanted:
        return True
    if wanted in ONLY_FOR and not any(is_in(module, entry) for entry in ONLY_FOR[wanted].split()):
        return False
    return RANK[unit] < RANK[wanted]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    path = MODULES[module]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {target}{' lazily' if lazy else ''}"
        for target, lazy, line in imports(module, path.read_text(), path.name == "__init__.py")
        if not is_allowed(module, target, lazy)
    ]
    assert not wrong, "\n".join(wrong)


def test_layers_and_exceptions_exist():
    """A line of the rules names something that is there, and is needed."""
    arrows = {
        (module, target)
        for module, path in MODULES.items()
        for target, *_ in imports(module, path.read_text(), path.name == "__init__.py")
    }
    for unit in RANK:
        assert any(is_in(module, unit) for module in MODULES), unit
    assert all(any(a == module and is_in(b, wanted) for a, b in arrows) for module, wanted in LAB_INSIDE.items())
    for table in (ONLY_FOR, OUTSIDE):
        for wanted, listed in table.items():
            for entry in listed.split():
                assert any(is_in(a, entry.rstrip("~")) and is_in(b, wanted) for a, b in arrows), f"{entry}: {wanted}"


@pytest.mark.parametrize(
    ("module", "source", "verdict"),
    [
        ("request", "import math", True),
        ("request", "from tilewise import api", False),
        ("request", "from . import merge", False),
        ("request", "from .errors import AttentionError", True),
        ("errors", "from .torch_internals import constant", False),
        ("api", "from .autograd import attend", True),
        ("api", "from .kv_cache import attention_kv", False),
        ("autograd", "from .api import attention", False),
        ("ops.dense", "from ..backends.registry import choose", True),
        ("ops.dense", "from tilewise.backends.triton import forward", False),
        ("ops.dense", "from tilewise.backends.common import launch", False),
        ("ops.dense", "def f():\n    from ..autograd import attend", False),
        ("plan_cache", "from .backends.hopper import KV", False),
        ("backends.registry", "from .hopper import KV", True),
        ("backends.triton.forward", "from ..common.device.mask import band", True),
        ("backends.triton.forward", "from ..hopper.forward import attend", False),
        ("backends.hopper.forward", "from ..triton.forward import attend", False),
        ("backends.hopper.forward", "from ..reference import tiled", False),
        ("backends.common.launch", "from ..protocol import Runner", False),
        ("backends.common.launch", "from ..registry import choose", False),
        ("backends.common.launch", "from ...plan_cache import plans", False),
        ("backends.common.launch", "from ...request import Spec", True),
        ("backends.common.device.mask", "from ....request import Spec", False),
        ("backends.common.device.mask", "from ..launch import Launch", False),
        ("backends.reference.tiled", "import triton", False),
        ("backends.registry", "import triton", False),
        ("warmup", "from .backends.common.tiles import Tile", True),
        ("warmup", "from .backends.hopper.tile_table import widths", False),
        ("warmup", "import triton", False),
        ("warmup", "def f():\n    import triton", True),
        ("warmup", "from tilewise_lab.bench import cases", False),
        ("tilewise", "from tilewise_lab.costs.explain import explain", False),
        ("tilewise", "def f():\n    from tilewise_lab.costs.explain import explain", True),
        ("tilewise", "if TYPE_CHECKING:\n    from tilewise_lab.costs.explain import explain", True),
        ("tilewise", "def f():\n    from tilewise_lab.bench import cases", False),
        ("distributed.api", "def f():\n    from tilewise_lab.costs.explain import explain", False),
        ("distributed.plan", "def f():\n    from tilewise_lab.costs.explain import explain", True),
        ("distributed.calls", "from ..backends.common.merge_kernel import merge", True),
        ("distributed.plan", "from ..backends.common.merge_kernel import merge", False),
        ("compat.flex", "from ..api import attention", True),
        ("api", "from .compat.flex import flex_attention", False),
        ("api", "import triton", False),
        ("api", "import tilewise_lab", False),
        ("api", "import numpy", False),
        ("api", "from cuda.bindings import driver", False),
        ("integrations.vllm", "import vllm", False),
        ("integrations.vllm", "def f():\n    import vllm", True),
        ("merge", "import bench.roofline", False),
        ("lab.demo.page", "import tilewise", True),
        ("lab.demo.page", "from tilewise.ops.dense import chosen", True),
        ("lab.bench.judge", "import bench.roofline", False),
        ("lab.bench.judge", "from .cases import Case", True),
    ],
)  # fmt: skip
def test_the_rules_can_tell(module, source, verdict):
    found = [is_allowed(module, i.target, i.lazy) for i in imports(module, source, False)]
    assert all(found) is verdict


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
    above = {"merge": {"request"}, "backends.registry": {"request"}, "backends.common.tiles": set()}
    arrows = above | {"request": arrows_of("request", source.format("merge"), False)}
    assert circles(arrows) == [("merge", "request")]
    arrows = above | {"request": arrows_of("request", source.format("backends.common.tiles"), False)}  # imports nothing
    assert not circles(arrows)
    assert circles(inside("tilewise", arrows)) == [("backends", "request")]


def strings(source: str) -> Iterator[tuple[str, int]]:
    """Text that a program may act on: no docstrings."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value, node.lineno


def test_hopper_is_named_in_its_folder_and_in_the_registry_alone():
    """A folder and an entry in the registry make a backend: nothing else asks for it by name. ("triton" is a package's
    name too.)"""
    found = [
        f"{module}:{line} {text!r}"
        for module, path in MODULES.items()
        if not module.startswith(("lab", "backends.hopper")) and module != "backends.registry"
        for text, line in strings(path.read_text())
        if "hopper" in text
    ]
    assert not found, "\n".join(found)


INTERNALS = "torch_internals"  # the only module that uses private names of torch
MOST_PRIVATE = 12
OTHERS_PRIVATE = {  # private names of other libraries
    "integrations.diffusers": {"_AttentionBackendRegistry"},
    "integrations.transformers": {"_attn_implementation", "_flash_with_kvcache_fn", "_loaded_implementation"},
    "integrations.vllm_backend": {"_k_scale", "_v_scale"},
    "backends.hopper.gluon_compat": {"_convert_to_ir_values"},
}


def private_names(source: str) -> set[str]:
    """Names with one underscore at their front that a module reads from something other than self: attributes, and what
    it imports or passes to getattr, hasattr or `private`, whose whole argument is one name."""
    found, whole = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                found.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
            full = [start + name.name for name in node.names]
            found |= {part for name in full if name.startswith("torch.") for part in name.split(".")}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            given = [x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
            if node.func.id in ("getattr", "hasattr"):
                found |= set(given)
            elif node.func.id == "private":
                whole |= set(given)
    return whole | {
        name for name in found if name.startswith("_") and not name.startswith("__") and not name.endswith("_")
    }


def own_names(source: str) -> set[str]:
    """What a module defines: functions, classes, fields and attributes of self."""
    found = {"_replace", "_asdict", "_fields", "_make"}  # named tuples
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and node.value == "_tilewise":
            found.add("_tilewise")  # an attribute that compat.flex sets on the user's function
    return found


def test_private_names_of_torch_are_few_and_in_one_file():
    library = {module: path.read_text() for module, path in MODULES.items() if not is_in(module, "lab")}
    own = set().union(*map(own_names, library.values()))
    for module, source in library.items():
        found = private_names(source) - own - OTHERS_PRIVATE.get(module, set())
        if module == INTERNALS:
            assert len(found) <= MOST_PRIVATE, sorted(found)
        else:
            assert not found, f"{module}: {sorted(found)} belong in {INTERNALS}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch._C._len_torch_dispatch_stack()", {"_C", "_len_torch_dispatch_stack"}),
        ("x._version", {"_version"}),
        ("from torch.utils._python_dispatch import x", {"_python_dispatch"}),
        ("from torch.nn.attention import _impl", {"_impl"}),
        ("import torch._dynamo", {"_dynamo"}),
        ('getattr(x, "_ragged_idx", 1)', {"_ragged_idx"}),
        ('private("_C._functorch.is_batchedtensor", None)', {"_C._functorch.is_batchedtensor"}),
        ("self._kept; cls._made; x.__class__; names._value2member_map_; from_x = x.y", set()),
    ],
)
def test_private_names_are_seen(source, found):
    assert private_names(source) == found


KERNELS = ("backends.common", "backends.hopper", "backends.triton")


# A message of an error may be broken into lines of 80 columns.
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("module", [name for name, path in MODULES.items() if ">>> " in path.read_text()])
def test_examples_in_docstrings_are_true(module):
    if module.startswith(KERNELS):
        pytest.importorskip("triton")
    assert doctest.testmod(import_module(long(module)), optionflags=FLAGS).failed == 0


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
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    results = runner.run(examples, clear_globs=False)  # what torch has compiled looks at them later
    assert results.attempted > 2
    assert results.failed == 0
    for name in list(sys.modules):
        if name.partition(".")[0] in installed:  # by the example that says how
            monkeypatch.delitem(sys.modules, name)


PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in ("bench/README.md", "CONTRIBUTING.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_code_of_the_pages_fits_80_columns(path):
    blocks = re.findall(r"^(```+)[^\n]*\n(.*?)^\1$", path.read_text(encoding="utf-8"), re.M | re.S)
    assert [line for _, block in blocks for line in block.splitlines() if len(line) > 80] == []


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
