"""The shape of the package, as rules: which module imports which, what `import tilewise` imports, what documents name.

One test is one rule. It reports everything that breaks the rule, a line each.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PACKAGES = ("tilewise", "tilewise_lab")


class Layers(NamedTuple):
    """The rules for imports.

    lines: the units of the library, the highest first; a line may hold several. A module imports from its own unit and
        from lower lines, inside functions too. The units of one line do not import each other.
    only_for: units that only the listed higher units may import.
    outside: packages other than torch and Python's own, and the units that import them; with a ~, only in functions.
    lab_outside: the packages that the laboratory may import. It may import all of the library.
    lab_inside: modules of the library that import a part of the laboratory, inside functions.
    """

    lines: tuple[str, ...]
    only_for: Mapping[str, str]
    outside: Mapping[str, str]
    lab_outside: tuple[str, ...]
    lab_inside: Mapping[str, str]

    @property
    def rank(self) -> dict[str, int]:
        return {unit: rank for rank, line in enumerate(self.lines) for unit in line.split()}

    def unit_of(self, module: str) -> str | None:
        """The smallest unit that covers a module."""
        return max((unit for unit in self.rank if is_in(module, unit)), key=len, default=None)

    def allow(self, module: str, target: str, lazy: bool) -> bool:
        if target in sys.stdlib_module_names or target in ("torch", "__future__"):
            return True
        unit, wanted = self.unit_of(module), self.unit_of(target)
        if is_in(module, "lab"):
            return is_in(target, "lab") or wanted is not None or target in self.lab_outside
        if is_in(target, "lab"):
            return lazy and module in self.lab_inside and is_in(target, self.lab_inside[module])
        if unit is None:
            return False
        if wanted is None:
            listed = self.outside.get(target, "").split()
            return any(is_in(module, entry.rstrip("~")) and (lazy or not entry.endswith("~")) for entry in listed)
        if unit == wanted:
            return True
        if wanted in self.only_for and not any(is_in(module, entry) for entry in self.only_for[wanted].split()):
            return False
        return self.rank[unit] < self.rank[wanted]


LAYERS = Layers(
    lines=(
        "tilewise",
        "compat integrations",
        "adapters",
        "distributed nn sparse",
        "mla",
        "api debug kv_cache warmup kv_warmup",
        "autograd",
        "ops",
        "plan_cache",
        "validation",
        "merging",
        "call",
        "backends.registry",
        "backends.hopper backends.triton backends.torch_fused",
        "backends.reference",
        "backends.kernels",
        "backends.protocol",
        "backends.common backends",
        "mods",
        "kv_request",
        "kv_formats",
        "request tensor_cache",
        "settings",
        "bounded errors torch_internals backends.common.device version",
    ),
    only_for={
        "backends.hopper": "backends.registry sparse.topk_attention sparse.block_ops",
        "backends.triton": "backends.registry",
        "backends.torch_fused": "backends.registry",
        # torch differentiates the reference itself
        "backends.reference": "backends.registry backends.torch_fused autograd debug",
        "backends.common": "backends.kernels backends.hopper backends.triton backends.reference"
        " warmup kv_warmup distributed.calls sparse.topk_attention sparse.block_ops sparse.nsa_attention sparse.packed"
        " sparse.moba_attention",
        "backends.common.device": "backends.common backends.hopper backends.triton",
    },
    outside={
        "triton": "backends.common backends.common.device backends.hopper backends.triton warmup~",
        "cuda": "backends.common.launch",
        "transformers": "adapters",
        "diffusers": "adapters.diffusers",
        "vllm": "adapters.vllm integrations.vllm~",
        "sglang": "adapters.sglang integrations.sglang~",
    },
    lab_outside=("triton", "numpy", "rich", "matplotlib", "sphinx", "babel"),
    lab_inside={"tilewise": "lab.costs", "distributed.plans": "lab.costs"},  # explain, explain_kv and Plan.simulate
)
BACKEND = "hopper"  # a folder and an entry in the registry make a backend: no other module has its name in a string
KERNELS = ("backends.common", "backends.hopper", "backends.triton")  # their docstrings' examples need Triton
INTERNALS = "torch_internals"  # the only module that uses private names of torch
MOST_PRIVATE = 15
OTHERS_PRIVATE = {  # private names of other libraries, and of Python
    "settings": {"_data"},
    "backends.common.launch": {"_pack_args"},  # Triton's: the only way to compile for another GPU than the one here
    "adapters.diffusers": {"_AttentionBackendRegistry"},
    "adapters.transformers": {"_attn_implementation", "_flash_with_kvcache_fn", "_loaded_implementation"},
    "adapters.vllm": {"_k_scale", "_v_scale"},
    "backends.hopper.gluon_compat": {"_convert_to_ir_values"},
}
MOST_POSITIONAL = 8  # arguments of a function of the library
OTHER_SIGNATURES = ("adapters", "nn")  # functions with the signatures of other libraries
GIVEN_BY = ("mask_mod", "score_mod", "torch.library.impl")  # decorators: the arguments are bound tensors, or of an op


class Import(NamedTuple):
    """`lazy`: inside a function, or for types only."""

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
    return f"{top}, outside the package," if LAYERS.unit_of(top) else top


def long(module: str) -> str:
    """The reverse."""
    if is_in(module, "lab"):
        return "tilewise_lab" + module.removeprefix("lab")
    return module if module == "tilewise" else f"tilewise.{module}"


def is_in(module: str, unit: str) -> bool:
    return module == unit or module.startswith(unit + ".")


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return short(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


MODULES = {module_name(path): path for package in PACKAGES for path in sorted((SRC / package).rglob("*.py"))}
FOLDERS = [module for module, path in MODULES.items() if path.name == "__init__.py"]


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def library() -> Iterator[str]:
    return (module for module in MODULES if not is_in(module, "lab"))


def imports(module: str, tree: ast.AST, is_package: bool, lazy: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(short(alias.name), lazy, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(short(name), lazy, node.lineno) for name in from_import(node, module, is_package))
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            )
            yield from imports(module, node, is_package, lazy or inner)


def base_of(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    base = node.module or ""
    if node.level:
        package = long(module).split(".")
        package = package[: len(package) - node.level + is_package]
        base = ".".join([*package, *([base] if base else [])])
    return base


def from_import(node: ast.ImportFrom, module: str, is_package: bool) -> Iterator[str]:
    base = base_of(node, module, is_package)
    for alias in node.names:  # `from tilewise import spec` imports a module, `from tilewise import attention` a name
        full = f"{base}.{alias.name}"
        yield full if short(full) in MODULES else base


@cache
def imports_of(module: str) -> list[Import]:
    return list(imports(module, tree_of(module), module in FOLDERS))


def test_imports_point_one_way():
    unknown = [module for module in library() if LAYERS.unit_of(module) is None]
    assert not unknown, f"no line in LAYERS: {unknown}"
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {target}{' lazily' if lazy else ''}"
        for module in MODULES
        for target, lazy, line in imports_of(module)
        if not LAYERS.allow(module, target, lazy)
    ]
    assert not wrong, "\n".join(wrong)


def test_layers_and_exceptions_exist():
    """An entry of the rules names something that is there, and is needed."""
    arrows = {(module, target) for module in MODULES for target, *_ in imports_of(module)}

    def is_needed(by: str, wanted: str) -> bool:
        return any(is_in(a, by) and is_in(b, wanted) for a, b in arrows)

    entries = [(entry, wanted) for wanted, listed in LAYERS.only_for.items() for entry in listed.split()]
    entries += [(entry.rstrip("~"), wanted) for wanted, listed in LAYERS.outside.items() for entry in listed.split()]
    entries += LAYERS.lab_inside.items()
    gone = [unit for unit in LAYERS.rank if not any(is_in(module, unit) for module in MODULES)]
    gone += [f"{by} imports {wanted}" for by, wanted in entries if not is_needed(by, wanted)]
    gone += [f"OTHERS_PRIVATE: {module}" for module in OTHERS_PRIVATE if module not in MODULES]
    assert not gone, "\n".join(gone)


MADE_UP = Layers(
    lines=("tilewise", "top other", "middle", "middle.fast middle.slow", "bottom"),
    only_for={"middle.fast": "middle.chooser"},
    outside={"triton": "middle.fast top~"},
    lab_outside=("rich",),
    lab_inside={"top": "lab.costs"},
)
ALLOWED = """
    top: import math                                        bottom: from torch import Tensor
    top: from tilewise.middle import f                      top.part: from tilewise.bottom import f
    top.part: from tilewise.top.other import f              middle.chooser: from tilewise.middle.fast import f
    middle.slow: from tilewise.bottom import f              middle.fast.part: import triton
    top: def f(): import triton                             top: def f(): from tilewise_lab.costs.explain import f
    lab.demo: from tilewise.middle.fast import f            lab.demo: import rich
    lab.demo: from tilewise_lab.costs import f              middle: from . import x
"""
REFUSED = """
    bottom: from tilewise import top                        top: from tilewise.other import f
    bottom: def f(): from tilewise.top import f             middle.fast: from tilewise.middle.slow import f
    middle.slow: from tilewise.middle.fast import f         top: from tilewise.middle.fast.part import f
    top: import triton                                      bottom: import triton
    top: import numpy                                       top: from tilewise_lab.costs import f
    top: def f(): from tilewise_lab.bench import f          other: def f(): from tilewise_lab.costs import f
    lab.demo: import bench.roofline                         nowhere: from tilewise.bottom import f
"""


def test_the_rules_for_imports_can_tell():
    def allowed(line: str) -> bool:
        module, source = line.split(": ", 1)
        return all(MADE_UP.allow(module, x.target, x.lazy) for x in imports(module, ast.parse(source), True))

    cases = [(line, verdict) for verdict, text in ((True, ALLOWED), (False, REFUSED)) for line in table(text)]
    assert len(cases) == 28
    assert [line for line, verdict in cases if allowed(line) is not verdict] == []


def table(text: str) -> list[str]:
    return [cell for line in text.strip().splitlines() for cell in re.split(r"\s{2,}", line.strip())]


Arrows = dict[str, set[str]]  # what each imports: when it is imported, inside its functions, or for its types only


def arrows_of(module: str, found: Iterable[Import]) -> set[str]:
    return {target for target, *_ in found if target in MODULES} - {module}


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


def shadowed(package: str, tree: ast.Module) -> list[str]:
    """The modules whose names a package's `__init__` gives to something else, by `from ... import`."""
    found = []
    for node in tree.body:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            name = short(f"{long(package)}.{alias.asname or alias.name}")
            if name in MODULES and f"{base_of(node, package, True)}.{alias.name}" != long(name):
                found.append(name)
    return found


def test_no_module_has_the_name_of_a_function_of_its_package():
    """`from tilewise.ops import dense` would be the one or the other. tilewise.warmup stays: users import the class
    tilewise.warmup.Warmed."""
    made_up = "from .dense import dense, forward\nfrom . import kv\nfrom .dense import forward as flops"
    assert shadowed("ops", ast.parse(made_up)) == ["ops.dense", "ops.flops"]
    packages = [package for package in library() if package in FOLDERS]
    assert [name for package in packages for name in shadowed(package, tree_of(package))] == ["warmup"]


def test_no_circles_of_files_or_folders():
    arrows = {module: arrows_of(module, imports_of(module)) for module in MODULES}
    found = {"files": circles(arrows)} | {folder: circles(inside(folder, arrows)) for folder in FOLDERS}
    assert {where: x for where, x in found.items() if x} == {}


def test_circles_are_seen():
    """Whether a module is imported at once, in a function or for types."""
    one, two, *_ = (x for x in MODULES if "." in x and x not in FOLDERS)
    for source in ("{}", "def f():\n    {}", "if TYPE_CHECKING:\n    {}"):
        tree = ast.parse(source.format(f"from {long(two)} import x"))
        arrows = {one: arrows_of(one, imports(one, tree, False)), two: {one}}
        assert circles(arrows) == [tuple(sorted((one, two)))]
        assert not circles(arrows | {two: set()})
    across = {"a.x": {"b.y"}, "b.z": {"a.w"}, "a.w": set(), "b.y": set()}  # no circle of files, but one of folders
    assert not circles(across)
    assert circles(inside("tilewise", across)) == [("a", "b")]


def strings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Text that a program may act on: no docstrings."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value, node.lineno


def test_a_backend_is_named_in_its_folder_and_in_the_registry_only():
    """("triton" is a package's name too.)"""
    found = [
        f"{module}:{line} {text!r}"
        for module in library()
        if not is_in(module, f"backends.{BACKEND}")
        and module not in ("backends.registry", "call.fields", "call.options")
        for text, line in strings(tree_of(module))
        if BACKEND in text
    ]
    assert not found, "\n".join(found)


def test_the_library_imports_itself_relatively():
    """One style: a reader sees at once what is the package's own."""
    found = [
        f"{module}:{node.lineno}"
        for module in library()
        for node in ast.walk(tree_of(module))
        if (isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith("tilewise."))
        or (isinstance(node, ast.Import) and any(x.name.split(".")[0] == "tilewise" for x in node.names))
    ]
    assert not found, "\n".join(found)


def reads_environment(tree: ast.AST) -> bool:
    """Whether a module uses os.environ, os.environb or os.getenv, under whatever name."""
    names = {"environ", "environb", "getenv", "getenvb"}
    return any(
        (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and any(x.name in names for x in node.names))
        for node in ast.walk(tree)
    )


def test_settings_alone_reads_the_environment():
    """A variable that is read where a module is imported has no effect later, and says nothing."""
    read = (
        "import os\nx = os.environ.get('A')",
        "import os as o\ndef f(): return o.getenv('A')",
        "from os import environ as e",
    )
    assert all(reads_environment(ast.parse(source)) for source in read)
    assert not reads_environment(ast.parse("import os\nos.cpu_count()"))
    assert [module for module in library() if reads_environment(tree_of(module))] == ["settings"]


def private_names(tree: ast.Module) -> set[str]:
    """Names with one underscore at their front that a module reads from something other than self: attributes, and what
    it imports or passes to getattr, hasattr or `private`, whose whole argument is one name."""
    found, whole = set(), set()
    for node in ast.walk(tree):
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


def own_names(tree: ast.Module) -> set[str]:
    """What a module defines: functions, classes, fields and attributes of self."""
    found = {"_replace", "_asdict", "_fields", "_make"}  # named tuples
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and node.value == "_tilewise":
            found.add("_tilewise")  # an attribute that adapters.flex sets on the user's function
    return found


def test_private_names_of_torch_are_few_and_in_one_file():
    own = set().union(*(own_names(tree_of(module)) for module in library()))
    found = {module: private_names(tree_of(module)) - own - OTHERS_PRIVATE.get(module, set()) for module in library()}
    here = found.pop(INTERNALS)
    assert {module: names for module, names in found.items() if names} == {}, f"these belong in {INTERNALS}"
    assert len(here) <= MOST_PRIVATE, sorted(here)


def test_private_names_are_seen():
    cases = {
        "torch._C._len_torch_dispatch_stack()": {"_C", "_len_torch_dispatch_stack"},
        "x._version": {"_version"},
        "from torch.utils._python_dispatch import x": {"_python_dispatch"},
        "from torch.nn.attention import _impl": {"_impl"},
        "import torch._dynamo": {"_dynamo"},
        'getattr(x, "_ragged_idx", 1)': {"_ragged_idx"},
        'private("_C._functorch.is_batchedtensor", None)': {"_C._functorch.is_batchedtensor"},
        "self._kept; cls._made; x.__class__; names._value2member_map_; from_x = x.y": set(),
    }
    assert {source: private_names(ast.parse(source)) for source in cases} == cases


def with_many_arguments(tree: ast.Module) -> list[str]:
    """Functions with more positional arguments than the limit. Kernels build their structs in their first lines."""
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = [x.arg for x in (*function.args.posonlyargs, *function.args.args)]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        decorators = [ast.unparse(x) for x in function.decorator_list]
        is_kernel = function.name.endswith("_kernel") and any("jit" in x for x in decorators)
        if len(names) > MOST_POSITIONAL and not is_kernel and not any(x.startswith(GIVEN_BY) for x in decorators):
            found.append(function.name)
    return found


def test_functions_have_few_positional_arguments():
    found = {
        module: names
        for module in library()
        if not any(is_in(module, unit) for unit in OTHER_SIGNATURES) and (names := with_many_arguments(tree_of(module)))
    }
    # a body that three loops call, each with other constants: Triton's device functions have no keyword-only arguments
    assert found == {"backends.common.device.attend": ["add_keys"]}
    many = "def f(a, b, c, d, e, f, g, h, i): pass\n"
    kernel = "@triton.jit\n" + many.replace("f(", "f_kernel(", 1)
    for source, seen in ((many, ["f"]), (many.replace("i)", "*, i)"), []), (kernel, []), ("@mask_mod\n" + many, [])):
        assert with_many_arguments(ast.parse(source)) == seen


# A message of an error may be broken into lines of 80 columns.
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def test_examples_in_docstrings_are_true():
    failed = io.StringIO()
    with contextlib.redirect_stdout(failed):
        for module, path in MODULES.items():
            if ">>> " not in path.read_text(encoding="utf-8"):
                continue
            if module.startswith(KERNELS):
                pytest.importorskip("triton")
            doctest.testmod(import_module(long(module)), optionflags=FLAGS)
    assert not failed.getvalue(), failed.getvalue()


def test_import_is_light():
    """After torch, `import tilewise` brings in tilewise and nothing else that is not Python's own, in half a second of
    CPU time."""
    script = (
        "import sys, time, torch; before = set(sys.modules); start = time.process_time(); import tilewise;"
        "print(time.process_time() - start);"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=SRC)
    seconds, loaded = done.stdout.splitlines()
    extra = set(loaded.split()) - set(sys.stdlib_module_names)
    assert extra <= {"tilewise", "torch"}
    assert "tilewise" in extra
    assert float(seconds) <= 0.5


def test_triton_is_no_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = chain(project["dependencies"], *project["optional-dependencies"].values())
    assert not [requirement for requirement in asked if requirement.startswith("triton")]


@cache
def committed() -> tuple[Path, ...]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file())


DOCUMENTS = [path for path in committed() if path.suffix == ".md"]
MENTION = re.compile(r"`(\.?[\w-]+(?:/[\w.-]+)*(?:\.(?:py|md|toml|html|json|sh)|/))`|\]\((?!\w+:)([^)#]+)")


def named(text: str) -> list[str]:
    return [a or b for a, b in MENTION.findall(text)]


def test_documents_name_files_that_exist():
    made_by_users = set((ROOT / ".gitignore").read_text().split())
    gone = []
    for document in DOCUMENTS:
        of_its_time = document.parent == ROOT / "bench" / "results"  # a note names the scripts of its commit
        places = (document.parent, ROOT, SRC, *(SRC / package for package in PACKAGES))
        for name in named(document.read_text(encoding="utf-8")):
            if of_its_time and name.endswith(".py"):
                continue
            if name not in made_by_users and not any((place / name).exists() for place in places):
                gone.append(f"{document.relative_to(ROOT)}: {name}")
    assert not gone, "\n".join(gone)
    text = "see `src/tilewise/api.py`, `bench/` and [this](docs/x.md), not `q.dtype`, `a/b` or [that](https://a.b/c.md)"
    assert named(text) == ["src/tilewise/api.py", "bench/", "docs/x.md"]


# Translations have the code of the original, to the letter: tests/tilewise_lab/docs compares them.
WITH_EXAMPLES = [
    path.relative_to(ROOT).as_posix()
    for path in DOCUMENTS
    if ">>> " in path.read_text(encoding="utf-8") and "docs/zh/" not in path.as_posix()
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


def test_code_of_the_pages_fits_80_columns():
    wide = []
    for path in (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "bench/README.md", ROOT / "CONTRIBUTING.md"):
        blocks = re.findall(r"^(```+)[^\n]*\n(.*?)^\1$", path.read_text(encoding="utf-8"), re.M | re.S)
        lines = (line for _, block in blocks for line in block.splitlines())
        wide += [f"{path.relative_to(ROOT)}: {line}" for line in lines if len(line) > 80]
    assert not wide, "\n".join(wide)


# The home of a person or a build on some machine; the lookbehind leaves URLs and relative paths alone.
MACHINE_PATH = re.compile(r"(?<![\w.~)}-])/(?:work|root|home|Users|tmp|opt|mnt)/[\w.-]+")


def test_no_machine_paths():
    found = []
    for path in committed():
        with contextlib.suppress(UnicodeDecodeError):
            text = path.read_text(encoding="utf-8")
            found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in MACHINE_PATH.finditer(text)]
    assert not found, "\n".join(found)
    texts = {"see {}ann/x": True, '"{}ann"': True, "https://example.org{}page": False, "src{}x": False}
    assert {text: bool(MACHINE_PATH.search(text.format("/home/"))) for text in texts} == texts


def test_fixes_of_wrong_results_are_commits():
    """docs/wrong-results.md names the commit that fixed each; a copy without its history cannot tell."""
    named_there = set(re.findall(r"`([0-9a-f]{8})`", (ROOT / "docs" / "wrong-results.md").read_text(encoding="utf-8")))
    assert named_there
    if subprocess.run(["git", "cat-file", "-e", "f81564d1^{commit}"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("no history of commits here")
    asked = "".join(f"{name}\n" for name in sorted(named_there))
    found = subprocess.run(["git", "cat-file", "--batch-check"], cwd=ROOT, input=asked, capture_output=True, text=True)
    assert [line.split()[1] for line in found.stdout.splitlines()] == ["commit"] * len(named_there), found.stdout
