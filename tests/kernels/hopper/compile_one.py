"""Compiles one call of the Hopper forward for sm_90 and prints what the compiler made of it, as JSON.

python -m tests.kernels.hopper.compile_one '{"d": 128, "after": 0}'
"""

from __future__ import annotations

import json
import sys

import torch
import triton

from tilewise.kernels.hopper.launch import forward_launches, new_state
from tilewise.perf.compiled import compile_for
from tilewise.spec import Spec


def main(
    d: int, dv: int | None = None, n: int = 4096, before: int | None = None, after: int | None = None,
    packed: bool = False, dtype: str = "bfloat16",
) -> None:  # fmt: skip
    heads, batch, dv = 4, 2, dv or d
    outer = (n,) if packed else (batch, n)
    q, k, v, out = (torch.empty(*outer, heads, x, dtype=getattr(torch, dtype)) for x in (d, d, dv, dv))
    lse = torch.empty(heads, n) if packed else torch.empty(batch, heads, n)
    cu = torch.zeros(3, dtype=torch.int32) if packed else None
    state = new_state(torch.device("cpu"))
    launches = forward_launches(q, k, v, out, lse, cu, cu, Spec(d**-0.5, before, after), state, 132)
    made = compile_for(90, launches[0].kernel, launches[0].args, launches[0].options)
    print(
        json.dumps(
            {
                "triton": triton.__version__,
                "spills": made.spills,
                "warnings": made.warnings,
                "shared": made.shared,
                "products": made.instructions["HGMMA"],
                "copies": made.instructions["UTMALDG"],
                "waits": made.sass.count("WARPGROUP.DEPBAR"),
            }
        )
    )


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
