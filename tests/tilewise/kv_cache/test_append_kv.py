"""Writing into a KV cache: places, slots, rotary embeddings of both styles, and what is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.kv_cases import KvCase, inputs
from tilewise import AttentionError, Rotary, append_kv, attention_kv
from tilewise.validation.kv_rotary import check_positions


def rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (T, heads, dim) by the definition: each pair of dims is a complex number, times exp(i angle)."""
    x, half = x.double().clone(), cos.shape[1]
    for t, position in enumerate(positions.tolist()):
        for d in range(half):
            a, b = (2 * d, 2 * d + 1) if interleaved else (d, d + half)
            z = torch.complex(x[t, :, a], x[t, :, b]) * torch.complex(
                cos[position, d].double(), sin[position, d].double()
            )
            x[t, :, a], x[t, :, b] = z.real, z.imag
    return x


def angles(width: int, positions: int = 64) -> tuple[Tensor, Tensor]:
    at = torch.arange(positions)[:, None] / 100 ** (torch.arange(width // 2) / (width // 2))
    return at.cos(), at.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 10, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_rotary(interleaved: bool, width: int, packed: bool, backend: str) -> None:
    n: Any = (3, 1, 0) if packed else 2
    x = inputs(KvCase((20, 3, 5), queries=n, new=n, page=8, dim=16))
    cos, sin = angles(width)
    new, q = x.options["k_new"], x.q
    at = [
        length + i
        for length, count in zip((20, 3, 5), (3, 1, 0) if packed else (2, 2, 2), strict=True)
        for i in range(count)
    ]
    positions = torch.tensor(at)
    k, v = x.k.clone(), x.v.clone()
    found = tilewise.append_kv(
        new,
        x.options["v_new"],
        k,
        v,
        x.lengths,
        q=q,
        rotary=tilewise.Rotary(cos, sin, interleaved),
        backend=backend,
        **{name: y for name, y in x.options.items() if name not in ("k_new", "v_new")},
    )
    assert found is not None
    flat = q if packed else q.flatten(0, 1)
    exact = rotated(flat, positions, cos, sin, interleaved).view(q.shape)
    assert torch.allclose(found.double(), exact, atol=1e-6)
    keys = rotated(new.flatten(0, -3), positions, cos, sin, interleaved)
    token = 0
    for b, (length, count) in enumerate(zip((20, 3, 5), (3, 1, 0) if packed else (2, 2, 2), strict=True)):
        for j in range(length, length + count):
            page = x.options["page_table"][b, j // 8].item()
            assert torch.allclose(k[page, j % 8].double(), keys[token], atol=1e-6)
            assert torch.equal(v[page, j % 8], x.values[b][j])
            x.k[page, j % 8], x.v[page, j % 8] = k[page, j % 8], v[page, j % 8]
            token += 1
    assert torch.equal(k.nan_to_num(7.0), x.k.nan_to_num(7.0))  # and nothing else was written
    assert torch.equal(v.nan_to_num(7.0), x.v.nan_to_num(7.0))


def test_positions_are_the_callers(backend: str) -> None:
    cos, sin = angles(16)
    cache, new, q = torch.zeros(2, 8, 2, 16), torch.randn(2, 3, 2, 16), torch.randn(2, 3, 4, 16)
    positions = torch.tensor([[5, 9, 2], [0, 63, 1]])
    rotary = tilewise.Rotary(cos, sin, False, positions)
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    found = tilewise.append_kv(new, new, cache, cache.clone(), lengths, q=q, rotary=rotary, backend=backend)
    assert found is not None
    exact = rotated(new.flatten(0, 1), positions.flatten(), cos, sin, False).view(2, 3, 2, 16)
    assert torch.allclose(cache[0, :3].double(), exact[0], atol=1e-6)
    assert torch.allclose(cache[1, 4:7].double(), exact[1], atol=1e-6)
    assert torch.allclose(
        found.double(), rotated(q.flatten(0, 1), positions.flatten(), cos, sin, False).view(q.shape), atol=1e-6
    )
    others = rotary._replace(q_positions=torch.full((2, 3), 7))
    found = tilewise.append_kv(new, new, cache, cache.clone(), lengths, q=q, rotary=others, backend=backend)
    assert found is not None
    exact = rotated(q.flatten(0, 1), torch.full((6,), 7), cos, sin, False).view(q.shape)
    assert torch.allclose(found.double(), exact, atol=1e-6)


def test_a_call_with_rotary_is_its_parts(backend: str) -> None:
    x, y = (inputs(KvCase((20, 3), queries=2, new=2, page=8, dim=16)) for _ in range(2))
    rotary = tilewise.Rotary(*angles(16))
    out = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, rotary=rotary, backend=backend)
    k, v = y.options.pop("k_new"), y.options.pop("v_new")
    q = tilewise.append_kv(k, v, y.k, y.v, y.lengths, **y.options, q=y.q, rotary=rotary, backend=backend)
    assert q is not None
    parts = tilewise.attention_kv(q, y.k, y.v, y.lengths + 2, **y.options, backend=backend)
    assert torch.allclose(out, parts, atol=1e-6)
    assert not torch.equal(q, y.q)


def test_slots(backend: str) -> None:
    pool, new = torch.zeros(3, 4, 1, 8), torch.arange(1.0, 5)[:, None, None].expand(4, 1, 8)
    cu = torch.tensor([0, 1, 4], dtype=torch.int32)
    lengths, slots = torch.zeros(2, dtype=torch.int32), torch.tensor([7, -1, 0, 11])
    other = pool.clone()
    tilewise.append_kv(new, new, pool, other, lengths, cu_seqlens_new=cu, slots=slots, backend=backend)
    assert pool[..., 0, 0].flatten().tolist() == [3, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 4]
    assert torch.equal(pool, other)


def test_offsets_of_packed_queries_are_those_of_the_new_tokens(backend: str) -> None:
    caches, new = torch.zeros(2, 2, 8, 1, 8), torch.randn(5, 1, 8)
    cu, lengths = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    options: dict[str, Any] = {"q": torch.randn(5, 2, 8), "cu_seqlens_q": cu, "backend": backend}
    append_kv(new, new, caches[0], caches[0].clone(), lengths, **options)
    append_kv(new, new, caches[1], caches[1].clone(), lengths, cu_seqlens_new=cu, **options)
    assert torch.equal(caches[0, 1, :3], new[2:])
    assert torch.equal(*caches)
    with pytest.raises(AttentionError, match="cu_seqlens_new: found None, for packed k_new"):
        append_kv(new, new, caches[0], caches[0].clone(), lengths)


def test_what_has_no_place_is_not_written(backend: str) -> None:
    """Tokens past the end of a dense row or of the table, and tokens after the last packed sequence. The reference
    reads lengths on a CPU, and raises."""
    cache, new = torch.zeros(2, 4, 1, 8), torch.ones(2, 3, 1, 8)
    if backend == "reference":
        with pytest.raises(AttentionError, match="sequence 0: found 3 in the cache and 3 new; expected at most 4"):
            tilewise.append_kv(new, new, cache, cache.clone(), torch.tensor([3, 9], dtype=torch.int32))
        assert not cache.any()
        return
    tilewise.append_kv(new, new, cache, cache.clone(), torch.tensor([3, 9], dtype=torch.int32), backend=backend)
    assert cache[..., 0, 0].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    cache.zero_()
    table = torch.tensor([[1]], dtype=torch.int32)
    cu = torch.tensor([0, 2], dtype=torch.int32)
    lengths = torch.tensor([3], dtype=torch.int32)
    packed = new.flatten(0, 1)
    tilewise.append_kv(
        packed, packed, cache, cache.clone(), lengths, page_table=table, cu_seqlens_new=cu, backend=backend
    )
    assert cache[..., 0, 0].tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]


def test_a_ring_of_pages(backend: str) -> None:
    """A window of 8 in a ring of 3 pages of 4: the pages of old tokens are used again, and the answer is right."""
    torch.manual_seed(0)
    steps, window = 20, 8
    k, v, q = (torch.randn(steps, 1, h, 16) for h in (1, 1, 2))
    ring_k, ring_v = torch.full((2, 3, 4, 1, 16), torch.nan)
    table = (torch.arange(16, dtype=torch.int32) % 3)[None]
    for t in range(steps):
        length = torch.tensor([t], dtype=torch.int32)
        found = tilewise.attention_kv(
            q[t][None],
            ring_k,
            ring_v,
            length,
            k_new=k[t][None],
            v_new=v[t][None],
            page_table=table,
            window=(window, 0),
            backend=backend,
        )
        first = max(0, t - window)
        exact = tilewise.attention(q[t][None], k[first : t + 1].transpose(0, 1), v[first : t + 1].transpose(0, 1))
        assert torch.allclose(found, exact, atol=1e-6)


def test_positions_of_other_tokens() -> None:
    """As many new tokens as queries in all, but of other sequences: their positions are not those of the queries."""
    q, new, cache = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.zeros(2, 8, 2, 8)
    lengths, angles = torch.tensor([4, 4], dtype=torch.int32), torch.randn(16, 4)
    rotary = Rotary(angles.cos(), angles.sin(), positions=torch.tensor([4, 4, 5]))
    cu_q, cu_new = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32)

    def rotated(cu_new: torch.Tensor, rotary: Rotary) -> torch.Tensor | None:
        tensors = new, new, cache.clone(), cache.clone(), lengths
        return append_kv(*tensors, q=q, cu_seqlens_q=cu_q, cu_seqlens_new=cu_new, rotary=rotary)

    with pytest.raises(AttentionError, match="rotary q_positions: found None; expected 3 integers: cu_seqlens_new is"):
        rotated(cu_new, rotary)
    own = rotary._replace(q_positions=rotary.positions)
    torch.testing.assert_close(rotated(cu_q.clone(), rotary), rotated(cu_new, own))
    # on a GPU the call does not read the offsets, and check_kv does
    check_positions(own, cu_q, cu_new)
    check_positions(rotary, cu_q, cu_q.clone())
    with pytest.raises(AttentionError, match="rotary q_positions: found None; expected given, because"):
        check_positions(rotary, cu_q, cu_new)


@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", [4, 40], ids=["by the decode kernel", "by a launch of its own"])
@pytest.mark.usefixtures("triton_runs")
def test_one_new_token_of_each_sequence(page: int, packed: bool, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty sequence, one whose page is full, one whose cache is full: its token has no place. The decode kernel
    writes the tokens itself if no other program reads them. Packed, the host does not know how many each has."""
    from tilewise.backends.common.kv import runners

    torch.manual_seed(0)
    lengths = torch.tensor([0, 4, 32, 29], dtype=torch.int32)
    q, new = torch.randn(4, 1, heads, 16), torch.randn(2, 4, 1, 2, 16)
    pool = torch.randn(2, 32, page, 2, 16) if page else torch.randn(2, 4, 32, 2, 16)
    options: Any = {"page_table": torch.randperm(32).int().view(4, 8)} if page else {}
    if packed:
        q, new = q.flatten(0, 1), new.flatten(1, 2)
        options |= {"cu_seqlens_q": torch.arange(5, dtype=torch.int32), "max_seqlen_q": 1}
    launched: list[Any] = []
    make = runners.append_launch
    monkeypatch.setattr(runners, "append_launch", lambda *given: launched.append(given) or make(*given))
    found = {}
    for backend in ("reference", "triton"):
        cache = pool.clone()
        out = attention_kv(q, *cache, lengths, k_new=new[0], v_new=new[1], backend=backend, **options)
        found[backend] = out, cache
    assert bool(launched) == (packed or heads > 2 * 16)
    assert torch.equal(found["triton"][1], found["reference"][1])
    torch.testing.assert_close(found["triton"][0], found["reference"][0])
