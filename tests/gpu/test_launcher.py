"""Prepared launches on a GPU: that the driver is given them, and calls at the edges of what they were prepared for."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import tilewise
from tilewise.backends.common import kernel_call
from tilewise.backends.common import launch as launcher
from tilewise.backends.common.kernel_call import KernelCall
from tilewise.kv_cache import Prepared
from tilewise.plan_cache import CallPlan, plans

needs_bindings = pytest.mark.skipif(launcher.driver is None, reason="no cuda.bindings here: Triton launches")
BACKENDS = ["triton", "hopper"]


def inputs(n: int = 200, d: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(2, n, 4, d, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]


def attention(tensors: list[Tensor], backend: str, **options: Any) -> Any:
    try:
        return tilewise.attention(*tensors, backend=backend, **options)
    except tilewise.AttentionError as error:
        pytest.skip(str(error))


def compare(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), atol=2e-2 * max(b.abs().max().item(), 1e-3), rtol=0)


@needs_bindings
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_are_launched_by_the_driver(backend: str) -> None:
    """The parameters of every compiled kernel are as expected, with all terms, packed and dense."""
    plans.clear()
    sinks = torch.zeros(4, device="cuda", requires_grad=True)
    bias = torch.zeros(1, 4, 200, 200, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, 50, 200], device="cuda", dtype=torch.int32)
    for options in ({}, {"causal": True}, {"sinks": sinks, "softcap": 5.0}, {"bias": bias}, {"window": (30, 0)}):
        attention(inputs(), backend, **options).sum().backward()
    packed = [x.detach()[0].requires_grad_() for x in inputs()]
    tilewise.attention_varlen(*packed, cu, cu, causal=True, backend=backend).sum().backward()
    calls = [x for x in plans.values() if isinstance(x, CallPlan)]
    assert len(calls) == 6
    runners = [runner for x in calls for runner in (x.forward, *x._backward.values())]
    kernels = [x for x in runners if isinstance(x, KernelCall)]
    assert len(kernels) >= 12
    assert all(x.launches is not None for x in kernels)


@needs_bindings
@pytest.mark.parametrize("queries", [1, 300])
def test_kernels_of_a_kv_cache_are_launched_by_the_driver(queries: int) -> None:
    plans.clear()
    q = torch.randn(2, queries, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 512, 2, 128, device="cuda", dtype=torch.bfloat16)
    new = torch.randn(2, queries, 2, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([100, 200], device="cuda", dtype=torch.int32)
    plan = tilewise.plan_kv(q, k, v, lengths, k_new=new, v_new=new)
    tilewise.attention_kv(q, k, v, lengths, k_new=new, v_new=new, plan=plan)
    tilewise.attention_kv(q, k, v, lengths, k_new=new, v_new=new)
    tilewise.append_kv(new, new, k, v, lengths)
    runners = [x.runner if isinstance(x, Prepared) else x for x in plans.values()]
    assert len(runners) >= 3
    assert all(isinstance(x, KernelCall) and x.launches is not None for x in runners)


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 3), (1, 0, 3), (1, 3, 0)])
def test_calls_without_elements(backend: str, batch: int, queries: int, keys: int) -> None:
    for _ in range(2):
        q = torch.randn(batch, queries, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        k, v = torch.randn(2, batch, keys, 2, 64, device="cuda", dtype=torch.float16).requires_grad_().unbind()
        out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True, backend=backend)
        assert torch.equal(out, torch.zeros_like(q))
        assert bool((lse == -torch.inf).all())
        assert torch.equal(torch.autograd.grad(out.sum(), q)[0], torch.zeros_like(q))


@pytest.mark.parametrize("backend", BACKENDS)
def test_unaligned_gradients_and_saved_tensors(backend: str) -> None:
    """Kernels are specialised for the alignment of the first call's tensors."""

    def moved(x: Tensor, shift: int) -> Tensor:
        """The same values and strides, `shift` elements past an aligned address."""
        span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        flat = torch.empty(span + shift, device=x.device, dtype=x.dtype)
        return flat[shift:].as_strided(x.shape, x.stride(), shift).copy_(x)

    wide = torch.randn(2, 200, 4, 128, device="cuda", dtype=torch.bfloat16)
    for shift, with_gaps in ((0, False), (1, False), (4, False), (0, True), (1, True), (0, False)):
        leaves = [x.detach().requires_grad_() for x in inputs()]
        if with_gaps:
            leaves[0] = wide[..., :64].detach().requires_grad_()
        dout, dlse = torch.randn_like(leaves[1]), torch.randn(2, 4, 200, device="cuda")
        with saved_tensors_hooks(lambda x: x, lambda x, n=shift: moved(x.detach(), n) if x.dim() == 4 else x):
            ours = attention(leaves, backend, causal=True, return_lse=True)
            found = torch.autograd.grad(ours, leaves, (moved(dout, shift), moved(dlse, shift)))
        theirs = tilewise.attention(*leaves, causal=True, return_lse=True, backend="reference")
        compare(found, torch.autograd.grad(theirs, leaves, (dout, dlse)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads(backend: str) -> None:
    """New threads have no CUDA context until they use one."""
    tensors = inputs()
    expected = attention(tensors, backend, causal=True)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                found = tilewise.attention(*tensors, causal=True, backend=backend)
                assert torch.equal(found, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failures, failures[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_streams_run_one_call_at_once(backend: str) -> None:
    """Each has its own counters."""
    tensors = inputs(3000)
    expected = attention(tensors, backend, causal=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(tilewise.attention(*tensors, causal=True, backend=backend))
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected) for x in found)


@needs_bindings
def test_a_launch_hook_sees_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a profiler's: Triton then launches."""
    tensors = inputs()
    expected = tilewise.attention(*tensors, causal=True, backend="triton")
    seen: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(kernel_call.KNOBS, "launch_enter_hook", seen.append)
        assert torch.equal(tilewise.attention(*tensors, causal=True, backend="triton"), expected)
    assert seen
    count = len(seen)
    assert torch.equal(tilewise.attention(*tensors, causal=True, backend="triton"), expected)
    assert len(seen) == count


def test_tf32_is_as_torch_says_now() -> None:
    """A plan is for one setting; a float32 call with the other is another plan."""
    tensors = [torch.randn(1, 256, 2, 128, device="cuda") for _ in range(3)]
    before = torch.backends.cuda.matmul.fp32_precision
    found = {}
    try:
        for setting in ("ieee", "tf32", "ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = setting
            out = tilewise.attention(*tensors, backend="triton")
            assert torch.equal(found.setdefault(setting, out), out)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert not torch.equal(found["ieee"], found["tf32"])


@needs_bindings
def test_a_signal_handler_that_calls_attention() -> None:
    """Within the launches of another call, in the same thread and on the same stream."""
    tensors = inputs(3000)
    expected = tilewise.attention(*tensors, causal=True)
    found: list[Tensor] = []

    handling = False

    def handler(*_: Any) -> None:  # not within itself: the timer may be faster than a call
        nonlocal handling
        if not handling and len(found) < 200:
            handling = True
            found.append(tilewise.attention(*tensors, causal=True).detach())
            handling = False

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        for _ in range(500):
            found.append(tilewise.attention(*tensors, causal=True).detach())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected) for x in found)


@needs_bindings
def test_a_launch_that_blocks_does_not_hold_up_other_streams() -> None:
    """The queue of a stream is full while a long kernel runs: other threads launch on other streams."""
    tensors = inputs(100)
    expected = tilewise.attention(*tensors, causal=True)
    torch.cuda.synchronize()
    full, done = torch.cuda.Stream(), threading.Event()

    def fill() -> None:
        with torch.cuda.stream(full), torch.no_grad():
            torch.cuda._sleep(4_000_000_000)  # 2 s
            for _ in range(3000):  # more than a queue takes
                tilewise.attention(*tensors, causal=True)
        done.set()

    thread = threading.Thread(target=fill)
    thread.start()
    time.sleep(0.5)
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        found = tilewise.attention(*tensors, causal=True)
        torch.cuda.current_stream().synchronize()
    assert not done.is_set(), "the queue was not full"
    assert torch.equal(found, expected)
    thread.join()
