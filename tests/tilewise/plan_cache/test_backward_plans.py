"""Plans of backwards: gradients and saved tensors of any layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close

import tilewise
from tests.tilewise.plan_cache.cases import StubBackend, fp32_precision, scaled
from tests.tilewise.plan_cache.third_backend import ThirdBackend
from tilewise import AttentionError, plan_cache
from tilewise.plan_cache import PlanCache


def strided(x: Tensor, kind: str) -> Tensor:
    """The same numbers with other strides or another alignment."""
    if kind == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "padded":
        padded = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
        padded[..., : x.shape[-1]] = x
        return padded[..., : x.shape[-1]]
    if kind == "unaligned":
        flat = x.new_empty(x.numel() + 1)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)
    if kind == "last axis":
        return x.mT.contiguous().mT
    return x


KINDS = ["contiguous", "heads first", "padded", "unaligned", "last axis"]


def gradients(out: Tensor, lse: Tensor, wanted: Sequence[Tensor], dout: Tensor, dlse: Tensor | None) -> Any:
    outputs, given = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    return torch.autograd.grad(outputs, wanted, given)


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_gradient_with_other_strides(with_lse: bool, third: ThirdBackend, kept: PlanCache) -> None:
    for kind in KINDS * 2:
        q, k, v = (torch.randn(2, 6, 2, 8, requires_grad=True) for _ in range(3))
        dout = torch.randn(2, 6, 2, 8)
        dlse = torch.randn(2, 6, 2).mT if with_lse else None
        found = gradients(*tilewise.attention(q, k, v, return_lse=True), (q, k, v), strided(dout, kind), dlse)
        results = tilewise.attention(q, k, v, return_lse=True, backend="reference")
        expected = gradients(*results, (q, k, v), dout, dlse)
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b)
    assert third.made.count("forward") == 1
    assert third.made.count("backward") == 3  # contiguous or copied, heads first, padded
    assert third.ran.count("backward") == len(KINDS) * 2


def test_gradients_with_and_without_one_of_lse(third: ThirdBackend, kept: PlanCache) -> None:
    q, k, v = (torch.randn(2, 6, 2, 8, requires_grad=True) for _ in range(3))
    for wanted in ("out", "lse", "both", "out", "lse"):
        for backend in ("auto", "reference"):
            out, lse = tilewise.attention(q, k, v, return_lse=True, backend=backend)
            loss = out.square().sum() * (wanted != "lse") + lse.square().sum() * (wanted != "out")
            found = torch.autograd.grad(loss if wanted == "both" else (out if wanted == "out" else lse).sum(), (q, k))
            if backend == "auto":
                first = found
        for a, b in zip(first, found, strict=True):
            assert_close(a, b)


def test_an_expanded_gradient_and_a_zero_tensor(third: ThirdBackend, kept: PlanCache) -> None:
    q, k, v = (torch.randn(2, 6, 2, 8, requires_grad=True) for _ in range(3))
    for dout in (torch.ones(()).expand(2, 6, 2, 8), torch._efficientzerotensor((2, 6, 2, 8)), -torch.ones(2, 6, 2, 8)):
        found = torch.autograd.grad(tilewise.attention(q, k, v), (q, k, v), dout)
        plain = torch.zeros(2, 6, 2, 8) + dout
        expected = torch.autograd.grad(tilewise.attention(q, k, v, backend="reference"), (q, k, v), plain)
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_saved_tensors_that_a_hook_returns_with_other_strides(
    kind: str, stub: StubBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an offload to the host: the runner of the first backward does not fit."""
    made: list[Any] = []
    backward = stub.backward_runner
    monkeypatch.setattr(stub, "backward_runner", lambda *x: made.append([y.stride() for y in x[0][:3]]) or backward(*x))
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    for hooked in (False, True, True, False):
        unpack = (lambda x: strided(x, kind) if x.dim() == 4 else x) if hooked else lambda x: x
        with saved_tensors_hooks(lambda x: x.detach().clone(), unpack):
            tilewise.attention(q, k, v).backward(torch.ones(1, 6, 2, 8))
        given = stub.gradients[-1][1]
        expected = [strided(x.detach(), kind) if hooked else x for x in (q, k, v)]
        assert [x.stride() for x in given[:3]] == [x.stride() for x in expected]
        assert [x.data_ptr() & 15 for x in given[:3]] == [x.data_ptr() & 15 for x in expected]
        assert all(torch.equal(a, b) for a, b in zip(given[:3], expected, strict=True))
    assert len(made) == 1 + (kind != "unaligned")  # a KernelCall checks the alignment itself
    assert len(stub.requests) == 1


def test_saved_tensors_that_a_hook_returns_with_another_dtype(third: ThirdBackend, kept: PlanCache) -> None:
    """The runner of the first backward would read their memory in the wrong dtype."""
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    tilewise.attention(q, k, v).sum().backward()
    with saved_tensors_hooks(lambda x: x, lambda x: x.half() if x.dim() == 4 else x):
        out = tilewise.attention(q, k, v)
        with pytest.raises(AttentionError, match=r"saved q: .*hook returned torch\.float16 on cpu.*torch\.float32"):
            out.sum().backward()


def test_hooks_with_numbers(third: ThirdBackend, kept: PlanCache) -> None:
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    for unpack in (lambda x: x, lambda x: strided(x, "padded") if x.dim() == 4 else x):
        with saved_tensors_hooks(lambda x: x, unpack):
            found = torch.autograd.grad(tilewise.attention(q, k, v).square().sum(), (q, k, v))
        expected = torch.autograd.grad(tilewise.attention(q, k, v, backend="reference").square().sum(), (q, k, v))
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b)


@tilewise.mask_mod
def below(b, h, q_idx, kv_idx, limits):  # type: ignore[no-untyped-def]
    return kv_idx < limits[q_idx]


@pytest.mark.parametrize("learned", [False, True])
def test_a_tensor_of_a_mask_has_no_gradient(learned: bool, stub: StubBackend) -> None:
    """It may require one. The gradients of a score mod are computed only if they are wanted."""
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    limits, table = torch.full((6,), 3.0, requires_grad=True), torch.ones(2, requires_grad=learned)
    for _ in range(2):
        stub.gradients.clear()
        out = tilewise.attention(q, k, v, score_mod=scaled(table, 2.0), mask_mod=below(limits))
        out.backward(torch.ones_like(out))
        assert [wanted for wanted, _ in stub.gradients] == [None, (False, False, True)][: 1 + learned]
    assert q.grad is not None
    assert limits.grad is None
    assert (table.grad is not None) == learned


def test_runners_of_a_backward_are_bounded(
    third: ThirdBackend, kept: PlanCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "MAX_LAYOUTS", 4)
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    for n in (*range(10), *range(6, 10)):  # the last four are kept
        dout = torch.randn(1, 6, 2, 8 + 8 * n)[..., :8]
        torch.autograd.grad(tilewise.attention(q, k, v), (q, k, v), dout)
        [plan] = kept.values()
        assert 1 <= len(plan._backward) <= 4
    assert third.made == ["forward", *["backward"] * 10]


def test_the_tf32_setting_of_the_backward_is_the_current_one(third: ThirdBackend, kept: PlanCache) -> None:
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    for setting in ("ieee", "tf32", "ieee", "tf32"):
        out = tilewise.attention(q, k, v)
        with fp32_precision(setting):
            torch.autograd.grad(out.sum(), q)
    assert third.made.count("backward") == 2


def test_batched_and_second_gradients_of_a_known_call(third: ThirdBackend, kept: PlanCache) -> None:
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    stack = torch.randn(3, 1, 4, 2, 8, dtype=torch.float64)
    for _ in range(2):
        out = tilewise.attention(q, k, v)
        (found,) = torch.autograd.grad(out, q, stack, is_grads_batched=True, retain_graph=True)
        for n in range(3):
            assert_close(found[n], torch.autograd.grad(out, q, stack[n], retain_graph=True)[0])
        (first,) = torch.autograd.grad(out, q, stack[0], create_graph=True)
        assert_close(first, found[0])
        (second,) = torch.autograd.grad(first.sum(), q)
        exact = tilewise.attention(q, k, v, backend="reference")
        (expected,) = torch.autograd.grad(exact, q, stack[0], create_graph=True)
        assert_close(second, torch.autograd.grad(expected.sum(), q)[0])


def test_a_retained_graph_runs_its_plan_again(third: ThirdBackend, kept: PlanCache) -> None:
    q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    out = tilewise.attention(q, k, v)
    kept.clear()  # the graph holds its plan
    first, second = (torch.autograd.grad(out.sum(), q, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert third.made == ["forward", "backward"]
