"""The boundary to torch: every transform and every kind of derivative gives what the plain call would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import tilewise

CU = torch.tensor([0, 2, 2, 5], dtype=torch.int32)


def plain(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Any:
    return tilewise.attention(q, k, v, causal=True, return_lse=True)


def with_terms(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, sinks: Tensor, bias: Tensor) -> Any:
    terms: dict[str, Any] = {"alibi_slopes": slopes, "sinks": sinks, "bias": bias, "softcap": 2.0}
    return tilewise.attention(q, k, v, window=(2, 1), return_lse=True, **terms)


def packed(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, sinks: Tensor, *_: Tensor) -> Any:
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    return tilewise.attention_varlen(*rows, CU, CU, causal=True, alibi_slopes=slopes, sinks=sinks)


CALLS: dict[str, Callable[..., Any]] = {"plain": plain, "terms": with_terms, "packed": packed}


@tilewise.score_mod
def steep(score, b, h, q_idx, kv_idx, slopes):  # type: ignore[no-untyped-def]
    return score * slopes[h]


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (1, 6, 2, 3), (1, 6, 1, 3), (1, 6, 1, 2), (2,), (2,), (1, 1, 6, 6)
    return [torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(
    ("dout", "is_copied"),
    [
        (torch.zeros(2, 8, 2, 16, dtype=torch.bfloat16), False),
        (torch.zeros(2, 2, 8, 16, dtype=torch.bfloat16).transpose(1, 2), False),
        (
            torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16).expand(2, 8, 2, 16),
            True,
        ),  # no stride of a TMA descriptor is 0
        (torch.zeros(2, 8, 1, 16, dtype=torch.bfloat16).expand(2, 8, 2, 16), True),
        (torch.zeros(2, 8, 2, 20, dtype=torch.bfloat16)[..., :16], True),
    ],
    ids=["contiguous", "heads first", "one of a batch", "one head", "rows of 40 bytes"],
)
def test_gradients_of_out_that_are_copied_for_the_backward(dout: Tensor, is_copied: bool) -> None:
    from tilewise.plan_cache import prepare_backward_inputs
    from tilewise.request import BackwardInputs

    given = BackwardInputs(torch.zeros(2, 8, 2, 16, dtype=torch.bfloat16), torch.zeros(2, 2, 8), dout, None)
    found = prepare_backward_inputs(given).dout
    assert (found is not dout) == is_copied
    assert torch.equal(found, dout)
    assert all(found.stride())


def used(name: str) -> list[Tensor]:
    return inputs()[: {"plain": 3, "packed": 5, "terms": 6}[name]]


@pytest.mark.parametrize("name", CALLS)
def test_gradcheck_with_batched_gradients_and_forward_mode(name: str) -> None:
    modes = {"check_batched_grad": True, "check_forward_ad": True, "check_batched_forward_grad": name == "plain"}
    assert gradcheck(CALLS[name], used(name), fast_mode=True, **modes)


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_with_batched_gradients(name: str) -> None:
    assert gradgradcheck(CALLS[name], used(name), fast_mode=True, check_batched_grad=True)


def loss(name: str) -> Callable[..., Tensor]:
    def total(*tensors: Tensor) -> Tensor:
        found = CALLS[name](*tensors)
        return sum(x.sin().sum() for x in (found if isinstance(found, tuple) else (found,)))

    return total


@pytest.mark.parametrize("name", CALLS)
def test_torch_func_agrees_with_backward(name: str) -> None:
    tensors = used(name)
    places = tuple(range(len(tensors)))
    expected = torch.autograd.grad(loss(name)(*tensors), tensors)
    bare = [x.detach() for x in tensors]
    assert_close(torch.func.grad(loss(name), places)(*bare), expected)
    value, pull = torch.func.vjp(loss(name), *bare)
    assert_close(pull(torch.ones_like(value)), expected)
    assert_close(torch.func.jacrev(loss(name), places)(*bare), expected)
    assert_close(torch.func.jacfwd(loss(name), places)(*bare), expected)
    assert max(float(x.abs().max()) for x in expected) > 1e-3


@pytest.mark.parametrize("name", CALLS)
def test_vmap_of_calls_and_of_gradients(name: str, backend: str) -> None:
    many = [torch.stack([x.detach().float(), x.detach().float() + 0.3, x.detach().float() * 2]) for x in used(name)]

    def call(*tensors: Tensor) -> Any:
        with_backend = {"backend": backend} if name == "plain" else {}
        if name == "plain":
            return tilewise.attention(*tensors[:3], causal=True, return_lse=True, **with_backend)
        return CALLS[name](*tensors)

    ours = torch.vmap(call)(*many)
    each = [call(*(x[n] for x in many)) for n in range(3)]
    stacked = tuple(map(torch.stack, zip(*each, strict=True))) if isinstance(each[0], tuple) else torch.stack(each)
    assert_close(ours, stacked)

    def total(*tensors: Tensor) -> Tensor:
        found = call(*tensors)
        return (found[0] if isinstance(found, tuple) else found).sin().sum()

    grads = torch.vmap(torch.func.grad(total))(*many)
    assert_close(grads, torch.stack([torch.func.grad(total)(*(x[n] for x in many)) for n in range(3)]))


def test_vmap_over_offsets(backend: str) -> None:
    """Kernels run one row after the other; the reference reads offsets, and raises."""
    torch.manual_seed(0)
    q, cu = torch.randn(3, 8, 2, 16), torch.tensor([[0, 3, 8], [0, 4, 8], [0, 5, 8]], dtype=torch.int32)

    def total(x: Tensor, cu: Tensor) -> Tensor:
        return tilewise.attention_varlen(x, x, x, cu, cu, backend=backend).sin().sum()

    if backend == "reference":
        for f in (total, torch.func.grad(total)):
            with pytest.raises(tilewise.AttentionError, match="cu_seqlens mapped over; expected in_dims=None"):
                torch.vmap(f)(q, cu)
    else:
        assert_close(torch.vmap(total)(q, cu), torch.stack([total(q[n], cu[n]) for n in range(3)]))
    assert_close(torch.vmap(total, in_dims=(0, None))(q, cu[0]), torch.stack([total(q[n], cu[0]) for n in range(3)]))


@pytest.mark.slow
def test_a_stack_of_gradients_through_the_kernels(triton_runs: None) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3)]
    out = tilewise.attention(*tensors, causal=True, backend="triton")
    many = torch.randn(3, *out.shape)
    ours = torch.autograd.grad(out, tensors, many, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, tensors, one, retain_graph=True) for one in many]
    assert_close(ours, tuple(map(torch.stack, zip(*each, strict=True))))
    jacobian = torch.autograd.functional.jacobian
    f = lambda q: tilewise.attention(q, *tensors[1:], backend="triton")[0, :2, 0, :3]  # noqa: E731
    assert_close(jacobian(f, tensors[0], vectorize=True), jacobian(f, tensors[0]))


@pytest.mark.parametrize("terms", [{}, {"softcap": 2.0}, {"sinks": torch.zeros(0)}, {"alibi_slopes": torch.zeros(0)}])
@pytest.mark.parametrize("kv_heads", [0, 1])
def test_no_heads(terms: dict[str, Any], kv_heads: int, backend: str) -> None:
    if kv_heads == 0 and backend == "triton":
        backend = "auto"
    q = torch.zeros(2, 5, 0, 8, requires_grad=True)
    k, v = (torch.zeros(2, 5, kv_heads, 8, requires_grad=True) for _ in range(2))
    out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True, backend=backend, **terms)
    assert (out.shape, lse.shape) == ((2, 5, 0, 8), (2, 0, 5))
    (out.sum() + lse.sum()).backward()
    assert all(not x.grad.any() for x in (q, k, v))


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
@pytest.mark.parametrize("leading", [False, True])
def test_slopes_of_no_pair_have_a_gradient(shape: tuple[int, int], leading: bool, backend: str) -> None:
    slopes = torch.randn(shape if leading else shape[1:], requires_grad=True)
    q, k, v = (torch.randn(shape[0], 3, heads, 4) for heads in (shape[1], 1, 1))
    tilewise.attention(q, k, v, alibi_slopes=slopes, backend=backend).sum().backward()
    assert slopes.grad.shape == slopes.shape
    assert not slopes.grad.any()


def test_second_derivatives_of_an_empty_batch() -> None:
    """As those of torch's own attention they are of size 0; what a term gets is zero."""
    q, k, v = (torch.randn(0, 3, 1, 4, requires_grad=True) for _ in range(3))
    sinks = torch.randn(1, requires_grad=True)
    leaves = (q, k, v, sinks)
    first = torch.autograd.grad(tilewise.attention(q, k, v, sinks=sinks).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.sum() for x in first), leaves, allow_unused=True, materialize_grads=True)
    assert [x.shape for x in second] == [x.shape for x in leaves]
    assert not second[3].any()


@pytest.mark.parametrize("kv_heads", [0, 1])
def test_second_derivatives_without_heads(kv_heads: int) -> None:
    q, k, v = (torch.randn(1, 3, heads, 4, requires_grad=True) for heads in (0, kv_heads, kv_heads))
    first = torch.autograd.grad(tilewise.attention(q, k, v).sum(), (q, k, v), create_graph=True)
    second = torch.autograd.grad(sum(x.sum() for x in first), (q, k, v), allow_unused=True, materialize_grads=True)
    assert not any(x.any() for x in second)


def test_a_term_of_fewer_bits_is_summed_over_sequences_in_the_bits_of_q() -> None:
    """Sequences whose parts cancel: rounded one by one, these would leave nothing but their rounding."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, 1, 4, dtype=torch.float64) for _ in range(3))
    cu = torch.tensor([0, 3, 6], dtype=torch.int32)
    sinks = torch.zeros(1)

    def total(sinks: Tensor, sign: Tensor) -> Tensor:
        out = tilewise.attention_varlen(q, k, v, cu, cu, sinks=sinks)
        return (out.sum((1, 2)) * sign).sum()

    ones = torch.ones(6, dtype=torch.float64)
    first, second = (torch.func.grad(total)(sinks.double(), ones * (torch.arange(6) // 3 == n)) for n in (0, 1))
    sign = torch.cat([ones[:3], -first / second * ones[3:] * (1 + 1e-7)])
    expected = torch.func.grad(total)(sinks.double(), sign)
    assert_close(torch.func.grad(total)(sinks, sign), expected.float(), rtol=1e-5, atol=0)


def test_a_nan_that_nobody_sees_stays_where_it_is_under_torch_func() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 4) for n in (2, 5, 5))
    total = lambda q, k, v: tilewise.attention(q, k, v, window=(1, None)).sin().sum()  # noqa: E731
    clean = torch.func.grad(total, (0, 1, 2))(q, k, v)
    k[:, 0] = v[:, 1] = torch.nan
    assert_close(torch.func.grad(total, (0, 1, 2))(q, k, v), clean)


def test_a_nan_that_nobody_sees_stays_out_of_the_gradients_of_a_mod_under_torch_func() -> None:
    torch.manual_seed(0)
    q, k, v, slopes = *(torch.randn(1, 5, 1, 4) for _ in range(3)), torch.ones(1)
    blind = tilewise.mask_mod(lambda b, h, q_idx, kv_idx: (kv_idx > 1) & (q_idx > 0))()

    def total(k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, score_mod=steep(slopes), mask_mod=blind).sin().sum()

    clean = torch.func.grad(total, (0, 1, 2))(k, v, slopes)
    k[:, 0] = v[:, 1] = q[:, 0] = torch.nan
    assert_close(torch.func.grad(total, (0, 1, 2))(k, v, slopes), clean)


@pytest.mark.parametrize("name", CALLS)
def test_functionalize(name: str) -> None:
    tensors = [x.detach() for x in used(name)]
    assert_close(torch.func.functionalize(CALLS[name])(*tensors), CALLS[name](*tensors))
    gradient = torch.func.grad(loss(name))
    assert_close(torch.func.functionalize(gradient)(*tensors), gradient(*tensors))
