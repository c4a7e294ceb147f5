"""The kernels of an MLA cache fit every GPU that has tiles: compiled without one, in a process of their own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compiling import reports
from tilewise.backends.common import tiles

MODULE = "tests.tilewise.backends.compile_mla"
pytestmark = pytest.mark.slow
ROWS: tuple[dict[str, Any], ...] = (
    {},
    {"heads": 16, "tokens": True, "packed": True},
    {"heads": 128, "queries": 2},
    {"heads": 16, "stored": "float8_e4m3fn"},
)
ON_90: tuple[dict[str, Any], ...] = (
    {"heads": 128, "stored": "int8", "tokens": True},
    {"heads": 128, "packed": True},
    {"heads": 16, "queries": 4, "kernel": "repair"},
    {"heads": 128, "hopper": True},
    {"heads": 16, "queries": 4, "page": 16, "hopper": True},
    {"heads": 16, "packed": True, "hopper": True},
)
# Bytes that a thread stores to local memory and loads again. To shrink, never to grow.
SPILLS = {"portable": 4096, "hopper": 500}  # hopper: in the loop over keys only of DeepSeek's fp8 format


def test_named_keys() -> None:
    """Copies of 16 bytes, and products that overlap; one load of a spill is in the loop over keys."""
    (made,) = reports(MODULE, [{"arch": 90, "heads": 128, "named": True}])
    assert made["warnings"] == []
    assert made["spills"] <= 32
    assert made["shared"] <= tiles.chip(90).shared
    assert made["instructions"]["HGMMA"] >= 2 * (36 + 4 + 4)
    assert made["copies"] == 36


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_fit(arch: int) -> None:
    pytest.importorskip("triton")
    wrong = []
    for made in reports(MODULE, [{"arch": arch, **row} for row in (ROWS + ON_90 if arch == 90 else ROWS)]):
        most = SPILLS["hopper" if made.get("hopper") else "portable"]
        if "error" in made or made["shared"] > tiles.chip(arch).shared or made["spills"] > most:
            wrong.append(made)
    assert not wrong, "\n".join(map(str, wrong))


def test_few_rows_do_not_spill() -> None:
    (made,) = reports(MODULE, [{"arch": 90, "tokens": True}])
    assert made["spills"] == 0
    assert made["instructions"]["HMMA"] > 0


def test_products_of_the_hopper_kernel_overlap() -> None:
    (made,) = reports(MODULE, [{"arch": 90, "heads": 128, "hopper": True}])
    assert made["warnings"] == []
    assert made["instructions"]["HGMMA"] >= 2 * (36 + 4 + 4)
