"""No step of vLLM needs a kernel that was not compiled when the engine started."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compiling import reports

pytest.importorskip("triton")

MODULE = "tests.tilewise.integrations.vllm_steps"
ROWS: tuple[dict[str, Any], ...] = (
    {},
    {"heads": 16, "kv_heads": 4, "dim": 64},
    {"heads": 32, "kv_heads": 32, "tokens": 2048, "sequences": 64},
    {"heads": 64, "kv_heads": 8, "dim": 64, "window": 128, "sinks": True},
    {"heads": 8, "kv_heads": 1, "dim": 256, "page": 32, "softcap": 50.0, "sequences": 1000, "tokens": 16384},
    {"heads": 16, "kv_heads": 2, "dim": 64, "drafts": 4},
    {"tokens": 200, "sequences": 7, "drafts": 2},
    {"stored": "fp8"},
)
MOST = 16  # kernels of a kind of layer
FORGOTTEN = [{"forget": 1}, {"forget": 255}, {"forget": 8192}, {"drafts": 3, "forget": 4, "dim": 64, "heads": 16}]


def test_every_kernel_of_a_step_is_compiled_before() -> None:
    for row, found in zip(ROWS, reports(MODULE, [*ROWS]), strict=True):
        assert not found["missing"], (row, found["missing"])
        assert found["steps"] > 50
        assert found["kernels"] <= MOST + 8 * bool(row.get("drafts")), row


def test_a_forgotten_kernel_is_noticed() -> None:
    for row, found in zip(FORGOTTEN, reports(MODULE, FORGOTTEN), strict=True):
        assert found["missing"], row
