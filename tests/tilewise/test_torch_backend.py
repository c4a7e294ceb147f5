"""The backend "torch": torch's fused kernels on a CPU, through the public functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests import budget, covering
from tests.cases import Case, make, run
from tests.covering import Row
from tests.properties.calls import numbers
from tilewise import AttentionError, attention

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for calls on a CPU")
BANDS = {"full": (None, None), "causal": (None, 0), "wide": (1000, 1000)}


def case_of(row: Row) -> Case:
    n_q, n_k = map(int, row["tokens"].split("x"))
    heads, kv_heads = numbers(row["heads"])
    d = int(row["dims"])
    before, after = BANDS[row["band"]]
    return Case(
        batch=int(row["batch"]),
        n_q=n_q,
        n_k=n_k,
        heads=heads,
        kv_heads=kv_heads,
        d=d,
        dv=d,
        dtype=row["dtype"],
        before=before,
        after=after,
        scale=None if row["scale"] == "-" else float(row["scale"]),
        layouts=(row["layout"],) * 3 + (row["dout"],),
        lse_gradient=row["dlse"] != "no",
    )


def supports(case: Case) -> bool:
    return case.after != 0 or case.n_q == case.n_k or case.n_q == 1


@covering.rows("plain")
def test_results_and_gradients(row: Row) -> None:
    """Each is within the error budget of float64; so is out alone, which 16-bit inputs compute in another way. Calls
    that are not supported raise by name, and run with "auto"."""
    case = case_of(row)
    inputs = make(case, "cpu")
    if not supports(case):
        with pytest.raises(AttentionError, match="window, or causal with other numbers"):
            run(inputs, "torch")
    backend = "torch" if supports(case) else "auto"
    results = run(inputs, backend)
    budget.check(results, inputs)
    again = run(inputs, backend)
    assert all(map(torch.equal, results, again))
    options: Any = {"window": (case.before, None if case.after == 0 else case.after), "causal": case.after == 0}
    out = attention(*inputs[1:4], scale=case.scale, backend=backend, **options)
    budget.check([out, *results[1:]], inputs)
    assert all(t.is_contiguous() for t in (out, *results))  # as the registered ops say


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("at", [39, 5])
def test_a_token_that_is_not_finite(where: str, value: float, at: int, dtype: torch.dtype) -> None:
    """Rows that do not see it are as without it, and every result is what the reference computes."""
    given = {"q": x(2, 40, 4, 16), "k": x(2, 40, 2, 16), "v": x(2, 40, 2, 16), "dout": x(2, 40, 4, 16)}
    given = {name: t.to(dtype) for name, t in given.items()}
    results = []
    for bad in (False, True):
        if bad:
            given[where][1, at, 0] = value
        for backend in ("torch", "reference"):
            leaves = [given[name].clone().requires_grad_() for name in "qkv"]
            out, lse = attention(*leaves, causal=True, return_lse=True, backend=backend)
            with torch.no_grad():
                alone = attention(*leaves, causal=True, backend=backend)
            results.append((out, lse, *torch.autograd.grad(out, leaves, given["dout"]), alone))
    clean, _, found, expected = results
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=2e-2, atol=2e-2 if dtype is torch.bfloat16 else 1e-5)
        assert torch.equal(a.isfinite(), b.isfinite())
    for n in (0, -1):
        assert found[n][:, :at].isfinite().all()
        torch.testing.assert_close(found[n][:, :at], clean[n][:, :at], rtol=1e-2, atol=1e-2)
    if value != value and where in "qk":
        assert found[0][1, at, 0].isnan().all()


@pytest.mark.parametrize("scale", [40.0, 1e30, -3e38])
def test_large_scores(scale: float) -> None:
    """The gradients of scores whose lse has no room for log l are the reference's."""
    leaves = [x(1, 30, 2, 16).requires_grad_() for _ in range(3)]
    given = [
        (out := attention(*leaves, scale=scale, causal=True, backend=b), torch.autograd.grad(out.sum(), leaves))
        for b in ("torch", "reference")
    ]
    torch.testing.assert_close(given[0], given[1], equal_nan=True, rtol=1e-3, atol=1e-3)


REFUSED = {
    "a window": ({"window": (3, 0)}, "window"),
    "bottom-right": ({"k": x(1, 9, 2, 16), "v": x(1, 9, 2, 16), "causal": True}, "causal with other numbers"),
    "values of 8 dims": ({"v": x(1, 6, 2, 8)}, "another head dim"),
    "a bias": ({"bias": x(1, 1, 6, 6)}, "a bias, sinks, mods or dropout"),
    "sinks": ({"sinks": x(2)}, "a bias, sinks, mods or dropout"),
    "softcap": ({"softcap": 3.0}, "a bias, sinks, mods or dropout"),
    "dropout": ({"dropout_p": 0.5}, "a bias, sinks, mods or dropout"),
    "the largest score": ({"return_max_logit": True}, "return_max_logit"),
    "no keys": ({"k": x(1, 0, 2, 16), "v": x(1, 0, 2, 16)}, "no queries, keys"),
    "no queries": ({"q": x(1, 0, 2, 16)}, "no queries, keys"),
    "no batch": ({"q": x(0, 6, 2, 16), "k": x(0, 6, 2, 16), "v": x(0, 6, 2, 16)}, "no queries, keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_raises_by_name_and_runs_with_auto(name: str) -> None:
    options, message = REFUSED[name]
    q, k, v = (options.get(n, x(1, 6, 2, 16)) for n in "qkv")
    others: Any = {n: value for n, value in options.items() if n not in "qkv"}
    with pytest.raises(AttentionError, match=message):
        attention(q, k, v, backend="torch", **others)
    others |= {"seed": 3} if "dropout_p" in others else {}
    found, expected = (attention(q, k, v, backend=b, **others) for b in ("auto", "reference"))
    torch.testing.assert_close(found, expected)


def test_packed_calls_and_caches_raise_by_name() -> None:
    q, cu = x(6, 2, 16), torch.tensor([0, 2, 6])
    with pytest.raises(AttentionError, match="packed sequences"):
        tilewise.attention_varlen(q, q, q, cu, cu, backend="torch")
    cache = x(1, 8, 2, 16)
    with pytest.raises(AttentionError, match="KV cache"):
        tilewise.attention_kv(x(1, 1, 2, 16), cache, cache, torch.tensor([5]).int(), backend="torch")


def test_explain_says_which_backend() -> None:
    q = x(1, 16, 2, 16)
    assert tilewise.explain(q, q, q, causal=True).backend == "torch"
    found = tilewise.explain(q, q, q, window=(3, 0))
    assert found.backend == "reference"
    assert "torch: a window, or causal" in found.reason


def test_derivatives_of_every_order_with_auto() -> None:
    """The reference computes them; kernels that are named have the first alone."""
    leaves = [x(1, 5, 2, 4, dtype=torch.float64).requires_grad_() for _ in range(3)]

    def third(backend: str) -> Tensor:
        found = attention(*leaves, causal=True, backend=backend).square().sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(found, leaves[0], create_graph=True)
            found = grad.square().sum()
        return found

    torch.testing.assert_close(third("auto"), third("reference"))
    with pytest.raises(AttentionError, match="backend='reference', which has derivatives of every order"):
        third("torch")
    hessians = [
        torch.func.hessian(lambda y, b=b: attention(y, *leaves[1:], backend=b).sum())(leaves[0].detach())
        for b in ("auto", "reference")
    ]
    torch.testing.assert_close(*hessians)
    tangent = x(1, 5, 2, 4, dtype=torch.float64)
    jvps = [
        torch.func.jvp(lambda y, b=b: attention(y, *leaves[1:], backend=b), (leaves[0].detach(),), (tangent,))
        for b in ("auto", "reference")
    ]
    torch.testing.assert_close(*jvps)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_and_traced_calls(layout: str, dtype: torch.dtype) -> None:
    """The same bits and strides, gradients too."""
    shapes = [(2, 33, heads, 16) if layout == "bshd" else (2, heads, 33, 16) for heads in (4, 2, 2)]
    leaves = [
        (y if layout == "bshd" else y.transpose(1, 2)).requires_grad_() for y in (x(*n, dtype=dtype) for n in shapes)
    ]

    def call(*given: Tensor) -> Any:
        return attention(*given, causal=True)

    found = []
    for function in (call, torch.compile(call, backend="aot_eager")):
        out = function(*leaves)
        found.append((out, *torch.autograd.grad(out, leaves, leaves[0].detach())))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert [t.stride() for t in found[0]] == [t.stride() for t in found[1]]
    q = leaves[0]
    mapped = torch.func.vmap(lambda a: attention(a, a, a, causal=True))(q.detach()[:, None])
    torch.testing.assert_close(mapped[:, 0], attention(q, q, q, causal=True, return_lse=True)[0])


def test_autocast() -> None:
    """Inputs are cast, and nothing within the kernels is."""
    q, k = x(1, 1, 4, 64), x(1, 900, 4, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = attention(q, k, k)
        own = attention(*(t.to(torch.bfloat16) for t in (q, k, k)))
        kept = attention(*(t.double() for t in (q, k, k)), backend="torch")
    assert cast.dtype == torch.bfloat16
    assert torch.equal(cast, own)
    torch.testing.assert_close(kept, attention(q.double(), k.double(), k.double(), backend="reference"))
