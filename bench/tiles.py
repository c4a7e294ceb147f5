"""Which tiles a kernel can use: registers, spills and shared memory of any row, compiled without a GPU.

    python bench/tiles.py key --capability 90 --dtype bfloat16 --dim 256          every candidate row, best first
    python bench/tiles.py forward --dim 128 --tile 128 64 8 3                     one row, in every variant
    python bench/tiles.py forward --dim 128 --precision tf32x3 --dtype float32    another way to multiply

Times come only from a GPU, but a row that spills or does not fit is out before it gets there. The tests compile the
tables of tilewise.backends.common.tiles with the same `compile_row`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch

from tilewise import mods
from tilewise.call.fields import ATTENTION
from tilewise.request import BackwardInputs, Gpu
from tilewise.validation import dense as checks
from tilewise_lab.costs.compiled import Compiled, compile_for

# what a variant asks of the kernel, beyond its row of the table: (n, band, packed, group)
VARIANTS: dict[str, tuple[int, tuple[int | None, int | None], bool, int]] = {
    "full": (1024, (None, None), False, 1),
    "causal": (1024, (None, 0), False, 1),
    "ragged": (1000, (None, None), False, 1),
    "window": (1000, (128, 64), False, 4),
    "varlen": (1000, (None, 0), True, 4),
    # forward only: so few queries (FEW), their keys in four parts
    "decode": (1000, (None, 0), False, 4),
    "few": (1000, (128, 0), False, 4),
    "few varlen": (1000, (128, 0), True, 4),
}
FEW = {"decode": 1, "few": 5, "few varlen": 5}
HARDEST = "window"  # in registers
# bytes of shared memory that a program can have: A100; the smallest part of the table's kind (sm_86, sm_89); H100
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}


@dataclass(frozen=True)
class Row:
    """One kernel to compile; without a tile, the one that config has for it."""

    # forward, merge, preprocess, query, key, jvp, clear, repair forward, repair backward, or value: the half of key
    # that sums dV in a pass of its own
    kernel: str
    capability: int | str  # 90, "gfx942"
    dtype: str
    dim: int
    variant: str
    tile: tuple[int, ...] | None = None
    precision: str | None = None
    term: str | None = None  # of TERMS


# name -> the arguments of a call, from its length and heads
TERMS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "softcap": lambda n, heads: {"softcap": 30.0},
    "alibi": lambda n, heads: {"alibi_slopes": torch.rand(heads)},
    "bias": lambda n, heads: {"bias": torch.empty(1, heads, n, n, dtype=torch.bfloat16)},
    "dropout": lambda n, heads: {"seed": 1, "dropout_p": 0.1},
    "documents": lambda n, heads: {"mask_mod": mods.document(ids=torch.arange(n).int() // 512)},
    "blocks": lambda n, heads: {"mask_mod": mods.block_mask(mods.document(ids=torch.arange(n).int() // 512), n, n)},
}


def compile_row(row: Row) -> Compiled:
    launch = launch_of(row)
    options = dict(launch.options)
    if row.precision is not None:
        options["CONFIG"] = options["CONFIG"]._replace(PRECISION=row.precision)
    return compile_for(row.capability, launch.kernel, launch.args, options)


def launch_of(row: Row) -> Any:
    from tilewise.backends.common import tiles
    from tilewise.backends.common.clear import clear_launches
    from tilewise.backends.common.jvp_launches import jvp_launch
    from tilewise.backends.common.kernel_config import flag_count
    from tilewise.backends.common.launch import OFFLINE_PROCESSORS, DeviceMemory, Target
    from tilewise.backends.common.preprocess import row_statistics
    from tilewise.backends.common.repair import repair_forward_kernel
    from tilewise.backends.common.repair_launches import repairs
    from tilewise.backends.triton.backward_launches import backward_launches, backward_repairs
    from tilewise.backends.triton.launches import forward_launch, merge_launch

    n, (before, after), packed, group = VARIANTS[row.variant]
    dtype = getattr(torch, row.dtype)
    gpu = Gpu("cuda" if isinstance(row.capability, int) else "hip", row.capability)
    target, memory = Target(gpu, OFFLINE_PROCESSORS), DeviceMemory(torch.device("cpu"))

    def flags_of(count: int) -> torch.Tensor | None:
        return memory.empty((count,), torch.int32) if count else None

    shape = (n,) if packed else (1, n)
    q = torch.empty(*shape, group, row.dim, dtype=dtype)
    k = torch.empty(*shape, 1, row.dim, dtype=dtype)
    lse = torch.empty(*shape[:-1], group, n)
    cu = torch.tensor([0, n], dtype=torch.int32)
    terms: Any = TERMS[row.term](n, group) if row.term else {}
    by_name = {"backend": "triton"} if row.variant in FEW else {}
    options = ATTENTION.completed({"window": (before, after), "scale": 0.125} | by_name | terms)
    request = checks.packed(q, k, k, cu, cu, (n, n), options) if packed else checks.dense(q, k, k, options)
    chosen = nullcontext() if row.tile is None else mock.patch.object(tiles, "tile", return_value=tiles.Tile(*row.tile))
    with chosen:
        if row.kernel in ("forward", "repair forward"):
            rows, parts = FEW.get(row.variant, n), 4 if row.variant in FEW and not packed else 1
            request, lse = request._replace(q=q[..., :rows, :, :]), lse[..., :rows]
            made = forward_launch(request, request.q, lse, gpu, parts, flags_of(flag_count(request, parts)))
            return repairs(repair_forward_kernel, made, target)[0] if row.kernel != "forward" else made
        if row.kernel == "merge":
            room = q.new_empty(64, dtype=torch.float32)
            return merge_launch(room, room, q, lse, 64, gpu)
        if row.kernel == "clear":
            return clear_launches(q[0], k[0], k[0], cu, cu, gpu)[0]
        if row.kernel == "jvp":
            return jvp_launch(request, q, lse, [q, k, k], q, lse, target, memory)
        statistics, flags = row_statistics(request, memory), flags_of(flag_count(request, both=True))
        bwd_inputs = BackwardInputs(q, lse, q, None)
        launches = backward_launches(request, bwd_inputs, (q, k, k), statistics, flags, gpu)
        launches += backward_repairs(launches, target) if row.kernel == "repair backward" else []
    return launches[{"preprocess": 0, "key": 1, "value": 2, "query": -1, "repair backward": -1}[row.kernel]]


def report(row: Row) -> dict[str, Any]:
    """What one row compiles to, as plain data; `error` where it does not compile."""
    try:
        made = compile_row(row)
    except Exception as error:
        return asdict(row) | {"error": f"{type(error).__name__}: {error}"[:300]}
    matrix = {name: n for name, n in made.instructions.items() if name == "FFMA" or "MMA" in name or "mfma" in name}
    facts = {"registers": made.registers, "spills": made.spills, "shared": made.shared}
    return asdict(row) | facts | {"warnings": made.warnings, "instructions": matrix}


def candidates(kernel: str, itemsize: int, dim: int) -> Iterator[tuple[int, int, int]]:
    """(M, N, warps) worth a try, largest first: what is kept fits in shared memory, its sums in half the registers."""
    sizes = (128, 64, 32, 16)
    for m, n, warps in itertools.product(sizes, sizes, (4, 8)):
        kept, streamed = (n, m) if kernel == "key" else (m, n)
        kept_tensors, sums = {"forward": (1, 1), "query": (2, 1), "key": (2, 2), "jvp": (2, 1)}[kernel]
        fits = (kept * kept_tensors + 2 * streamed) * dim * itemsize <= SHARED[90]
        if fits and kept * dim * sums <= 128 * 32 * warps:
            yield m, n, warps


def search(row: Row) -> Iterator[dict[str, Any]]:
    """Every candidate with one stage of loads, and with more of them where one does not spill."""
    for tile in candidates(row.kernel, getattr(torch, row.dtype).itemsize, row.dim):
        for stages in (1, 2, 3):
            found = report(replace(row, tile=(*tile, stages)))
            yield found
            if found.get("spills", 1) or found["shared"] > SHARED[row.capability]:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=("forward", "query", "key", "value", "jvp", "json"))
    parser.add_argument("--capability", type=int, default=90, choices=SHARED)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--tile", type=int, nargs="+", help="M N WARPS STAGES, and 1 where dK and dV are summed apart")
    parser.add_argument("--precision", choices=("ieee", "tf32", "tf32x3"))
    args = parser.parse_args()
    if args.kernel == "json":  # rows on the standard input, reports on the standard output: the tests' way in
        for fields in json.load(sys.stdin):
            print(json.dumps(report(Row(**fields))), flush=True)
        return
    row = Row(args.kernel, args.capability, args.dtype, args.dim, HARDEST, precision=args.precision)
    one = (report(replace(row, tile=tuple(args.tile), variant=name)) for name in VARIANTS) if args.tile else None
    for found in one or search(row):
        facts = found.get("error") or "{registers} registers, {spills} spilled bytes, {shared} shared".format(**found)
        tile = "x".join(map(str, found["tile"]))
        print(f"{tile:14} {found['variant']:8} {facts} {found.get('instructions', '')}", flush=True)


if __name__ == "__main__":
    main()
