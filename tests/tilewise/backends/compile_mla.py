"""Compile the kernels of an MLA cache for a target without a GPU: rows on the standard input, reports on the output.

A row: {"arch": 90}, and the call: heads, queries, page, dtype, packed, stored (a dtype of 8 bits, with scales by
token), tokens (a token table), split, kernel ("attend", "repair"), hopper (whether the Hopper kernel), named (the
Hopper kernel of keys that queries name).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch

from tilewise.backends.common.kv import launches
from tilewise.backends.common.kv.mla_launches import attend_launches
from tilewise.backends.common.launch import DeviceMemory, Target
from tilewise.backends.hopper.mla_launches import hopper_mla_launches
from tilewise.backends.hopper.topk import topk_launch
from tilewise.call.fields import CACHE
from tilewise.kv_request import KvCall
from tilewise.request import Gpu
from tilewise.validation import kv as checks
from tilewise_lab.costs.compiled import compile_for

BATCH, ROWS = 4, 64


def launch_of(
    arch: int,
    *,
    heads: int = 16,
    queries: int = 1,
    page: int = 64,
    dtype: str = "bfloat16",
    packed: bool = False,
    stored: str | None = None,
    tokens: bool = False,
    split: int | None = None,
    kernel: str = "attend",
    hopper: bool = False,
    named: bool = False,
) -> Any:
    if named:
        q, k = (torch.empty(2, n, h, 576, dtype=getattr(torch, dtype)) for n, h in ((32, heads), (4096, 1)))
        results = torch.empty(*q.shape[:3], 512, dtype=q.dtype), torch.empty(2, heads, 32)
        return topk_launch(q, k, torch.zeros(2, 32, 1, 2048, dtype=torch.int32), results, 0.04)
    q = torch.empty(BATCH, queries, heads, 576, dtype=getattr(torch, dtype))
    cache = torch.empty(ROWS, page or 4096, 1, 576, dtype=q.dtype)
    if packed:
        cache = torch.empty(ROWS, page or 4096, 1, 656, dtype=torch.float8_e4m3fn)
    options: Any = {"split": split}
    if stored is not None:
        cache = torch.empty(cache.shape, dtype=getattr(torch, stored))
        options["k_scale"] = options["v_scale"] = torch.ones(cache.shape[:3])
    if tokens:
        options["token_table"] = torch.zeros(BATCH, 2048, dtype=torch.int32)
    elif page:
        options["page_table"] = torch.zeros(BATCH, ROWS, dtype=torch.int32)
    lengths = torch.zeros(BATCH, dtype=torch.int32)
    request = checks.attend_request(q, cache, cache[..., :512], lengths, CACHE.completed(options))
    target, memory = Target(Gpu("cuda", arch), 132), DeviceMemory(torch.device("cpu"))
    numbers, floats = launches.schedule_sizes(request, target)
    schedule, workspace = torch.empty(numbers, dtype=torch.int64), torch.empty(floats)
    out, lse = torch.empty(*q.shape[:-1], 512, dtype=q.dtype), torch.empty(BATCH, heads, queries)
    call = KvCall(request, None, schedule, workspace, out, lse)
    made = hopper_mla_launches(call, target) if hopper else attend_launches(call, target, memory)
    return made[{"attend": 0, "repair": 1}[kernel]]


def report(row: dict[str, Any]) -> dict[str, Any]:
    try:
        made = launch_of(**row)
        found = compile_for(row["arch"], made.kernel, made.args, made.options)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"[-300:]}
    facts = {"registers": found.registers, "spills": found.spills, "shared": found.shared, "warnings": found.warnings}
    facts["copies"] = found.instructions["LDGSTS"]
    return row | facts | {"instructions": {name: n for name, n in found.instructions.items() if "MMA" in name}}


if __name__ == "__main__":
    for fields in json.load(sys.stdin):
        print(json.dumps(report(fields)), flush=True)
