"""The loops of the forward as code for mma.sync: without a branch around the mask, Triton gives both products of a loop
one division of their rows among the warps, so that no score passes through shared memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.forks import ROOT, environment

pytestmark = pytest.mark.slow

COMPILED = r"""
import json, re, sys
from bench.tiles import Row, launch_of
from tilewise.backends.common.offline import binary_for
from tilewise_lab.costs.compiled import inspect

def loops(ptx):
    "The lines of the innermost loops."
    lines, labels = ptx.splitlines(), {}
    for n, line in enumerate(lines):
        if found := re.match(r"(\$L__BB\w+):", line):
            labels[found[1]] = n
        found = re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);", line)
        if found and found[1] in labels:
            yield lines[labels[found[1]] : n]

def facts(arch, dim, variant):
    launch = launch_of(Row("forward", arch, "bfloat16", dim, variant))
    binary = binary_for(arch, launch.kernel, launch.args, launch.options)
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", binary.asm["ttgir"], re.M))
    products = re.findall(r"tt\.dot .*-> tensor<\w+, (#\w+)>", binary.asm["ttgir"])
    bodies = [body for body in loops(binary.asm["ptx"]) if any("mma.sync" in line for line in body)]
    return {
        "warps": sorted({re.search(r"warpsPerCTA = (\[[^\]]*\])", layouts[x])[1] for x in products}),
        "barriers": [sum("bar.sync" in line for line in body) for body in bodies],
        "spills": inspect(binary, arch).spills, "shared": binary.metadata.shared,
    }

print(json.dumps([facts(*row) for row in json.loads(sys.argv[1])]))
"""
SPILLS = {256: 256}  # bytes; 0 for other head dims. To shrink, never to grow.


@pytest.mark.parametrize("arch", [80, 89])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_products_are_divided_by_rows(dim: int, arch: int) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, json.dumps([[arch, dim, "causal"]])],
        capture_output=True, text=True, cwd=ROOT, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads(done.stdout.splitlines()[-1])
    assert found["warps"] == ["[4, 1]"]
    assert len(found["barriers"]) == 2  # the interior and the edge
    assert max(found["barriers"]) <= 2
    assert found["spills"] <= SPILLS.get(dim, 0)
    assert found["shared"] <= (163 if arch == 80 else 99) * 1024
