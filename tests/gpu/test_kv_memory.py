"""Calls with a KV cache that share memory, or have wrong contents, on a GPU: shared memory raises, also where a call of
the same layouts has a plan; contents are read with TILEWISE_CHECK=1 alone. FlashMLA's functions round once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tilewise.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata


def test_shared_memory(device: str) -> None:
    new = torch.randn(2, 1, 1, 2, 64, device=device).half()
    lengths = torch.tensor([2], dtype=torch.int32, device=device)
    pool = torch.zeros(4, 8, 2, 64, device=device).half()
    for first in (1, 2):
        tilewise.append_kv(*new, pool[:1], pool[first : first + 1], lengths)
    tilewise.append_kv(*new, pool[:2], pool[2:], lengths)
    with pytest.raises(tilewise.AttentionError, match="v_new: found other memory than k_new's"):
        tilewise.append_kv(*new, pool[:1], pool[:1], lengths)
    with pytest.raises(tilewise.AttentionError, match="k_cache and v_cache: found in the same memory"):
        tilewise.append_kv(*new, pool[:2], pool[1:3], lengths)
    cache, scale = torch.zeros(2, 1, 8, 2, 64, dtype=torch.int8, device=device), torch.ones(2, 1, 8, 2, device=device)
    tilewise.append_kv(*new, *cache, lengths, k_scale=scale[0], v_scale=scale[1])
    for v_scale in (scale[0], scale[:1][0]):
        with pytest.raises(tilewise.AttentionError, match="k_scale and v_scale: found in the same memory"):
            tilewise.append_kv(*new, *cache, lengths, k_scale=scale[0], v_scale=v_scale)
    out = torch.zeros(512, device=device).half().as_strided((1, 1, 4, 64), (256, 256, 32, 1))
    with pytest.raises(tilewise.AttentionError, match="strides of out"):
        tilewise.attention_kv(torch.randn(1, 1, 4, 64, device=device).half(), pool[:1], pool[1:2], lengths, out=out)


def test_contents_are_read_where_asked(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache = torch.randn(2, 1, 4, 64, device=device).half(), torch.randn(2, 2, 8, 2, 64, device=device).half()
    lengths = torch.tensor([3, 9], dtype=torch.int32, device=device)
    call: Any = q, *cache, lengths
    tilewise.attention_kv(*call)
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            tilewise.attention_kv(*call)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for function in (tilewise.attention_kv, tilewise.plan_kv, tilewise.check_kv):
        monkeypatch.setenv("TILEWISE_CHECK", "1")
        with pytest.raises(tilewise.AttentionError, match="tokens of sequence 1: found 9; expected at most 8"):
            function(*call)
        monkeypatch.delenv("TILEWISE_CHECK")
    tilewise.attention_kv(*call)


def test_no_overlap_set_later(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call has kernels of its own."""
    from tilewise.plan_cache import plans

    q = torch.randn(1, 300, 2, 64, device=device).half()
    first, count = tilewise.attention(q, q, q), len(plans)
    monkeypatch.setenv("TILEWISE_NO_OVERLAP", "1")
    assert torch.equal(tilewise.attention(q, q, q), first)
    assert len(plans) > count


@pytest.mark.parametrize("function", ["decode", "prefill"])
@pytest.mark.parametrize("heads", [16, 64])
def test_flash_mla_rounds_once(function: str, heads: int, device: str) -> None:
    g = torch.Generator(device).manual_seed(0)
    q = torch.randn(1, 64, heads, 576, generator=g, device=device).bfloat16()
    caches = torch.randn(2, 8, 64, 1, 576, generator=g, device=device).bfloat16()
    indices = torch.randint(0, 512, (1, 64, 128), generator=g, device=device).int()
    sink = torch.randn(heads, generator=g, device=device)

    def call(q: torch.Tensor, cache: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        named, sinks = indices.to(q.device), sink.to(q.device)
        if function == "prefill":
            return flash_mla_sparse_fwd(q[0], cache.flatten(0, 1), named[0][:, None], 0.02, attn_sink=sinks)[0]
        given: Any = {"extra_k_cache": extra, "extra_indices_in_kvcache": named, "attn_sink": sinks}
        meta, _ = get_mla_metadata()
        out, _ = flash_mla_with_kvcache(q, cache, None, None, 512, meta, None, 0.02, indices=named, **given)
        return out

    out, reference = call(q, *caches).cpu(), call(q.cpu().double(), *caches.cpu().double())
    error, least = ((x.double() - reference).square().mean().sqrt() for x in (out, reference.bfloat16()))
    assert error <= 1.3 * least
