"""Every GPU that has tiles gets kernels it can run: compiled without one, they fit its memory and spill no register.

On the Triton that is installed, and a few rows on those in the folders that TILEWISE_TRITONS names. sm_80 and sm_90 are
compiled in more variants by test_compile.py. `--all-tiles` compiles every row of every table, with every term.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from tests.covering import cases
from tests.forks import ROOT, environment
from tilewise.backends.common import tiles

TRITONS = ("", *filter(None, os.environ.get("TILEWISE_TRITONS", "").split(os.pathsep)))
pytestmark = pytest.mark.slow
TARGETS: tuple[tiles.Arch, ...] = (80, 86, 89, 90, 100, 120, "gfx942", "gfx950")
OWN: tuple[tiles.Arch, ...] = (100, 120, "gfx942", "gfx950")  # rows or an assembler that test_compile.py does not see
PASSES = ("forward", "query", "key")
TERMS = ("softcap", "alibi", "documents", "blocks", "bias", "dropout")

Wanted = tuple[str, str, int, str, str | None]  # kernel, dtype, dim, variant, term
FEW: tuple[Wanted, ...] = (
    ("forward", "bfloat16", 128, "causal", None),
    ("key", "bfloat16", 64, "varlen", None),
    ("query", "bfloat16", 128, "window", "softcap"),
)
SOME: tuple[Wanted, ...] = (
    *FEW,
    *((kernel, "bfloat16", dim, "window", None) for kernel, dim in product(PASSES, (64, 256))),
    *((kernel, "float32", 64, "causal", None) for kernel in PASSES),
    ("forward", "bfloat16", 128, "few", None),
    ("forward", "bfloat16", 64, "few varlen", "alibi"),
    ("merge", "bfloat16", 128, "decode", None),
    ("clear", "bfloat16", 64, "varlen", None),
    ("repair forward", "bfloat16", 128, "causal", None),
    ("repair backward", "bfloat16", 128, "causal", None),
    ("forward", "bfloat16", 64, "causal", "alibi"),
    ("key", "bfloat16", 128, "causal", "documents"),
    ("key", "bfloat16", 64, "varlen", "bias"),
)
# rows that only a term has, by the GPU that needs them most
TERMED: dict[tiles.Arch, tuple[Wanted, ...]] = {
    86: tuple((kernel, "bfloat16", 128, "window", "blocks") for kernel in PASSES),
    **dict.fromkeys((80, 90, 100), (("forward", "bfloat16", 128, "window", "bias"),)),
}

# Bytes that a row may spill, in its worst variant; 0 for all others. To shrink, never to grow.
SPILLS: dict[tuple[tiles.Arch, str, str, int, str | None], int] = {
    (100, "repair forward", "bfloat16", 128, None): 8,
    (100, "forward", "bfloat16", 256, "documents"): 8, (120, "forward", "bfloat16", 64, "dropout"): 12,
    (100, "key", "bfloat16", 64, "bias"): 100,
    **{(arch, "key", "bfloat16", 128, term): most for arch in (80, 86, 89)
       for term, most in (("documents", 324), ("alibi", 144))},
    # faster than rows without spills, as test_compile.py says
    **{(arch, kernel, "bfloat16", dim, None): most for arch in (80, 86, 89)
       for kernel, dim, most in (
           ("forward", 256, 256), ("query", 128, 16), ("key", 128, 160), ("key", 256, 192), ("value", 256, 192))},
}  # fmt: skip


def everything(arch: tiles.Arch) -> list[Wanted]:
    table = tiles.chip(arch).tiles
    rows: list[Wanted] = []
    for dtype, kernel in product(("bfloat16", "float16", "float32"), (*PASSES, "jvp")):
        for dim in table[kernel, 4 if dtype == "float32" else 2]:
            terms = (None, *TERMS) if kernel != "jvp" and dtype != "float16" else (None,)
            rows += [(kernel, dtype, dim, variant, None) for variant in ("full", "causal", "varlen")]
            rows += [(kernel, dtype, dim, "window", term) for term in terms]
    dims = (64, 128, 256, 512)
    rows += [("forward", "bfloat16", dim, variant, None) for dim, variant in product(dims, ("decode", "few"))]
    rows += [("forward", "bfloat16", dim, "few", term) for dim, term in product((64, 128), ("alibi", "dropout"))]
    rows += [("merge", "bfloat16", dim, "decode", None) for dim in dims]
    rows += [("preprocess", "bfloat16", dim, "varlen", None) for dim in dims]
    return [*rows, ("clear", "bfloat16", 64, "varlen", None)]


def compiled(arch: tiles.Arch, wanted: list[Wanted], triton: str = "") -> list[dict[str, Any]]:
    names = ("kernel", "dtype", "dim", "variant", "term")
    rows = []
    for row in wanted:
        fields = {"capability": arch, **dict(zip(names, row, strict=True))}
        rows.append(fields)
        if row[0] == "key" and tiles.tile("key", arch, 4 if row[1] == "float32" else 2, row[2]).apart:
            rows.append({**fields, "kernel": "value"})
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "tiles.py"), "json"],
        input=json.dumps(rows), capture_output=True, text=True, env=environment(triton),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == len(rows)
    return made


def faults(made: dict[str, Any]) -> list[str]:
    if "error" in made:
        return [made["error"]]
    arch, kernel, dtype, dim, term = (made[name] for name in ("capability", "kernel", "dtype", "dim", "term"))
    found = []
    if made["spills"] > SPILLS.get((arch, kernel, dtype, dim, term), 0):
        found.append(f"{made['spills']} bytes spilled")
    if made["shared"] > tiles.chip(arch).shared:
        found.append(f"{made['shared']} bytes of shared memory")
    multiplies = kernel not in ("merge", "preprocess", "clear")
    if multiplies and not any("MMA" in name or "mfma" in name for name in made["instructions"]):
        found.append("no matrix instruction: of too much tensor memory Triton makes a trap")
    return found


def check(made: list[dict[str, Any]]) -> None:
    wrong = [
        f"{x['capability']} {x['kernel']} {x['dtype']} {x['dim']} {x['variant']} {x['term']}: {'; '.join(faults(x))}"
        for x in made
        if faults(x)
    ]
    assert not wrong, "\n".join(wrong)


@cases("arch", [80], TARGETS)
def test_kernels_fit(arch: tiles.Arch, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("triton")
    every = request.config.getoption("--all-tiles")
    check(compiled(arch, everything(arch) if every else [*(SOME if arch in OWN else FEW), *TERMED.get(arch, ())]))


@pytest.mark.parametrize(("triton", "arch"), [*product(TRITONS[1:], TARGETS)])
def test_kernels_fit_on_other_tritons(triton: str, arch: tiles.Arch, request: pytest.FixtureRequest) -> None:
    every = request.config.getoption("--all-tiles")
    check(compiled(arch, [*(SOME if every else FEW)], triton))


@cases("arch", [80], TARGETS)
def test_sums_fit(arch: tiles.Arch, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("triton")
    if not request.config.getoption("--all-tiles"):
        pytest.skip("--all-tiles compiles the sums of gradients for every target")
    for dim, dtype in product((64, 128, 256, 512), ("bfloat16", "float32")):
        done = subprocess.run(
            [sys.executable, "-m", "tests.tilewise.backends.compile_sums", str(arch), str(dim), dtype],
            capture_output=True, text=True, cwd=ROOT,
            env=environment(),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        for each in json.loads(done.stdout.splitlines()[-1]):
            assert each["shared"] <= tiles.chip(arch).shared, (dim, dtype, each)
            assert each["spills"] == 0, (dim, dtype, each)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, False),
        ({"spills": 4}, True),
        ({"shared": 65 * 1024}, True),
        ({"instructions": {}}, True),
        ({"kernel": "merge", "instructions": {}}, False),
        ({"error": "CompilationError"}, True),
    ],
    ids=str,
)
def test_the_gate_can_fail(change: dict[str, Any], verdict: bool) -> None:
    good = {
        "capability": "gfx942", "kernel": "forward", "dtype": "bfloat16", "dim": 64, "variant": "full", "term": None,
        "spills": 0, "shared": 64 * 1024, "instructions": {"v_mfma_f32_32x32x8_bf16": 8},
    }  # fmt: skip
    assert bool(faults(good | change)) is verdict


def test_a_gpu_that_nobody_knew_gets_what_the_smallest_of_its_kind_has() -> None:
    assert tiles.chip(125) == tiles.chip(120)
    assert tiles.chip("gfx1100") == tiles.chip("gfx942")
    assert tiles.tile("forward", 121, 2, 128) == tiles.tile("forward", 120, 2, 128)
    assert tiles.chip(125).shared == min(tiles.chip(arch).shared for arch in tiles.CHIPS if isinstance(arch, int))


def test_a_hip_device_is_not_taken_for_hopper() -> None:
    assert tiles.chip("gfx90a").tiles is not tiles.HOPPER
    assert tiles.chip(100).tiles is not tiles.HOPPER
