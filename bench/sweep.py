"""Times tile candidates of the portable kernels on this GPU, taking turns with each other.

    python bench/sweep.py forward --dim 128 --tile 64,64,4,3 --tile 128,128,8,2 [--seqs 1024 4096] [--causal]

Prints TFLOP/s of each candidate (dQ counts 1.5 forwards of work, dK and dV 2). The candidates should compile without
spills first: bench/tiles.py. Only the ratios within one run mean anything.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from unittest import mock

import torch

import tilewise
from tilewise import config
from tilewise.kernels import launch
from tilewise.spec import Spec

WORK = {"forward": 1.0, "query": 1.5, "key": 2.0}
TOKENS, HIDDEN = 16384, 2048


def candidate(which: str, tile: config.Tile, causal: bool, tensors: list[torch.Tensor]) -> Callable[[], None]:
    q, k, v, dout = tensors
    out, lse = tilewise.attention(q, k, v, causal=causal, return_lse=True, backend="triton")
    spec = Spec.of(head_dim=q.shape[-1], causal=causal)
    capability = 10 * torch.cuda.get_device_capability()[0]
    with mock.patch.object(config, "tile", return_value=tile):
        if which == "forward":
            return launch.forward_launch(q, k, v, out, lse, None, None, spec, capability)
        grads = (torch.empty_like(x) for x in (q, k, v))
        launches = launch.backward_launches(dout, None, q, k, v, out, lse, *grads, None, None, spec, capability)
    prepare, key, query = launches
    prepare()
    return key if which == "key" else query


def milliseconds(run: Callable[[], None], repeats: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=WORK)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--tile", action="append", required=True, help="BLOCK_M,BLOCK_N,warps,stages")
    parser.add_argument("--seqs", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for n in options.seqs:
        shape = TOKENS // n, n, HIDDEN // options.dim, options.dim
        tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        flops = 4 * TOKENS * n * HIDDEN * WORK[options.which] * (0.5 if options.causal else 1.0)
        runs = {
            name: candidate(options.which, config.Tile(*map(int, name.split(","))), options.causal, tensors)
            for name in options.tile
        }
        repeats = {}
        for name, run in runs.items():
            run()
            repeats[name] = max(1, int(5 / milliseconds(run, 2)))
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name in random.sample(list(runs), len(runs)):
                times[name].append(milliseconds(runs[name], repeats[name]))
        speeds = {name: flops / statistics.median(t) * 1e-9 for name, t in times.items()}
        print(f"{n:6d}", "  ".join(f"{name} {speed:.0f}" for name, speed in speeds.items()), flush=True)


if __name__ == "__main__":
    main()
