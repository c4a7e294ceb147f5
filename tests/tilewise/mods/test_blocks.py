"""Block masks: their tiles, what the reference computes of them, and which calls they fit."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise import AttentionError, mods
from tilewise.backends.reference import scored
from tilewise.mods.blocks import listed


def test_the_mod_is_asked_only_where_it_hides_what_the_band_shows() -> None:
    ids = torch.tensor([0] * 40 + [1] * 24, dtype=torch.int32)
    mask = tilewise.block_mask(mods.document(ids=ids), 64, 64, causal=True, block=(16, 16))
    rows, columns = ([(x // 4, x % 4) for x in entries.tolist()] for entries in mask.lists[1::2])
    # 3 full, 2 only the band hides something, 1 the mod does; the second document begins at 40
    assert rows == [(0, 2), (0, 3), (1, 2), (0, 1), (1, 1), (2, 1), (2, 1), (3, 2)]
    assert columns == [(0, 2), (1, 3), (2, 1), (1, 2), (2, 1), (2, 1), (3, 1), (3, 2)]
    assert mask.tiles[0, 0].tolist() == [[1, 0, 0, 0], [2, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_the_reference_computes_only_visited_tiles(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = []
    score_terms = scored.score_terms
    monkeypatch.setattr(
        scored, "score_terms", lambda raw, *rest: (pairs.append(raw.numel()), score_terms(raw, *rest))[1]
    )
    x = [torch.randn(96, 2, 4, requires_grad=True) for _ in range(3)]
    cu = torch.tensor([0, 64, 96], dtype=torch.int32)
    mod = mods.block_diagonal(32)
    computed, results = [], []
    for blocks in (False, True):
        if packed:
            mask = tilewise.block_mask_varlen(mod, cu, cu, block=(16, 32)) if blocks else mod
            out = tilewise.attention_varlen(*x, cu, cu, mask_mod=mask)
        else:
            mask = tilewise.block_mask(mod, 96, 96, block=(16, 32)) if blocks else mod
            out = tilewise.attention(*(t[None] for t in x), mask_mod=mask)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
        computed.append(sum(pairs))
        pairs.clear()
    torch.testing.assert_close(*results)
    every = 64**2 + 32**2 if packed else 96**2
    assert computed == [2 * 2 * every, 2 * 2 * 3 * 32**2]  # two heads, forward and backward


def test_tiles_of_packed_sequences() -> None:
    """Each sequence has the tiles of a mask of its own lengths, and none past its end."""
    lengths = [(40, 70), (0, 9), (33, 0), (64, 64)]
    cu_q, cu_k = (torch.tensor([0, *x], dtype=torch.int32).cumsum(0).int() for x in zip(*lengths, strict=True))
    mod = mods.block_diagonal(24)
    mask = tilewise.block_mask_varlen(mod, cu_q, cu_k, window=(30, 5), block=(16, 32))
    assert mask.shape == (4, 1, 64, 70)
    for b, (n_q, n_k) in enumerate(lengths):
        expected = torch.zeros(4, 3, dtype=torch.int8)
        if min(n_q, n_k):
            alone = tilewise.block_mask(mod, n_q, n_k, window=(30, 5), block=(16, 32)).tiles[0, 0]
            expected[: alone.shape[0], : alone.shape[1]] = alone
        assert torch.equal(mask.tiles[b, 0], expected)


def test_a_block_mask_of_the_other_kind_is_refused() -> None:
    cu = torch.tensor([0, 5, 16], dtype=torch.int32)
    mod = mods.block_diagonal(4)
    dense, packed = tilewise.block_mask(mod, 16, 16), tilewise.block_mask_varlen(mod, cu, cu)
    x = torch.zeros(16, 2, 4)
    with pytest.raises(AttentionError, match="made by block_mask; expected one made by block_mask_varlen"):
        tilewise.attention_varlen(x, x, x, cu, cu, mask_mod=dense)
    with pytest.raises(AttentionError, match="made by block_mask_varlen; expected one made by block_mask,"):
        tilewise.attention(x[None], x[None], x[None], mask_mod=packed)
    shorter = torch.tensor([0, 5, 15], dtype=torch.int32)
    with pytest.raises(AttentionError, match="tokens of the block mask: found 16; expected q's 15"):
        tilewise.attention_varlen(x[:15], x[:15], x[:15], shorter, shorter, mask_mod=packed)
    with pytest.raises(AttentionError, match="sequences of a block mask"):
        tilewise.block_mask_varlen(mod, cu, cu[:2])


@tilewise.mask_mod
def indexed_by_b(b, h, q_idx, kv_idx, ids):
    return ids[b, q_idx] == ids[b, kv_idx]


@tilewise.mask_mod
def indexed_and_counted(b, h, q_idx, kv_idx, ids):
    return (ids[b, q_idx] == ids[b, kv_idx]) & (kv_idx >= b)


@tilewise.mask_mod
def indexed_twice(b, h, q_idx, kv_idx, ids, table):
    return (ids[b, q_idx] == ids[b, kv_idx]) & (table[0, b] > 0)


@tilewise.mask_mod
def through_a_table(b, h, q_idx, kv_idx, ids, rows):
    return ids[rows[b], q_idx] == ids[rows[b], kv_idx]


@tilewise.mask_mod
def indexed_by_h(b, h, q_idx, kv_idx, reach):
    return q_idx - kv_idx <= reach[h]


IDS = (torch.arange(32) // 9)[None]


@pytest.mark.parametrize(
    ("mod", "axis"),
    [
        (indexed_by_b(IDS), None),
        (indexed_by_b(IDS.expand(2, -1)), "b"),
        (indexed_and_counted(IDS), "b"),
        (indexed_twice(IDS, torch.ones(1, 2)), "b"),
        (indexed_twice(IDS, torch.ones(1, 1)), None),
        (through_a_table(IDS, torch.tensor([0, 0])), None),
        (through_a_table(IDS.expand(2, -1), torch.tensor([0, 1])), "b"),
        (through_a_table(IDS.expand(2, -1), torch.tensor([1])), None),
        (indexed_by_h(torch.tensor([4])), None),
        (indexed_by_h(torch.tensor([4, 8])), "h"),
    ],
)
def test_one_batch_row_stands_for_all_only_where_none_differs(mod: mods.Mod, axis: str | None) -> None:
    x = torch.randn(2, 32, 2, 8)
    if axis is None:
        mask = tilewise.block_mask(mod, 32, 32, block=(16, 16))
    else:
        hint = {"b": "batch", "h": "heads"}[axis]
        with pytest.raises(AttentionError, match=f"{hint} of a block mask: found 1; expected {hint}= as in the calls"):
            tilewise.block_mask(mod, 32, 32, block=(16, 16), **{"batch": 2, "heads": 2} | {hint: 1})
        mask = tilewise.block_mask(mod, 32, 32, block=(16, 16), batch=2, heads=2)
    expected = tilewise.attention(x, x, x, mask_mod=mod)
    torch.testing.assert_close(tilewise.attention(x, x, x, mask_mod=mask), expected)


def test_a_packed_mask_of_one_sequence_is_for_one_sequence() -> None:
    one, two = torch.tensor([0, 16], dtype=torch.int32), torch.tensor([0, 8, 16], dtype=torch.int32)
    x = torch.zeros(16, 2, 8)
    mask = tilewise.block_mask_varlen(indexed_and_counted(IDS), one, one, block=(16, 16))
    tilewise.attention_varlen(x, x, x, one, one, mask_mod=mask)
    with pytest.raises(AttentionError, match="B of the block mask: found 1; expected 2"):
        tilewise.attention_varlen(x, x, x, two, two, mask_mod=mask)


def test_tensors_of_the_mod_are_where_the_mask_is() -> None:
    with pytest.raises(AttentionError, match="device of a tensor of the block mask's mod: found cpu; expected meta"):
        tilewise.block_mask(indexed_by_b(IDS), 32, 32, device="meta")


def test_to_another_device() -> None:
    mask = tilewise.block_mask(indexed_by_b(IDS), 32, 32, block=(16, 16))
    moved = mask.to("meta")
    assert {x.device.type for x in (*moved.lists, *moved.mod.tensors)} == {"meta"}
    assert moved.shape == mask.shape
    assert torch.equal(mask.to("cpu").tiles, mask.tiles)


def test_it_says_what_it_is_without_its_numbers() -> None:
    mask = tilewise.block_mask(mods.document(ids=torch.arange(512) // 200), 512, 512, causal=True)
    assert repr(mask) == (
        "block mask of mask_mod _same_document(int64 (512,)): B 1, H 1, 512 queries x 512 keys, window (None, 0),"
        " tiles of 128 x 128, 50.0 % visited, on cpu"
    )
    assert mask.density() == float((mask.tiles > 0).float().mean())


@pytest.mark.parametrize("block", [128, (128,), (128, 128.0), "ab"])
def test_a_tile_has_two_sizes(block):
    with pytest.raises(AttentionError, match=r"\(128, 128\)"):
        tilewise.block_mask(mods.block_diagonal(16), 32, 32, block=block)


@tilewise.mask_mod
def not_before(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@tilewise.score_mod
def biased(score, b, h, q_idx, kv_idx, keys, distances):
    return score + keys[h, kv_idx] + distances[q_idx - kv_idx + 40]


@pytest.mark.parametrize("lines", [(1, 1), (2, 2)], ids=str)
def test_tiles_are_believed(lines: tuple[int, int], backend: str) -> None:
    """Whatever the mod says of a tile that is not listed, or listed as full; of what the score mod reads, too."""
    torch.manual_seed(0)
    n, heads = 40, 2
    kinds = torch.tensor([0, 1, 3], dtype=torch.int8)[torch.randint(0, 3, (*lines, 3, 3))]
    x = [torch.randn(2, n, heads, 8) for _ in range(3)] + [torch.randn(heads, n), torch.randn(2 * n)]
    i, j = torch.arange(n)[:, None], torch.arange(n)
    at = kinds[:, :, i // 16, j // 16]
    seen = (at == 3) | ((at == 1) & (i >= j))
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).requires_grad_() for t in x]
        q, k, v, keys, distances = leaves
        if dtype is torch.float32:
            mask = listed(not_before(), kinds, (16, 16), n, n)
            out = tilewise.attention(q, k, v, score_mod=biased(keys, distances), mask_mod=mask, backend=backend)
        else:
            s = torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5 + keys[:, None] + distances[i - j + n]
            empty = ~seen.any(-1, keepdim=True)
            p = torch.softmax(s.masked_fill(~seen, -torch.inf).masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
            out = torch.einsum("bhij,bjhd->bihd", p, v)
        weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
        results.append([t.double() for t in (out, *torch.autograd.grad(out, leaves, weights))])
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("block", "amd"), [((24, 40), False), ((4, 100), False), ((16, 32), True)], ids=str)
def test_a_mod_says_what_lists_would(block: tuple[int, int], amd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiles that no kernel has, and where none walks lists."""
    monkeypatch.setattr(torch.version, "hip", "7.0" if amd else None)
    n_q, n_k = 150, 300
    torch.manual_seed(0)
    kinds = torch.tensor([0, 0, 1, 3], dtype=torch.int8)[
        torch.randint(0, 4, (1, 2, -(-n_q // block[0]), -(-n_k // block[1])))
    ]
    kinds[0, 0, :, : 128 // block[1] + 1] = 0
    kinds[0, 1, :, : 128 // block[1] + 1] = 3
    mask = listed(not_before(), kinds, block, n_q, n_k)
    h, i, j = torch.arange(2)[:, None, None], torch.arange(n_q)[:, None], torch.arange(n_k)
    at = kinds[0, h, i // block[0], j // block[1]]
    seen = (at == 3) | ((at == 1) & (i >= j))
    assert torch.equal(mask.mod(0, h, i, j).expand(seen.shape), seen)
    if not amd:
        assert mask.block == (128, 128)
        assert mask.tiles[0, :, :, 0].tolist() == [[0, 0], [2, 2]]
        assert (mask.tiles[0, :, :, 1:] == 1).all()


def test_a_packed_mask_with_a_padded_bias() -> None:
    """max_seqlen is a bound: it may be larger than the longest sequence."""
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    q, bias = torch.randn(12, 2, 8), torch.randn(2, 2, 9, 8)
    mod = mods.block_diagonal(3)
    options = {"bias": bias, "max_seqlen_q": 9, "max_seqlen_k": 8}
    mask = tilewise.block_mask_varlen(mod, cu, cu, block=(16, 16))
    found, expected = (tilewise.attention_varlen(q, q, q, cu, cu, mask_mod=x, **options) for x in (mask, mod))
    torch.testing.assert_close(found, expected)
    with pytest.raises(AttentionError, match="Sq of the block mask: found 7"):
        tilewise.attention_varlen(q, q, q, cu, cu, mask_mod=mask, max_seqlen_q=6)
