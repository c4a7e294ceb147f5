"""Plans of the registered ops, of several threads, and of tensors whose memory does not hold their values."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tilewise
from tests.tilewise.plan_cache.cases import Q, StubBackend, scaled
from tests.tilewise.plan_cache.third_backend import ThirdBackend
from tilewise import AttentionError
from tilewise.plan_cache import PlanCache
from tilewise.request import Request, Spec, arguments


def test_nested_tensors_have_plans(kept: PlanCache) -> None:
    """Calls with and without gradients; the second of each runs by the plan of the first."""
    parts = [torch.randn(n, 2, 8) for n in (3, 5)]
    for requires_grad in (False, True):
        x = torch.nested.nested_tensor(parts, layout=torch.jagged).detach().requires_grad_(requires_grad)
        tilewise.attention(x, x, x, backend="reference")
        plans = len(kept)
        out = tilewise.attention(x, x, x, backend="reference")
        assert len(kept) == plans > 0
        assert out.requires_grad is requires_grad
        for found, part in zip(out.detach().unbind(), parts, strict=True):
            assert_close(found, tilewise.attention(*[part[None]] * 3)[0])


# The registered ops


def test_calls_of_the_ops_share_a_plan(third: ThirdBackend, kept: PlanCache) -> None:
    for n in (128, 128, 64, 128, 64, 64):
        q, k, v, dout = (torch.randn(1, n, 4, 8, dtype=torch.float64) for _ in range(4))
        asked = arguments(Request(q, k, v, Spec(0.5)))[3:]
        out, lse = torch.ops.tilewise.forward(q, k, v, *asked)
        found = torch.ops.tilewise.backward(out, lse, dout, None, q, k, v, *asked)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = tilewise.attention(*leaves, scale=0.5, backend="reference")
        assert_close(out, expected)
        for a, b in zip(found, torch.autograd.grad(expected, leaves, dout), strict=True):
            assert_close(a, b)
    assert third.made == ["forward", "backward"] * 2
    assert [key[0] for key in kept].count("op") == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"scale": 0.0}, {"scale": -0.0}),
        ({"before": 3}, {"before": 4}),
        ({"before": 3}, {"after": 3}),
        ({"before": None}, {"before": 0}),
        ({"score_mod": scaled(torch.ones(4), 0.0)}, {"score_mod": scaled(torch.ones(4), -0.0)}),
        ({"backend": "auto"}, {"backend": "stub"}),
        ({"deterministic": False}, {"deterministic": True}),
        ({"partial": False}, {"partial": True}),
    ],
)
def test_other_scalars_of_an_op_are_another_call(
    one: dict[str, Any], other: dict[str, Any], stub: StubBackend, kept: PlanCache
) -> None:
    for words in (one, other) * 2:
        words = {"scale": 1.0, **words}
        mod = words.pop("score_mod", None)
        if mod is not None:
            words |= {"score_mod": mod.key, "score_numbers": mod.numbers, "score_tensors": 1}
        request = Request(Q, Q, Q, Spec(**words), score=() if mod is None else mod.tensors)
        torch.ops.tilewise.forward(*arguments(request))
    assert len(stub.requests) == 2
    assert repr(stub.requests[0].spec) != repr(stub.requests[1].spec)


# Threads


def test_threads_share_the_cache(third: ThirdBackend, kept: PlanCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets the results of its own tensors, while the cache fills up and starts again."""
    monkeypatch.setattr(kept, "limit", 4)
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            start.wait()
            for n in (3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 7, 8) * 2:
                q, k, v = (torch.randn(1, n, 2, 8, generator=generator).requires_grad_() for _ in range(3))
                found = torch.autograd.grad(tilewise.attention(q, k, v).square().sum(), (q, k, v))
                expected = torch.autograd.grad(
                    torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
                    .square()
                    .sum(),
                    (q, k, v),
                )
                for a, b in zip(found, expected, strict=True):
                    assert_close(a, b, atol=1e-5, rtol=1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert len(kept) <= 4 + len(threads)


# Tensors whose memory does not hold their values


def negative(*shape: int) -> Tensor:
    """A view with the negative bit: its values are those in memory, negated."""
    x = torch.randn(*shape, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    return x


@pytest.mark.parametrize("what", ["q", "k", "v", "bias", "sinks", "slopes", "mod", "dout", "dlse"])
@pytest.mark.parametrize("kind", ["negative", "zero"])
def test_negative_views_and_zero_tensors(what: str, kind: str, kept: PlanCache, triton_runs: None) -> None:
    """Kernels read memory, so these are copied first; by every call."""
    make = negative if kind == "negative" else lambda *shape: torch._efficientzerotensor(shape)
    shapes = {"q": (1, 6, 2, 16), "k": (1, 6, 2, 16), "v": (1, 6, 2, 16), "bias": (1, 2, 6, 6), "sinks": (2,),
              "slopes": (2,), "mod": (2,), "dout": (1, 6, 2, 16), "dlse": (1, 2, 6)}  # fmt: skip
    for _ in range(2):
        given = {name: make(*shape) if name == what else torch.randn(*shape) for name, shape in shapes.items()}
        results = []
        for backend in ("triton", "reference"):
            q = given["q"] if what == "q" else given["q"].clone().requires_grad_()
            terms = {"bias": given["bias"], "sinks": given["sinks"], "alibi_slopes": given["slopes"]}
            options: dict[str, Any] = {} if what in "qkv" else terms | {"score_mod": scaled(given["mod"], 1.0)}
            found = tilewise.attention(q, given["k"], given["v"], **options, return_lse=True, backend=backend)
            if q.requires_grad:
                found = *found, *torch.autograd.grad(found, q, (given["dout"], given["dlse"]))
            results.append(found)
        for a, b in zip(*results, strict=True):
            assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["sparse", "nested"])
@pytest.mark.parametrize("what", ["q", "k", "sinks"])
def test_layouts_without_strides_are_errors(what: str, kind: str, kept: PlanCache) -> None:
    made = torch.ones(1, 6, 2, 8).to_sparse() if kind == "sparse" else torch.nested.nested_tensor([torch.ones(6, 2, 8)])
    q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    with pytest.raises(AttentionError, match="layout of"):  # noqa: PT012
        if what == "sinks":
            tilewise.attention(q, k, v, sinks=made)
        else:
            tilewise.attention(*((made, k, v) if what == "q" else (q, made, v)))


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 3), (1, 0, 3), (1, 3, 0)])
def test_calls_without_elements(batch: int, queries: int, keys: int, kept: PlanCache, triton_runs: None) -> None:
    for _ in range(2):
        q = torch.randn(batch, queries, 2, 16, requires_grad=True)
        k, v = torch.randn(2, batch, keys, 2, 16).requires_grad_().unbind()
        out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True, backend="triton")
        assert torch.equal(out, torch.zeros_like(q))
        assert bool((lse == -torch.inf).all())
        assert torch.equal(torch.autograd.grad(out.sum(), q)[0], torch.zeros_like(q))
