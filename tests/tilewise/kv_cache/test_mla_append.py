"""New tokens of caches whose values are columns of the keys (MLA): the columns after them are rotated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import each_once
from tests.tilewise.kv_cache.test_append_kv import angles, rotated
from tilewise import AttentionError, QkNorm, Rotary, append_kv, attention_kv, check_kv, pack_mla

I32 = torch.int32
CASES = {"MLA": (576, 512, 64), "narrow": (80, 64, 16), "half": (96, 64, 16)}


def given(dim: int, dim_v: int, heads: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    cache, new, q = torch.randn(3, 8, 1, dim), torch.randn(2, 2, 1, dim), torch.randn(2, 2, heads, dim)
    return cache, cache[..., :dim_v], new, q


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_rotary(case: str, interleaved: bool, backend: str) -> None:
    dim, dim_v, width = CASES[case]
    cache, values, new, q = given(dim, dim_v)
    before, lengths = cache.clone(), torch.tensor([1, 5], dtype=I32)
    rotary = Rotary(*angles(width), interleaved)
    options: Any = {"k_new": new, "v_new": new[..., :dim_v], "rotary": rotary, "backend": backend}
    out = attention_kv(q, cache, values, lengths, **options)
    positions = torch.tensor([1, 2, 5, 6])

    def turned(x: Tensor) -> Tensor:
        rest = rotated(x[..., dim_v:].flatten(0, 1), positions, *angles(width), interleaved)
        return torch.cat([x[..., :dim_v].double(), rest.view(*x.shape[:3], -1)], -1)

    exact = before.double()
    for b, length in enumerate(lengths.tolist()):
        exact[b, length : length + 2] = turned(new)[b]
    torch.testing.assert_close(cache.double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache[..., :dim_v], exact[..., :dim_v].float(), atol=0, rtol=0)
    alone = attention_kv(turned(q), exact, exact[..., :dim_v], lengths + 2, backend="reference")
    torch.testing.assert_close(out.double(), alone, atol=1e-4, rtol=1e-4)
    again = before.clone()
    found = append_kv(new, new[..., :dim_v], again, again[..., :dim_v], lengths, q=q, rotary=rotary, backend=backend)
    assert found is not None
    torch.testing.assert_close(found.double(), turned(q), atol=1e-5, rtol=1e-5)
    assert torch.equal(again, cache)


def test_traced(backend: str) -> None:
    """The op finds the columns from the addresses of the caches, which a trace does not have."""
    cache, values, new, q = given(80, 64)
    lengths, rotary = torch.tensor([1, 5], dtype=I32), Rotary(*angles(16))

    def step(cache: Tensor, values: Tensor) -> Tensor:
        return attention_kv(  # type: ignore[no-any-return]
            q, cache, values, lengths, k_new=new, v_new=new[..., :64], rotary=rotary, backend=backend
        )

    other = cache.clone()
    out = step(cache, values)
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(other, other[..., :64]), out)
    assert torch.equal(other, cache)


def test_what_would_change_values() -> None:
    cache, values, new, q = given(80, 64)
    lengths, ones = torch.tensor([1, 5], dtype=I32), torch.ones(80)
    norm, wide = QkNorm(ones, ones), Rotary(*angles(32))
    for options, match in (
        (
            {"qk_norm": norm},
            r"qk_norm: found given with v_cache, a view of k_cache\[..., 0:64\]; expected None: normal",
        ),
        ({"rotary": wide}, r"rotary: found 32 dims, .*; expected a rotary embedding of at most 16 dims"),
    ):
        with pytest.raises(AttentionError, match=match):
            attention_kv(q, cache, values, lengths, k_new=new, v_new=new[..., :64], **options)
        with pytest.raises(AttentionError, match=match):
            append_kv(new, new[..., :64], cache, values, lengths, **options)
    last = cache[..., 16:]
    with pytest.raises(AttentionError, match=r"rotary: .*view of k_cache\[..., 16:80\]; expected values that are the"):
        append_kv(new, new[..., 16:], cache, last, lengths, rotary=Rotary(*angles(16)))
    append_kv(new, new[..., :64], cache, cache.clone()[..., :64], lengths, qk_norm=norm, rotary=wide)  # no view


def test_values_that_are_not_the_columns() -> None:
    cache, values, new, q = given(80, 64)
    lengths = torch.tensor([1, 5], dtype=I32)
    new[0, 0, 0, 3] = torch.nan
    check_kv(q, cache, values, lengths, k_new=new, v_new=new[..., :64].clone())
    with pytest.raises(AttentionError, match=r"v_new: found other numbers than in k_new; expected k_new\[..., 0:64\]"):
        check_kv(q, cache, values, lengths, k_new=new, v_new=new[..., 16:])


def test_one_scale() -> None:
    cache, lengths = torch.zeros(2, 8, 1, 80, dtype=torch.int8), torch.tensor([1, 5], dtype=I32)
    new = torch.randn(2, 1, 1, 80)
    by_token = torch.ones(2, 8, 1)
    for k_scale, v_scale in ((0.1, 0.2), (torch.tensor(0.1), 0.1), (by_token, by_token.clone())):
        with pytest.raises(AttentionError, match=r"k_scale and v_scale: .* expected one number or tensor for both"):
            append_kv(new, new[..., :64], cache, cache[..., :64], lengths, k_scale=k_scale, v_scale=v_scale)
    append_kv(new, new[..., :64], cache, cache[..., :64], lengths, k_scale=0.1, v_scale=0.1)
    assert torch.equal(cache[0, 1], (new[0, 0] / 0.1).round().to(torch.int8))


@each_once(dtype=[torch.int8, torch.float8_e4m3fn], dim=[80, 576], ids=str)
def test_one_scale_by_token(dtype: torch.dtype, dim: int, backend: str) -> None:
    """It is that of the whole key, rotated; the values have it too. Traced, the op finds out that they are columns."""
    torch.manual_seed(0)
    cache, scale = torch.zeros(3, 4, 1, dim, dtype=torch.uint8).view(dtype), torch.full((3, 4, 1), torch.nan)
    new, lengths = torch.randn(2, 2, 1, dim), torch.tensor([0, 1], dtype=I32)
    scale[1, 0] = 1.0  # of the token that is there before
    new[..., dim - 1] = 9.0  # the largest, behind the values
    end, q = 512 if dim == 576 else 64, torch.randn(2, 2, 4, dim)
    rotary = Rotary(*angles(8))

    def step(cache: Tensor, scale: Tensor) -> Tensor:
        options: Any = {"k_new": new, "v_new": new[..., :end], "rotary": rotary, "k_scale": scale, "v_scale": scale}
        return attention_kv(q, cache, cache[..., :end], lengths, **options, backend=backend)  # type: ignore[no-any-return]

    other, other_scale = cache.clone(), scale.clone()
    out = step(cache, scale)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(other, other_scale), out)
    assert torch.equal(other_scale.nan_to_num(-1), scale.nan_to_num(-1))
    assert torch.equal(other.view(torch.uint8), cache.view(torch.uint8))
    assert torch.equal(scale[0, :2], scale[1, 1:3])
    assert torch.equal(scale[0, :2], torch.full((2, 1), 9.0) / (127.0 if dtype == torch.int8 else 448.0))
    assert scale[2].isnan().all()
    numbers = cache.float() * scale.nan_to_num(0.0)[..., None]
    for b, length in enumerate((0, 1)):
        found, wanted = numbers[b, length : length + 2, :, :end], new[b, :, :, :end]
        assert (
            (found - wanted).abs() <= (9.0 / 127 / 1.99 if dtype == torch.int8 else wanted.abs() / 15.9 + 1e-3)
        ).all()
    rest = rotated(q[..., end:].flatten(0, 1), torch.tensor([0, 1, 1, 2]), *angles(8), False).view(2, 2, 4, -1)
    turned = torch.cat([q[..., :end], rest.float()], -1)
    alone = attention_kv(turned, numbers, numbers[..., :end], lengths + 2, backend="reference")
    torch.testing.assert_close(out, alone, atol=1e-4, rtol=1e-4)


def fp8_cache(*shape: int) -> Tensor:
    """A cache in DeepSeek's fp8 format, full of bytes that are no numbers."""
    return torch.full((*shape, 1, 656), 255, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_deepseek_fp8(dtype: torch.dtype, backend: str) -> None:
    """The bytes of `pack_mla`, of numbers of any size, and no others: dense, by rows; in pages; at slots."""
    torch.manual_seed(0)
    new = (torch.randn(2, 3, 1, 576) * torch.tensor([1e-4, 1.0, 300.0])[:, None, None]).to(dtype)
    new[0, 1, 0, 128:256] = 0
    lengths, slots = (
        torch.tensor([1, 6], dtype=I32),
        torch.tensor([30, -1, 3, 7, 8, 200 if backend == "triton" else -9]),
    )
    table = torch.tensor([[4, 1, 7], [0, 5, 2]], dtype=I32)
    rows = torch.tensor([2, 0], dtype=I32)
    dense: list[Any] = [(2, 1), (2, 2), (2, 3), (0, 6), (0, 7), (0, 8)]
    if backend == "triton":
        dense[-1] = None  # it does not fit: kernels skip it
    paged = [(int(table[b, j // 3]), j % 3) for b, n in enumerate((1, 6)) for j in range(n, n + 3)]
    named = [(7, 2), None, (0, 3), (1, 3), (2, 0), None]
    for places, options, shape in (
        (dense, {"cache_rows": rows}, (3, 8 if backend == "triton" else 9)),
        (paged, {"page_table": table}, (9, 3)),
        (named, {"slots": slots}, (9, 4)),
    ):
        cache = fp8_cache(*shape)
        wanted = cache.clone().view(torch.uint8)
        for place, token in zip(places, new.flatten(0, 1), strict=True):
            if place is not None:
                wanted[place] = pack_mla(token)
        append_kv(new, new[..., :512], cache, cache[..., :512], lengths, backend=backend, **options)
        assert torch.equal(cache.view(torch.uint8), wanted)


@pytest.mark.parametrize("interleaved", [False, True])
def test_deepseek_fp8_rotated_and_read(interleaved: bool, backend: str) -> None:
    """Packed queries; tokens 656 and 672 bytes apart."""
    torch.manual_seed(0)
    new, q = torch.randn(4, 1, 576).bfloat16(), torch.randn(4, 2, 576).bfloat16()
    lengths, cu = torch.tensor([1, 5], dtype=I32), torch.tensor([0, 3, 4], dtype=I32)
    rotary, at = Rotary(*angles(64), interleaved), torch.tensor([1, 2, 3, 5])
    cache = torch.zeros(2, 8, 1, 672 if interleaved else 656, dtype=torch.uint8)[..., :656]
    cache.copy_(pack_mla(torch.randn(2, 8, 1, 576)))
    wanted, exact = cache.clone(), rotated(new[..., 512:], at, *angles(64), interleaved).float()
    packed = pack_mla(torch.cat([new[..., :512].float(), exact], -1))
    wanted[0, 1:4], wanted[1, 5] = packed[:3], packed[3]
    k = cache.view(torch.float8_e4m3fn)
    options: Any = {"cu_seqlens_q": cu, "k_new": new, "v_new": new[..., :512], "rotary": rotary, "backend": backend}
    out = attention_kv(q, k, k[..., :512], lengths, **options)
    assert torch.equal(cache[..., :528], wanted[..., :528])
    rest, other = (x[..., 528:].contiguous().view(torch.bfloat16).double() for x in (cache, wanted))
    torch.testing.assert_close(rest, other, rtol=2**-7, atol=1e-6)  # one unit in the last place
    q_rotated = torch.cat([q[..., :512].double(), rotated(q[..., 512:], at, *angles(64), interleaved)], -1).bfloat16()
    totals = torch.tensor([4, 6], dtype=I32)
    alone = attention_kv(q_rotated, k, k[..., :512], totals, cu_seqlens_q=cu, backend="reference")
    torch.testing.assert_close(out, alone, atol=2e-2, rtol=2e-2)


def test_deepseek_fp8_keeps_signs_of_zeros(backend: str) -> None:
    """Only the last dims are rotated: the bytes of the others are those of `pack_mla`."""
    new, cache = -torch.zeros(1, 1, 1, 576), fp8_cache(1, 2)
    rotary, lengths = Rotary(*angles(2), True), torch.tensor([0], dtype=I32)
    append_kv(new, new[..., :512], cache, cache[..., :512], lengths, rotary=rotary, backend=backend)
    found, wanted = (x.view(torch.uint8)[0, 0, 0] for x in (cache, pack_mla(new)))
    assert torch.equal(found[:528], wanted[:528])
    assert torch.equal(found[532:], wanted[532:])


def test_deepseek_fp8_traced(backend: str) -> None:
    new, q, lengths = torch.randn(2, 1, 1, 576), torch.randn(2, 1, 2, 576), torch.tensor([1, 5], dtype=I32)
    cache = pack_mla(torch.randn(2, 8, 1, 576)).view(torch.float8_e4m3fn)
    rotary, other = Rotary(*angles(64)), cache.clone()

    def step(k: Tensor) -> Tensor:
        options: Any = {"k_new": new, "v_new": new[..., :512], "rotary": rotary, "backend": backend}
        return attention_kv(q, k, k[..., :512], lengths, **options)  # type: ignore[no-any-return]

    out = step(cache)
    torch.testing.assert_close(torch.compile(step, backend="eager", fullgraph=True)(other), out)
    assert torch.equal(other.view(torch.uint8), cache.view(torch.uint8))


def test_deepseek_fp8_at_odd_addresses() -> None:
    """The reference writes anywhere, the kernels at multiples of 4 bytes."""
    room = torch.zeros(2, 8, 1, 658, dtype=torch.uint8).view(torch.float8_e4m3fn)
    cache, lengths, new = room[..., :656], torch.tensor([1, 5], dtype=I32), torch.randn(2, 1, 1, 576)
    append_kv(new, new[..., :512], cache, cache[..., :512], lengths, backend="reference")
    assert torch.equal(cache[1, 5].view(torch.uint8), pack_mla(new[1, 0]))
