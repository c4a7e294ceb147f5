"""The kernels of the KV cache fit every GPU that has tiles: compiled without one, in a process of their own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compiling import reports
from tests.covering import cases
from tilewise.backends.common import tiles

MODULE = "tests.tilewise.backends.compile_kv"
pytestmark = pytest.mark.slow
TARGETS: tuple[tiles.Arch, ...] = (80, 86, 89, 90, 100, 120, "gfx942")
E4M3, INT8, INT4 = (["float8_e4m3fn"] * 2, ["int8"] * 2, ["uint8"] * 2)  # dtypes of K and V
ROWS: tuple[dict[str, Any], ...] = (
    {"kernel": "attend"},
    {"kernel": "attend", "queries": 16},
    {"kernel": "attend", "dim": 64, "heads": 64, "term": "window"},
    {"kernel": "attend", "dim": 256},
    {"kernel": "attend", "page": 0, "dtype": "float32", "dim": 64},
    {"kernel": "schedule", "packed": True},
    {"kernel": "combine", "heads": 8, "kv_heads": 1},
    {"kernel": "append"},
    {"kernel": "attend", "stored": E4M3, "scale": "head"},
    {"kernel": "attend", "stored": INT8, "scale": "token"},
    {"kernel": "attend", "stored": INT4, "scale": "group"},
    {"kernel": "append", "stored": INT4, "scale": "group", "norm": True},
    {"kernel": "attend", "stored": INT4, "scale": "group4"},
    *({"kernel": kernel, "prefix": "auto"} for kernel in ("prefix", "attend", "common", "groups")),
)
MORE: tuple[dict[str, Any], ...] = (  # where it is measured
    *({"kernel": "attend", "page": page} for page in (0, 1, 64, 256)),
    {"kernel": "attend", "queries": 8, "term": "tree"},
    {"kernel": "attend", "queries": 100, "packed": True, "term": "softcap"},
    {"kernel": "attend", "split": 4096},
    {"kernel": "append", "stored": INT4, "scale": "group4"},
    *({"kernel": "attend", "stored": INT4, "scale": "group4", "queries": n} for n in (8, 16)),
    {"kernel": "attend", "dim": 512},
    *({"kernel": "attend", "queries": 16, "stored": x, "scale": "token"} for x in (E4M3, INT8, INT4)),
    *({"kernel": "attend", "dim": dim, "stored": E4M3, "scale": "token"} for dim in (64, 256, 512)),
    {"kernel": "attend", "stored": ["bfloat16", "float8_e4m3fn"], "scale": "head", "page": 64},
    {"kernel": "attend", "stored": ["float16", "float8_e5m2"], "scale": "tensor", "page": 0},
    {"kernel": "append", "stored": ["float8_e5m2", "float8_e4m3fn"], "scale": "token", "norm": True},
    *({"kernel": kernel, "prefix": "auto", "queries": 4, "packed": True} for kernel in ("prefix", "attend", "groups")),
    {"kernel": "combine", "prefix": "auto", "heads": 8, "kv_heads": 1},
    {"kernel": "prefix", "prefix": "auto", "stored": E4M3, "scale": "head"},
)
SPILL = 256  # bytes that a thread may store and load once, outside of the loop over keys
LOOP_SPILLS = 6  # instructions in its loop over keys (a mask mod 6, a tree 2, sm_100 1): to shrink, never to grow
SMALL_SPILL = 16  # of small kernels, outside of loops: the ptxas for aarch64 spills 8 bytes, that for x86_64 none
REPAIR_SPILL = 1024  # if rows may see different keys: the repair nearly never runs


def faults(made: dict[str, Any]) -> list[str]:
    if "error" in made:
        return [made["error"]]
    repairs = made.get("queries", 1) > 1 or made.get("term") == "documents"
    is_decode = made["kernel"] in ("attend", "prefix")
    allowed = (REPAIR_SPILL if repairs else SPILL) if is_decode else SMALL_SPILL
    found = [f"{made['spills']} bytes spilled"] if made["spills"] > allowed else []
    if made["loop_spills"] > (LOOP_SPILLS if repairs else 0):
        found.append(f"{made['loop_spills']} spills in the loop over keys")
    if made["shared"] > tiles.chip(made["arch"]).shared:
        found.append(f"{made['shared']} bytes of shared memory")
    if is_decode and not any("MMA" in name or "mfma" in name for name in made["instructions"]):
        found.append("no matrix instruction")
    return found


@cases("arch", [90], TARGETS)
def test_kernels_fit(arch: tiles.Arch) -> None:
    pytest.importorskip("triton")
    made = reports(MODULE, [{"arch": arch, **row} for row in (ROWS + MORE if arch == 90 else ROWS)])
    wrong = [f"{row}: {'; '.join(faults(row))}" for row in made if faults(row)]
    assert not wrong, "\n".join(wrong)


def test_keys_are_loaded_ahead() -> None:
    """On Hopper: asynchronous copies into three stages of shared memory, and products of a warpgroup."""
    (made,) = reports(MODULE, [{"arch": 90, "kernel": "attend"}])
    assert made["instructions"]["LDGSTS"] > 0
    assert made["instructions"]["HGMMA"] > 0
    assert made["shared"] >= 2 * 3 * 64 * 128 * 2


def test_bytes_are_read_as_words() -> None:
    """ldmatrix reads K and V of a quantised cache, and a packed conversion unpacks e4m3."""
    (made,) = reports(MODULE, [{"arch": 90, "kernel": "attend", "stored": E4M3, "scale": "head"}])
    assert made["instructions"]["LDSM"] > 0
    assert made["instructions"]["F2FP"] >= 128
    assert made["instructions"]["LDGSTS"] > 0
