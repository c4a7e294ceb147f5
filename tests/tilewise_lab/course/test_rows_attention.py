"""Rows of COVERAGE.md about attention as a user calls it: on the reference, and on the kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tests.conftest import DEVICE
from tilewise.integrations.sdpa import scaled_dot_product_attention as ours_for_torchs
from tilewise_lab.costs.cost import Call
from tilewise_lab.derivation import attention as rung
from tilewise_lab.machine import budget


class MultiHeadAttention(torch.nn.Module):
    """MultiHead(X) = Concat(head_1 .. head_h) W^O, head_i = Attention(X W_i^Q, X W_i^K, X W_i^V)"""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x: Tensor, backend: str = "auto") -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.out(tilewise.attention(q, k, v, backend=backend).flatten(2))


def randoms(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=make).to(DEVICE, dtype) for shape in shapes]


def test_multi_head_attention_is_torchs(backend: str) -> None:
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True, device=DEVICE)
    ours = MultiHeadAttention(32, 4).to(DEVICE)
    ours.qkv.weight.data, ours.qkv.bias.data = theirs.in_proj_weight.data, theirs.in_proj_bias.data
    ours.out.load_state_dict(theirs.out_proj.state_dict())
    (x,) = randoms((2, 10, 32))
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    a, b = ours(mine, backend), theirs(other, other, other)[0]
    assert_close(a, b, atol=1e-5, rtol=1e-4)
    dy = torch.randn_like(a)
    assert_close(*(torch.autograd.grad(y, z, dy)[0] for y, z in ((a, mine), (b, other))), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("n", [8, 64, 256])
def test_projections_grow_with_the_length_and_attention_with_its_square(n: int) -> None:
    """8 N width² FLOPs, ordinary products, against 4 N² width, all that tilewise touches: equal at N = 2 width."""
    width, heads = 32, 4
    layer = MultiHeadAttention(width, heads)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.randn(1, n, width))
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = counts.pop("tilewise.forward")
    assert sum(counts.values()) == 8 * n * width**2
    assert attention == 4 * n**2 * width == Call(1, n, n, heads, heads, width // heads, width // heads).flops()
    assert (attention == sum(counts.values())) == (n == 2 * width)


def test_shapes_from_scores_to_output() -> None:
    """Q, K (N, d) -> S, P (N, N), row by row -> O (N, d); a tensor that does not fit is named, with its dim."""
    q, k, v = randoms((6, 8), (9, 8), (9, 5))
    s = rung.scores(q, k)
    p = torch.softmax(s, -1)
    assert s.shape == p.shape == (6, 9)
    assert_close(p.sum(-1), torch.ones(6, device=DEVICE))
    assert tilewise.attention(*(x[None, :, None] for x in (q, k, v))).shape == (1, 6, 1, 5)
    with pytest.raises(tilewise.AttentionError, match="head dim of k: found 7; expected q's 8"):
        tilewise.attention(q[None, :, None], k[None, :, None, :7], v[None, :, None])
    with pytest.raises(tilewise.AttentionError, match=r"shape of v: found \(1, 4, 1, 5\)"):
        tilewise.attention(q[None, :, None], k[None, :, None], v[None, :4, None])


def test_4096_tokens_in_tiles_of_64() -> None:
    """Q_1 = Q[0:64] .. Q_64 = Q[4032:4096], S_11 = Q_1 K_1ᵀ / √64, O (4096, 64): each block of O from its own rows."""
    q, k, v = randoms((4096, 64), (4096, 64), (4096, 64))
    tiles = budget.tiles(4096, 64)
    assert [(t.number, t.start, t.stop) for t in (tiles[0], tiles[-1])] == [(1, 0, 64), (64, 4032, 4096)]
    assert sum(t.stop - t.start for t in tiles) == 4096
    first, last = (slice(t.start, t.stop) for t in (tiles[0], tiles[-1]))
    s = rung.scores(q[first], k[first])
    assert s.shape == (64, 64)
    assert_close(s, q[:64] @ k[:64].mT / 8)
    o = tilewise.attention(*(x[None, :, None] for x in (q, k, v)))[0, :, 0]
    assert o.shape == (4096, 64)
    for rows in (first, last):
        assert_close(o[rows], rung.fa2(q[rows], k, v, 64, 64)[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("d", "dv"), [(8, 24), (24, 8), (40, 72)])
def test_values_have_a_width_of_their_own(d: int, dv: int, backend: str) -> None:
    q, k, v = randoms((1, 5, 2, d), (1, 7, 2, d), (1, 7, 2, dv))
    out = tilewise.attention(q, k, v, backend=backend)
    assert out.shape == (1, 5, 2, dv)
    for h in range(2):
        assert_close(out[0, :, h], rung.naive(q[0, :, h], k[0, :, h], v[0, :, h]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_of_ten_thousand_do_not_overflow(dtype: torch.dtype, backend: str) -> None:
    q = torch.full((1, 4, 1, 16), 50.0, dtype=dtype, device=DEVICE)
    k = torch.cat([q, -q], 1)
    v = torch.arange(8.0, device=DEVICE).to(dtype)[None, :, None, None]
    out, lse = tilewise.attention(q, k, v, scale=0.25, return_lse=True, backend=backend)
    assert_close(lse, torch.full_like(lse, 10_000 + math.log(4)), rtol=0, atol=0.01)
    assert_close(out.float(), torch.full_like(out, 1.5).float())  # the mean of the four keys that agree


def test_no_keys_give_zero_and_minus_infinity(backend: str) -> None:
    """l = 0 and a guard: O = 0 and lse = -inf where nothing was seen, not 0 / 0."""
    q, k = randoms((1, 4, 1, 8), (1, 2, 1, 8))
    for keys, rows in ((k[:, :0], slice(0, 4)), (k, slice(0, 2))):  # none at all; none for the first two of four
        out, lse = tilewise.attention(q, keys, keys, causal=True, return_lse=True, backend=backend)
        assert torch.equal(out[:, rows], torch.zeros_like(out[:, rows]))
        assert torch.equal(lse[..., rows], torch.full_like(lse[..., rows], -torch.inf))


def test_a_sum_that_starts_at_one_is_a_sink() -> None:
    """l = 1 is harmless while m = -inf wipes it out; with a finite m it is a key without a value: softmax₁."""
    q, k, v = (x.double() for x in randoms((4, 8), (6, 8), (6, 8)))
    zero = q.new_zeros(4)
    empty = rung.nothing(q, v)
    for m, sink in ((empty.m, None), (zero, 0.0)):
        state = rung.step(rung.State(m, zero + 1, empty.o), q, k, v)
        sinks = None if sink is None else torch.tensor([sink], dtype=q.dtype, device=DEVICE)
        out = tilewise.attention(*(x[None, :, None] for x in (q, k, v)), sinks=sinks)
        assert_close(rung.rescale(1 / state.l, state.o), out[0, :, 0])


def test_minus_a_million_is_no_mask(backend: str) -> None:
    """Hidden scores are -inf: a row that sees nothing is 0, and a seen score of -2 million outweighs a hidden one."""
    torchs = torch.full((16,), -1e6, dtype=torch.float64)
    assert round(torchs.logsumexp(-1).item()) == -999_997
    assert torch.softmax(torchs, -1) @ torch.arange(16.0).double() == 7.5  # the mean of V
    q, k = torch.full((1, 2, 1, 4), 1000.0, device=DEVICE), torch.full((1, 2, 1, 4), -1000.0, device=DEVICE)
    k[:, 1] = 0.0
    v = torch.tensor([1.0, 100.0], device=DEVICE)[None, :, None, None]
    out, lse = tilewise.attention(q, k, v, scale=0.5, causal=True, return_lse=True, backend=backend)
    assert (out[0, 0, 0, 0], lse[0, 0, 0]) == (1.0, -2e6)
    four = torch.cat([q, q], 1)  # the first two come before both keys
    out, lse = tilewise.attention(four, k, v, scale=0.5, causal=True, return_lse=True, backend=backend)
    assert torch.equal(out[:, :2], torch.zeros_like(out[:, :2]))
    assert (lse[..., :2] == -torch.inf).all()


def test_a_negative_scale_is_applied_before_the_maximum(backend: str) -> None:
    products, scale = torch.tensor([-100.0, 100.0]), -1.0
    careless = torch.exp(products * scale - products.max() * scale)  # max(QK) · scale, as the notes' kernel has it
    assert (careless / careless.sum()).isnan().any()
    q, k, v = randoms((1, 20, 1, 8), (1, 20, 1, 8), (1, 20, 1, 8))
    found = tilewise.attention(20 * q, k, v, scale=-0.5, return_lse=True, backend=backend)
    assert_close(found, tilewise.attention(-20 * q, k, v, scale=0.5, return_lse=True, backend=backend))


def test_causal_is_bottom_right_and_torchs_is_top_left(backend: str) -> None:
    """The last query sees all keys; torch's first query sees the first key. With fewer keys than queries too."""
    for n_q, n_k in ((3, 5), (5, 3)):
        q, k, v = randoms((1, n_q, 2, 8), (1, n_k, 2, 8), (1, n_k, 2, 8))
        bottom_right = tilewise.attention(q, k, v, causal=True, backend=backend)
        mask = torch.ones(n_q, n_k, dtype=torch.bool, device=DEVICE).tril(n_k - n_q)
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        expected = scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2).nan_to_num()
        assert_close(bottom_right, expected, atol=1e-5, rtol=1e-4)
        top_left = scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
        named = ours_for_torchs(*heads_first, is_causal=True).transpose(1, 2)
        assert_close(named, top_left, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(bottom_right, top_left, atol=0.1)


def test_attention_is_a_node_of_the_graph() -> None:
    """Q, K, V -> O, with a backward of its own: gradcheck in float64."""
    leaves = [x.double().requires_grad_() for x in randoms((1, 3, 2, 2), (1, 4, 1, 2), (1, 4, 1, 3))]
    out = tilewise.attention(*leaves, causal=True)
    assert "Attention" in type(out.grad_fn).__name__
    assert torch.autograd.gradcheck(lambda *x: tilewise.attention(*x, causal=True, return_lse=True), leaves)


def test_weights_are_computed_again_and_not_kept() -> None:
    """Between forward and backward lie q, k, v, o and lse; for what was not kept the backward takes a fifth product."""
    n, d = 64, 8
    leaves = [x.requires_grad_() for x in randoms((1, n, 1, d), (1, n, 1, d), (1, n, 1, d))]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = tilewise.attention(*leaves)
    assert sum(x.numel() for x in kept) == 4 * n * d + n < n * n
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out.sum(), leaves)
    product = 2 * n * n * d
    assert counter.get_total_flops() == Call(1, n, n, 1, 1, d, d).flops(backward=True) == 5 * product
