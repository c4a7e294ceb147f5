"""Each rung of one-head attention equals the one before, and the wrong one is wrong in the way it says."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.oracle import naive
from tilewise.request import Spec
from tilewise_lab.derivation import attention

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


def test_eight_tokens_are_a_grid_of_four_by_four_tiles() -> None:
    """Q (8, 128) in 4 blocks of (2, 128), K as many, S a 4 x 4 grid of (2, 2) that no one ever holds: two loops."""
    q, k, v = inputs(8, 8, 128, 128)
    tiles = []

    def spy(q_i: Tensor, k_j: Tensor, f=attention.scores) -> Tensor:
        tiles.append((tuple(q_i.shape), tuple(k_j.shape), tuple(f(q_i, k_j).shape)))
        return f(q_i, k_j)

    with mock.patch.object(attention, "scores", spy):
        attention.without_softmax(q, k, v, rows=2, columns=2)
    assert tiles == [((2, 128), (2, 128), (2, 2))] * 16


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


def test_the_step_corrects_what_softmax_per_block_gets_wrong() -> None:
    """exp(S - m') under the running maximum, O and l rescaled: not softmax(S_ij), as notes have it."""
    q, k, v = inputs(8, 8, 4, 4)
    wrong, right = attention.wrong_local_softmax(q, k, v, 2, 2), attention.fa2(q, k, v, 2, 2)[0]
    assert_close(right, attention.naive(q, k, v))
    assert not torch.allclose(wrong / 4, right, atol=0.1)  # dividing by the number of blocks does not mend it


def test_softmax_star_is_softmax_without_its_denominator() -> None:
    s = attention.scores(*inputs(8, 8, 16, 1)[:2])
    p = attention.softmax_star(s)
    assert torch.equal(p.amax(-1), torch.ones(8).double())
    assert p.sum(-1).min() > 1
    assert_close(p / p.sum(-1, keepdim=True), torch.softmax(s, -1))


def test_softmax_star_of_a_block() -> None:
    """S = [a b; c d] with row maxima a and d: P = [e^(a-a) e^(b-a); e^(c-d) e^(d-d)]."""
    a, b, c, d = 1.5, 0.5, -1.0, 2.0
    expected = torch.tensor([[1, math.exp(b - a)], [math.exp(c - d), 1]])
    assert_close(attention.softmax_star(torch.tensor([[a, b], [c, d]])), expected)


def test_rescale_is_a_diagonal_product() -> None:
    factor, o = torch.rand(5) + 0.5, torch.randn(5, 3)
    assert_close(attention.rescale(factor, o), torch.diag(factor) @ o)
    assert_close(attention.rescale(1 / factor, o), torch.diag(factor).inverse() @ o)


def test_no_key_has_been_seen() -> None:
    """m = [-inf, -inf], l = [0, 0], O = 0 (2 x 128), and what comes first replaces all of it."""
    q, k, v = inputs(8, 8, 128, 128)
    start = attention.nothing(q[:2], v)
    assert (start.m.tolist(), start.l.tolist()) == ([-math.inf] * 2, [0, 0])
    assert torch.equal(start.o, torch.zeros_like(v[:2]))
    state = attention.step(start, q[:2], k[:2], v[:2])
    assert_close(state.l, attention.softmax_star(attention.scores(q[:2], k[:2])).sum(-1))


def test_blocks_of_rows_do_not_depend_on_one_another() -> None:
    """Each by a thread of its own, in any order, as programs of a grid: the same bits."""
    q, k, v = inputs(12, 9, 8, 5)
    together = attention.fa2(q, k, v, 3, 2)
    order = [2, 0, 3, 1]
    with ThreadPoolExecutor(4) as cores:
        alone = dict(zip(order, cores.map(lambda i: attention.fa2(q.split(3)[i], k, v, 3, 2), order), strict=True))
    for part, whole in enumerate(together):
        assert torch.equal(torch.cat([alone[i][part] for i in range(4)]), whole)


def test_states_are_exact_attention_over_the_keys_so_far() -> None:
    q, k, v = inputs(8, 8, 128, 128)
    states = list(attention.states(q[:2], k, v, columns=2))
    assert len(states) == 4
    for j, (m, l, o) in enumerate(states, start=1):
        seen = slice(0, 2 * j)
        assert_close(m, attention.scores(q[:2], k[seen]).amax(-1))
        assert_close(m + l.log(), attention.scores(q[:2], k[seen]).logsumexp(-1))
        assert_close(attention.rescale(1 / l, o), attention.naive(q[:2], k[seen], v[seen]))


@pytest.mark.parametrize("rung", [attention.fa1, attention.fa2])
def test_large_scores_do_not_overflow(rung) -> None:
    q, k, v = inputs(8, 8, 16, 4)
    q = 1e4 * q
    assert_close(rung(q, k, v, 2, 2)[0], attention.naive(q, k, v))
