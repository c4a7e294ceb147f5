"""Times tile candidates of the portable kernels on this GPU, taking turns with each other and with FlashAttention-2.

    python bench/sweep.py "forward 128 64,64,4,3 128,128,8,2" "key 256 32,32,8,2 32,64,8,2" --seqs 1024 4096 --causal
    python bench/sweep.py "query 128 softcap 64,64,4,2 64,32,4,3" "value 256 32,128,8,2,1"

A sweep is a pass, a head dim, perhaps a score term, and candidates: BLOCK_M,BLOCK_N,warps,stages, and 1 where dK (key)
and dV (value) have passes of their own. Prints milliseconds and TFLOP/s of the products in each pass; of a forward in
FlashAttention-2's, of five products in its backward. Marks the candidates whose results are not those of the first.
All are compiled in parallel before anything is timed; they should compile without spills first: bench/tiles.py. Only
the ratios within one run mean anything.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilewise import mods
from tilewise.backends.common import tiles
from tilewise.backends.common.launch import DeviceMemory, target_of
from tilewise.backends.registry import BACKENDS
from tilewise.backends.triton.backward_launches import named_launches
from tilewise.backends.triton.launches import forward_launches
from tilewise.call.fields import ATTENTION
from tilewise.call.options import Options
from tilewise.request import BackwardInputs, Request
from tilewise.validation import dense as checks

PORTABLE = next(backend for backend in BACKENDS if backend.name == "triton")
PRODUCTS = {"forward": 2, "query": 3, "key": 4, "key apart": 3, "value": 2, "fa2 forward": 2, "fa2 backward": 5}
TOKENS, HIDDEN = 16384, 2048
Run = Callable[[], Any]


class Sweep(NamedTuple):
    which: str  # forward, query, key or value
    dim: int
    term: str
    tiles: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Sweep:
        which, dim, *rest = text.split()
        term = "" if "," in rest[0] else rest.pop(0)
        return cls(which, int(dim), term, tuple(rest))


def problem(n: int, dim: int, term: str, causal: bool, dtype: torch.dtype) -> tuple[Request, Tensor]:
    heads = HIDDEN // dim
    tensors = [torch.randn(TOKENS // n, n, heads, dim, device="cuda", dtype=dtype) for _ in range(4)]
    given: Options = {"causal": causal}
    if term == "softcap":
        given["softcap"] = 30.0
    elif term == "alibi":
        given["alibi_slopes"] = torch.rand(heads, device="cuda") * 0.1
    elif term == "sinks":
        given["sinks"] = torch.randn(heads, device="cuda")
    elif term == "documents":
        ids = (torch.arange(n, device="cuda") * 8 // n).to(torch.int32)
        given["mask_mod"] = mods.block_mask(mods.document(ids=ids), n, n, causal=causal)
    *qkv, dout = tensors
    return checks.dense(*qkv, ATTENTION.completed(given)), dout


def candidate(which: str, tile: str, request: Request, dout: Tensor) -> tuple[Run, list[Tensor]]:
    """The launch of one pass with this tile, and what it writes."""
    target, memory = target_of(request.q.device), DeviceMemory(request.q.device)
    out, lse = PORTABLE.forward_runner(request)(request.tensors())
    with mock.patch.object(tiles, "tile", return_value=tiles.Tile(*map(int, tile.split(",")))):
        if which == "forward":
            return forward_launches(request, out, lse, target, memory, 1)["forward"], [out]
        dq, dk, dv = grads = tuple(torch.empty_like(x) for x in request[:3])
        found = named_launches(request, BackwardInputs(out, lse, dout, None), grads, target, memory)
    found["preprocess"]()
    written = {"query": [dq], "key": [dk] if "value" in found else [dk, dv], "value": [dv]}
    return found[which], written[which]


def peers(tensors: list[Tensor], causal: bool) -> dict[str, Run]:
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in tensors[:3])

    def forward() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    out, dout = forward(), tensors[3].transpose(1, 2)
    return {
        "fa2 forward": forward,
        "fa2 backward": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
    }


def warm(sweep: Sweep, tile: str, causal: bool, dtype: torch.dtype) -> str:
    try:
        candidate(sweep.which, tile, *problem(1024, sweep.dim, sweep.term, causal, dtype))[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{sweep.which} {sweep.dim} {sweep.term} {tile}: {error}"[:300]
    return ""


def milliseconds(run: Run, repeats: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10**6)  # the host gets ahead
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", type=Sweep.parse)
    parser.add_argument("--seqs", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        wanted = [(sweep, tile) for sweep in options.sweeps for tile in sweep.tiles]
        faults = pool.map(warm, *zip(*wanted, strict=True), [options.causal] * len(wanted), [dtype] * len(wanted))
        failed = {pair: fault for pair, fault in zip(wanted, faults, strict=True) if fault}
    print("\n".join(failed.values()) or "all compiled", flush=True)
    for n in options.seqs:
        runs: dict[tuple[str, int, str, str], Run] = {}
        wrong = set()
        for dim in sorted({sweep.dim for sweep in options.sweeps}):
            for sweep in options.sweeps:
                if sweep.dim != dim:
                    continue
                tensors, spec, terms = problem(n, dim, sweep.term, options.causal, dtype)
                first = None
                for tile in sweep.tiles:
                    if (sweep, tile) in failed:
                        continue
                    name = sweep.which, dim, sweep.term, tile
                    runs[name], results = candidate(sweep.which, tile, tensors, spec, terms)
                    for x in results:
                        x.fill_(torch.nan)
                    runs[name]()
                    first = first or results
                    if not all(
                        torch.allclose(a, b, atol=0.02, rtol=0.02) for a, b in zip(results, first, strict=False)
                    ):
                        wrong.add(name)
            if dtype.itemsize == 2:
                runs |= {(name, dim, "", ""): run for name, run in peers(tensors, options.causal).items()}
        repeats = {name: max(1, int(4 / milliseconds(run, 2))) for name, run in runs.items()}
        times: dict[tuple[str, int, str, str], list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name in random.sample(list(runs), len(runs)):
                times[name].append(milliseconds(runs[name], repeats[name]))
        for name in sorted(times):
            which, dim, term, tile = name
            ms = statistics.median(times[name])
            products = PRODUCTS["key apart" if which == "key" and tile.count(",") == 4 else which]
            flops = 2 * TOKENS * n * HIDDEN * products * (0.5 if options.causal else 1.0)
            remark = " WRONG" if name in wrong else ""
            print(
                f"{n:6d} {which:12} {dim:4d} {term:10} {tile:12} {ms:8.3f} ms {flops / ms * 1e-9:6.0f} TFLOP/s{remark}"
            )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
