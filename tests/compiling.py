"""Compiles kernels in a process whose Triton is the compiler's: the tests' own process may have the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def reports(module: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a module prints, a line of JSON each, for rows on its standard input."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, input=json.dumps(rows), capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
