"""Rotary embeddings of flash-attn's layers, beside complex numbers in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tilewise
from tilewise.compat import rotary


def rotated(x: Tensor, at: Tensor, base: float, width: int, interleaved: bool) -> Tensor:
    """x (.., H, D) times exp(i t base^(-2 k / width)), t = at[..], the first `width` dims as complex numbers."""
    x, out = x.double(), x.double().clone()
    turns = at.double()[..., None] * base ** (-torch.arange(0, width, 2).double() / width)
    pairs = (
        (slice(0, width, 2), slice(1, width, 2)) if interleaved else (slice(0, width // 2), slice(width // 2, width))
    )
    first, second = (x[..., p] for p in pairs)
    y = torch.complex(first, second) * torch.polar(torch.ones_like(turns), turns)[..., None, :]
    out[..., pairs[0]], out[..., pairs[1]] = y.real, y.imag
    return out


def tables(n: int, width: int, base: float = 100.0) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(n).double(), base ** (-torch.arange(0, width, 2).double() / width))
    return angles.cos().float(), angles.sin().float()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, "tensor"])
@pytest.mark.parametrize("width", [16, 10])
def test_dense(interleaved: bool, offsets: Any, width: int) -> None:
    x = torch.randn(2, 7, 3, 16)
    offsets = torch.tensor([4, 0]) if offsets == "tensor" else offsets
    at = torch.arange(7) + (offsets[:, None] if isinstance(offsets, Tensor) else offsets)
    expected = rotated(x, at.expand(2, 7), 100.0, width, interleaved)
    cos, sin = tables(20, width)
    found = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    back = rotary.apply_rotary(found, cos, sin, offsets, interleaved=interleaved, conjugate=True)
    assert_close(back, x, atol=1e-5, rtol=1e-5)
    assert rotary.apply_rotary_emb(x, cos, sin, interleaved, True, offsets) is x
    assert_close(x, found)


def test_packed() -> None:
    x, cu = torch.randn(9, 2, 8), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    at = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]) + torch.tensor([1] * 4 + [7] * 5)
    found = rotary.apply_rotary_emb(
        x, *tables(20, 8), seqlen_offsets=torch.tensor([1, 5, 7]), cu_seqlens=cu, max_seqlen=5
    )
    assert_close(found.double(), rotated(x, at, 100.0, 8, False), atol=1e-5, rtol=1e-5)


def test_positions_past_the_tables_are_not_rotated() -> None:
    x = torch.randn(1, 5, 2, 8)
    found = rotary.apply_rotary_emb(x, *tables(3, 8))
    assert torch.equal(found[:, 3:], x[:, 3:])
    assert not torch.equal(found[:, 2], x[:, 2])


def test_gradients_and_dtypes() -> None:
    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    cos, sin = tables(4, 8)
    dout = torch.randn(1, 4, 2, 8)
    (dx,) = torch.autograd.grad(rotary.apply_rotary_emb(x, cos, sin), x, dout)
    assert_close(dx, rotary.apply_rotary(dout, cos, sin, conjugate=True))
    half = rotary.apply_rotary_emb(x.detach().half(), cos.half(), sin.half())
    assert half.dtype == torch.float16
    y = x * 1.0
    (dx,) = torch.autograd.grad(rotary.apply_rotary_emb(y, cos, sin, inplace=True), x, dout)
    assert_close(dx, rotary.apply_rotary(dout, cos, sin, conjugate=True))


@pytest.mark.parametrize("scale_base", [None, 512.0])
@pytest.mark.parametrize("kind", ["qkv", "grouped", "q and kv"])
def test_the_module(kind: str, scale_base: float | None) -> None:
    module = rotary.RotaryEmbedding(8, base=100.0, scale_base=scale_base)
    q, k, v = (torch.randn(2, 6, heads, 8) for heads in (4, 4 if kind == "qkv" else 2, 4 if kind == "qkv" else 2))
    at = (torch.arange(6) + 2).expand(2, 6)
    wanted = [rotated(x, at, 100.0, 8, False) for x in (q, k)]
    if scale_base is not None:
        s = (torch.arange(0, 8, 2).double() + 3.2) / 11.2
        scale = (s ** ((at[0].double() - 4) / scale_base)[:, None]).repeat(1, 2)[:, None]
        wanted = [wanted[0] * scale, wanted[1] / scale]
    if kind == "q and kv":
        found_q, kv = module(q, torch.stack([k, v], 2), seqlen_offset=2)
        found = [found_q, *kv.unbind(2)]
    elif kind == "qkv":
        found = [*module(torch.stack([q, k, v], 2), seqlen_offset=2).unbind(2)]
    else:
        qkv = module(torch.cat([q, k, v], 2), seqlen_offset=2, num_heads_q=4)
        found = [*qkv.split((4, 2, 2), 2)]
    for a, b in zip(found, [*wanted, v.double()], strict=True):
        assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


def test_tables_follow_the_input() -> None:
    module = rotary.RotaryEmbedding(8)
    first = module._tables_of(4, torch.zeros(1))
    assert module._tables_of(3, torch.zeros(1)) is first
    assert module._tables_of(5, torch.zeros(1))[0].shape == (5, 4)
    assert module._tables_of(5, torch.zeros(1).half())[0].dtype == torch.float16
    x = torch.randn(1, 2, 3, 1, 8)
    assert_close(module.half()(x.clone()), rotary.RotaryEmbedding(8)(x.clone()))  # the cast buffer is not used
    found = module(x.clone().half(), seqlen_offset=torch.tensor([1]))  # as many positions as are known
    assert_close(found[:, :1], rotary.RotaryEmbedding(8)(x.clone().half(), seqlen_offset=1)[:, :1])


def test_bad_input() -> None:
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(tilewise.AttentionError, match="width at most 8"):
        rotary.apply_rotary_emb(x, *tables(4, 16))
    with pytest.raises(tilewise.AttentionError, match="num_heads_q"):
        rotary.apply_rotary_emb_qkv_(x, *tables(4, 8))
    with pytest.raises(tilewise.AttentionError, match="max_seqlen"):
        rotary.RotaryEmbedding(8)(torch.randn(1, 4, 3, 2, 8), seqlen_offset=torch.tensor([1]))


def test_module_is_found_without_an_import(monkeypatch):
    monkeypatch.delattr(tilewise.compat, "rotary")  # an import of the module sets it
    assert tilewise.compat.rotary is rotary
