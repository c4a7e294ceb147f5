"""Expressions: their derivatives, first and second, and what torch.compile makes of them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

import tilewise
from tests import features
from tilewise import mods
from tilewise.mods import bounds, expr

S = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class SlowlyHashed(str):
    """A string that lets other threads run while it is hashed, that is, between a look-up and a write."""

    def __hash__(self) -> int:
        time.sleep(0.005)
        return str.__hash__(self)


def test_threads_that_make_equal_expressions_make_one() -> None:
    start = Barrier(8)

    def make(_: int) -> expr.Expr:
        start.wait()
        return expr.node(SlowlyHashed("sqrt"), expr.SCORE, value="made by threads", kind="float")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(make, range(8)))
    assert len({id(x) for x in found}) == 1


PLACE = (0, 1, torch.arange(4)[:, None], torch.arange(5))


def double(x):
    return 2 * x


@tilewise.score_mod
def everything(score, b, h, q_idx, kv_idx, t, cap: float):
    """Each operation with a derivative at least once."""
    x = score / cap + t[q_idx % 3, h]
    x -= double(x).clamp(-0.5, 0.5) * 0.25
    y = torch.exp(-abs(x)) + torch.log(x * x + 1) + torch.sqrt(x**2 + 0.1) + x**-2.0 * 1e-3
    z = torch.tanh(y) * torch.sigmoid(x) + torch.sin(x) * torch.cos(y) + max(x, 0.1) + min(y, 1.0)
    far = not (abs(q_idx - kv_idx) < 2 and q_idx >= kv_idx)
    return z if far else torch.where(kv_idx // 2 == 1, x % 0.7, (2.0**x) + y.relu())


def test_slope_and_sites_are_what_autograd_says() -> None:
    t = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    score = S.clone().requires_grad_()
    mod = everything(t, 1.5)
    value = mod(score, *PLACE)
    dscore, dt = torch.autograd.grad(value.sum(), (score, t))
    place = mods.expr.Place(*PLACE, 4, 5)
    slope, *sites = mods.expr.evaluate(
        [mod.program.derivative, *(d for _, d in mod.program.sites)], place, S, (t.detach(),), (1.5,), torch.float64
    )
    torch.testing.assert_close(slope.expand(S.shape), dscore)
    total = torch.zeros_like(t)
    for (load, _), d in zip(mod.program.sites, sites, strict=True):
        mods.expr.scatter_(total, load, d.expand(S.shape), place, (t,), (1.5,))
    torch.testing.assert_close(total, dt)


def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor, slopes: Tensor, table: Tensor) -> Tensor:
    out, lse = tilewise.attention(
        q,
        k,
        v,
        causal=True,
        softcap=2.0,
        score_mod=features.distance_table(table),
        alibi_slopes=slopes,
        bias=bias,
        sinks=sinks,
        mask_mod=mods.window_with_globals(3, 1),
        dropout_p=0.2,
        seed=5,
        return_lse=True,
    )
    return out.sum(-1).transpose(1, 2) + lse


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 5, 2, 4), (2, 6, 1, 4), (2, 6, 1, 4), (1, 2, 5, 6), (2,), (2,), (2, 16)]
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.slow
def test_every_term_has_first_and_second_derivatives() -> None:
    assert torch.autograd.gradcheck(call, leaves())
    assert torch.autograd.gradgradcheck(call, leaves())


def test_forward_mode_of_every_term() -> None:
    x = [t.detach() for t in leaves()]
    along = [torch.randn_like(t) for t in x]
    _, moved = torch.func.jvp(call, tuple(x), tuple(along))
    step = 1e-6
    up, down = (call(*(t + sign * step * d for t, d in zip(x, along, strict=True))) for sign in (1, -1))
    torch.testing.assert_close(moved, (up - down) / (2 * step), rtol=1e-6, atol=1e-7)


def test_the_t5_table_is_read_by_distance_alone() -> None:
    """What lets its gradient be summed along diagonals, a table of one head at a time and not of every pair."""
    (load, _), *_ = mods.t5_relative(torch.ones(8, 2)).program.sites
    assert bounds.only_difference(load.args, mods.expr.I, mods.expr.J)
    assert bounds.only_difference(load.args, mods.expr.N_Q, mods.expr.N_K)
    assert not bounds.only_difference([mods.alibi(torch.ones(2)).program.root], mods.expr.I, mods.expr.N_Q)
