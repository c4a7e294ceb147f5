"""Compile the kernels of the KV cache for a target without a GPU: rows on the standard input, reports on the output.

A row: {"arch": 90 or "gfx942", "kernel": "attend" ("schedule", "combine" of few KV heads, "append"; with prefix also
"prefix", "common", "groups")}, and the call: dim, dim_v, dtype, page, heads, kv_heads, queries, packed, split, term,
tile, stored (dtypes of K and V), scale, norm, prefix (the option shared_prefix).
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import nullcontext
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch

import tilewise
from tilewise.backends.common.kv import append_launches
from tilewise.backends.common.kv import launches as kv_launch
from tilewise.backends.common.kv import partition as partitions
from tilewise.backends.common.kv import prefix_launches as prefix_launch
from tilewise.backends.common.kv.runners import with_rotated
from tilewise.backends.common.launch import DeviceMemory, Target
from tilewise.call.fields import CACHE
from tilewise.kv_request import KvCall, KvRequest
from tilewise.request import Gpu
from tilewise.validation import kv as checks
from tilewise_lab.costs.compiled import Compiled, compile_for

BATCH, ROWS = 4, 64
COPIES = ("LDGSTS", "LDSM", "F2FP")  # copies to shared memory and from it, packed conversions


def launch_of(
    arch: int | str,
    kernel: str,
    *,
    dim: int = 128,
    dim_v: int = 0,
    dtype: str = "bfloat16",
    page: int = 16,
    heads: int = 32,
    kv_heads: int = 8,
    queries: int = 1,
    packed: bool = False,
    split: int | None = None,
    term: str | None = None,
    tile: list[int] | None = None,
    stored: list[str] | None = None,
    scale: str | None = None,
    norm: bool = False,
    prefix: str | None = None,
) -> Any:
    gpu = Gpu("cuda" if isinstance(arch, int) else "hip", arch)
    kind, dv = getattr(torch, dtype), dim_v or dim
    q = torch.empty(BATCH, queries, heads, dim, dtype=kind)
    options: Any = {"split": split, "shared_prefix": prefix}
    if packed:
        q = q.flatten(0, 1)
        options["cu_seqlens_q"] = torch.zeros(BATCH + 1, dtype=torch.int32)
    k, v = (
        torch.empty(ROWS, page or 4096, kv_heads, d // 2 if name == "uint8" else d, dtype=getattr(torch, name))
        for d, name in zip((dim, dv), stored or [dtype] * 2, strict=True)
    )
    for name, x in (("k_scale", k), ("v_scale", v)):
        shapes: Any = {"tensor": (), "head": (kv_heads,), "token": x.shape[:3]}
        shapes |= {f"group{n}": (*x.shape[:3], int(n or 2)) for n in ("", "4", "8")}
        if scale is not None and x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            options[name] = torch.ones(shapes[scale])
    if page:
        options["page_table"] = torch.zeros(BATCH, ROWS, dtype=torch.int32)
    options |= {
        None: {},
        "window": {"window": (128, 0), "sinks": torch.zeros(heads)},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": torch.zeros(heads)},
        "tree": {"tree": torch.zeros(BATCH, queries, queries) > 0},
        "documents": {"mask_mod": tilewise.mods.document(ids=torch.zeros(BATCH, 4096, dtype=torch.int32))},
        "starts": {"starts": torch.zeros(BATCH, dtype=torch.int32)},
    }[term]
    lengths = torch.zeros(BATCH, dtype=torch.int32)
    chosen = (
        nullcontext()
        if tile is None
        else mock.patch.object(partitions, "decode_tile", return_value=partitions.KvTile(*tile))
    )
    with chosen, mock.patch.object(partitions, "INTERPRETED_PROCESSORS", 132):
        if kernel == "append":
            new = (
                torch.empty(BATCH, queries, kv_heads, dim, dtype=kind),
                torch.empty(BATCH, queries, kv_heads, dv, dtype=kind),
            )
            rotary = tilewise.Rotary(torch.zeros(64, dim // 2), torch.zeros(64, dim // 2))
            names = ("page_table", "k_scale", "v_scale")
            asked = CACHE.completed({"rotary": rotary, **{n: options[n] for n in names if n in options}})
            if norm:
                asked["qk_norm"] = tilewise.QkNorm(torch.ones(dim), torch.ones(dim))
            places = checks.places_of(new[0], k, lengths, asked)
            request = checks.append_request(*new, k, v, places, q, asked)
            return append_launches.append_launch(with_rotated(request, DeviceMemory(torch.device("cpu"))), gpu)
        request = checks.attend_request(q, k, v, lengths, CACHE.completed(options))
        target, memory = Target(gpu, 132), DeviceMemory(torch.device("cpu"))
        if prefix:
            return prefix_launch_of(kernel, request, target, memory)
        numbers, floats = kv_launch.schedule_sizes(request, target)
        schedule, workspace = torch.empty(numbers, dtype=torch.int64), torch.empty(floats)
        out = torch.empty(*q.shape[:-1], dv, dtype=kind)
        lse = torch.empty(*q.shape[:-3], heads, q.shape[-3])
        call = KvCall(request, None, schedule, workspace, out, lse)
        made = dict(zip(("attend", "combine"), kv_launch.attend_launches(call, target, memory), strict=False))
        (made["schedule"],) = kv_launch.schedule_launches(request, schedule, target)
        return made[kernel]


def prefix_launch_of(kernel: str, request: KvRequest, target: Target, memory: Any) -> Any:
    """A launch of a call with shared prefixes."""
    numbers, floats = prefix_launch.schedule_sizes(request, target)
    schedule, workspace = torch.empty(numbers, dtype=torch.int64), torch.empty(floats)
    q = request.q
    out, lse = torch.empty(*q.shape[:-1], request.v.shape[-1], dtype=q.dtype), torch.empty(q.shape[:-1]).mT
    names = ("common", "groups", "prefix schedule", "schedule")
    made = dict(zip(names, prefix_launch.schedule_launches(request, schedule, target), strict=True))
    call = KvCall(request, None, schedule, workspace, out, lse)
    attends = prefix_launch.attend_launches(call, target, memory)
    made["prefix"] = next(x for x in attends if getattr(x.options["CONFIG"], "OF_PREFIX", False))
    made["attend"] = next(x for x in attends if hasattr(x.options["CONFIG"], "OF_PREFIX") and x is not made["prefix"])
    if attends[-1] is not made["attend"]:
        made["combine"] = attends[-1]
    return made[kernel]


def compiled(**row: Any) -> Compiled:
    made = launch_of(**row)
    return compile_for(row["arch"], made.kernel, made.args, made.options)


def loop_spills(sass: str) -> int:
    """Instructions that spill or reload registers in loops that copy keys to shared memory ahead of their use."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label is not None:
            labels[label[1]] = len(lines)
        lines += re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
    jumps = ((n, re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) for n, line in enumerate(lines))
    loops = [(labels[jump[1]], n + 1) for n, jump in jumps if jump is not None and labels.get(jump[1], n + 1) <= n]
    found = 0
    for first, end in loops:
        body = lines[first:end]
        innermost = not any(first <= a and b <= end and (a, b) != (first, end) for a, b in loops)
        if innermost and any("LDGSTS" in x for x in body):
            found += sum("LDL" in x or "STL" in x for x in body)
    return found


def report(row: dict[str, Any]) -> dict[str, Any]:
    try:
        made = compiled(**row)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"[-300:]}
    matrix = {name: n for name, n in made.instructions.items() if "MMA" in name or "mfma" in name or name in COPIES}
    facts = {"registers": made.registers, "spills": made.spills, "shared": made.shared}
    facts["loop_spills"] = loop_spills(made.sass)
    return row | facts | {"instructions": matrix}


if __name__ == "__main__":
    for fields in json.load(sys.stdin):
        print(json.dumps(report(fields)), flush=True)
