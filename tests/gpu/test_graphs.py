"""CUDA graphs: torch.compile's own, graphed callables and captures by hand, beside eager calls and each other."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests import features
from tilewise.backends.common import kernel_call
from tilewise.backends.common import launch as launcher
from tilewise.plan_cache import plans

IDS = torch.arange(256) // 64


def packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    cu = torch.tensor([0, 100, 356, 512], dtype=torch.int32, device="cuda")
    found: Tensor = tilewise.attention_varlen(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, **options)
    return found.unflatten(0, (2, 256))


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "hopper": lambda q, k, v: tilewise.attention(q, k, v, causal=True, backend="hopper"),
    "hopper, in order": lambda q, k, v: tilewise.attention(q, k, v, causal=True, backend="hopper", deterministic=True),
    "hopper, full": lambda q, k, v: tilewise.attention(q, k, v, backend="hopper"),
    "portable": lambda q, k, v: tilewise.attention(q, k, v, causal=True, window=(100, 0), backend="triton"),
    "packed": lambda q, k, v: packed(q, k, v, causal=True),
    "softcap": lambda q, k, v: tilewise.attention(q, k, v, causal=True, softcap=20.0),
    "dropout": lambda q, k, v: tilewise.attention(
        q, k, v, dropout_p=0.2, seed=torch.full((), 7, dtype=torch.int64, device="cuda")
    ),
    "documents": lambda q, k, v: tilewise.attention(q, k, v, mask_mod=tilewise.mods.document(ids=IDS.cuda())),
    "one query": lambda q, k, v: tilewise.attention(q[:, :1], k, v, causal=True),
}
SAFE = [name for name in CALLS if name not in ("packed", "documents")]  # make nothing on the host


def inputs(seed: int, grad: bool) -> list[Tensor]:
    make = torch.Generator("cuda").manual_seed(seed)
    shapes = (2, 256, 4, 64), (2, 256, 2, 64), (2, 256, 2, 64)
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=make).requires_grad_(grad) for shape in shapes
    ]


def results(call: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    out = call(*tensors)
    if not tensors[0].requires_grad:
        return [out.clone()]
    grads = torch.autograd.grad(out.float().square().sum(), tensors)
    return [x.clone() for x in (out.detach(), *grads)]


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-2 * y.abs().max().item(), rtol=0)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("name", CALLS)
def test_compiled(name: str, mode: str, grad: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(CALLS[name], mode=mode)
    for seed in range(5):  # two warm up, one captures, the others replay
        torch.compiler.cudagraph_mark_step_begin()
        tensors = inputs(seed, grad)
        check(results(compiled, tensors), results(CALLS[name], tensors))


@pytest.mark.parametrize("name", SAFE)
def test_graphed_callables(name: str) -> None:
    if name == "one query":
        pytest.skip("its key gradients want a static view")
    graphed = torch.cuda.make_graphed_callables(CALLS[name], tuple(inputs(0, True)))
    for seed in (1, 2):
        tensors = inputs(seed, True)
        check(results(graphed, tensors), results(CALLS[name], tensors))


@pytest.mark.parametrize("name", SAFE)
def test_two_graphs_on_two_streams_and_eager_calls_between(name: str) -> None:
    static = [inputs(n, False) for n in range(2)]
    streams = [torch.cuda.Stream() for _ in static]
    graphs, outs = [], []
    for tensors, stream in zip(static, streams, strict=True):
        with torch.cuda.stream(stream):
            CALLS[name](*tensors)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs.append(CALLS[name](*tensors))
        graphs.append(graph)
    for seed in range(3, 9, 2):
        for n, tensors in enumerate(static):
            for x, y in zip(tensors, inputs(seed + n, False), strict=True):
                x.copy_(y)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = CALLS[name](*inputs(99, False))
        torch.cuda.synchronize()
        for n, out in enumerate(outs):
            check([out], [CALLS[name](*inputs(seed + n, False))])
        check([eager], [CALLS[name](*inputs(99, False))])


def captured(name: str, calls: int) -> tuple[torch.cuda.CUDAGraph, list[list[Tensor]], list[Tensor]]:
    """A graph of calls that run on two streams at once, their inputs and their outputs."""
    tensors = [inputs(n, False) for n in range(calls)]
    CALLS[name](*tensors[0])
    torch.cuda.synchronize()
    graph, other, outs = torch.cuda.CUDAGraph(), torch.cuda.Stream(), []
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        for n, x in enumerate(tensors):
            other.wait_stream(here)
            with torch.cuda.stream(other if n % 2 else here):
                outs.append(CALLS[name](*x))
        here.wait_stream(other)
    return graph, tensors, outs


@pytest.mark.parametrize("name", ["hopper", "hopper, full", "softcap"])
def test_each_stream_of_a_graph_has_counters(name: str) -> None:
    before = {*kernel_call._graphs}
    graph, tensors, outs = captured(name, 6)
    [key] = {*kernel_call._graphs} - before
    assert [len(x) for x in kernel_call._graphs[key].streams.values()] == [1, 1]
    for seed in range(10, 40, 10):
        for n, x in enumerate(tensors):
            for old, new in zip(x, inputs(seed + n, False), strict=True):
                old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        check(outs, [CALLS[name](*inputs(seed + n, False)) for n in range(len(outs))])


def test_counters_of_graphs_come_back() -> None:
    """When a graph is gone. So as many graphs may be captured, one after another, as a process likes."""
    graph, _, _ = captured("hopper", 2)
    graph.replay()
    assert all(x.ended for x in kernel_call._graphs.values()), "no semaphores here"
    device = torch.cuda.current_device()

    def reclaimed() -> int:
        torch.cuda.synchronize()
        time.sleep(0.5)  # CUDA tells a thread of its own
        spare: list[int] = []
        kernel_call._reclaim_counters(device, spare)
        assert len({*spare}) == len(spare)
        kernel_call._spare.setdefault(device, []).extend(spare)
        return len(spare)

    reclaimed()
    assert reclaimed() == 0  # the graph is there
    graph.replay()
    del graph
    gc.collect()
    assert reclaimed() == 2
    for _ in range(3):
        graph, tensors, outs = captured("hopper", 2)
        graph.replay()
        torch.cuda.synchronize()
        check(outs, [CALLS["hopper"](*x) for x in tensors])


def test_a_first_call_while_another_thread_captures() -> None:
    """It loads kernels, allocates counters and makes a plan. Neither that nor the capture fails, in torch's strictest
    mode."""
    failures: list[BaseException] = []
    results: list[Tensor] = []

    def other() -> None:
        try:
            with torch.cuda.stream(stream):
                for q in queries:
                    results.append(tilewise.attention(q, q, q, causal=True))
                    results.append(tilewise.attention(q, q, q, causal=True, backend="triton"))
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failures.append(error)

    tensors = inputs(1, False)
    CALLS["hopper"](*tensors)
    stream = torch.cuda.Stream()
    queries = [torch.randn(1, 300, 2, dim, device="cuda", dtype=torch.bfloat16) for dim in (32, 48, 80)]
    with torch.cuda.stream(stream):  # torch allocates memory for a new stream with cudaMalloc, which ends a capture
        reserved = [torch.empty(1 << 18, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del reserved
    torch.cuda.synchronize()
    kernel_call._spare.clear()  # more counters are allocated
    plans.clear()
    launcher._functions.clear()  # kernels are loaded again
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        first = CALLS["hopper"](*tensors)  # also in the thread that captures
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        second = CALLS["hopper"](*tensors)
    assert not failures, failures[0]
    assert len(results) == 6
    for seed in (3, 4):
        for old, new in zip(tensors, inputs(seed, False), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        expected = CALLS["hopper"](*tensors)
        check([first, second], [expected, expected])


def test_a_graph_of_terms_with_gradients() -> None:
    slopes = torch.rand(4, device="cuda", requires_grad=True)
    call = torch.compile(
        lambda q, k, v, s: tilewise.attention(q, k, v, score_mod=features.relative(s)), mode="reduce-overhead"
    )
    for seed in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        tensors = [*inputs(seed, True), slopes]
        found = results(call, tensors)
        expected = results(lambda q, k, v, s: tilewise.attention(q, k, v, score_mod=features.relative(s)), tensors)
        check(found, expected)
