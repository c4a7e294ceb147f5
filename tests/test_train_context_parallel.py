"""The example that trains on sharded sequences: its losses are those of one process, or it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_context_parallel.py"


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--ranks 4", "--ranks 2 --documents 40 3 21 1 30", "--ranks 2 --window 9"])
def test_the_losses_are_those_of_one_process(words):
    command = [sys.executable, str(EXAMPLE), "--steps", "6", "--length", "101", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    difference = float(done.stdout.split("largest difference")[1].split()[0])
    assert difference < 1e-4
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    assert float(lines[-1].split()[3]) < float(lines[0].split()[3])
