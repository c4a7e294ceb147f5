"""What the compiler makes of every row of the tile tables, without a GPU: spills, shared memory, matrix instructions.

Each test is a process of its own, because this one's Triton is the interpreter's. `--all-tiles` compiles every row in
every variant and dtype; without it each row is compiled once, and the measured head dims in more variants.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from tests.covering import cases
from tests.forks import ROOT, environment
from tilewise.backends.common import tiles

pytestmark = pytest.mark.slow

VARIANTS = ("full", "causal", "ragged", "window", "varlen")
SHARED = {arch: tiles.chip(arch).shared for arch in (80, 90)}
TABLES = {80: tiles.A100, 90: tiles.HOPPER}

# Bytes that a row may spill, in its worst variant; 0 for all others. To shrink, never to grow.
SPILLS = {
    (90, "jvp", "float32", 512): 16, (90, "jvp", "bfloat16", 512): 8, (90, "jvp", "float16", 512): 8,
    (90, "key", "float32", 128): 8, (90, "key", "bfloat16", 512): 48, (90, "key", "float16", 512): 72,
    (80, "jvp", "bfloat16", 64): 8, (80, "key", "bfloat16", 512): 20, (80, "key", "float16", 512): 24,
    # beside FlashAttention-2 these were faster than any row without spills (bench/results/2026-11-19-older-gpus.md)
    **{(80, kernel, dtype, dim): most for dtype in ("bfloat16", "float16") for kernel, dim, most in (
        ("forward", 256, 256), ("query", 128, 16), ("key", 128, 160), ("key", 256, 192), ("value", 256, 192))},
}  # fmt: skip


def rows(capability: int, kernel: str, dtype: str, everything: bool) -> list[dict[str, Any]]:
    dims = TABLES[capability][kernel, 4 if dtype == "float32" else 2]
    if everything:
        wanted = [*product(dims, VARIANTS)]
    elif dtype == "bfloat16":
        wanted = [*product(dims, ("causal",)), (128, "window"), (64, "varlen"), (128, "varlen"), (256, "varlen")]
        wanted += [(128, "decode"), (256, "few")] if kernel == "forward" else []
    elif dtype == "float32":
        wanted = [(64, "full"), (128, "window"), (256, "causal"), (512, "varlen")]
    else:
        wanted = [(64, "full")]
    terms = ("softcap", "alibi", "documents") if (dtype, capability) == ("bfloat16", 90) and kernel != "jvp" else ()
    return [
        {"kernel": name, "capability": capability, "dtype": dtype, "dim": dim, "variant": variant, "term": term}
        for dim, variant, term in (*((*pair, None) for pair in wanted), *((128, "causal", term) for term in terms))
        for name in ((kernel, "value") if dims[dim].apart else (kernel,))
    ]


def faults(made: dict[str, Any]) -> list[str]:
    if "error" in made:
        return [made["error"]]
    capability, kernel, dtype, dim = (made[name] for name in ("capability", "kernel", "dtype", "dim"))
    found = []
    if made["spills"] > SPILLS.get((capability, kernel, dtype, dim), 0):
        found.append(f"{made['spills']} bytes spilled")
    if made["shared"] > SHARED[capability]:
        found.append(f"{made['shared']} bytes of shared memory")
    by_key = kernel in ("key", "value")
    terms = ("groups",) if made.get("variant") == "few" else ()
    tile = tiles.tile("key" if by_key else kernel, capability, 4 if dtype == "float32" else 2, dim, *terms)
    rows_of_a_product = tile.block_n if by_key else tile.block_m
    matrix = "HGMMA" if capability >= 90 and rows_of_a_product >= 64 else "HMMA"
    if not made["instructions"].get(matrix):
        found.append(f"no {matrix}")
    return found + made["warnings"]


@cases(
    "capability, kernel, dtype",
    [(90, "forward", "bfloat16")],
    product(TABLES, ["forward", "query", "key", "jvp"], ["bfloat16", "float16", "float32"]),
)
def test_tiles(capability: int, kernel: str, dtype: str, request: pytest.FixtureRequest) -> None:
    made = compiled(rows(capability, kernel, dtype, request.config.getoption("--all-tiles")))
    wrong = [f"{x['dim']} {x['variant']} {x['term']}: {'; '.join(faults(x))}" for x in made if faults(x)]
    assert not wrong, "\n".join(wrong)


def compiled(wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "tiles.py"), "json"],
        input=json.dumps(wanted), capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == len(wanted)
    return made


@cases("capability", [90], TABLES)
def test_the_merge_of_the_most_parts_fits(capability: int) -> None:
    fixed = {"kernel": "merge", "capability": capability, "dtype": "bfloat16", "variant": "decode"}
    for made in compiled([{**fixed, "dim": dim} for dim in (64, 128, 512)]):
        assert made.get("spills") == 0, made
        assert made["shared"] <= SHARED[capability], made


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, False),
        ({"spills": 8}, True),
        ({"shared": 300_000}, True),
        ({"instructions": {"FFMA": 9}}, True),
        ({"warnings": ["Potential Performance Loss"]}, True),
        ({"error": "CompilationError"}, True),
    ],
    ids=str,
)
def test_the_gate_can_fail(change: dict[str, Any], verdict: bool) -> None:
    good = {
        "capability": 90, "kernel": "forward", "dtype": "bfloat16", "dim": 64, "variant": "full",
        "spills": 0, "shared": 1024, "instructions": {"HGMMA": 8}, "warnings": [],
    }  # fmt: skip
    assert bool(faults(good | change)) is verdict


SUMS = [(*x, "bfloat16") for x in ((90, 64), (90, 128), (90, 256), (80, 128))] + [
    (90, 64, "float32"),
    (80, 64, "float32"),
]


@cases("capability, dim, dtype", [(80, 128, "bfloat16")], SUMS)
def test_sums_of_gradients_fit(capability: int, dim: int, dtype: str) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.tilewise.backends.compile_sums", str(capability), str(dim), dtype],
        capture_output=True, text=True, cwd=ROOT,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(done.stdout.splitlines()[-1])
    assert len(made) == 18
    for each in made:
        assert each["shared"] <= SHARED[capability], each
        assert each["spills"] == 0, each


def test_every_kind_of_call_has_a_row() -> None:
    for capability, kernel, itemsize, dim in product(
        TABLES, ("forward", "query", "key", "sums", "jvp", "hvp query", "hvp key"), (2, 4), (16, 32, 64, 128, 256, 512)
    ):
        tile = tiles.tile(kernel, capability, itemsize, dim)
        assert min(tile.block_m, tile.block_n) >= 16
        assert tile.block_m <= 128  # the padding of the row statistics
