"""Times the Hopper kernels by head dim, in turns with FlashAttention-3; above 256 with the portable kernels.

    python bench/head_dims.py --fa3 DIR    # DIR has FlashAttention-3's fa3.py

Prints for each call milliseconds, TFLOP/s and the other's time / ours. tests/gpu/test_head_dims.py checks the results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise.backends.common.kernel_call import call_shape
from tilewise.backends.common.launch import DeviceMemory, Launch, target_of
from tilewise.backends.hopper import backward_launches as backward
from tilewise.backends.hopper import launches as forward
from tilewise.backends.hopper.backward_schedule import choose_split
from tilewise.backends.registry import BACKENDS
from tilewise.request import BackwardInputs, Request, Spec

Run = Callable[[], Any]
PORTABLE = next(backend for backend in BACKENDS if backend.name == "triton")
ROUNDS = 7


class Timed(NamedTuple):
    d: int
    dv: int
    causal: bool
    batch: int
    tokens: int
    heads: int = 16

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.d} by {self.dv} {mask} {self.batch} x {self.tokens} x {self.heads}"

    @property
    def pairs(self) -> float:
        return self.batch * self.heads * self.tokens**2 / (2 if self.causal else 1)


def run_all(launches: list[Launch]) -> Run:
    def run() -> None:
        for launch in launches:
            launch()

    return run


def forward_run(request: Request, out: Tensor, lse: Tensor) -> Run:
    device = request.q.device
    state = forward.new_state(DeviceMemory(device), request)
    return run_all(forward.forward_launches(request, out, lse, state, target_of(device).num_sms))


def backward_run(request: Request, inputs: BackwardInputs) -> Run:
    memory, sms = DeviceMemory(request.q.device), target_of(request.q.device).num_sms
    space = backward.new_workspace(memory, call_shape(request), choose_split(request, sms))
    grads = torch.empty_like(request.q), torch.empty_like(request.k), torch.empty_like(request.v)
    return run_all(backward.backward_launches(request, inputs, grads, space, sms).values())


def captured(run: Run, repeats: int) -> torch.cuda.CUDAGraph:
    with torch.cuda.stream(torch.cuda.Stream()):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return graph


def report(name: str, runs: dict[str, Run], flops: float) -> None:
    repeats = max(1, min(8, int(1.2e12 / flops)))
    graphs = {who: captured(run, repeats) for who, run in runs.items()}
    times: dict[str, list[float]] = {who: [] for who in graphs}
    for turn in range(ROUNDS):
        names = [*graphs]
        for who in names[turn % len(names) :] + names[: turn % len(names)]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(200_000)
            start.record()
            graphs[who].replay()
            end.record()
            torch.cuda.synchronize()
            times[who].append(start.elapsed_time(end) / repeats)
    medians = {who: statistics.median(x) for who, x in times.items()}
    peer = next(iter(medians.values()))
    lines = (f"{who} {ms:.3f} ms {flops / ms / 1e9:.0f} TFLOP/s {peer / ms:.3f}" for who, ms in medians.items())
    print(name, "|", ", ".join(lines), flush=True)


def time_call(x: Timed, fa3: Any) -> None:
    outer = x.batch, x.tokens, x.heads
    q, k, v, dout = (torch.randn(*outer, d, device="cuda", dtype=torch.bfloat16) for d in (x.d, x.d, x.dv, x.dv))
    request = Request(q, k, v, Spec(x.d**-0.5, None, 0 if x.causal else None))
    out, lse = torch.empty_like(dout), torch.empty(x.batch, x.heads, x.tokens, device="cuda")
    ours = forward_run(request, out, lse)
    ours()
    inputs = BackwardInputs(out, lse, dout, None)
    if x.d > 256:
        theirs, theirs_back = PORTABLE.forward_runner(request), PORTABLE.backward_runner(request, inputs)
        peers = {
            "portable": lambda: theirs(request.tensors()),
            "portable backward": lambda: theirs_back((*request.tensors(), *inputs)),
        }
    else:
        wide_v, wide_dout = (pad(t, (0, x.d - x.dv)) for t in (v, dout))  # FlashAttention-3's backward has one dim
        wide_out, wide_lse = fa3.forward(q, k, wide_v, causal=x.causal)
        peers = {
            "fa3": lambda: fa3.forward(q, k, v, causal=x.causal),
            "fa3 backward": lambda: fa3.backward(wide_dout, q, k, wide_v, wide_out, wide_lse, causal=x.causal),
        }
    (name, run), (back_name, back_run) = peers.items()
    report(f"forward {x}", {name: run, "hopper": ours}, x.pairs * 2 * (x.d + x.dv))
    report(
        f"backward {x}", {back_name: back_run, "hopper": backward_run(request, inputs)}, x.pairs * (6 * x.d + 4 * x.dv)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fa3", metavar="DIR", required=True)
    sys.path.insert(0, parser.parse_args().fa3)
    import fa3

    for causal in (True, False):
        for d, dv in ((80, 80), (96, 96), (192, 192), (192, 128), (256, 256)):
            for batch, tokens in ((1, 4096), (4, 4096), (1, 16384)):
                time_call(Timed(d, dv, causal, batch, tokens), fa3)
        time_call(Timed(512, 512, causal, 4, 4096, heads=4), fa3)


if __name__ == "__main__":
    main()
