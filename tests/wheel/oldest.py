"""The tests of the public functions and of the reference with the oldest torch that pyproject.toml allows, on a CPU:
python tests/wheel/oldest.py [folder]

The CPU build comes from pytorch.org. PyPI has none for Linux on x86-64: where nothing else can be reached, its CUDA
build (0.9 GB) is taken without the 2.5 GB of libraries that it wants, whose places stand-ins take (see `stand_in`).
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/tilewise/test_api.py", "tests/tilewise/test_ops.py", "tests/tilewise/reference")
TOOLS = ("pytest", "hypothesis", "pytest-xdist", "numpy")


def script() -> Any:
    """./run as a module."""
    spec = importlib.util.spec_from_loader("run_script", SourceFileLoader("run_script", str(ROOT / "run")))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def floor() -> str:
    """
    >>> floor()
    '2.10'
    """
    run = script()
    (found,) = (r.partition(">=")[2] for r in run.project()["project"]["dependencies"] if run.name_of(r) == "torch")
    return str(found)


def install(python: Path, site: Path) -> str | None:
    """torch of the floor and the tools; or what stands in the way."""
    run, torch = script(), f"torch=={floor()}.*"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if run.answers(run.CPU_WHEELS):
        subprocess.run([*pip, torch, "--index-url", run.CPU_WHEELS], check=True)
    elif sys.platform != "linux" or platform.machine() != "x86_64":
        subprocess.run([*pip, torch], check=True)
    elif not (shutil.which("gcc") and shutil.which("readelf")):
        return "pytorch.org does not answer, and PyPI's CUDA build needs gcc and readelf to be loaded without CUDA"
    else:
        subprocess.run([*pip, "--no-deps", torch], check=True)
        (told,) = site.glob("torch-*.dist-info/METADATA")
        wanted = re.findall(r"^Requires-Dist: ([^;\n]+?) *(?:;.*)?$", told.read_text(), re.M)
        plain = [r for r in wanted if not r.startswith(("nvidia", "triton", "cuda", "opt-einsum", "optree", "pyyaml"))]
        subprocess.run([*pip, *plain], check=True)
        stand_in(site / "torch" / "lib")
    subprocess.run([*pip, *TOOLS], check=True)
    return None


def stand_in(lib: Path) -> None:
    """Put empty CUDA libraries beside torch's own, with the symbols and versions that these want. Every function
    returns 100, cudaErrorNoDevice: torch finds no GPU and goes on.
    """
    needed: set[str] = set()
    given: set[str] = set()
    wanted: set[str] = set()
    file_of: dict[str, str] = {}  # the library that a version of symbols is looked for in
    for path in lib.glob("*.so*"):
        told = subprocess.run(
            ["readelf", "-dVW", "--dyn-syms", str(path)], capture_output=True, text=True, check=True
        ).stdout
        needed |= set(re.findall(r"\(NEEDED\).*\[(.+?)\]", told))
        file = ""
        for found in re.finditer(r"File: (\S+)|Name: (\S+)  Flags", told):
            if found[1]:
                file = found[1]
            else:
                file_of.setdefault(found[2], file)
        for where, name in re.findall(r"^\s*\d+: \S+\s+\d+ \w+\s+(?:GLOBAL|WEAK)\s+\w+\s+(\S+) (\S+)", told, re.M):
            if where == "UND":
                wanted.add(name)
            else:
                given.add(name.partition("@")[0])
    missing = sorted(n for n in needed - {p.name for p in lib.glob("*.so*")} if re.match("lib(cu|nv|nccl)", n))
    symbols: dict[str, dict[str, list[str]]] = {n: defaultdict(list) for n in missing}
    for version, file in file_of.items():
        if file in symbols:
            symbols[file][version] = []
    for name in sorted(wanted):
        symbol, _, version = name.partition("@")
        if version and file_of.get(version) in symbols:
            symbols[file_of[version]][version].append(symbol)
        elif not version and symbol not in given and re.match("cu|nv|nccl|__cuda", symbol):
            symbols[missing[0]][""].append(symbol)
    for library, versions in symbols.items():
        with tempfile.TemporaryDirectory() as folder:
            source, names = Path(folder, "stand_in.c"), Path(folder, "versions")
            source.write_text("".join(f"int {s}(void) {{ return 100; }}\n" for v in versions.values() for s in v))
            names.write_text(
                "".join(f"{v} {{ {' '.join(f'{s};' for s in of)} }};\n" for v, of in versions.items() if v)
            )
            script = [f"-Wl,--version-script={names}"] if any(versions) else []
            gcc = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{library}", *script]
            subprocess.run([*gcc, "-o", str(lib / library), str(source)], check=True)


def main(argv: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(argv[0] if argv else folder).resolve()
        paths = sysconfig.get_paths("venv", vars={"base": str(venv), "platbase": str(venv)})
        python, site = Path(paths["scripts"], "python"), Path(paths["purelib"])
        if not (site / "pytest").exists():
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
            obstacle = install(python, site)
            if obstacle is not None:
                print(f"not tested with torch {floor()}: {obstacle}", file=sys.stderr)
                return 0
        version = subprocess.run(
            [str(python), "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
        ).stdout.strip()
        assert version.startswith(f"{floor()}."), version
        print(f"with torch {version}:", flush=True)
        tests = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", "-n", "2", *TESTS]
        return subprocess.run(tests, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
