"""Compiles the launches of precision="fp8" of the portable kernels, for `test_fp8_compile`."""

from __future__ import annotations

from typing import Any

import torch

from tests.compiling import answer
from tilewise.backends.triton.offline import offline_launches
from tilewise.request import Gpu, Request, Spec
from tilewise_lab.costs.compiled import compile_for


def main(arch: int, d: int, before: int | None = None, after: int | None = None) -> dict[str, Any]:
    """By launch: the bytes of spilled registers, and whether the code has the scales of rows: a negative scale."""
    x = torch.empty(1, 4096, 8, d, dtype=torch.bfloat16, device="meta")
    request = Request(x, x, x, Spec(d**-0.5, before, after, precision="fp8"))
    found = {}
    for name, launch in offline_launches(request, Gpu("cuda", arch), False).items():
        if "repair" not in name:
            made = compile_for(arch, launch.kernel, launch.args, launch.options)
            ttir = made.asm["ttir"]
            flag = "-1.000000e+00" if "quantise" in name else "math.absf"
            found[name] = {"spills": made.spills, "own scales": flag in ttir}
    return found


if __name__ == "__main__":
    answer(main)
