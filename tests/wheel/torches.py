"""The oldest and the newest torch that we claim, on a CPU: what of torch we use is there, and does what it did.

    python tests/wheel/torches.py                     the boundary to torch with both: a download, and a minute
    python tests/wheel/torches.py --all 2.12.1        the public functions and the reference too, with any torch
    python tests/wheel/torches.py --fetch FOLDER      only the download, for a later time
    python tests/wheel/torches.py --from FOLDER       without one

The oldest is that of `dependencies` in pyproject.toml, the newest that of its group `newest`. Each is put into a folder
ahead of what is installed, and is left out, with a word, where it cannot be had. CPU builds come from pytorch.org.
PyPI has none for Linux (on ARM from torch 2.11 on): where nothing else can be reached, its CUDA build (0.5 to 0.9 GB)
is taken without the libraries that it wants, whose places stand-ins take (see `stand_in`).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600  # seconds for a download
READY = "ready"  # a file beside a torch that is whole
BOUNDARY = (
    *(f"tests/tilewise/test_{name}.py" for name in ("torch_tools", "integration", "ops")),
    "tests/tilewise/plan_cache",
    "tests/tilewise/kv_cache/test_refusals.py::test_one_graph_with_the_writes_declared",
    "tests/tilewise/mods/test_modifier.py::test_compiled_with_tensors_from_outside",
    "tests/tilewise/integrations/test_sdpa.py::TestRegistry",
    "tests/tilewise/distributed/test_processes.py",
    "tests/tilewise/integrations/test_transformers.py::test_compiled_whole[llama-packed]",
    "tests/tilewise/integrations/test_transformers.py::test_compiled_whole[gemma3-left]",
)
ALL = (*BOUNDARY, "tests/tilewise/test_api.py", "tests/tilewise/backends/reference")


def script() -> Any:
    """./run as a module."""
    spec = importlib.util.spec_from_loader("run_script", SourceFileLoader("run_script", str(ROOT / "run")))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def claimed() -> list[str]:
    """
    >>> claimed()
    ['2.10.0', '2.15.0']
    """
    run = script()
    found = run.requirements(run.project(), "dependencies", "newest")
    return [
        f"{version}{'.0' * (2 - version.count('.'))}" for version in re.findall(r"torch[>=]=([\d.]+)", " ".join(found))
    ]


def install(version: str, folder: Path) -> str | None:
    """Put a torch into the folder; or say what stands in the way."""
    run = script()
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
    ]
    pip += ["--target", str(folder), f"torch=={version}"]
    if run.answers(run.CPU_WHEELS):
        pip += ["--index-url", run.CPU_WHEELS]
    try:
        done = subprocess.run(pip, timeout=PATIENCE, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return f"not here after {PATIENCE} s"
    if done.returncode:
        return f"pip: {(done.stderr.strip().splitlines() or ['no word'])[-1]}"
    lib = folder / "torch" / "lib"
    if (lib / "libtorch_cuda.so").exists():
        if not (shutil.which("gcc") and shutil.which("readelf")):
            return "pytorch.org does not answer, and PyPI's CUDA build needs gcc and readelf to be loaded without CUDA"
        stand_in(lib)
    (folder / READY).touch()
    return None


def stand_in(lib: Path) -> None:
    """Put empty CUDA libraries beside torch's own, with the symbols and versions that these want. Every function
    returns 100, cudaErrorNoDevice: torch finds no GPU and goes on, or asks for the words, and raises.
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
            source.write_text("".join(_stand_in_for(s) for of in versions.values() for s in of))
            names.write_text(
                "".join(f"{v} {{ {' '.join(f'{s};' for s in of)} }};\n" for v, of in versions.items() if v)
            )
            script = [f"-Wl,--version-script={names}"] if any(versions) else []
            gcc = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{library}", *script]
            subprocess.run([*gcc, "-o", str(lib / library), str(source)], check=True)


def _stand_in_for(symbol: str) -> str:
    """
    >>> _stand_in_for("cudaGetErrorString")
    'const char *cudaGetErrorString(void) { return "no CUDA"; }\\n'
    """
    if re.fullmatch("(cuda|nccl|cudnn)GetError(String|Name)", symbol):
        return f'const char *{symbol}(void) {{ return "no CUDA"; }}\n'
    return f"int {symbol}(void) {{ return 100; }}\n"


def tests(version: str, folder: Path, everything: bool) -> int:
    chosen = ALL if everything else (*BOUNDARY, "-k", "not triton and not few_files", "--maxfail=3")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")])}
    look = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    found = subprocess.run(look, capture_output=True, text=True, check=True, env=env).stdout.strip()
    assert found.startswith(version), found
    print(f"with torch {found}:", flush=True)
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", *chosen]
    return subprocess.run(line, cwd=ROOT, env=env).returncode


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Tests with other versions of torch, on a CPU.")
    parser.add_argument("versions", nargs="*", help="2.12.1; by default the oldest and the newest that we claim")
    parser.add_argument("--all", action="store_true", help="the public functions and the reference too")
    parser.add_argument("--fetch", type=Path, metavar="FOLDER", help="put them there, and run nothing")
    parser.add_argument("--from", type=Path, metavar="FOLDER", dest="there", help="take those that are there")
    options = parser.parse_args(argv)
    versions = options.versions or claimed()
    codes = []
    with tempfile.TemporaryDirectory() as room, ThreadPoolExecutor() as threads:
        folders = [(options.there or options.fetch or Path(room)).resolve() / version for version in versions]
        if options.there is None:
            for version, obstacle in zip(versions, threads.map(install, versions, folders), strict=True):
                if obstacle is not None:
                    print(f"torch {version} cannot be had: {obstacle}", file=sys.stderr)
        for version, folder in zip(versions, folders, strict=True):
            if options.fetch is not None:
                continue
            if (folder / READY).exists():
                codes.append(tests(version, folder, options.all))
            else:
                print(f"not tested with torch {version}", file=sys.stderr)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
