"""The example that trains on sharded sequences, as the guide starts it: its losses are those of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"`torchrun ([^`]+train_context_parallel\.py)`")


@pytest.mark.slow
@pytest.mark.parametrize("documents", ["", "--documents 40 3 21 1 30"])
def test_the_losses_are_those_of_one_process(documents):
    line = LINE.search((ROOT / "docs/distributed.md").read_text(encoding="utf-8"))[1]
    if documents:
        line = line.replace("--nproc-per-node 4", "--nproc-per-node 2")
    command = [
        sys.executable,
        "run",
        "python",
        "-m",
        "torch.distributed.run",
        *line.split(),
        "--steps",
        "6",
        "--length",
        "101",
        *documents.split(),
    ]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # ./run knows the sources
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    difference = float(done.stdout.split("largest difference")[1].split()[0])
    assert difference < 1e-4
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    assert float(lines[-1].split()[3]) < float(lines[0].split()[3])
