"""Training steps of GPTs, and host time of small calls, with tilewise and SDPA in turns on one GPU.

    PYTHONPATH=src python bench/steps.py gpt 1:graphs 1:compiled 3:eager 4:compiled    # size:mode
    PYTHONPATH=src python bench/steps.py host [--processes 2]

Each case runs in a process of its own. The processes compile at the same time and measure one after another. A ratio
above 1 means that tilewise is faster: the median of the ratios of a round, of the medians, and of the least times. With
`--profile`, the kernels of one step by name. For host times the ratio is tilewise's time over SDPA's.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import tilewise
from tilewise_lab.bench.models import MODES, Gpt
from tilewise_lab.bench.settings import Model

LOCK = "TILEWISE_STEPS_LOCK"
SIZES = {
    "1": Model(12, 768, 12, 8, 1024, 50304),
    "2": Model(12, 768, 12, 32, 1024, 50304),
    "3": Model(8, 2048, 16, 4, 4096, 50304),
    "4": Model(4, 4096, 32, 1, 16384, 50304),
}
HOST_SHAPES = (2, 128, 8, 64), (1, 64, 1, 64)
STEPS = 2  # of each attention in a round


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tilewise.attention(q, k, v, causal=True)


def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True).transpose(1, 2)


ATTENTIONS = {"tilewise": ours, "sdpa": theirs}


@contextmanager
def alone() -> Iterator[None]:
    """Waits until no other process measures."""
    with Path(os.environ[LOCK]).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def training(size: Model, mode: str, attention: Any) -> Callable[[], Any]:
    """A training step in bfloat16 autocast, with AdamW."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Gpt(size, attention)
        tokens, targets = (torch.randint(size.vocabulary, (size.batch, size.seq)) for _ in range(2))
    run = MODES[mode](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def timed(step: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of one of STEPS steps: as the user sees it, and of the host."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    host = time.perf_counter()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / STEPS, 1e3 * (host - began) / STEPS


def measure_gpt(case: str, seconds: float, profiled: bool) -> None:
    number, mode = case.split(":")
    steps = {name: training(SIZES[number], mode, attention) for name, attention in ATTENTIONS.items()}
    losses = {name: [float(step()) for _ in range(4)][-1] for name, step in steps.items()}
    with alone():
        for step in steps.values():
            timed(step)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(found["sdpa"]) < 3:
            for name, step in steps.items():
                found[name].append(timed(step))
        t, s = ([x for x, _ in found[name]] for name in ATTENTIONS)
        rounds = median(b / a for a, b in zip(t, s, strict=True))
        hosts = [median(h for _, h in found[name]) for name in ATTENTIONS]
        print(
            f"gpt {SIZES[number].name} {mode}: {median(t):.2f} ms (host {hosts[0]:.1f}), sdpa {median(s):.2f}"
            f" ({hosts[1]:.1f}); {rounds:.3f} {median(s) / median(t):.3f} {min(s) / min(t):.3f}; {len(t)} rounds;"
            f" losses {losses['tilewise']:.4f} {losses['sdpa']:.4f}",
            flush=True,
        )
        if profiled:
            for name, step in steps.items():
                kernels(f"{case} {name}", step)


def kernels(title: str, step: Callable[[], Any]) -> None:
    """The time of each kernel in a step, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    times, counts = Counter[str](), Counter[str]()
    for event in found.key_averages():
        times[event.key[:60]] += event.self_device_time_total / 3
        counts[event.key[:60]] += event.count
    print(f"  {title}: {sum(times.values()):.0f} us, {sum(counts.values()) / 3:.0f} kernels")
    for name, us in times.most_common(16):
        print(f"    {us:8.0f} {counts[name] / 3:6.1f} {name}")


def measure_host(rounds: int = 36) -> None:
    for b, s, h, d in HOST_SHAPES:
        q, k, v, dout = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def without_gradients(attention: Any, x: Any = (q, k, v)) -> None:
            with torch.no_grad():
                attention(*x)

        def forward(attention: Any, x: Any = leaves) -> None:
            attention(*x)

        def both(attention: Any, x: Any = leaves, dout: Tensor = dout) -> None:
            torch.autograd.grad(attention(*x), x, dout)

        with alone():
            for what in (without_gradients, forward, both):
                ratios, least = [], {name: float("inf") for name in ATTENTIONS}
                for _ in range(rounds):
                    times = {name: burst(what, attention) for name, attention in ATTENTIONS.items()}
                    ratios.append(times["tilewise"] / times["sdpa"])
                    least = {name: min(least[name], times[name]) for name in times}
                us = " ".join(f"{x:.1f}" for x in least.values())
                print(f"host b{b} s{s} h{h} {what.__name__}: {median(ratios):.3f} of sdpa; least us {us}", flush=True)


def burst(what: Callable[[Any], None], attention: Any, calls: int = 25) -> float:
    """Microseconds of the host for a call."""
    what(attention)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        what(attention)
    found = 1e6 * (time.perf_counter() - began) / calls
    torch.cuda.synchronize()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gpt", "host"))
    parser.add_argument("cases", nargs="*", help="gpt: size:mode")
    parser.add_argument("--processes", type=int, default=2, help="host: how many")
    parser.add_argument("--seconds", type=float, default=4, help="gpt: of rounds")
    parser.add_argument("--timeout", type=float, default=150, help="seconds until all processes are ended")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.worker:
        measure_host() if options.what == "host" else measure_gpt(options.cases[0], options.seconds, options.profile)
        return
    cases = options.cases if options.what == "gpt" else [str(n) for n in range(options.processes)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, options.what, "--worker", "--seconds", str(options.seconds)]
        command += ["--profile"] * options.profile
        env = os.environ | {LOCK: f"{folder}/lock"}
        workers = [subprocess.Popen([*command, case], env=env) for case in cases]
        end = time.monotonic() + options.timeout
        for case, worker in zip(cases, workers, strict=True):
            try:
                worker.wait(max(1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                print(f"{options.what} {case}: not done in {options.timeout:.0f} s")


if __name__ == "__main__":
    main()
