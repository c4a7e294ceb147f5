"""The CPU backend beside torch's own attention: time of forward + backward, and the memory it takes beyond its results.

    python bench/cpu.py                     a table
    python bench/cpu.py --out FILE.json     and the numbers, for bench/results

Times are seconds of the processor, of one thread, interleaved and in random order: on a machine that others use too,
they are what the work costs and the clock on the wall is not. Memory is the peak of a process that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise_lab.bench.machine import processor

BATCH, HEADS, TOKENS, DIM = 1, 8, 4096, 64
LENGTHS = (2048, 4096, 8192, 16384)  # for the memory, of one head


def step(name: str, inputs: list[Tensor], dout: Tensor, causal: bool) -> list[Tensor]:
    """out, dq, dk and dv."""
    if name == "tilewise":
        out = tilewise.attention(*inputs, causal=causal, backend="reference")
    else:
        q, k, v = (x.transpose(1, 2) for x in inputs)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    return [out, *torch.autograd.grad(out, inputs, dout)]


def data(tokens: int, heads: int) -> tuple[list[Tensor], Tensor]:
    q, k, v, dout = (torch.randn(BATCH, tokens, heads, DIM) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], dout


def times(causal: bool, rounds: int) -> dict[str, float]:
    """The best of so many rounds."""
    inputs, dout = data(TOKENS, HEADS)
    found: dict[str, list[float]] = {"tilewise": [], "torch": []}
    for _ in range(rounds):
        for name in random.sample(list(found), 2):
            start = time.process_time()
            step(name, inputs, dout, causal)
            found[name].append(time.process_time() - start)
    return {name: min(x) for name, x in found.items()}


def extra_memory(name: str, tokens: int) -> int:
    """Bytes, at their peak, beyond the inputs and the results, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory", name, str(tokens)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def measure_memory(name: str, tokens: int) -> int:
    step(name, *data(64, 1), causal=False)
    inputs, dout = data(tokens, 1)
    before = peak()
    results = step(name, inputs, dout, causal=False)
    return peak() - before - sum(x.nbytes for x in results)


def peak() -> int:
    """The most bytes this process has had in memory (Linux; getrusage would count its parent's)."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", nargs=2, metavar=("NAME", "TOKENS"), help="only this, in bytes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        print(measure_memory(options.memory[0], int(options.memory[1])))
        return
    case = f"float32, B{BATCH} H{HEADS} S{TOKENS} D{DIM}, forward + backward"
    result: dict[str, Any] = {
        "date": date.today().isoformat(), "machine": f"{processor()}, 1 thread", "torch": torch.__version__,
        "case": case, "seconds": {}, "extra_bytes_of_one_head": {},
    }  # fmt: skip
    print(f"{result['machine']}, torch {torch.__version__}; {case}")
    for mask in ("full", "causal"):
        found = result["seconds"][mask] = times(mask == "causal", options.rounds)
        ratio = found["tilewise"] / found["torch"]
        seconds = "   ".join(f"{name} {x:6.2f} s" for name, x in found.items())
        print(f"{mask:8} {seconds}   {ratio:.2f}x", flush=True)
    for tokens in LENGTHS:
        found = {name: extra_memory(name, tokens) for name in ("tilewise", "torch")}
        result["extra_bytes_of_one_head"][tokens] = found
        sizes = "   ".join(f"{name} {x / 2**20:7.1f} MiB" for name, x in found.items())
        print(f"S {tokens:6} {sizes}   (the scores: {tokens * tokens * 4 / 2**20:.0f} MiB)", flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
