"""No step of vLLM needs a kernel that was not compiled when the engine started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
ROWS: tuple[dict[str, Any], ...] = (
    {},
    {"heads": 16, "kv_heads": 4, "dim": 64},
    {"heads": 32, "kv_heads": 32, "tokens": 2048, "sequences": 64},
    {"heads": 64, "kv_heads": 8, "dim": 64, "window": 128, "sinks": True},
    {"heads": 8, "kv_heads": 1, "dim": 256, "page": 32, "softcap": 50.0, "sequences": 1000, "tokens": 16384},
    {"heads": 16, "kv_heads": 2, "dim": 64, "drafts": 4},
    {"tokens": 200, "sequences": 7, "drafts": 2},
)
MOST = 16  # kernels of a kind of layer
FORGOTTEN = [{"forget": 1}, {"forget": 255}, {"forget": 8192}, {"drafts": 3, "forget": 4, "dim": 64, "heads": 16}]


def reports(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.tilewise.integrations.vllm_steps"],
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_of_a_step_is_compiled_before() -> None:
    for row, found in zip(ROWS, reports([*ROWS]), strict=True):
        assert not found["missing"], (row, found["missing"])
        assert found["steps"] > 50
        assert found["kernels"] <= MOST + 8 * bool(row.get("drafts")), row


def test_a_forgotten_kernel_is_noticed() -> None:
    for row, found in zip(FORGOTTEN, reports(FORGOTTEN), strict=True):
        assert found["missing"], row
