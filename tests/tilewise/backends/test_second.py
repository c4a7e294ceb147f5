"""Second derivatives on the kernels: against torch's double backward in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests import second
from tests.cases import Case, make
from tests.compiling import reports
from tests.covering import cases
from tilewise import AttentionError

CASES = {
    "full, odd, grouped heads": Case(n_q=19, n_k=37, heads=4, kv_heads=2, d=8, dv=24),
    "causal, empty rows": Case(n_q=35, n_k=18, after=0, heads=1, kv_heads=1),
    "window, negative scale, strides": Case(
        n_q=33, n_k=40, before=7, after=3, scale=-0.3, d=40, heads=2, kv_heads=1,
        layouts=("bhsd", "qkv", "strided", "bdsh"),
    ),
    "packed": Case(
        batch=4, n_q=40, n_k=52, heads=2, kv_heads=1, after=0, lengths=((17, 17), (0, 5), (20, 30), (3, 0))
    ),
}  # fmt: skip


@cases("name", ["packed"], CASES)
def test_within_budget(name: str, triton_runs: None, device: str) -> None:
    second.check(CASES[name], "triton", device)


@pytest.mark.parametrize("term", second.TERMS)
def test_terms(term: str, triton_runs: None) -> None:
    """Terms whose score has derivative 1: the same as the reference in float64."""
    torch.manual_seed(0)
    found, exact = second.of_term(term, Case(n_q=33, n_k=33), "triton", "cpu")
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


def penalty(backend: str, **options: object) -> Callable[..., Tensor]:
    """A scalar with a second derivative: the square of dq, of a loss that is not linear in out."""

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, backend=backend, **options).square().sum()

    return lambda *x: torch.func.grad(loss)(*x).square().sum()


def test_through_torch_func(triton_runs: None, device: str) -> None:
    """Reverse over reverse, and forward over reverse, which differentiates dout too."""
    x, along = ([torch.randn(1, 18, 1, 16, device=device) for _ in range(3)] for _ in range(2))
    expected = torch.func.grad(penalty("reference", causal=True), argnums=(0, 1, 2))(*(t.double() for t in x))
    found = torch.func.grad(penalty("triton", causal=True), argnums=(0, 1, 2))(*x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)

    def moved(backend: str, x: list[Tensor], along: list[Tensor]) -> tuple[Tensor, ...]:
        loss = lambda *t: tilewise.attention(*t, backend=backend).square().sum()  # noqa: E731
        return torch.func.jvp(torch.func.grad(loss, argnums=(0, 1, 2)), tuple(x), tuple(along))[1]

    exact = moved("reference", [t.double() for t in x], [t.double() for t in along])
    for a, b in zip(moved("triton", x, along), exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_the_first_backward_does_not_run_again(triton_runs: None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With zeros, as it would if out and lse had a place in the graph of the gradients."""
    q, dout = (torch.randn(1, 17, 1, 16, device=device, requires_grad=True) for _ in range(2))
    out, lse = tilewise.attention(q, q, q, backend="triton", return_lse=True)
    (dq,) = torch.autograd.grad((out, lse), q, (dout, lse.detach()), create_graph=True)
    monkeypatch.setattr("tilewise.autograd.run_backward", None)
    again = torch.autograd.grad(dq, (q, dout), torch.ones_like(dq))
    assert all(x.abs().sum() > 0 for x in again)


def test_stacked_cotangents(triton_runs: None, device: str) -> None:
    """`is_grads_batched`: the same as one cotangent after the other."""
    q = torch.randn(1, 17, 1, 16, device=device, requires_grad=True)
    out = tilewise.attention(q, q, q, backend="triton")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    stack = torch.randn(2, *q.shape, device=device)
    (found,) = torch.autograd.grad(dq, q, stack, is_grads_batched=True, retain_graph=True)
    for n in range(2):
        torch.testing.assert_close(found[n], torch.autograd.grad(dq, q, stack[n], retain_graph=True)[0])


@cases("name", ["v"], ["q", "k", "v", "tangent of v", "dout"])
def test_a_hidden_token(name: str, backend: str, device: str) -> None:
    """Token 20 is nan: rows and keys that no visible pair links to it do not change."""
    if backend == "reference" and name == "tangent of v":
        pytest.skip("a cotangent of a gradient, which torch multiplies with zeros")
    case = Case(n_q=36, n_k=36, heads=2, kv_heads=1, before=5, after=2)
    inputs, along = make(case, device), list(make(Case(n_q=36, n_k=36, heads=2, kv_heads=1, seed=1), device)[1:4])
    clean = second.ours(inputs, along, backend)
    bad = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "tangent of v": along[2], "dout": inputs.dout}[name].clone()
    bad[0, 20] = torch.nan
    if name == "tangent of v":
        along[2] = bad
    else:
        inputs = inputs._replace(**{name: bad})
    dirty = second.ours(inputs, along, backend)
    i = torch.arange(36, device=device)
    far = ((i - 20).abs() > 8).nonzero().squeeze(-1)
    assert len(far) >= 8
    for n, (x, y) in enumerate(zip(clean, dirty, strict=True)):
        axis = 2 if n == 1 else 1
        torch.testing.assert_close(y.index_select(axis, far), x.index_select(axis, far))
    assert any(x.isnan().any() for x in dirty)


REFUSED = {
    "softcap": ({"softcap": 2.0}, "softcap"),
    "bias": ({"bias": torch.zeros(1, 1, 8, 8)}, "bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_lack(name: str, triton_runs: None) -> None:
    options, words = REFUSED[name]
    q = torch.randn(1, 8, 1, 16, requires_grad=True)
    out = tilewise.attention(q, q, q, backend="triton", **options)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(AttentionError, match=rf"a gradient of the gradient: found .*{words}.*; expected .*'reference'"):
        torch.autograd.grad(dq.sum(), q)


def test_a_hessian(triton_runs: None) -> None:
    """torch.func takes the tuples among a Function's arguments apart."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 1, 8).unbind()

    def hessian(backend: str, dtype: torch.dtype) -> Any:
        call = lambda q, k: tilewise.attention(q, k, v.to(dtype), causal=True, backend=backend).sin().sum()  # noqa: E731
        return torch.func.hessian(call, (0, 1))(q.to(dtype), k.to(dtype))

    for row, exact in zip(hessian("triton", torch.float32), hessian("reference", torch.float64), strict=True):
        for found, expected in zip(row, exact, strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_third_derivative_is_refused(triton_runs: None) -> None:
    q = torch.randn(1, 8, 1, 16, requires_grad=True)
    (first,) = torch.autograd.grad(tilewise.attention(q, q, q, backend="triton").sum(), q, create_graph=True)
    (found,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
    with pytest.raises(AttentionError, match=r"a third derivative: found .*; expected .*'reference'"):
        torch.autograd.grad(found.sum(), q)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "shared"), [(80, 99 * 1024), (90, 227 * 1024)])
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_fit(arch: int, shared: int, dim: int) -> None:
    made = reports("tests.tilewise.backends.compile_hvp", [{"arch": arch, "dtype": "bfloat16", "dim": dim}])
    assert {x["kernel"] for x in made} == {"jvp_kernel", "hvp_key_kernel", "hvp_query_kernel"}
    for x in made:
        assert x["spills"] == 0, x
        assert x["shared"] <= shared, x
        assert not x["warnings"], x


@pytest.mark.slow
def test_terms_compile() -> None:
    """The interpreter runs what the compiler may refuse."""
    row = {"dtype": "bfloat16", "dim": 64, "all_kernels": True}
    rows = [row | {"arch": 90, "term": "block mask"}, row | {"arch": 80, "term": "alibi"}]
    made = reports("tests.tilewise.backends.compile_hvp", rows)
    assert sum(x["kernel"] == "hvp_key_kernel" for x in made) == len(rows)
