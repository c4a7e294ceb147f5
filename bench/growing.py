"""A new shape at every call, on a GPU: what it costs the host beside a call of a known one.

    python bench/growing.py

Decoding with a cache that grows by a token, and training on packed batches of ever-new lengths.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import partial

import torch

import tilewise
from tilewise_lab.clock import HostClock

SHAPES = range(1100, 1300)


def decode(keys: int, cache: torch.Tensor, q: torch.Tensor) -> None:
    with torch.no_grad():
        tilewise.attention(q, cache[:, :keys], cache[:, :keys], causal=True)


def packed_step(tokens: int, cache: torch.Tensor) -> None:
    cu = torch.tensor([0, tokens // 3, tokens // 2, tokens], dtype=torch.int32, device="cuda")
    q, k, v = (cache[0, :tokens].detach().requires_grad_() for _ in range(3))
    tilewise.attention_varlen(q, k, v, cu, cu, causal=True).sum().backward()


def dense_step(tokens: int, cache: torch.Tensor) -> None:
    q, k, v = (cache[:, :tokens].detach().requires_grad_() for _ in range(3))
    tilewise.attention(q, k, v, causal=True).sum().backward()


def microseconds(call: Callable[[int], None], shapes: Iterable[int]) -> tuple[float, float]:
    """Median and largest, with the device waited for between calls."""
    found = HostClock(torch.device("cuda")).start([partial(call, n) for n in shapes])()
    return 1e6 * statistics.median(found), 1e6 * max(found)


def main() -> None:
    cache = torch.randn(1, 4096, 8, 128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[int], None]] = {
        "decoding": lambda n: decode(n, cache, q),
        "packed step": lambda n: packed_step(n, cache),
        "dense step": lambda n: dense_step(n, cache),
    }
    print("| us of the host | new shape | largest | known shape | largest |\n|---|---:|---:|---:|---:|")
    for name, call in calls.items():
        for n in (1000, 1001, 1500, 3000):  # whatever is compiled
            call(n)
        numbers = (*microseconds(call, SHAPES), *microseconds(call, [1000] * len(SHAPES)))
        print(f"| {name} | {' | '.join(f'{x:.0f}' for x in numbers)} |", flush=True)


if __name__ == "__main__":
    main()
