"""Checks and times the Hopper kernels of head dims that no call chooses yet, in turns with FlashAttention-3.

    python bench/head_dims.py check          # against torch in float64: the backward without padded columns, D 512
    python bench/head_dims.py time --fa3 DIR # DIR has FlashAttention-3's fa3.py

Prints, for each call, milliseconds, TFLOP/s and the other's time / ours. Kernels are compiled as they come: run `check`
first, or both twice. The predictions are in bench/results/2026-11-17-head-dims.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace as altered
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.budget import check
from tests.cases import Case, make
from tests.oracle import naive, naive_grads
from tilewise.backends.common.launch import DeviceMemory, Launch, target_of
from tilewise.backends.common.shapes import call_shape
from tilewise.backends.hopper import backward_launches as backward
from tilewise.backends.hopper import launches as forward
from tilewise.backends.triton import TritonBackend
from tilewise.request import BackwardInputs, Request, Spec

Run = Callable[[], Any]
ROUNDS, REPEATS = 9, 4
BACKWARD_DIMS = ((80, 80), (96, 96), (96, 64), (160, 160), (192, 192), (192, 128), (192, 64))
FORWARD_DIMS = ((192, 192), (192, 128), (320, 72), (384, 384), (512, 512))
LENGTHS = ((5, 0), (0, 60), (145, 210), (64, 80), (300, 300))


class Timed(NamedTuple):
    d: int
    dv: int
    causal: bool
    heads: int = 16
    batch: int = 4
    tokens: int = 4096

    def __str__(self) -> str:
        return (
            f"{self.d} by {self.dv} {'causal' if self.causal else 'full'} {self.batch} x {self.tokens} x {self.heads}"
        )


def cases(d: int, dv: int) -> list[Case]:
    plain = Case(n_q=150, n_k=150, heads=2, kv_heads=2, d=d, dv=dv, dtype="bfloat16", lse_gradient=False)
    return [
        altered(plain, batch=5, n_q=514, n_k=650, lengths=LENGTHS, heads=4, kv_heads=1, after=0),
        altered(plain, n_q=1000, n_k=777, before=130, after=30, dtype="float16", lse_gradient=True),
        altered(plain, n_q=2000, n_k=2100, heads=4, kv_heads=2, batch=2),
        altered(plain, n_q=130, n_k=77, scale=-0.2, after=0),
        altered(plain, n_q=2048, n_k=2048, heads=8, kv_heads=8, after=0),
    ]


def backward_run(request: Request, inputs: BackwardInputs, grads: tuple[Tensor, Tensor, Tensor], unpadded: bool) -> Run:
    size, memory = call_shape(request), DeviceMemory(request.q.device)
    space = backward.new_workspace(memory, size, backward.unpadded_parts(size) if unpadded else None)
    return run_all(backward.backward_launches(request, inputs, grads, space, target_of(request.q.device).num_sms))


def forward_run(request: Request, out: Tensor, lse: Tensor) -> Run:
    device = request.q.device
    state = forward.new_state(DeviceMemory(device))
    return run_all(forward.forward_launches(request, out, lse, state, target_of(device).num_sms))


def run_all(launches: list[Launch]) -> Run:
    def run() -> None:
        for launch in launches:
            launch()

    return run


def check_backward(case: Case, deterministic: bool) -> None:
    inputs = make(case, "cuda")
    _, q, k, v, dout, dlse, cu_q, cu_k = inputs
    out, lse, *_ = naive_grads(q, k, v, case.spec, dout, dlse, cu_q, cu_k)
    request = Request(q, k, v, case.spec._replace(deterministic=deterministic), cu_q=cu_q, cu_k=cu_k)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    run = backward_run(request, BackwardInputs(out.to(q.dtype), lse.float(), dout, dlse), grads, unpadded=True)
    found = []
    for _ in range(2):
        for x in grads:
            x.fill_(torch.nan)
        run()
        found.append([x.clone() for x in grads])
    unused = torch.zeros((), device="cuda")
    check([unused, unused, *grads], inputs, ("dq", "dk", "dv"))
    if deterministic and not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
        raise AssertionError("two runs differ")


def check_forward(case: Case) -> None:
    inputs = make(case, "cuda")
    _, q, k, v, _, _, cu_q, cu_k = inputs
    out, lse = naive(q, k, v, case.spec, cu_q, cu_k)
    request = Request(q, k, v, case.spec, cu_q=cu_q, cu_k=cu_k)
    found = torch.full(out.shape, torch.nan, dtype=q.dtype, device="cuda")
    found_lse = torch.full(lse.shape, torch.nan, device="cuda")
    forward_run(request, found, found_lse)()
    torch.testing.assert_close(found.double(), out, atol=2e-2, rtol=0)
    torch.testing.assert_close(found_lse.double(), lse.double(), atol=1e-4, rtol=0)


def check_all() -> int:
    """Prints a line for each call; returns the number of wrong ones."""
    jobs: list[tuple[str, Run]] = []
    for dims in BACKWARD_DIMS:
        for case in cases(*dims):
            for ordered in (False, True):
                jobs.append((f"backward {case} {'ordered' * ordered}", lambda c=case, o=ordered: check_backward(c, o)))
    jobs += [(f"forward {case}", lambda c=case: check_forward(c)) for d in FORWARD_DIMS for case in cases(*d)]
    wrong = 0
    for name, job in jobs:
        try:
            job()
            print("right", name, flush=True)
        except AssertionError as error:
            wrong += 1
            print("WRONG", name, str(error)[:300], flush=True)
    return wrong


def captured(run: Run) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    return graph


def report(name: str, runs: dict[str, Run], flops: float) -> None:
    graphs = {who: captured(run) for who, run in runs.items()}
    times: dict[str, list[float]] = {who: [] for who in graphs}
    for turn in range(ROUNDS):
        order = [*graphs][turn % len(graphs) :] + [*graphs][: turn % len(graphs)]
        for who in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(200_000)
            start.record()
            graphs[who].replay()
            end.record()
            torch.cuda.synchronize()
            times[who].append(start.elapsed_time(end) / REPEATS)
    medians = {who: statistics.median(x) for who, x in times.items()}
    peer = next(iter(medians.values()))
    lines = (f"{who} {ms:.3f} ms {flops / ms / 1e9:.0f} TFLOP/s {peer / ms:.3f}" for who, ms in medians.items())
    print(name, "|", ", ".join(lines), flush=True)


def time_backward(x: Timed, fa3: Any) -> None:
    outer = x.batch, x.tokens, x.heads
    q, k, v, dout = (torch.randn(*outer, d, device="cuda", dtype=torch.bfloat16) for d in (x.d, x.d, x.dv, x.dv))
    v_, dout_ = (torch.nn.functional.pad(t, (0, x.d - x.dv)) for t in (v, dout))
    out, lse = fa3.forward(q, k, v_, causal=x.causal)
    request = Request(q, k, v, Spec(x.d**-0.5, None, 0 if x.causal else None))
    inputs = BackwardInputs(out[..., : x.dv].contiguous(), lse, dout, None)
    runs: dict[str, Run] = {"fa3": lambda: fa3.backward(dout_, q, k, v_, out, lse, causal=x.causal)}
    for who, unpadded in (("padded", False), ("unpadded", True)):
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        runs[who] = backward_run(request, inputs, grads, unpadded)
    report(f"backward {x}", runs, x.batch * x.heads * x.tokens**2 * (6 * x.d + 4 * x.dv) / (2 if x.causal else 1))


def time_forward(x: Timed) -> None:
    outer = x.batch, x.tokens, x.heads
    q, k, v = (torch.randn(*outer, d, device="cuda", dtype=torch.bfloat16) for d in (x.d, x.d, x.dv))
    request = Request(q, k, v, Spec(x.d**-0.5, None, 0 if x.causal else None))
    out, lse = torch.empty_like(v), torch.empty(x.batch, x.heads, x.tokens, device="cuda")
    portable = TritonBackend().forward(request)
    runs = {"portable": lambda: portable(request.tensors()), "hopper": forward_run(request, out, lse)}
    report(f"forward {x}", runs, x.batch * x.heads * x.tokens**2 * 2 * (x.d + x.dv) / (2 if x.causal else 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time"))
    parser.add_argument("--fa3", metavar="DIR")
    options = parser.parse_args()
    if options.what == "check":
        return check_all()
    for causal in (True, False):
        time_forward(Timed(512, 512, causal, heads=4))
    if options.fa3:
        sys.path.insert(0, options.fa3)
        import fa3

        for d, dv in ((96, 96), (80, 80), (192, 192), (192, 128)):
            for causal in (True, False):
                time_backward(Timed(d, dv, causal), fa3)
    return 0


if __name__ == "__main__":
    sys.exit(main())
