"""Scores that a mod or a bias makes as large as float32 has them, for a whole row: a mask that was written as numbers.
Softmax of n equal scores is 1 / n, however large they are, and so are the weights that the backward computes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.conftest import DEVICE
from tests.covering import cases, each_once
from tilewise import mods
from tilewise.backends.common.mod_source import has_large_scores
from tilewise.mods.program import Mod

LEAST = torch.finfo(torch.float32).min
ROW = 3


@tilewise.score_mod
def says(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx == 3, -3e38, score)


@tilewise.score_mod
def told(score, b, h, q_idx, kv_idx, far: float):
    return torch.where(q_idx == 3, far, score)


@tilewise.score_mod
def table(score, b, h, q_idx, kv_idx, t):
    return score + t[q_idx, kv_idx]


@tilewise.score_mod
def by_key(score, b, h, q_idx, kv_idx, t):
    return score + t[b, kv_idx]


@tilewise.score_mod
def by_query(score, b, h, q_idx, kv_idx, t):
    return score + t[q_idx]


@tilewise.score_mod
def everywhere(score, b, h, q_idx, kv_idx):
    return torch.where(score == score, -3e38, score)


@tilewise.score_mod
def hidden(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx == 3, -float("inf"), score)


@tilewise.score_mod
def grown(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx == 3, -torch.exp(score * 0 + 80), score)


def bands(n: int) -> torch.Tensor:
    t = torch.zeros(n, n)
    t[ROW] = LEAST
    return t


MODS = {
    "a number in the text": lambda n: says(),
    "a number that is given": lambda n: told(-1e30),
    "a table of them": lambda n: table(bands(n).to(DEVICE)),
    "an exponential": lambda n: grown(),
}


@each_once(name=MODS, dtype=[torch.float32, torch.bfloat16])
def test_a_row_of_equals_is_a_mean(name: str, dtype: torch.dtype, backend: str) -> None:
    """As softmax has it, and so have its gradients."""
    check(MODS[name], dtype, backend)


def name_of(make: Any) -> str:
    return next(name for name, found in MODS.items() if found is make)


def naive(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, after: int | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 of the scores that float32 has, and their gradients: those of torch's own logsumexp are off
    by the same factor."""
    n_q, n_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.double().repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k) * q.shape[-1] ** -0.5
    s = (s.float() + bias).double() if q.dtype != torch.float64 else s + bias
    if after is not None:
        at = torch.arange(n_q, device=q.device)[:, None] + (n_k - n_q)
        s = s.masked_fill(torch.arange(n_k, device=q.device) > at + after, -torch.inf)
    column = s.new_full((*s.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand_as(column)
    s = torch.cat([s, column], -1)
    p = s.softmax(-1)
    lse = s.detach().logsumexp(-1) + (p.detach() * (s - s.detach()).nan_to_num(0.0)).sum(-1)
    return torch.einsum("bhij,bjhd->bihd", p[..., :-1], v), lse


def close(ours: Any, theirs: Any, dtype: torch.dtype) -> None:
    for x, y in zip(ours, theirs, strict=True):
        most = y.abs().max().item()
        rounding = {torch.float32: 2e-6, torch.float64: 1e-14, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(x.double(), y.double(), atol=rounding * max(most, 0.5), rtol=0)


CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal, shared keys": {"heads": 4, "after": 0},
    "sinks": {"sinks": 0.3},
    "sinks as far out": {"sinks": True},
    "few queries": {"n_q": 3, "n_k": 129},  # in two parts, of 80 and 49 keys
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16, "after": 0},
}


@cases(
    "name, far",
    [("causal, shared keys", LEAST), ("sinks as far out", LEAST), ("bfloat16", LEAST), ("full", -1e4)],
    [*((name, LEAST) for name in CALLS), ("full", -1e9)],
)
def test_gradients_of_a_biased_row(name: str, far: float, backend: str) -> None:
    """Of q, k, v, the bias and the sinks, through out and lse."""
    gradients(backend, far, **CALLS[name])


@pytest.mark.parametrize("far", [LEAST, -1e300])
def test_gradients_in_float64(far: float) -> None:
    gradients("reference", far, dtype=torch.float64, after=0)


def gradients(
    backend: str, far: float, *, n_q: int = 10, n_k: int = 21, heads: int = 2, after: int | None = None,
    sinks: Any = None, dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    statistics = torch.promote_types(dtype, torch.float32)
    q, k, v = (
        torch.randn(2, n, h, 16, device=DEVICE, dtype=dtype).requires_grad_()
        for n, h in ((n_q, heads), (n_k, 2), (n_k, 2))
    )
    bias = torch.randn(1, heads, n_q, n_k, device=DEVICE, dtype=statistics)
    bias[:, 0, 1] = far
    bias[:, 1] = far
    leaves = [q, k, v, bias.requires_grad_()]
    sink = None
    if sinks is not None:
        sink = torch.full((heads,), far if sinks is True else sinks, device=DEVICE, dtype=statistics).requires_grad_()
        leaves.append(sink)
    out, lse = tilewise.attention(q, k, v, bias=bias, causal=after == 0, sinks=sink, return_lse=True, backend=backend)
    exact = naive(q, k, v, bias, after=after, sinks=sink)
    close((out,), exact[:1], dtype)
    torch.testing.assert_close(lse, exact[1].to(statistics))
    upstream = torch.randn_like(out), torch.randn_like(lse)
    ours = torch.autograd.grad((out, lse), leaves, upstream)
    close(ours, torch.autograd.grad(exact, leaves, [x.double() for x in upstream]), dtype)


def test_gradients_of_packed_sequences(backend: str) -> None:
    """One of them far out, with tokens past the last sequence, and sinks."""
    torch.manual_seed(0)
    ends = torch.tensor([0, 7, 25, 30], dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.randn(33, 2, 16, device=DEVICE).requires_grad_() for _ in range(3))
    t, sink = torch.zeros(3, 18, device=DEVICE), torch.full((2,), LEAST, device=DEVICE).requires_grad_()
    t[1] = LEAST
    t.requires_grad_()
    out = tilewise.attention_varlen(q, k, v, ends, ends, score_mod=by_key(t), sinks=sink, backend=backend)
    dout = torch.randn_like(out)
    leaves = [q, k, v, t, sink]
    parts = [
        naive(*(x[None, a:b] for x in (q, k, v)), t[n, : b - a], sinks=sink)[0][0]
        for n, (a, b) in enumerate(((0, 7), (7, 25), (25, 30)))
    ]
    exact = torch.cat([*parts, torch.zeros(3, 2, 16, device=DEVICE)])
    close((out,), (exact,), torch.float32)
    ours, theirs = (torch.autograd.grad(x, leaves, dout.to(x.dtype)) for x in (out, exact))
    close(ours, theirs, torch.float32)


@pytest.mark.parametrize("make", [by_key, by_query], ids=["by key", "by query"])
@pytest.mark.parametrize("far", [LEAST, -1e6])
def test_tables_of_tokens(make: Any, far: float, backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 20, 2, 16, device=DEVICE).requires_grad_() for _ in range(3))
    t = torch.full((1, 20) if make is by_key else (20,), far, device=DEVICE).requires_grad_()
    out = tilewise.attention(q, k, v, score_mod=make(t), backend=backend)
    exact, _ = naive(q, k, v, t if make is by_key else t[:, None])
    dout, leaves = torch.randn_like(out), (q, k, v, t)
    close((out,), (exact,), torch.float32)
    ours, theirs = (torch.autograd.grad(x, leaves, dout.to(x.dtype)) for x in (out, exact))
    close(ours, theirs, torch.float32)


@pytest.mark.parametrize("options", [{}, {"split": 128}, {"sinks": True}], ids=["balanced", "split", "sinks"])
def test_parts_of_a_cache(options: dict[str, Any], backend: str) -> None:
    """Of 40, 300 and no keys, some of whose parts have more than others."""
    torch.manual_seed(0)
    lengths = torch.tensor([40, 300, 0], dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.randn(3, n, 2, 16, device=DEVICE) for n in (1, 300, 300))
    if "sinks" in options:
        options = {"sinks": torch.full((2,), -3e38, device=DEVICE)}
    out, lse = tilewise.attention_kv(
        q, k, v, lengths, score_mod=everywhere(), return_lse=True, backend=backend, **options
    )  # fmt: skip
    for x, row, n in zip(out, v, lengths.tolist(), strict=True):
        torch.testing.assert_close(x[0], row[:n].sum(0) / max(n + ("sinks" in options), 1), atol=1e-6, rtol=0)
    seen = lengths > 0 if "sinks" not in options else lengths >= 0
    assert torch.equal((lse < -1e38) & (lse > -torch.inf), seen[:, None, None].expand_as(lse))


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e5), (torch.float64, 1e9), (torch.float64, 1e140)])
def test_large_products_on_the_reference(dtype: torch.dtype, size: float) -> None:
    """q.k of 1e10 and more, alike for all keys, without a bias."""
    torch.manual_seed(0)
    q, k = (torch.full((1, 12, 2, 4), size, dtype=dtype).requires_grad_() for _ in range(2))
    v = torch.randn(1, 12, 2, 4, dtype=dtype, requires_grad=True)
    out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True, backend="reference")
    exact = naive(q, k, v, torch.zeros((), dtype=dtype), after=0)
    upstream = torch.randn_like(out), torch.randn_like(lse)
    ours = torch.autograd.grad((out, lse), (q, k, v), upstream)
    close(ours, torch.autograd.grad(exact, (q, k, v), [x.double() for x in upstream]), dtype)


def check(make: Any, dtype: torch.dtype, backend: str, n: int = 20, d: int = 16) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, d, device=DEVICE, dtype=dtype).requires_grad_() for _ in range(3))
    out, lse = tilewise.attention(q, k, v, score_mod=make(n), return_lse=True, backend=backend)
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out[0, ROW], v[0].mean(0), atol=rounding, rtol=rounding)
    assert (lse[0, :, ROW] < -1e29).all()
    others = [row for row in range(n) if row != ROW]
    plain = tilewise.attention(q, k, v, backend="reference")
    torch.testing.assert_close(out[0, others], plain[0, others], atol=2 * rounding, rtol=2 * rounding)
    mean = v.mean(1, keepdim=True).expand_as(v)
    exact = torch.where((torch.arange(n, device=DEVICE) == ROW)[:, None, None], mean, plain)
    if name_of(make) == "a table of them":  # which adds: q and k get a gradient from this row, too
        exact = naive(q, k, v, bands(n).to(DEVICE))[0]
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for ours, theirs in zip(grads, torch.autograd.grad(exact, (q, k, v), dout.to(exact.dtype)), strict=True):
        torch.testing.assert_close(ours, theirs.to(dtype), atol=8 * rounding, rtol=8 * rounding)


def test_which_mods_are_far() -> None:
    def far(mod: Any) -> bool:
        assert isinstance(mod, Mod)
        return has_large_scores(mod.key, mod.numbers)

    slopes = torch.ones(2)
    assert all(far(make(8)) for make in MODS.values())
    assert all(map(far, (told(-1e5), by_key(torch.ones(2, 8)), by_query(torch.ones(8)))))
    assert not any(map(far, (told(float("-inf")), hidden())))
    assert not any(map(far, (told(-1e4), mods.softcap(50.0), mods.alibi(slopes), mods.t5_relative(torch.ones(32, 2)))))
