"""New tokens of caches whose values are columns of the keys (MLA): the columns after them are rotated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

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
    for k_scale, v_scale in ((0.1, 0.2), (torch.tensor(0.1), 0.1), (by_token, by_token)):
        with pytest.raises(AttentionError, match=r"k_scale and v_scale: .* expected one number or tensor for both"):
            append_kv(new, new[..., :64], cache, cache[..., :64], lengths, k_scale=k_scale, v_scale=v_scale)
    append_kv(new, new[..., :64], cache, cache[..., :64], lengths, k_scale=0.1, v_scale=0.1)
    assert torch.equal(cache[0, 1], (new[0, 0] / 0.1).round().to(torch.int8))


def test_deepseek_fp8() -> None:
    cache = pack_mla(torch.randn(2, 8, 1, 576)).view(torch.float8_e4m3fn)
    new, lengths = torch.randn(2, 1, 1, 576), torch.tensor([1, 5], dtype=I32)
    for k in (cache, cache.view(torch.uint8)):
        with pytest.raises(AttentionError, match=r"k_new: found new tokens for a cache of 656 bytes .*pack_mla"):
            append_kv(new, new[..., :512], k, k[..., :512], lengths, k_scale=1.0, v_scale=1.0)
