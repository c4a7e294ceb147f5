"""What `import tilewise` costs after torch. Its bar is half a second, which no test measures: a busy machine would fail
it. The work is counted instead: on one core at 2.5 GHz 33,000 calls of Python functions took 0.35 s, 2026-11-19."""

from __future__ import annotations

import json
import subprocess
import sys

MODULES, CALLS = 85, 45_000  # 74 and 33,000 on 2026-11-19

COUNT = """
import json, sys
import torch
before, calls = set(sys.modules), 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
import tilewise
sys.setprofile(None)
print(json.dumps([sorted(set(sys.modules) - before), calls]))
"""


def test_the_import_is_small():
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    modules, calls = json.loads(done.stdout)
    assert "tilewise.api" in modules
    assert [x for x in modules if x.partition(".")[0] != "tilewise"] == []  # torch had them all
    assert len(modules) <= MODULES
    assert 0 < calls <= CALLS
