"""The kernels of sparse attention's parts against torch, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilewise.request import INTERPRETER
from tilewise.sparse.block_attention import sorted_choices
from tilewise.sparse.block_ops import _combine
from tilewise.sparse.moba_attention import best_before
from tilewise.sparse.nsa_attention import _block_weights, _gated_sum, _gated_sum_backward
from tilewise.sparse.packed import _best_blocks

pytestmark = pytest.mark.usefixtures("triton_runs")


def drawn(starts: Tensor, kv_heads: int, choosers: int, most: int) -> Tensor:
    """(T, C, most): blocks before that of each token, some of them -1."""
    torch.manual_seed(most)
    tokens = int(starts[-1])
    own = torch.searchsorted(starts, torch.arange(tokens), right=True) - 1
    order = torch.rand(tokens, choosers, len(starts) - 1).argsort(-1)[..., :most]
    return torch.where((order < own[:, None, None]) & (torch.rand(order.shape) < 0.9), order, -1)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("group", "d", "most"), [(1, 16, 3), (3, 20, 1), (4, 8, 5)])
def test_combine(weighted: bool, group: int, d: int, most: int) -> None:
    from tilewise.backends.common import combine_parts

    torch.manual_seed(d)
    lines, count = 13, 20
    base, parts = torch.randn(lines, group, d), torch.randn(count, group, d)
    lse, part_lse = 5 * torch.randn(lines, group), 5 * torch.randn(group, count)
    lse[0, 0] = -torch.inf
    part_lse[0, 3] = -torch.inf
    positions = torch.randint(0, count + 3, (lines, most), dtype=torch.int32)
    positions[0] = count  # nothing at all for this line
    positions = positions.clamp(max=count)
    logs = (lse, part_lse) if weighted else (None, None)
    for given in ((base, logs[0], parts, logs[1]), (None, None, parts, logs[1])):
        ours = combine_parts.combine(*given, positions, torch.float32)
        wide = [None if x is None else x.double() for x in given]
        expected = _combine(*wide, positions, torch.float64)
        torch.testing.assert_close(ours[0].double(), expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours[1].double(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kv_heads", "choosers", "group", "d", "dv"), [(2, 2, 3, 8, 6), (1, 2, 1, 16, 16), (2, 2, 16, 20, 8)]
)
def test_block_parts(
    kv_heads: int, choosers: int, group: int, d: int, dv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewise.backends.common import block_parts

    monkeypatch.setattr(block_parts, "RANGE", 64 if d == 16 else 13)
    starts = torch.tensor([0, 10, 20, 23, 33, 36], dtype=torch.int32)
    chosen = drawn(starts, kv_heads, choosers, 2)
    own = torch.searchsorted(starts, torch.arange(36), right=True) - 1
    chosen = torch.cat([chosen, own[:, None, None].expand(36, choosers, 1)], 2)
    lists = sorted_choices(chosen, kv_heads, starts, None)
    tokens, heads = 36, choosers * group
    q, k, v = torch.randn(tokens, heads, d), torch.randn(tokens, kv_heads, d), torch.randn(tokens, kv_heads, dv)
    choices = block_parts.Choices(lists.lines, lists.cu_q, starts, choosers, 10, 0.3)
    out, lse = block_parts.forward(q, k, v, choices)
    total, dout = torch.randn(tokens, heads) + 3, torch.randn(tokens, heads, dv)
    delta = torch.randn(tokens, heads)
    dq, dk, dv_ = block_parts.backward(q, k, v, choices, (dout, total, delta))
    expected = [torch.zeros(x.shape, dtype=torch.float64) for x in (k, v)]
    seen = 0
    for block in range(5):
        for t, c in (chosen == block).any(-1).nonzero().tolist():
            j = slice(int(starts[block]), min(int(starts[block + 1]), t + 1))
            slot = chosen[t, c].tolist().index(block)
            at, h = int(lists.positions[t * choosers + c, slot]), slice(c * group, (c + 1) * group)
            kv = c // (choosers // kv_heads)
            keys, values, rows = k[j, kv].double(), v[j, kv].double(), q[t, h].double()
            s = 0.3 * rows @ keys.T
            torch.testing.assert_close(out[at].double(), s.softmax(-1) @ values, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse[:, at].double(), s.logsumexp(-1), rtol=1e-5, atol=1e-5)
            p = torch.exp(s - total[t, h, None])
            ds = 0.3 * p * (dout[t, h].double() @ values.T - delta[t, h, None])
            torch.testing.assert_close(dq[at].double(), ds @ keys, rtol=1e-4, atol=1e-4)
            expected[0][j, kv] += ds.T @ rows
            expected[1][j, kv] += p.T @ dout[t, h].double()
            seen += 1
    assert seen == int((chosen >= 0).sum()) > 20
    torch.testing.assert_close(dk.double(), expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dv_.double(), expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "block"), [(4, 2, 3), (6, 2, 5), (20, 1, 2)])
def test_block_weights(heads: int, kv_heads: int, block: int) -> None:
    from tilewise.backends.common import nsa

    torch.manual_seed(heads)
    n = 8 * block
    q, keys, lse = torch.randn(2, n, heads, 12), torch.randn(2, 8, kv_heads, 12), 1 + torch.randn(2, heads, n)
    lse[:, :, 0] = -torch.inf
    ours = nsa.block_weights(q, keys, lse, block, -0.4, INTERPRETER)
    expected = _block_weights(q.double(), keys.double(), lse.double(), block, -0.4)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def test_gated_sum() -> None:
    from tilewise.backends.common import nsa

    torch.manual_seed(0)
    outs, gates, dout = (
        [torch.randn(5, 7, 20) for _ in range(3)],
        [torch.rand(5, 7) for _ in range(3)],
        torch.randn(5, 7, 20),
    )
    total, grads = torch.empty(5, 7, 20), [torch.empty(x.shape) for x in (*outs, *gates)]
    nsa.gated_launch(nsa.GateTensors(tuple(outs), tuple(gates), None, None, total))()
    nsa.gated_launch(nsa.GateTensors(tuple(outs), tuple(gates), tuple(grads[:3]), tuple(grads[3:]), dout))()
    wide = [x.double() for x in outs], [x.double() for x in gates]
    torch.testing.assert_close(total.double(), _gated_sum(*wide), rtol=1e-5, atol=1e-6)
    for a, b in zip(grads, _gated_sum_backward(dout.double(), *wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 3, 20), (40, 1, 16)])
def test_row_dots(shape: tuple[int, ...]) -> None:
    from tilewise.backends.common import combine_parts

    a, b = torch.randn(shape), torch.randn(shape)
    expected = (a.double() * b.double()).sum(-1)
    torch.testing.assert_close(combine_parts.row_dots(a, b).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("d", [64, 128])
def test_add_sums(d: int) -> None:
    """Of 16 columns 8 b + 2 l + e, the sum of one is at 4 l + 2 b + e."""
    from tilewise.backends.common import combine_parts

    torch.manual_seed(d)
    base, sums = torch.randn(5, 3, d), torch.randn(5, 3, d)
    stored = sums.unflatten(2, (-1, 2, 4, 2)).transpose(3, 4).reshape(-1, d)
    torch.testing.assert_close(combine_parts.add_sums(base, stored, 0.25), base + 0.25 * sums)


def test_gather() -> None:
    from tilewise.backends.common import combine_parts

    x, lines = torch.randn(9, 3, 20), torch.randint(0, 9, (31,))
    assert torch.equal(combine_parts.gather(x, lines), x[lines])


@pytest.mark.parametrize(("tokens", "choosers", "blocks", "most"), [(7, 3, 5, 2), (40, 1, 33, 8), (3, 2, 100, 15)])
def test_best_blocks(tokens: int, choosers: int, blocks: int, most: int) -> None:
    from tilewise.backends.common.best_blocks import best_blocks

    torch.manual_seed(blocks)
    weight = torch.randn(tokens, choosers, blocks)
    weight[0, 0, 1], weight[1, 0, 2:4], weight[-1, 0] = -torch.inf, 0.25, -1e-30
    own = torch.randint(0, blocks + 1, (tokens,))
    first = torch.minimum(torch.randint(0, blocks, (tokens,)), own)
    ours = best_blocks(weight, first, own, most)
    expected = _best_blocks(weight, first, own, most)
    for slot in range(tokens):  # of equal weights any may be chosen
        a, b = (x[slot].sort(-1).values for x in (ours, expected))
        assert torch.equal(a < 0, b < 0)
        weights = [weight[slot].gather(1, x.clamp(min=0).long()).masked_fill(x < 0, 0.0).sum(1) for x in (a, b)]
        torch.testing.assert_close(*weights)
        assert all(len(set(row)) == len(row) for row in (x[x >= 0].tolist() for x in a))
    assert ours.dtype == torch.int32


def test_blocks_by_mean_key() -> None:
    from tilewise.backends.common.best_blocks import blocks_by_mean_key

    torch.manual_seed(0)
    q, means = torch.randn(2, 60, 4, 20).bfloat16(), torch.randn(2, 6, 2, 20)
    ours = blocks_by_mean_key(q, means, 10, 3)
    scores = torch.einsum("bshgd,bnhd->bshgn", q.double().unflatten(2, (2, 2)), means.double()).flatten(2, 3)
    expected = best_before(scores, 10, 3)
    assert torch.equal(ours.sort(-1).values, expected.sort(-1).values)
