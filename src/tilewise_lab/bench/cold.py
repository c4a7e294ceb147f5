"""The first call of a program: with an empty cache of kernels, with a full one, and what other sizes and kinds add.

    python -m tilewise_lab.bench.cold cuda bfloat16 tilewise step

is one program: its first call, then calls of other sizes and of other kinds, each timed once; JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import tilewise
from tilewise_lab.bench.results import OURS, Cell, Entry

if TYPE_CHECKING:  # the program that is timed needs none of it
    from tilewise_lab.bench.runner import Run

SIZE = (2, 1024, 16, 128)  # batch, tokens, heads, head dim
OTHER_SIZES = ((3, 1000, 16, 128), (1, 777, 4, 128), (2, 63, 1, 128), (5, 1, 16, 128))
KINDS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {  # shape, heads of k and v, options
    "no mask": (SIZE, 16, {}),
    "head dim 64": ((2, 1024, 16, 64), 16, {"causal": True}),
    "grouped heads": (SIZE, 4, {"causal": True}),
    "window": (SIZE, 16, {"causal": True, "window": (255, 0)}),
    "softcap": (SIZE, 16, {"causal": True, "softcap": 20.0}),
}
CALLERS = (OURS, "sdpa")


class Nothing(torch.autograd.Function):
    """What torch loads for a program's first Function of this kind is no kernel's fault."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads


def cells(run: Run) -> Iterator[Cell]:
    """Programs one after the other, each in a process of its own: (caller, what was asked) with an empty, then a full
    cache."""
    found: dict[str, dict[str, Entry]] = {}
    for caller in CALLERS:
        for work in ("forward", "step"):
            with tempfile.TemporaryDirectory() as cache:
                for filled in (False, True):
                    entry, told = run.attempt(partial(program, run, caller, work, cache))
                    rows = told if told is not None else {"first": None}
                    for row, seconds in rows.items():
                        name = f"{row} {work}" + ", cache on disk" * filled
                        if filled and row != "first":
                            continue
                        found.setdefault(name, {})[caller] = (
                            entry if seconds is None else Entry("ok", times=[round(seconds, 4)])
                        )
    for name, entries in found.items():
        yield Cell("cold", name, {}, None, OURS, entries)


def program(run: Run, caller: str, work: str, cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tilewise_lab.bench.cold", run.device.type, run.settings.dtype, caller, work]
    environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    if said.returncode:
        raise RuntimeError(said.stderr.strip().splitlines()[-1])
    told: dict[str, float] = json.loads(said.stdout)
    return told


def main(device: str, dtype: str, caller: str, work: str) -> None:
    grad = work == "step"
    once: Callable[[Tensor], Tensor] = Nothing.apply
    once(torch.ones(1, device=device, requires_grad=True)).backward()

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if caller == OURS:
            out: Tensor = tilewise.attention(q, k, v, **options)
            return out
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        causal, grouped = options.pop("causal", False), k.shape[1] != q.shape[1]
        if options:
            raise NotImplementedError
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    def call(shape: tuple[int, ...], kv_heads: int | None = None, **options: Any) -> Callable[[], None]:
        b, s, h, d = shape
        q, k, v = (
            torch.randn(b, s, n, d, device=device, dtype=getattr(torch, dtype), requires_grad=grad)
            for n in (h, kv_heads or h, kv_heads or h)
        )

        def once() -> None:
            out = attend(q, k, v, **options)
            if grad:
                out.sum().backward()
            if device == "cuda":
                torch.cuda.synchronize()

        return once

    def seconds(*calls: Callable[[], None]) -> float:
        began = time.perf_counter()
        for once in calls:
            once()
        return time.perf_counter() - began

    found = {"first": seconds(call(SIZE, causal=True))}
    found["four other sizes,"] = seconds(*(call(shape, causal=True) for shape in OTHER_SIZES))
    for name, (shape, kv_heads, options) in KINDS.items():
        try:
            found[f"then {name},"] = seconds(call(shape, kv_heads, **options))
        except NotImplementedError:
            continue
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
