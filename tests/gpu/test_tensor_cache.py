"""Tensors that are kept between calls, on several streams, in CUDA graphs, and their bytes over many batches."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from tilewise import AttentionError
from tilewise.distributed import plan, rehearse
from tilewise.sparse import neighborhood
from tilewise.tensor_cache import TensorCache, device_of

DEVICE = device_of("cuda")
BUSY = 200_000_000  # cycles, 0.1 s


def grid(n: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(1, n, n + 1, 2, 32, device="cuda", dtype=torch.bfloat16)


def test_an_entry_is_complete_for_a_stream_that_does_not_wait():
    """The stream that makes it is busy; another one reads it at once."""
    cache = TensorCache(1 << 20)
    here, there = torch.cuda.Stream(), torch.cuda.Stream()
    for n in range(20):
        with torch.cuda.stream(here):
            torch.cuda._sleep(BUSY // 20)
            cache.get(n, DEVICE, lambda n=n: torch.arange(9999, device=DEVICE) * n)
        with torch.cuda.stream(there):
            x = cache.get(n, DEVICE, lambda: pytest.fail("made again")).clone()
        there.synchronize()
        assert torch.equal(x.cpu(), torch.arange(9999) * n)


def test_memory_of_a_dropped_entry_is_not_reused_while_a_stream_reads_it():
    cache = TensorCache(1)
    other = torch.cuda.Stream()
    for n in range(5):
        with torch.cuda.stream(other):
            x = cache.get(n, DEVICE, lambda n=n: torch.full((1 << 20,), n, device=DEVICE))
            torch.cuda._sleep(BUSY)
            late = x + 0
        del x
        for m in range(100, 110):  # drops the entry; the stream that makes entries has its memory back, or not
            cache.get(m, DEVICE, lambda m=m: torch.full((1 << 20,), m, device=DEVICE))
        other.synchronize()
        assert bool((late == n).all())


@pytest.mark.parametrize("what", ["neighborhood", "ring", "ulysses"])
def test_two_streams(what):
    """First call on one stream, second at once on the other."""
    here, there = torch.cuda.Stream(), torch.cuda.Stream()
    for n in range(24, 40, 4):
        if what == "neighborhood":
            q = grid(n)
            call = lambda q=q: neighborhood(q, q, q, kernel_size=7)  # noqa: E731
        else:
            q = torch.randn(1, 40 * n, 4, 64, device="cuda", dtype=torch.bfloat16)
            made = plan(4, cu_seqlens=[0, 13 * n, 40 * n], causal=True, strategy=what, layout="striped")
            call = lambda q=q, made=made: rehearse(q, q, q, plan=made)  # noqa: E731
        torch.cuda.synchronize()
        with torch.cuda.stream(here):
            torch.cuda._sleep(BUSY // 10)
            first = call()
        with torch.cuda.stream(there):
            second = call()
        torch.cuda.synchronize()
        assert torch.equal(first, second)


def test_a_graph_keeps_what_it_reads():
    """At every replay, after other grids have dropped the entry from the cache; one that is not there raises."""
    q = grid(33)
    expected = neighborhood(q, q, q, kernel_size=9)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = neighborhood(q, q, q, kernel_size=9)
        with pytest.raises(AttentionError, match="the same call once before the capture"):
            neighborhood(q, q, q, kernel_size=5)
    for n in range(70):
        x = grid(8 + n)
        neighborhood(x, x, x, kernel_size=3)
    gc.collect()
    torch.cuda.empty_cache()
    torch.full((1 << 28,), -1, dtype=torch.int32, device="cuda")
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_memory_after_a_thousand_packed_batches():
    """128k tokens on 4 ranks, all in this process: at most 64 MB more than before."""
    tokens, rng = 1 << 17, random.Random(0)
    q = torch.randn(1, tokens, 1, 16, device="cuda", dtype=torch.bfloat16)
    for n in range(1000):
        cuts = sorted(rng.sample(range(1, tokens), 31))
        with torch.no_grad():
            rehearse(q, q, q, plan=plan(4, cu_seqlens=[0, *cuts, tokens], causal=True))
        if n == 2:
            gc.collect()
            before = torch.cuda.memory_allocated()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 64 << 20
