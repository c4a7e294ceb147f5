"""Second derivatives on a GPU, within twice the error of torch's own arithmetic in the same dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise
from tests import second
from tests.cases import Case

CASES = {
    "causal": Case(batch=2, n_q=256, n_k=256, after=0),
    "full, odd, grouped heads": Case(n_q=131, n_k=77, heads=4, kv_heads=2),
    "full, even, grouped heads": Case(n_q=256, n_k=200, heads=4, kv_heads=2),
    "window, more keys": Case(n_q=100, n_k=333, before=50, after=7),
    "packed, empty rows": Case(
        batch=3, n_q=310, n_k=300, heads=4, kv_heads=1, after=0, lengths=((150, 100), (0, 40), (160, 160))
    ),
}
DIMS = {"bfloat16": ((64, 64), (128, 128), (256, 256), (72, 40)), "float32": ((64, 64), (40, 96))}


@pytest.mark.parametrize(("dtype", "dims"), [(dtype, d) for dtype, dims in DIMS.items() for d in dims], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_within_budget(name: str, dtype: str, dims: tuple[int, int]) -> None:
    second.check(replace(CASES[name], dtype=dtype, d=dims[0], dv=dims[1]), "triton", "cuda")


@pytest.mark.parametrize("term", second.TERMS)
def test_terms(term: str) -> None:
    """Against the reference in float64. float32: the errors are those of the order of sums."""
    torch.manual_seed(0)
    found, exact = second.of_term(term, Case(n_q=200, n_k=200, d=64, dv=64), "triton", "cuda")
    for name, x, y in zip(second.NAMES, found, exact, strict=True):
        error = (x.double() - y).norm() / y.norm()
        assert error < 1e-2, f"{name}: {error:.1e}"


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", [name for name in CASES if "packed" not in name])
def test_one_pass(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hopper backend's: dk and dv are added to float32 sums by TMA."""
    hvp = pytest.importorskip("tilewise.backends.hopper.hvp_launches")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper GPU")
    ran: list[object] = []
    made = hvp.ONE_PASS._replace(launch=lambda *given: (ran.append(1), hvp.hvp_launch(*given))[1])
    monkeypatch.setattr(hvp, "ONE_PASS", made)
    second.check(replace(CASES[name], dtype="bfloat16", d=dim, dv=dim), "hopper", "cuda")
    assert ran


@pytest.mark.parametrize("which", range(3))
def test_hidden_nan(which: int) -> None:
    """Keys that a query does not see, and queries that do not see a key, change nothing for it."""
    q, k, v, dout, *along = (torch.randn(1, 320, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(7))
    found = []
    for bad in (0.0, torch.nan):
        leaves = [t.clone() for t in (q, k, v)]
        leaves[which][:, -1 if which else 0] = bad
        leaves = [t.requires_grad_() for t in leaves]
        grads = torch.autograd.grad(tilewise.attention(*leaves, causal=True), leaves, dout, create_graph=True)
        dq, dk, dv = torch.autograd.grad(grads, leaves, along, retain_graph=True)
        found.append([dq[:, :-1]] if which else [dk[:, 1:], dv[:, 1:]])
    for a, b in zip(*found, strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_auto() -> None:
    """Whatever backend computes the forward and the first backward."""
    second.check(Case(batch=2, n_q=300, n_k=300, d=64, dv=64, dtype="bfloat16", after=0), "auto", "cuda")


def test_memory_is_linear() -> None:
    """Beyond its inputs a double backward keeps what grows with the tokens: four times as many for four times."""
    found = []
    for n in (1024, 4096):
        q, k, v = (torch.randn(1, n, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        out = tilewise.attention(q, k, v, causal=True)
        first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v))
        found.append(torch.cuda.max_memory_allocated() - before)
    assert found[1] <= 4.5 * found[0]
