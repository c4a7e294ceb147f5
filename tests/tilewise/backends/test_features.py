"""Score terms in the portable kernels: random combinations with every gradient, hidden NaN, forward mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tests.conftest import INTERPRETED
from tests.covering import cases, each_once
from tilewise.autograd import attend
from tilewise.backends.common import term_gradients
from tilewise.plan_cache import CallPlan
from tilewise.request import Request, Spec


@pytest.mark.parametrize("blocks", [False, True])
def test_a_masked_key_does_not_leak(blocks: bool, backend: str, device: str) -> None:
    """Key 20 is NaN; the queries of other documents must not know, forward or backward."""
    ids = (torch.arange(36, device=device) // 12).to(torch.int32)
    q, k, v, dout = (torch.randn(1, 36, 2, 8, device=device) for _ in range(4))
    bad = [x.clone() for x in (k, v)]
    for x in bad:
        x[0, 20] = torch.nan
    mask = tilewise.mods.document(ids=ids)
    if blocks:
        mask = tilewise.block_mask(mask, 36, 36, block=(16, 16))
    results = []
    for keys, values in ((k, v), bad):
        leaves = [x.clone().requires_grad_() for x in (q, keys, values)]
        out = tilewise.attention(*leaves, mask_mod=mask, softcap=3.0, backend=backend)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    others = ids != ids[20]
    for clean, dirty in zip(*results, strict=True):
        torch.testing.assert_close(clean[:, others], dirty[:, others])
    assert results[1][0][:, ~others].isnan().all()


@cases("options", [{"window": (5, 2), "scale": -0.3}], [{}, {"causal": True}], ids=str)
def test_forward_mode(options: dict[str, object], triton_runs: None, device: str) -> None:
    shapes = ((2, 37, 4, 16), (2, 45, 2, 16), (2, 45, 2, 24))
    x, along = (tuple(torch.randn(s, device=device) for s in shapes) for _ in range(2))

    def moved(backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        call = lambda *t: tilewise.attention(*t, return_lse=True, backend=backend, **options)  # noqa: E731
        return torch.func.jvp(call, x, along)[1]

    for ours, expected in zip(moved("triton"), moved("reference"), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@each_once(value=[torch.nan, torch.inf], name=["k", "v", "dk", "dv"])
def test_forward_mode_of_a_hidden_key(name: str, value: float, triton_runs: None, device: str) -> None:
    """Key 20, or its movement, is not finite: rows that do not see it must not know, and those that do become nan."""
    x, along = ([torch.randn(1, 36, 2, 16, device=device) for _ in range(3)] for _ in range(2))
    bad_x, bad_along = ([t.clone() for t in tensors] for tensors in (x, along))
    (bad_along if name.startswith("d") else bad_x)["qkv".index(name[-1])][0, 20] = value

    def moved(x: list[torch.Tensor], along: list[torch.Tensor]) -> torch.Tensor:
        call = lambda *t: tilewise.attention(*t, window=(6, 2), backend="triton")  # noqa: E731
        return torch.func.jvp(call, tuple(x), tuple(along))[1]

    clean, dirty = moved(x, along), moved(bad_x, bad_along)
    i = torch.arange(36, device=device)
    sees = (i - 6 <= 20) & (i + 2 >= 20)
    torch.testing.assert_close(dirty[:, ~sees], clean[:, ~sees])
    assert not dirty[:, sees].isfinite().any(-1).any()


TERMS = {
    "softcap and sinks": {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0])},
    "alibi, scale": {"alibi_slopes": torch.tensor([0.2, 0.4]), "scale": -0.3, "causal": True},
    "dropout and a mask": {"dropout_p": 0.3, "seed": 3, "mask_mod": tilewise.mods.document(ids=torch.arange(37) // 9)},
}


@cases("name", ["dropout and a mask"], TERMS)
def test_forward_mode_with_terms(name: str, triton_runs: None) -> None:
    """Tangents of q, k and v of a call with terms."""
    torch.manual_seed(0)
    x, along = (tuple(torch.randn(1, 37, 2, 16) for _ in range(3)) for _ in range(2))

    def moved(backend: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        call = lambda *t: tilewise.attention(*t, return_lse=True, backend=backend, **TERMS[name])  # noqa: E731
        return torch.func.jvp(call, *(tuple(t.to(dtype) for t in y) for y in (x, along)))[1]

    for ours, expected in zip(moved("triton", torch.float32), moved("reference", torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tangent", [False, True], ids=["bias", "tangent of sinks"])
def test_forward_mode_of_a_term_is_refused(tangent: bool, triton_runs: None, device: str) -> None:
    x, sinks = torch.randn(1, 8, 2, 16, device=device), torch.zeros(2, device=device)
    if tangent:
        call, given = lambda q, sinks: tilewise.attention(q, x, x, sinks=sinks, backend="triton"), (x, sinks)
    else:
        bias = torch.zeros(1, 1, 8, 8, device=device)
        call, given = lambda q: tilewise.attention(q, x, x, bias=bias, backend="triton"), (x,)
    with pytest.raises(tilewise.AttentionError, match=r"forward mode.*'reference'"):
        torch.func.jvp(call, given, given)


@cases("dtype", [torch.float32], [torch.bfloat16])
def test_a_finite_bias_hides_nothing(dtype: torch.dtype, backend: str) -> None:
    """A row of the least number there is has the mean of its values, as in torch; a row of -inf sees nothing. Where
    other keys have a better score, neither counts."""
    torch.manual_seed(0)
    least, rows = torch.finfo(dtype).min, 4
    q, k, v = (torch.randn(1, n, 2, 16).to(dtype).requires_grad_() for n in (rows, 40, 40))
    bias = torch.zeros(rows, k.shape[1], dtype=dtype)
    bias[0], bias[1], bias[2, ::2], bias[2, 1::4] = least, -torch.inf, least, -torch.inf
    bias.requires_grad_()
    sinks = torch.tensor([-torch.inf, least], dtype=dtype)
    out, lse = tilewise.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True, backend=backend)
    s = (q.double() / 4).transpose(1, 2) @ k.double().permute(0, 2, 3, 1) + bias.double()
    s[:, :, 0] = least  # in float32 there is no room for more
    with_sink = torch.cat([s, sinks.double()[None, :, None, None].expand(1, 2, rows, 1)], -1)
    p = torch.softmax(with_sink, -1)[..., :-1].nan_to_num(0.0)
    expected = (p @ v.double().transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    torch.testing.assert_close(lse.double(), torch.logsumexp(with_sink, -1), rtol=1e-5, atol=1e-5)
    (out.float().sum() + lse[:, :, 2:].sum()).backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v, bias))
    assert (q.grad[:, 1] == 0).all()


@tilewise.score_mod
def by_distance(score, b, h, q_idx, kv_idx, table):
    return score + table[h, q_idx - kv_idx + 8]


@tilewise.score_mod
def by_pair(score, b, h, q_idx, kv_idx, table):
    return score * table[q_idx // 4, kv_idx // 4]


class Unread(TorchDispatchMode):
    """Refuses what waits for the numbers of a tensor, as on a GPU every read of them does."""

    READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func not in self.READS, f"{func} reads a tensor"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mod", "told"), [(by_distance, False), (by_pair, True)], ids=["distance", "pair"])
def test_a_table_of_packed_sequences_reads_no_lengths(
    mod: Any, told: bool, triton_runs: None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is a sum over pairs (i, j), as many as the caller says or as there are tokens."""
    torch.manual_seed(0)
    cu = torch.tensor([0, 11, 11, 20], dtype=torch.int32, device=device)
    q, k, v, dout = (torch.randn(24, 2, 16, device=device) for _ in range(4))
    table = torch.randn(2 if mod is by_distance else 6, 17 if mod is by_distance else 6, device=device)
    longest = {"max_seqlen_q": 12, "max_seqlen_k": 11} if told else {}

    def grads(backend: str) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, table)]
        options: Any = {"causal": True, "score_mod": mod(leaves[3]), "backend": backend}
        out = tilewise.attention_varlen(*leaves[:3], cu, cu, **longest, **options)
        return list(torch.autograd.grad(out, leaves, dout))

    launched = term_gradients.sums_of_terms

    def watched(*call: Any) -> Any:  # within the op, into which a mode around it does not see
        with Unread():
            return launched(*call)

    if INTERPRETED:
        monkeypatch.setattr(term_gradients, "sums_of_terms", watched)
    for ours, expected in zip(grads("triton"), grads("reference"), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_a_bias_shorter_than_a_sequence_is_not_left(triton_runs: None, device: str) -> None:
    """Lengths are not read on a GPU, so the kernels stay inside of the bias: it is 0 for the rest."""
    bias = torch.randn(1, 2, 5, 6, device=device)
    frame = torch.full((1, 2, 9, 9), torch.nan, device=device)
    frame[:, :, :5, :6] = bias
    q, k, v = (torch.randn(8, 2, 16, device=device) for _ in range(3))
    cu = torch.tensor([0, 8], dtype=torch.int32, device=device)
    spec = Spec(0.25, backend="triton")
    short = Request(q, k, v, spec, bias=frame[:, :, :5, :6], cu_q=cu, cu_k=cu)
    padded = torch.nn.functional.pad(bias, (0, 2, 0, 3))
    whole = Request(q, k, v, spec, bias=padded, cu_q=cu, cu_k=cu)
    found = (attend(request.spec, CallPlan(request), request.tensors()) for request in (short, whole))
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("far", [30.0, 1.1e30, 3.4e38])
@pytest.mark.parametrize("statistics", [False, True], ids=["out", "out and lse"])
def test_sinks_of_rows_without_keys(far: float, statistics: bool, backend: str, device: str) -> None:
    """30 rows see no key: their lse is the sink, to a rounding that is above 1e20 for the large ones."""
    values = torch.tensor([-torch.inf, 0.0, far, -far, -0.7 * far, 0.3 * far], device=device)
    q, k, v, dout = (torch.randn(1, n, 6, 16, device=device) for n in (40, 10, 10, 40))
    dlse = torch.randn(1, 6, 40, device=device) * statistics
    found = []
    for name, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (values, q, k, v)]
        sinks, *tensors = leaves
        out, lse = tilewise.attention(*tensors, sinks=sinks, causal=True, return_lse=True, backend=name)
        total = (out * dout).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse).sum()
        found.append(torch.autograd.grad(total, leaves))
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("far", [-1e30, 3.4e38])
def test_derivatives_of_rows_without_keys_and_with_sinks(far: float, triton_runs: None, device: str) -> None:
    """Forward mode and second derivatives with sinks, for which some rows have an lse without a key."""
    sinks = torch.tensor([-torch.inf, far], device=device)
    x, along = (tuple(torch.randn(1, n, 2, 16, device=device) for n in (30, 12, 12)) for _ in range(2))

    def call(*t: torch.Tensor, backend: str) -> torch.Tensor:
        return tilewise.attention(*t, sinks=sinks, causal=True, backend=backend)

    moved, second = [], []
    for backend in ("triton", "reference"):
        moved.append(torch.func.jvp(lambda *t, backend=backend: call(*t, backend=backend), x, along)[1])
        leaves = [t.clone().requires_grad_() for t in x]
        first = torch.autograd.grad(call(*leaves, backend=backend).square().sum(), leaves, create_graph=True)
        second.append(torch.autograd.grad(sum((g * a).sum() for g, a in zip(first, along, strict=True)), leaves))
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-4)
    for ours, expected in zip(*second, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
