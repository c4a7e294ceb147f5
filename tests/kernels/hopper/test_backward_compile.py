"""What the compiler makes of the Hopper backward, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product

import pytest

from .test_compile import ROOT, TRITONS

CALLS = {
    "64 full": {"d": 64},
    "64 causal": {"d": 64, "after": 0},
    "128 full": {"d": 128},
    "128 causal": {"d": 128, "after": 0},
    "128 ordered": {"d": 128, "deterministic": True},
}
# bytes, at most, all outside of the loop: what the compiler computes before the warps part, and keeps
SPILLS = {"128 causal": 40, "128 ordered": 64}


def compiled(call: dict[str, object], triton: str = "") -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [triton, str(ROOT / "src"), str(ROOT)]))}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.hopper.compile_backward", json.dumps(call)],
        capture_output=True, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(("name", "triton"), product(CALLS, TRITONS))
def test_nothing_serialised_and_no_shared_barriers(name, triton):
    """A barrier that is initialised twice is two barriers: one of them has ended, as the compiler sees it, and what
    came to lie in its place is overwritten when the GPU puts the program aside for another process."""
    pytest.importorskip("triton")
    made = compiled(CALLS[name], triton)
    assert made["spills"] <= SPILLS.get(name, 0)
    assert made["warnings"] == []
    assert made["products"] > made["waits"] > 0
    assert made["shared"] <= 227 * 1024
    assert len({*made["barriers"]}) == len(made["barriers"]) > 0
