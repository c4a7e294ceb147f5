"""Run by test_offsets, in a process whose Triton is the compiler's: the uses of strides as 32-bit numbers in kernels
whose tensors have dims so far apart that offsets inside a tile exceed 32 bits. Prints JSON: {kernel: lines of IR}."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.common.kv import launches as kv
from tilewise.backends.common.kv.append_launches import append_launch
from tilewise.backends.common.launch import DeviceMemory, Launch, Target
from tilewise.backends.common.offline import binary_for
from tilewise.backends.triton.offline import offline_launches
from tilewise.kv_request import AppendRequest, CachePlaces, KvCall, KvRequest
from tilewise.request import Gpu, Request, Spec

SM_90 = Gpu("cuda", 90)
ARGUMENT = re.compile(r"(%\w+): (!tt\.ptr|i32)")


def wide(*shape: int) -> Tensor:
    return torch.empty_strided(shape, (64, 16, 8, 2**25 + 8), dtype=torch.bfloat16, device="meta")


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def kv_launches() -> dict[str, Launch]:
    target, memory = Target(SM_90, 132), DeviceMemory(torch.device("meta"))
    q, k, v = wide(4, 1, 4, 128), wide(64, 16, 2, 128), wide(64, 16, 2, 128)
    places = CachePlaces(meta(4), meta(4, 21), new=1)
    request = KvRequest(Request(q, k, v, Spec(0.1, None, 0)), places)
    numbers, floats = kv.schedule_sizes(request, target)
    buffers = meta(numbers, dtype=torch.int64), meta(floats, dtype=torch.float32)
    call = KvCall(request, None, *buffers, wide(4, 1, 4, 128), meta(4, 4, 1, dtype=torch.float32))
    attend, *_, combine = kv.attend_launches(call, target, memory)
    new = AppendRequest(wide(4, 1, 2, 128), wide(4, 1, 2, 128), k, v, places)
    return {"decode": attend, "combine": combine, "append": append_launch(new, SM_90)}


def dense_launches() -> dict[str, Launch]:
    q, k, v = wide(2, 300, 4, 64), wide(2, 300, 2, 64), wide(2, 300, 2, 64)
    request = Request(q, k, v, Spec(0.1, None, 0))
    made = offline_launches(request, SM_90, False) | offline_launches(request, SM_90, True)
    return {name: x for name, x in made.items() if name != "preprocess"}  # which reads results only: contiguous here


def wide_strides(head: str) -> list[str]:
    """The arguments that are strides of a wide tensor: four follow its pointer. (The last of other tensors is 1, which
    is a constant; an axis of size 1 has stride 0.)"""
    kinds = ARGUMENT.findall(head)
    pointers = [n for n, (_, kind) in enumerate(kinds) if kind != "i32"]
    runs = (kinds[a + 1 : b] for a, b in pairwise([*pointers, len(kinds)]))
    return [name for run in runs if len(run) == 4 for name, _ in run]


def narrow_uses(launch: Launch) -> list[str]:
    ir: str = binary_for(90, launch.kernel, launch.args, launch.options).asm["ttir"]
    (head,) = (line for line in ir.splitlines() if "tt.func public" in line)
    strides = wide_strides(head)
    assert strides, head
    uses = (line.split("=", 1)[-1].split(" loc(")[0] for line in ir.splitlines() if "tt.func" not in line)
    found = [line for line in uses if any(re.search(re.escape(x) + r"\b", line) for x in strides)]
    return [line.strip() for line in found if "arith.extsi" not in line]


if __name__ == "__main__":
    made: dict[str, Any] = kv_launches() | dense_launches()
    print(json.dumps({name: narrow_uses(launch) for name, launch in made.items()}))
