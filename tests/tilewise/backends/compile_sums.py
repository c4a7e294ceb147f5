"""Compiles the sums of the gradients of biases and sinks, as JSON: what their tiles need.

python -m tests.tilewise.backends.compile_sums 90 256 bfloat16
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tilewise.backends.common import term_gradients as terms
from tilewise.backends.common.kernel_call import new_results
from tilewise.backends.common.launch import DeviceMemory, Launch, Target
from tilewise.backends.common.sinks import named_sink_launches
from tilewise.request import BackwardInputs, Gpu, Request, Spec
from tilewise_lab.costs.compiled import compile_for


def main(arch: int | str, d: int, dtype: str) -> None:
    made = []

    class Compile(Launch):
        def __call__(self) -> None:
            found = compile_for(arch, self.kernel, self.args, self.options)
            made.append({"kernel": self.kernel.fn.__name__, "shared": found.shared, "spills": found.spills})

    gpu = Gpu("cuda" if isinstance(arch, int) else "hip", arch)
    target, memory = Target(gpu, 132), DeviceMemory(torch.device("cpu"))
    preprocess, renormalised = terms.preprocess_launch, terms.renormalised

    def compile_first(*args: Any) -> Any:
        first, bwd_inputs = renormalised(*args)
        return [Compile(*launch) for launch in first], bwd_inputs

    stand_ins: dict[str, Any] = {
        "Launch": Compile,
        "target_of": lambda _: target,
        "preprocess_launch": lambda *args: (lambda: None, preprocess(*args)[1]),
        "renormalised": compile_first,
        "scatter_": lambda *_: None,
    }
    for name, value in stand_ins.items():
        setattr(terms, name, value)
    n, cu = 256, torch.zeros(3, dtype=torch.int32)
    q, k, v, dout, out = (torch.empty(2, n, 4, d, dtype=getattr(torch, dtype)) for _ in range(5))
    for shape in ((1, 4, n, n), (2, 4, n, n), (1, 4, 1, n), (1, 4, n, 1)):
        bias = torch.empty(shape, dtype=q.dtype)
        request = Request(q, k, v, Spec(d**-0.5, None, 0), bias=bias)
        terms.Sums(request, BackwardInputs(out, torch.empty(2, 4, n), dout, None)).of_bias(bias)
        packed = Request(*(x[0] for x in (q, k, v)), request.spec, bias=bias, cu_q=cu, cu_k=cu)
        terms.Sums(packed, BackwardInputs(out[0], torch.empty(4, n), dout[0], None)).of_bias(bias)
    request = Request(q, k, v, Spec(d**-0.5, None, 0), sinks=torch.empty(4, dtype=q.dtype))
    out, lse = new_results(request, memory)
    for launch in named_sink_launches(request, BackwardInputs(out, lse, out, None), target, memory).values():
        Compile(*launch)()
    print(json.dumps(made))


if __name__ == "__main__":
    which = sys.argv[1]
    main(int(which) if which.isdigit() else which, int(sys.argv[2]), sys.argv[3])
