"""The time of a double backward over that of the first backward, on a GPU: `python bench/second.py`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch

import tilewise

BATCH, TOKENS, HEADS = 4, 2048, 16
BAR = 4.0


def derivatives(d: int, causal: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Functions that run the first backward and the double backward of one call."""
    shape = BATCH, TOKENS, HEADS, d
    q, k, v, dout, *along = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(n < 4) for n in range(7)
    )
    out = tilewise.attention(q, k, v, causal=causal)
    grads = torch.autograd.grad(out, (q, k, v), dout, create_graph=True)

    def first() -> Any:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    def second() -> Any:
        return torch.autograd.grad(grads, (q, k, v, dout), along, retain_graph=True)

    return first, second


def milliseconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """The median; a spin on the device first hides the host."""
    for _ in range(3):
        run()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda._sleep(20_000_000)
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return float(sorted(start.elapsed_time(end) for start, end in marks)[repeats // 2])


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for d, causal in product((64, 128), (False, True)):
        runs = derivatives(d, causal)
        one, two = (
            sorted(times)[1] for times in zip(*([milliseconds(f) for f in runs] for _ in range(3)), strict=True)
        )
        ratio = two / one
        verdict = "" if ratio <= BAR else f"  above the bar of {BAR:g}"
        print(
            f"D {d:3} causal={causal!s:5}  first {one:.3f} ms  second {two:.3f} ms  ratio {ratio:.2f}{verdict}",
            flush=True,
        )


if __name__ == "__main__":
    main()
