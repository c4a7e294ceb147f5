"""A cache that was warmed without looking at the GPU leaves nothing to compile on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CALLS = """
import torch, triton, tilewise
misses = []
triton.knobs.compilation.listener = lambda **told: None if told["cache_hit"] else misses.append(told["src"].fn.__name__)
for batch, tokens, heads in ((2, 1500, 8), (1, 1000, 2), (3, 77, 4), (1, 4096, 16)):
    q = torch.randn(batch, tokens, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(batch, tokens, heads // 2, 128, device="cuda", dtype=q.dtype, requires_grad=True) for _ in "kv")
    tilewise.attention(q, k, v, causal=True).sum().backward()
torch.cuda.synchronize()
print(misses)
"""


def test_a_warmed_cache_leaves_nothing_to_compile(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    sources = Path(__file__).resolve().parents[2] / "src"
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(sources)}
    warm = ["warm", "--head-dim", "128", "--heads", "8", "--kv-heads", "4", "--gpu", f"sm_{major}{minor}"]
    subprocess.run([sys.executable, "-m", "tilewise_lab", *warm], env=environment, check=True)
    said = subprocess.run([sys.executable, "-c", CALLS], env=environment, check=True, capture_output=True, text=True)
    assert said.stdout.strip() == "[]"


pytestmark = pytest.mark.slow
