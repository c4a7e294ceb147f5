"""tilewise on a CPU beside torch's scaled_dot_product_attention: 12 shapes, forward, and forward with backward.

    python bench/cpu.py --seconds 20 --threads 1 --json bench/results/2026-11-19-cpu.json

Calls alternate; the best time of each counts, because other programs can only make one longer. Ratio: SDPA's time /
ours. With one thread the time is that of the process on the CPU, so that programs beside it hardly matter.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import tilewise

# batch, queries, keys, heads, KV heads, head dim, causal
SHAPES = [
    (2, 128, 128, 8, 8, 64, True),
    (2, 512, 512, 8, 8, 64, True),
    (1, 2048, 2048, 8, 8, 64, True),
    (1, 2048, 2048, 8, 8, 64, False),
    (1, 4096, 4096, 8, 2, 128, True),
    (1, 1, 4096, 32, 8, 128, False),
]
LEAST = 3


def calls(shape: tuple[Any, ...], dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    batch, n_q, n_k, heads, kv_heads, d, causal = shape
    sizes = ((n_q, heads), (n_k, kv_heads), (n_k, kv_heads), (n_q, heads))
    q, k, v, dout = (torch.randn(batch, n, h, d, dtype=dtype) for n, h in sizes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def ours(*tensors: Any) -> Any:
        return tilewise.attention(*tensors, causal=causal)

    def sdpa(*tensors: Any) -> Any:
        inputs = (x.transpose(1, 2) for x in tensors)
        return scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=heads != kv_heads).transpose(1, 2)

    found: dict[str, Callable[[], Any]] = {"ours forward": lambda: ours(q, k, v), "sdpa forward": lambda: sdpa(q, k, v)}
    if n_q > 1:
        found["ours both"] = lambda: torch.autograd.grad(ours(*leaves), leaves, dout)
        found["sdpa both"] = lambda: torch.autograd.grad(sdpa(*leaves), leaves, dout)
    return found


def best(
    functions: dict[str, Callable[[], Any]], seconds: float, clock: Callable[[], float]
) -> tuple[dict[str, float], int]:
    """The shortest time of each, and how often they ran."""
    times = dict.fromkeys(functions, math.inf)
    for function in functions.values():
        function()
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end or rounds < LEAST:
        rounds += 1
        for name, function in functions.items():
            start = clock()
            function()
            times[name] = min(times[name], clock() - start)
    return times, rounds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0, help="for each shape and dtype")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            times, rounds = best(calls(shape, dtype), options.seconds, clock)
            row: dict[str, Any] = {"dtype": str(dtype)[6:], "shape": shape, "rounds": rounds, "seconds": times}
            row |= {name: times[f"sdpa {name}"] / t for x, t in times.items() if (name := x[5:]) and x[:4] == "ours"}
            rows.append(row)
            print(json.dumps(row), flush=True)
    means = {}
    for name in ("forward", "both"):
        ratios = [row[name] for row in rows if name in row]
        means[name] = {"mean": math.exp(sum(map(math.log, ratios)) / len(ratios)), "worst": min(ratios)}
    print(means)
    if options.json is not None:
        found = {"torch": torch.__version__, "threads": options.threads, "means": means, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
