"""Compiles the kernels of second derivatives for rows on standard input: {"arch", "dtype", "dim", "packed", "group",
"one_pass": whether the Hopper kernel runs, "window", "term": a name in `second.TERMS`, "all_kernels": those that repair
too}. Prints a line of JSON for each kernel of each row."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import torch

from tests.second import TERMS
from tilewise.backends.common.hvp_launches import build_hvp
from tilewise.backends.common.launch import DeviceMemory, Target
from tilewise.call.fields import ATTENTION
from tilewise.request import Gpu, Request, Spec
from tilewise.validation import dense as checks
from tilewise_lab.costs.compiled import compile_for

KERNELS = ("jvp_kernel", "hvp_key_kernel", "hvp_query_kernel", "hvp_kernel")


def launches(
    arch: int,
    dtype: str,
    dim: int,
    packed: bool = False,
    group: int = 1,
    one_pass: bool = False,
    window: tuple[int | None, int | None] = (None, 0),
    term: str | None = None,
) -> list[Any]:
    n = 1024
    shape = (n,) if packed else (1, n)
    q, k = (torch.empty(*shape, heads, dim, dtype=getattr(torch, dtype)) for heads in (2 * group, 2))
    lse = torch.empty(*shape[:-1], 2 * group, n)
    cu = torch.tensor([0, n], dtype=torch.int32) if packed else None
    if term is None:
        request = Request(q, k, k, Spec(scale=0.125, before=window[0], after=window[1]), cu_q=cu, cu_k=cu)
    else:
        request = checks.dense(q, k, k, ATTENTION.completed(TERMS[term](n, "cpu")))
    tensors = *request.tensors(), q, lse, q, lse, q, k, k
    target = Target(Gpu("cuda", arch), 132)
    made = import_module("tilewise.backends.hopper.hvp_launches").ONE_PASS if one_pass else None
    return list(build_hvp(request.spec, made)(tensors, target, DeviceMemory(q.device)).launches)


if __name__ == "__main__":
    for row in json.load(sys.stdin):
        kernels = None if row.pop("all_kernels", False) else KERNELS
        for launch in launches(**row):
            name = launch.kernel.fn.__name__
            if kernels is None or name in kernels:
                made = compile_for(row["arch"], launch.kernel, launch.args, launch.options)
                facts = {"spills": made.spills, "shared": made.shared, "warnings": made.warnings}
                print(json.dumps({"kernel": name} | facts))
