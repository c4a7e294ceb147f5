"""The plan in use: of a thread, of autograd's threads during its backward, as long as a gradient may be asked for."""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch

import tilewise
from tilewise.distributed import attention, current, plan, use


def inputs(tokens: int = 12) -> list[torch.Tensor]:
    return [torch.randn(1, tokens, 2, 8, requires_grad=True) for _ in range(3)]


def test_each_thread_has_its_own():
    plans = [plan(1, seqlen=12, window=(n, 0)) for n in range(4)]
    entered, found = threading.Barrier(4), [None] * 4

    def run(n: int) -> None:
        with use(plans[n]):
            entered.wait()
            first = current()
            with use(None):
                entered.wait()
                nothing = current()
            entered.wait()
            found[n] = (first, nothing, current())

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(made, None, made) for made in plans]
    assert current() is None


def test_another_thread_has_none():
    found = []
    with use(plan(1, seqlen=12)):
        thread = threading.Thread(target=lambda: found.append(current()))
        thread.start()
        thread.join()
    assert found == [None]


class Deep(torch.autograd.Function):
    """A backward within a backward, which autograd runs in another thread if there are many."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, seen: list[Any]) -> torch.Tensor:
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.seen.append((threading.get_ident(), current()))
        if ctx.depth:
            with torch.enable_grad():
                Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.seen).sum().backward()
        return grad, None, None


def test_threads_of_autograd_have_the_plan_of_their_caller():
    made, seen = plan(1, seqlen=12), []
    x = Deep.apply(torch.ones(1, requires_grad=True), 70, seen)
    with use(made):
        x.sum().backward()
    assert len({thread for thread, _ in seen}) > 1, "no other thread: more depth"
    assert {found for _, found in seen} == {made}
    x = Deep.apply(torch.ones(1, requires_grad=True), 70, seen)
    seen.clear()
    x.sum().backward()
    assert {found for _, found in seen} == {None}


def test_a_checkpointed_layer_finds_the_plan_in_its_backward():
    from torch.utils.checkpoint import checkpoint

    q, k, v = inputs()
    expected = torch.autograd.grad(tilewise.attention(q, k, v, window=(3, 0)).sum(), q)
    with use(plan(1, seqlen=12, window=(3, 0))):
        out = checkpoint(attention, q, k, v, use_reentrant=False)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), q), expected)


def test_a_gradient_keeps_its_plan():
    made = plan(1, seqlen=12, causal=True)
    q, k, v = inputs()
    out = attention(q, k, v, plan=made)
    del made
    for n in range(300):
        plan(2, seqlen=500 + n, causal=True)
    gc.collect()
    out.sum().backward()
    assert q.grad is not None


def test_a_compiled_function_uses_the_plan_of_its_thread():
    q, k, v = (x.detach() for x in inputs())
    call = torch.compile(lambda q, k, v: attention(q, k, v) if current() else q * 0, backend="eager", fullgraph=True)
    for window in ((3, 0), (5, 0), None):
        with use(plan(1, seqlen=12, window=window)) as made:
            assert made.counts() == [12]  # known before it is compiled: Python 3.11 has a lock there
            torch.testing.assert_close(call(q, k, v), tilewise.attention(q, k, v, window=window))
    assert not call(q, k, v).any()
