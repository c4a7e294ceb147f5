"""Compiles the kernels before and after the Hopper backward for sm_90 and prints how wide their loads and stores are,
how many 16-byte loads the first does before its first store, and how many bytes it spills.

echo '{"d": 72}' | python -m tests.tilewise.backends.hopper.compile_small
"""

from __future__ import annotations

import re
from typing import Any

import torch

from tilewise.backends.common.kernel_call import call_shape
from tilewise.backends.common.launch import DeviceMemory
from tilewise.backends.hopper.backward_launches import backward_launches, new_workspace
from tilewise.request import BackwardInputs, Request, Spec
from tilewise_lab.costs.compiled import compile_for

from ....compiling import answer


def main(d: int) -> dict[str, Any]:
    q = torch.empty(1, 256, 3, d, dtype=torch.bfloat16)
    request, inputs = Request(q, q, q, Spec(1.0)), BackwardInputs(q, torch.empty(1, 3, 256), q, None)
    space = new_workspace(DeviceMemory(q.device), call_shape(request), None)
    before, _, after = backward_launches(request, inputs, (q, q, q), space, 132).values()
    made = {
        name: compile_for(90, launch.kernel, launch.args, launch.options)
        for name, launch in {"before": before, "after": after}.items()
    }
    widths = {
        name: sorted(set(re.findall(r"(?:ld|st)\.global\.((?:v\d\.)?b\d+)", x.asm["ptx"]))) for name, x in made.items()
    }
    loads = made["before"].sass.partition("STG")[0].count("LDG.E.128")
    return {"widths": widths, "loads": loads, "spills": made["before"].spills}


if __name__ == "__main__":
    answer(main)
