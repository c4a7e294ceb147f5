"""vLLM's backend on a GPU, on stubs of its interface: no kernel is compiled after the builder is made, and steps in
CUDA graphs and outside of them are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.kv_cases import KvCase, compare, inputs
from tests.tilewise.integrations import vllm_stub
from tests.tilewise.integrations.test_vllm import backend, cache_of, run

__all__ = ["backend"]  # a fixture
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
CASE = KvCase((20, 3, 0, 330), new=1, queries=1, page=PAGE, heads=HEADS, kv_heads=KV_HEADS, dim=DIM)
STEPS = (
    CASE.but(queries=(1, 1, 1, 1), new=(1, 1, 1, 1)),
    CASE.but(queries=(1, 3, 2, 5), new=(1, 3, 2, 5), padding=3),
    CASE.but(queries=(1, 300, 40, 1), new=(1, 300, 40, 1)),  # a prompt for the kernels of prefill
    CASE.but(lengths=(1000,), queries=(513,), new=(513,)),
    CASE.but(lengths=tuple(range(0, 640, 10)), queries=(1,) * 64, new=(1,) * 64),
)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The names of kernels that Triton compiles or loads."""
    import triton

    found: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **event: found.append(str(event["fn"].name))
    yield found
    triton.knobs.runtime.jit_post_compile_hook = before


def builder_and_layer(backend: Any, **words: Any) -> tuple[Any, Any]:
    impl = backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, KV_HEADS, **words)
    config = vllm_stub.vllm_config({"layer": impl}, tokens=2048, sequences=64, length=2048)
    spec = vllm_stub.AttentionSpec(PAGE, KV_HEADS, DIM, torch.bfloat16)
    return backend.get_builder_cls()(spec, ["layer"], config, torch.device("cuda", torch.cuda.current_device())), impl


@pytest.mark.parametrize("window", [None, 128])
def test_steps_after_the_start(backend: Any, compiled: list[str], window: int | None) -> None:
    sinks = None if window is None else torch.randn(HEADS, device="cuda")
    words = {"sliding_window": window, "sinks": sinks}
    builder, _ = builder_and_layer(backend, **words)
    compiled.clear()
    for n, case in enumerate(STEPS):
        x = inputs(case, torch.bfloat16, "cuda", seed=n)
        output = run(backend, x, cache_of(x, "five"), words, layers=2, builder=builder)
        assert not compiled, (case, compiled)
        y = inputs(case, torch.bfloat16, "cuda", seed=n)
        band = {} if window is None else {"window": (window - 1, 0), "sinks": sinks}
        options = y.options | band | {"backend": "triton", "return_lse": True}
        lse = tilewise.attention_kv(y.q, y.k, y.v, y.lengths, **options)[1]
        compare((output, lse), y, **band)
        compiled.clear()  # of the call with lse


def test_a_graph_serves_the_steps_after_it(backend: Any) -> None:
    """Captured with other lengths; between its replays another step plans in the same memory."""
    batch, pages = 8, 40
    builder, impl = builder_and_layer(backend)
    cache = torch.randn(batch * pages, 2, PAGE, KV_HEADS, DIM, device="cuda").bfloat16()
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    cu, lengths = torch.arange(batch + 1, device="cuda").int(), torch.ones(batch, device="cuda").int()
    slots = torch.full((batch,), -1, device="cuda")
    q, k, v = torch.randn(batch, HEADS + 2 * KV_HEADS, DIM, device="cuda").bfloat16().split([HEADS, *[KV_HEADS] * 2], 1)
    output = torch.empty(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)

    def step(metadata: Any) -> None:
        for _ in range(2):
            impl.do_kv_cache_update(None, k, v, cache, slots)
            impl.forward(None, q, k, v, cache, metadata, output=output)

    told = vllm_stub.CommonAttentionMetadata(cu, cu, lengths, batch, batch, 1, PAGE * pages, table, slots)
    step(builder.build_for_cudagraph_capture(told))
    metadata, graph = builder.build_for_cudagraph_capture(told), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(metadata)
    for seed in range(3):
        other = inputs(STEPS[2], torch.bfloat16, "cuda", seed=seed)
        run(backend, other, cache_of(other, "five"), {}, builder=builder)
        torch.manual_seed(seed)
        now = torch.randint(1, PAGE * pages, (batch,), device="cuda").int()
        now[seed] = 0
        lengths.copy_(now)
        q.normal_()
        output.fill_(torch.nan)
        graph.replay()
        expected: Tensor = tilewise.attention_kv(
            q[:, None].cpu().float(), *(x.cpu().float() for x in cache.unbind(1)), now.cpu(), page_table=table.cpu()
        )
        torch.testing.assert_close(output.cpu().float(), expected[:, 0], atol=2e-2, rtol=2e-2)
