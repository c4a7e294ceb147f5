from __future__ import annotations

import os
import subprocess
import sys

from tests.forks import python

SCRIPT = """
import os, sys, torch, tilewise
print(sys.argv[1:], sys.stdin.read(), os.environ.get("SAID"), os.getcwd(), __name__, "triton" in sys.modules)
print(hasattr(torch, "left_behind"), hasattr(tilewise, "left_behind"))
torch.left_behind = tilewise.left_behind = os.environ["SAID"] = "here"
import json; sys.modules["left_behind"] = json
print("left_behind" in sys.modules, file=sys.stderr)
raise SystemExit(int(sys.argv[1]))
"""


def test_it_does_what_a_new_process_does_and_leaves_nothing_behind(tmp_path):
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"} | {"SAID": "this"}
    command = [sys.executable, "-c", SCRIPT, "3", "b c"]
    known = subprocess.run(command, input="given", env=env, cwd=tmp_path, capture_output=True, text=True)
    assert known.returncode == 3, known.stderr
    for _ in range(2):
        found = python("-c", SCRIPT, "3", "b c", input="given", env=env, cwd=tmp_path)
        assert (found.returncode, found.stdout, found.stderr) == (3, known.stdout, known.stderr)


def test_errors_are_seen():
    found = python("-c", "raise ValueError('no')")
    assert found.returncode == 1
    assert found.stderr.endswith("ValueError: no\n")
    assert python("-c", "import os; os.abort()").returncode == -1
    assert python("-c", "raise SystemExit('words')").stderr == "words\n"
    module = python("-m", "tilewise_lab", "--version")
    assert (module.returncode, module.stdout[:9]) == (0, "tilewise ")


def test_processes_of_it_see_how_their_own_end():
    script = "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'raise SystemExit(5)']).returncode)"
    assert python("-c", script).stdout == "5\n"
