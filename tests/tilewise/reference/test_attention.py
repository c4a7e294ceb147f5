"""Each rung of one-head attention equals the one before, and the wrong one is wrong in the way it says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.oracle import naive
from tilewise.reference import attention
from tilewise.spec import Spec

SHAPES = [(8, 8, 128, 128), (7, 5, 3, 4), (1, 9, 4, 1), (64, 48, 16, 24)]
BLOCKS = [(2, 2), (3, 2), (4, 16), (100, 100)]


def inputs(n: int, m: int, d: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((n, d), (m, d), (m, e)))
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = naive(*(x[None, :, None] for x in (q, k, v)), Spec.of(head_dim=q.shape[1]))
    return out[0, :, 0], lse[0, 0]


every = pytest.mark.parametrize(
    ("shape", "blocks"), [(s, b) for s in SHAPES for b in BLOCKS], ids=lambda x: "x".join(map(str, x))
)


@pytest.mark.parametrize("shape", SHAPES)
def test_naive(shape) -> None:
    q, k, v = inputs(*shape)
    assert_close(attention.naive(q, k, v), exact(q, k, v)[0])


@every
def test_without_softmax(shape, blocks) -> None:
    q, k, v = inputs(*shape)
    assert_close(attention.without_softmax(q, k, v, *blocks), q @ k.mT @ v / math.sqrt(shape[2]))


@every
def test_fa1(shape, blocks) -> None:
    q, k, v = inputs(*shape)
    o, m, l = attention.fa1(q, k, v, *blocks)
    assert_close(o, attention.naive(q, k, v))
    assert_close(m, attention.scores(q, k).amax(-1))
    assert_close(m + l.log(), exact(q, k, v)[1])


@every
def test_fa2(shape, blocks) -> None:
    q, k, v = inputs(*shape)
    o, m, l = attention.fa1(q, k, v, *blocks)
    assert_close(attention.fa2(q, k, v, *blocks), (o, m + l.log()))


@every
def test_split_keys(shape, blocks) -> None:
    q, k, v = inputs(*shape)
    assert_close(attention.split_keys(q, k, v, *blocks, chunk=3), attention.fa2(q, k, v, *blocks))


def test_weights_of_local_softmax_add_up_to_the_number_of_blocks() -> None:
    q, k, v = inputs(8, 8, 4, 4)
    ones = torch.ones_like(v)
    for columns, blocks in (8, 1), (4, 2), (2, 4), (1, 8):
        assert_close(attention.wrong_local_softmax(q, k, ones, 2, columns), blocks * ones)
    assert_close(attention.wrong_local_softmax(q, k, v, 2, 8), attention.naive(q, k, v))
    assert (attention.wrong_local_softmax(q, k, v, 2, 2) - attention.naive(q, k, v)).abs().max() > 0.5


def test_softmax_star() -> None:
    a, b, c, d = 1.5, 0.5, -1.0, 2.0
    expected = torch.tensor([[1, math.exp(b - a)], [math.exp(c - d), 1]])
    assert_close(attention.softmax_star(torch.tensor([[a, b], [c, d]])), expected)


def test_rescale_is_a_diagonal_product() -> None:
    factor, o = torch.rand(5) + 0.5, torch.randn(5, 3)
    assert_close(attention.rescale(factor, o), torch.diag(factor) @ o)
    assert_close(attention.rescale(1 / factor, o), torch.diag(factor).inverse() @ o)


def test_states_are_exact_attention_over_the_keys_so_far() -> None:
    q, k, v = inputs(8, 8, 128, 128)
    m, l, o = attention.nothing(q[:2], v)
    assert (m.tolist(), l.tolist()) == ([-math.inf] * 2, [0, 0])
    assert torch.equal(o, torch.zeros_like(v[:2]))
    states = list(attention.states(q[:2], k, v, columns=2))
    assert len(states) == 4
    for j, (m, l, o) in enumerate(states, start=1):
        seen = slice(0, 2 * j)
        assert_close(m, attention.scores(q[:2], k[seen]).amax(-1))
        assert_close(attention.rescale(1 / l, o), attention.naive(q[:2], k[seen], v[seen]))


@pytest.mark.parametrize("rung", [attention.fa1, attention.fa2])
def test_large_scores_do_not_overflow(rung) -> None:
    q, k, v = inputs(8, 8, 16, 4)
    q = 1e4 * q
    assert_close(rung(q, k, v, 2, 2)[0], attention.naive(q, k, v))


def test_blocks_of_the_4096_example() -> None:
    q = torch.arange(4096.0)[:, None].expand(4096, 64)
    blocks = q.split(64)
    assert len(blocks) == 64
    assert (blocks[0][0, 0], blocks[0][-1, 0], blocks[-1][0, 0], blocks[-1][-1, 0]) == (0, 63, 4032, 4095)
    assert attention.scores(blocks[0], blocks[0]).shape == (64, 64)
