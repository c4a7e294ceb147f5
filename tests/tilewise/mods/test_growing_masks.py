"""Block masks of some queries of a sequence, and of sequences that grow: as the mask of the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import AttentionError, mods


@tilewise.mask_mod
def by_row(b, h, q_idx, kv_idx, ids):
    return ids[b, q_idx] == ids[b, kv_idx]


@tilewise.mask_mod
def by_position(b, h, q_idx, kv_idx, ids, *, q_pos):
    return (ids[q_pos] == ids[kv_idx]) | (kv_idx < h + 2)


@tilewise.mask_mod
def by_lengths(b, h, q_idx, kv_idx, *, q_len, kv_len):
    return (q_idx * kv_len + kv_idx * q_len) % 7 < 4


@tilewise.mask_mod
def by_query(b, h, q_idx, kv_idx, every, reach):
    return ((q_idx + kv_idx) % every == 0) | (kv_idx * 1.0 <= q_idx * reach)


N = 90
IDS = torch.tensor([0] * 7 + [1] * 40 + [2] * 3 + [3] * 50 + [4] * 60)
MODS: dict[str, Any] = {
    "by_row": by_row(torch.stack([IDS, IDS.flip(0)])),
    "by_position": by_position(IDS),
    "by_lengths": by_lengths(),
    "by_query": by_query(3, 0.5),
    "document": mods.document(ids=IDS),
    "prefix_lm": mods.prefix_lm(torch.tensor([17, 30])),
}
BANDS: dict[str, Any] = {"none": {}, "causal": {"causal": True}, "window": {"window": (9, 4)}}


def made(mod: Any, n_q: int, n_k: int, **band: Any) -> mods.BlockMask:
    return tilewise.block_mask(mod, n_q, n_k, batch=2, heads=2, block=(16, 32), **band)


def randn(n: int, heads: int) -> Tensor:
    return torch.randn(2, n, heads, 8, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("keys", [N, N + 21, N - 30])
def test_queries_are_those_of_the_whole_call(name: str, band: str, keys: int) -> None:
    """Out and gradients of parts, in float64."""
    torch.manual_seed(0)
    mod, edges = MODS[name], BANDS[band]
    whole = made(mod, N, keys, **edges)
    q, k, v = randn(N, 2), randn(keys, 1), randn(keys, 1)
    weights = torch.randn(2, N, 2, 8, dtype=torch.float64)
    for start, stop in ((31, 32), (30, 77), (N - 3, N)):
        n_k = stop + keys - N
        mask = whole.queries(start, stop)
        assert mask.shape == (2, 2, stop - start, n_k)
        keys_of = k[:, :n_k], v[:, :n_k]
        expected = tilewise.attention(q, *keys_of, mask_mod=table(mod, whole))[:, start:stop]
        found = tilewise.attention(q[:, start:stop], *keys_of, mask_mod=mask, **edges)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad((x * weights[:, start:stop]).sum(), (q, k, v)) for x in (found, expected)]
        torch.testing.assert_close(*grads)


def table(mod: Any, whole: mods.BlockMask) -> Any:
    """All pairs of the mod and of causal or window, for calls with any number of keys."""
    _, _, n_q, n_k = whole.shape
    b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(2).view(1, 2, 1, 1)
    i, j = torch.arange(n_q).view(-1, 1), torch.arange(n_k)
    before, after = (n_q + n_k if x is None else x for x in whole.band)
    place = i + n_k - n_q
    seen = mod(b, h, i, j, q_len=n_q, kv_len=n_k) & (j >= place - before) & (j <= place + after)
    return looked_up(seen.expand(2, 2, n_q, n_k).contiguous())


@tilewise.mask_mod
def looked_up(b, h, q_idx, kv_idx, seen):
    return seen[b, h, q_idx, kv_idx]


@pytest.mark.parametrize("name", MODS)
def test_decoding_gives_the_rows_of_the_full_call(name: str, backend: str) -> None:
    """A prompt, then a token at a time, then several, while the sequence grows; float64 on the reference."""
    mod, prompt, total = MODS[name], 40, 47
    if name == "by_lengths":
        pytest.skip("its rows change with the length")
    torch.manual_seed(1)
    dtype = torch.float64 if backend == "reference" else torch.float32
    q, k, v = (torch.randn(2, total, h, 16, dtype=dtype) for h in (2, 1, 1))
    truth = tilewise.attention(q.double(), k.double(), v.double(), causal=True, mask_mod=mod)
    mask = made(mod, prompt, prompt, causal=True)
    outs = [tilewise.attention(*(x[:, :prompt] for x in (q, k, v)), causal=True, mask_mod=mask, backend=backend)]
    for start, stop in ((40, 41), (41, 42), (42, 47)):
        part = mask.queries(start, stop)
        rows = q[:, start:stop], k[:, :stop], v[:, :stop]
        outs.append(tilewise.attention(*rows, causal=True, mask_mod=part, backend=backend))
    tolerance = 1e-12 if backend == "reference" else 2e-6
    torch.testing.assert_close(torch.cat(outs, 1).double(), truth, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize(("n_q", "n_k"), [(64, 64), (50, 71), (10, 20), (70, 35)])
def test_grown_masks_are_those_made_at_once(name: str, band: str, n_q: int, n_k: int) -> None:
    mask = made(MODS[name], n_q, n_k, **BANDS[band])
    for tokens in (0, 1, 15, 33):
        mask = mask.grown(tokens)
        n_q, n_k = n_q + tokens, n_k + tokens
        expected = made(MODS[name], n_q, n_k, **BANDS[band])
        assert mask.shape == expected.shape
        assert all(map(torch.equal, mask.lists, expected.lists))


def test_tiles_of_old_tokens_are_copied() -> None:
    ids = torch.arange(64) // 32
    mask = tilewise.block_mask(mods.document(ids=ids), 64, 64, block=(16, 16))
    other = torch.cat([torch.zeros_like(ids), torch.zeros(16, dtype=ids.dtype)])  # sees all old pairs
    found = mask.grown(16, mod=mods.document(ids=other)).tiles[0, 0]
    assert torch.equal(found[:4, :4], mask.tiles[0, 0])
    assert (found[4] == 2).all()
    assert (found[:, 4] == 2).all()


def test_longer_tensors_of_a_mod() -> None:
    mask = made(by_row(IDS[None, :N]), N, N, causal=True)
    with pytest.raises(AttentionError, match=r"axis 1 of tensor 0 of the mask mod 'by_row': found 90; .* 91"):
        mask.queries(N, N + 1)
    with pytest.raises(AttentionError, match=r"axis 1 of tensor 0 of the mask mod 'by_row': found 90; .* 91"):
        mask.grown(1)
    longer = by_row(IDS[None])
    expected = made(longer, N + 1, N + 1, causal=True)
    assert all(map(torch.equal, mask.grown(1, mod=longer).lists, expected.lists))
    assert torch.equal(mask.queries(N, N + 1, mod=longer).tiles > 0, last_row(expected) > 0)


def last_row(mask: mods.BlockMask) -> Tensor:
    """Of tiles that hold one query each in this row."""
    x = torch.arange(mask.shape[2])
    seen = mask.mod(0, 0, x[:, None], x)[-1] & (x <= x[-1])
    return torch.nn.functional.pad(seen, (0, -len(x) % 32)).view(-1, 32).any(1).expand(*mask.shape[:2], 1, -1)


def test_all_keys_of_a_mask_without_a_band() -> None:
    whole = made(MODS["by_row"], N, N)
    q, k, v = randn(N, 2), randn(N, 1), randn(N, 1)
    expected = tilewise.attention(q, k, v, mask_mod=whole)
    for start, stop in ((0, 16), (3, 50)):
        found = tilewise.attention(q[:, start:stop], k, v, mask_mod=whole.queries(start, stop, n_k=N))
        torch.testing.assert_close(found, expected[:, start:stop])
    for name in ("by_position", "by_lengths", "by_query"):
        found = tilewise.attention(q[:, 5:9], k, v, mask_mod=made(MODS[name], N, N).queries(5, 9, n_k=N))
        torch.testing.assert_close(found, tilewise.attention(q, k, v, mask_mod=MODS[name])[:, 5:9])


def test_one_program_for_all_parts() -> None:
    """Kernels are cached by it; a mod that reads q_pos alone keeps its own."""
    mask = made(MODS["by_row"], N, N, causal=True)
    assert mask.queries(3, 5).mod.key == mask.queries(8, 60).mod.key != mask.mod.key
    mask = made(MODS["by_position"], N, N, causal=True)
    assert mask.queries(3, 5).mod.key == mask.mod.key


def test_parts_of_parts() -> None:
    whole = made(MODS["by_query"], N, N, causal=True)
    a, b = whole.queries(20, 70).queries(11, 30), whole.queries(31, 50)
    assert all(map(torch.equal, a.lists, b.lists))
    i, j = torch.arange(19)[:, None], torch.arange(50)
    assert torch.equal(a.mod(0, 0, i, j, q_len=19, kv_len=50), b.mod(0, 0, i, j, q_len=19, kv_len=50))


def test_the_newest_query_of_a_million_tokens() -> None:
    """A table of all pairs would have 10^12 elements."""
    n = 1 << 20
    mod = mods.document(ids=torch.arange(n + 1) // 100_000)
    mask = tilewise.block_mask(mod, 1, 1, causal=True).queries(n, n + 1)
    assert mask.shape == (1, 1, 1, n + 1)
    assert 0 < len(mask.lists[1]) < 400


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m: m.queries(5, 5), r"queries of a block mask: found \('5', '5'\); expected ints, 0 <= start < stop"),
        (lambda m: m.queries(-1, 5), "queries of a block mask"),
        (lambda m: m.queries(0, 5.0), "queries of a block mask"),
        (lambda m: m.queries(0, 5, n_k=9), "keys of queries 0 to 5 of a block mask: found 9; expected 5: causal and"),
        (lambda m: m.grown(-1), "tokens that a block mask grows by: found -1; expected an int, at least 0"),
        (lambda m: m.grown(1.5), "tokens that a block mask grows by"),
        (lambda m: m.grown(1, mod=by_query(4, 0.5)), "mod of BlockMask.grown: found mask_mod by_query"),
        (lambda m: m.queries(1, 2, mod=by_row(IDS[None])), "mod of BlockMask.queries: found mask_mod by_row"),
        (lambda m: m.queries(1, 2, mod=3), "the mask of a block mask: found 3"),
    ],
)
def test_errors(call: Any, match: str) -> None:
    with pytest.raises(AttentionError, match=match):
        call(made(MODS["by_query"], 32, 32, causal=True))


@pytest.mark.parametrize("name", ["queries", "grown"])
def test_a_part_keeps_its_mod(name: str) -> None:
    part = made(MODS["by_row"], 32, 32, causal=True).queries(3, 32)
    numbers = (30, 31) if name == "queries" else (1,)
    with pytest.raises(AttentionError, match=f"mod of BlockMask.{name}: found given to a mask of some queries; .*None"):
        getattr(part, name)(*numbers, mod=MODS["by_row"])
    assert part.grown(1).shape == (2, 2, 30, 33)


def test_masks_of_packed_sequences_have_no_parts() -> None:
    cu = torch.tensor([0, 5, 16])
    mask = tilewise.block_mask_varlen(mods.block_diagonal(4), cu, cu)
    for call in (lambda: mask.queries(0, 1), lambda: mask.grown(1)):
        with pytest.raises(AttentionError, match="a mask of packed sequences; expected one made by"):
            call()
    with pytest.raises(AttentionError, match="keys of queries 0 to 1 of a block mask: found 0; expected an int"):
        made(MODS["by_query"], 32, 32).queries(0, 1, n_k=0)
