"""What a row does not see cannot reach it: NaN and inf in hidden keys, in other sequences, past the ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tilewise
from tests.budget import heads_first, largest
from tests.cases import NAMES, Case, Inputs, make, run
from tests.conftest import DEVICE
from tests.covering import each_once
from tests.oracle import seen

CASE = Case(batch=1, n_q=36, n_k=44, heads=2, kv_heads=1, d=8, dv=8, before=6, after=3)


def poisoned(inputs: Inputs, name: str, index: tuple, value: float) -> Inputs:
    x = getattr(inputs, name).clone()
    x[index] = value
    return inputs._replace(**{name: x})


def affected(name: str, at: int, case: Case) -> dict[str, Tensor]:
    """The tokens of each result that a bad token of `name` may reach: rows that see it, keys that such rows see."""
    pairs = seen(case.n_q, case.n_k, case.spec)
    rows = pairs[:, at] if name in "kv" else torch.arange(case.n_q) == at
    keys = pairs[rows].any(0)
    none = torch.zeros_like(rows)
    forward = {"k": (rows, rows), "q": (rows, rows), "v": (rows, none)}.get(name, (none, none))
    return dict(zip(NAMES, (*forward, rows, keys, keys), strict=True))


def check_untouched(
    expected: Sequence[Tensor], found: Sequence[Tensor], reached: dict[str, Tensor], **tolerance: float
) -> None:
    for name, x, y in zip(NAMES, expected, found, strict=True):
        axis = -1 if name == "lse" else -3
        keep = (~reached[name]).nonzero().squeeze(-1).to(x.device)
        x, y = x.index_select(axis, keep), y.index_select(axis, keep)
        assert_close(y, x, **tolerance, msg=lambda m, name=name: f"{name}: {m}")


@cache
def clean() -> tuple[Tensor, ...]:
    return run(make(CASE, DEVICE), "triton")


@each_once(name=["q", "k", "v", "dout"], bad=[(0, torch.nan), (17, torch.nan), (17, torch.inf), (35, -torch.inf)])
def test_hidden_token(name: str, bad: tuple[int, float]) -> None:
    at, value = bad
    found = run(poisoned(make(CASE, DEVICE), name, (0, at), value), "triton")
    reached = affected(name, at, CASE)
    check_untouched(clean(), found, reached)
    if name == "v" and value != value:
        assert found[0][0, reached["out"].to(DEVICE)].isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_column_of_a_hidden_value(value: float) -> None:
    found = run(poisoned(make(CASE, DEVICE), "v", (0, 20, 0, 3), value), "triton")
    check_untouched(clean(), found, affected("v", 20, CASE))


def test_nan_in_lse_gradient() -> None:
    found = run(poisoned(make(CASE, DEVICE), "dlse", (0, slice(None), 11), torch.nan), "triton")
    check_untouched(clean(), found, affected("dlse", 11, CASE))


def test_other_sequences() -> None:
    """One of the packed sequences is all NaN; the others do not notice."""
    lengths = ((5, 9), (18, 18), (0, 3), (7, 4))
    case = Case(lengths=lengths, batch=4, n_q=30, n_k=34, heads=2, kv_heads=1, d=8, dv=8, after=1)
    inputs = make(case, DEVICE)
    bad = inputs
    for name, tokens in ("q", slice(5, 23)), ("dout", slice(5, 23)), ("k", slice(9, 27)), ("v", slice(9, 27)):
        bad = poisoned(bad, name, (tokens,), torch.nan)
    rows, keys = torch.zeros(30, dtype=torch.bool), torch.zeros(34, dtype=torch.bool)
    rows[5:23] = keys[9:27] = True
    found = run(bad, "triton")
    check_untouched(run(inputs, "triton"), found, dict(zip(NAMES, (rows, rows, rows, keys, keys), strict=True)))
    assert found[0][5:23].isnan().all()


def test_a_flag_is_that_of_its_tile() -> None:
    """With 31 tiles of queries, and of keys, one row apart: the NaN repair would look at a neighbour's flag."""
    case = Case(batch=31, n_q=2, n_k=2, heads=1, kv_heads=1, d=8, dv=8, after=0)
    inputs = make(case, DEVICE)
    clean, found = (run(x, "triton") for x in (inputs, poisoned(inputs, "dout", (5, 0), torch.nan)))
    check_untouched([x[5:6] for x in clean], [x[5:6] for x in found], affected("dout", 0, case))
    for x, y in zip(clean, found, strict=True):
        assert torch.equal(x[:5], y[:5])
        assert torch.equal(x[6:], y[6:])


@tilewise.mask_mod
def all_but_key_5(b, h, q_idx, kv_idx):
    return (kv_idx != 5) | (q_idx >= 20)


def test_queries_past_the_end_see_nothing() -> None:
    """A mask mod that would show them a key which no query sees."""
    inputs = make(Case(batch=1, n_q=20, n_k=20, heads=2, kv_heads=1, d=8, dv=8), DEVICE)
    q, k, v = (x.detach().clone() for x in (inputs.q, inputs.k, inputs.v))
    k[:, 5] = torch.nan
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = tilewise.attention(q, k, v, mask_mod=all_but_key_5(), backend="triton")
    for x in torch.autograd.grad(out, (q, k, v), inputs.dout):
        assert x.isfinite().all()


def test_rows_that_see_nothing_ignore_everything() -> None:
    """Queries before the first key and a NaN in every key: still out 0, lse -inf, dq 0."""
    inputs = make(Case(batch=1, n_q=40, n_k=10, after=0), DEVICE)
    bad = inputs._replace(k=torch.full_like(inputs.k, torch.nan), v=torch.full_like(inputs.v, torch.inf))
    out, lse, dq, _, _ = run(bad, "triton")
    assert not out[:, :30].any()
    assert not dq[:, :30].any()
    assert (lse[..., :30] == -torch.inf).all()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_memory_around_the_tensors(packed: bool) -> None:
    """Each tensor is a window into a larger one full of NaN, before and after it, along every axis."""
    lengths = ((9, 13), (0, 0), (12, 8)) if packed else None
    case = Case(1, 21, 21, 2, 1, 5, 3, after=0, lengths=lengths)
    inputs = make(case, DEVICE)

    def framed(x: Tensor) -> Tensor:
        frame = x.new_full([n + 4 for n in x.shape], torch.nan)
        inner = frame[tuple(slice(2, n + 2) for n in x.shape)]
        return inner.copy_(x)

    bad = inputs._replace(**{name: framed(getattr(inputs, name)) for name in ("q", "k", "v", "dout", "dlse")})
    for name, x, y in zip(NAMES, run(inputs, "triton"), run(bad, "triton"), strict=True):
        assert torch.equal(x, y), name


@tilewise.score_mod
def root(score, b, h, q_idx, kv_idx):
    return torch.sqrt(abs(score))


def test_slopes_of_rows_that_do_not_exist() -> None:
    """The scores of padding are 0, where this mod has no finite slope. Near 0 it is steep, which no arithmetic helps:
    the budget is twice what torch's own is off by, or what one rounding of the inputs does to the truth."""
    inputs = make(replace(CASE, before=None, after=None), DEVICE)
    eps = torch.finfo(torch.float32).eps

    def plain(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        q, k, v = (heads_first(x, 1 if n == 0 else CASE.heads // CASE.kv_heads) for n, x in enumerate(leaves))
        p = torch.softmax((CASE.spec.scale * (q @ k.mT)).abs().sqrt(), -1)
        return torch.autograd.grad((p @ v).transpose(-2, -3), leaves, inputs.dout.to(q.dtype))

    tensors = [x.detach() for x in inputs[1:4]]
    doubles = [x.double() for x in tensors]
    exact, peers = plain(doubles), [plain(tensors)]
    peers += [plain([x * (1 + eps * (2 * torch.rand_like(x) - 1)) for x in doubles]) for _ in range(4)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = tilewise.attention(*leaves, scale=CASE.spec.scale, score_mod=root(), backend="triton")
    for n, ours in enumerate(torch.autograd.grad(out, leaves, inputs.dout)):
        assert largest(ours, exact[n]) <= 2 * max(largest(peer[n], exact[n]) for peer in peers)
