"""Compiles calls of the Hopper backward for sm_90 and prints what the compiler made of their sums, as JSON.

echo '{"d": 256, "after": 0}' | python -m tests.tilewise.backends.hopper.compile_backward
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from tilewise.backends.common.kernel_call import call_shape, new_gradients
from tilewise.backends.common.launch import DeviceMemory
from tilewise.backends.hopper.backward_launches import backward_launches, new_workspace
from tilewise.backends.hopper.backward_schedule import Split
from tilewise.request import BackwardInputs, Request, Spec
from tilewise_lab.costs.compiled import compile_for

from ....compiling import answer
from .compile_one import with_terms


def main(
    d: int,
    dv: int | None = None,
    n: int = 4096,
    before: int | None = None,
    after: int | None = None,
    packed: bool = False,
    group: int = 1,
    deterministic: bool = False,
    dtype: str = "bfloat16",
    terms: str = "",
    partial: bool = False,
    split: Sequence[int] | None = None,
) -> dict[str, Any]:
    kv_heads, batch, dv = 4, 2, dv or d
    heads = kv_heads * group
    outer = (n,) if packed else (batch, n)
    shapes = (heads, d), (kv_heads, d), (kv_heads, dv), (heads, dv)
    q, k, v, out = (torch.empty(*outer, *shape, dtype=getattr(torch, dtype)) for shape in shapes)
    lse = torch.empty(heads, n) if packed else torch.empty(batch, heads, n)
    cu = torch.zeros(3, dtype=torch.int32) if packed else None
    spec = Spec(d**-0.5, before, after, deterministic=deterministic, partial=partial)
    request = with_terms(Request(q, k, v, spec, cu_q=cu, cu_k=cu), terms, batch, n)
    memory = DeviceMemory(q.device)
    space = new_workspace(memory, call_shape(request), Split(*split) if split else Split() if partial else None)
    if partial:  # and somewhere in a larger call, if something asks where
        request = request._replace(position_offsets=torch.zeros(batch, 7, dtype=torch.int32) if terms else None)
    grads = new_gradients(request, memory)
    words = torch.empty(1 << 16, dtype=torch.int32) if "words" in terms else None
    bwd_inputs = BackwardInputs(out, lse, out, None)
    _, sums, *_ = backward_launches(request, bwd_inputs, grads, space, 132, words).values()
    made = compile_for(90, sums.kernel, sums.args, sums.options)
    return {
        "spills": made.spills,
        "warnings": made.warnings,
        "shared": made.shared,
        "products": made.instructions["HGMMA"],
        "copies": made.instructions["UTMALDG"],
        "waits": made.sass.count("WARPGROUP.DEPBAR"),
        "barriers": re.findall(r"SYNCS\.EXCH\.64 URZ, \[(\S+)\]", made.sass),
    }


if __name__ == "__main__":
    answer(main)
