"""FlashMLA's functions: what its own tests promise, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.mla_cases import MlaCase, answer, inputs
from tilewise import AttentionError, pack_mla
from tilewise.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata


def close(found: Tensor, exact: Tensor) -> None:
    assert found.isfinite().equal(exact.isfinite())
    some = exact.isfinite()
    largest = max([1.0, *exact[some].abs().tolist()])  # sums of 576 products in float32 are rounded in some order
    assert ((found.double() - exact.double())[some].abs() < 2e-5 * largest).all()
    assert (found[~some] == exact[~some]).all()


@pytest.mark.parametrize("packed", [False, True], ids=["16-bit", "fp8"])
@pytest.mark.parametrize("causal", [False, True])
def test_dense(causal: bool, packed: bool) -> None:
    x = inputs(MlaCase((150, 65, 0), heads=3, queries=2, page=64, packed=packed), torch.float32)
    meta, splits = get_mla_metadata(x.lengths, 6, 1)
    for _ in range(2):  # the second call uses the plan of the first
        out, lse = flash_mla_with_kvcache(
            x.q, x.cache, x.options["page_table"], x.lengths, 512, meta, splits, None, causal, packed
        )
        exact, logs = answer(x.q, x.keys, torch.float64, causal)
        close(out, exact)
        close(lse, logs.masked_fill(logs == -torch.inf, torch.inf))
    assert meta.plan is not None
    with pytest.raises(AttentionError, match="get_mla_metadata"):
        flash_mla_with_kvcache(
            x.q[:, :1], x.cache, x.options["page_table"], x.lengths, 512, meta, splits, None, causal, packed
        )


def named(cache: Tensor, indices: Tensor, counts: list[int]) -> list[Tensor]:
    """The keys of each query, float64."""
    flat = cache.double().flatten(0, -2)
    rows = [row[:n] for row, n in zip(indices.flatten(0, 1).long(), counts, strict=True)]
    return [flat[row[(row >= 0) & (row < len(flat))]] for row in rows]


def sunk(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """out (n, 1, H, 512), lse (n, H, 1)"""
    return out * torch.sigmoid(lse - sink[:, None].double()).transpose(1, 2)[..., None]


def test_indices() -> None:
    g = torch.Generator().manual_seed(0)
    q, cache, extra = (torch.randn(*n, generator=g) for n in ((2, 2, 4, 576), (5, 16, 1, 576), (3, 8, 1, 576)))
    indices = torch.stack([torch.randperm(80, generator=g)[:12] for _ in range(4)]).view(2, 2, 12).int()
    indices[0, 0, 3] = indices[1, 1] = -1
    more = torch.stack([torch.randperm(24, generator=g)[:6] for _ in range(4)]).view(2, 2, 6).int()
    more[1, 1] = -1
    length = torch.tensor([12, 7], dtype=torch.int32)
    sink = torch.tensor([0.5, -torch.inf, torch.inf, 3.0])
    rest: Any = {"attn_sink": sink, "extra_k_cache": extra, "extra_indices_in_kvcache": more, "topk_length": length}
    out, lse = flash_mla_with_kvcache(
        q, cache, None, None, 512, get_mla_metadata()[0], None, 0.1, indices=indices, **rest
    )
    keys = [
        torch.cat(pair) for pair in zip(named(cache, indices, [12, 12, 7, 7]), named(extra, more, [6] * 4), strict=True)
    ]
    rows = q.flatten(0, 1)[:, None] * (0.1 * 576**0.5)
    exact, logs = answer(rows, keys, torch.float64, False)
    close(out.flatten(0, 1)[:, None], sunk(exact, logs, sink).nan_to_num(0.0))
    logs = logs.masked_fill(logs == -torch.inf, torch.inf)
    close(lse.transpose(1, 2).flatten(0, 1)[..., None], logs)
    assert (out[1, 1] == 0).all()


def test_sparse_prefill() -> None:
    g = torch.Generator().manual_seed(0)
    q, kv = torch.randn(7, 3, 576, generator=g), torch.randn(40, 1, 576, generator=g)
    indices = torch.stack([torch.randperm(40, generator=g)[:9] for _ in range(7)])[:, None].int()
    indices[2], indices[3, 0, 2] = -1, 40
    length = torch.tensor([9, 0, 5, 9, 1, 9, 9], dtype=torch.int32)
    sink = torch.tensor([0.5, -torch.inf, 2.0])
    out, most, lse = flash_mla_sparse_fwd(q, kv, indices, 0.05, attn_sink=sink, topk_length=length)
    keys = named(kv, indices, length.tolist())
    exact, logs = answer(q[:, None] * (0.05 * 576**0.5), keys, torch.float64, False)
    close(out[:, None], sunk(exact, logs, sink).nan_to_num(0.0))
    close(lse[..., None], logs.masked_fill(logs == -torch.inf, torch.inf))
    for row, k, found in zip(q.double(), keys, most, strict=True):
        s = (row @ k.mT) * 0.05
        close(found, s.amax(-1) if len(k) else s.new_full((3,), -torch.inf))


def test_bad_input() -> None:
    x = inputs(MlaCase((20,), page=64), torch.float32)
    meta, table = get_mla_metadata()[0], x.options["page_table"]
    indices = torch.zeros(1, 1, 4, dtype=torch.int32)

    def refused(expected: str, *args: Any, **options: Any) -> None:
        with pytest.raises(AttentionError, match=expected):
            flash_mla_with_kvcache(*args, **options)

    refused("tile_scheduler_metadata", x.q, x.cache, table, x.lengths, 512, None)
    refused("num_splits", x.q, x.cache, table, x.lengths, 512, meta, 3)
    refused("head_dim_v", x.q, x.cache, table, x.lengths, 256, meta)
    refused("k_cache", x.q, x.cache, table, x.lengths, 512, meta, is_fp8_kvcache=True)
    refused("block_table", x.q, x.cache, None, x.lengths, 512, meta)
    refused("causal", x.q, x.cache, None, None, 512, meta, causal=True, indices=indices)
    refused("given without indices", x.q, x.cache, table, x.lengths, 512, meta, attn_sink=torch.zeros(4))
    refused("extra_k_cache", x.q, x.cache, None, None, 512, meta, indices=indices, extra_k_cache=x.cache)
    refused("attn_sink", x.q, x.cache, None, None, 512, meta, indices=indices, attn_sink=torch.zeros(5))
    refused("dtype of indices: found torch.int64", x.q, x.cache, None, None, 512, meta, indices=indices.long())
    some, both = torch.ones(1, dtype=torch.int32), "extra_k_cache and extra_indices_in_kvcache"
    for given, missing in (
        ({"extra_k_cache": x.cache}, "extra_indices_in_kvcache"),
        ({"extra_indices_in_kvcache": indices}, "extra_k_cache"),
        ({"extra_topk_length": some}, both),
        ({"extra_topk_length": some, "extra_indices_in_kvcache": indices}, "extra_k_cache"),
    ):
        match = f"extra_.*: found given without {missing}; expected {both}, or neither"
        refused(match, x.q, x.cache, None, None, 512, meta, indices=indices, **given)
    rest: Any = {"extra_k_cache": x.cache, "extra_indices_in_kvcache": indices, "extra_topk_length": some}
    refused("given without indices", x.q, x.cache, table, x.lengths, 512, meta, **rest)
    with pytest.raises(AttentionError, match="q and kv"):
        flash_mla_sparse_fwd(x.q, x.cache, indices, 1.0)
    with pytest.raises(AttentionError, match="shape of indices"):
        flash_mla_sparse_fwd(x.q[0], x.cache[0], indices[0], 1.0)
    with pytest.raises(AttentionError, match=r"kv: found torch.uint8 .*DeepSeek's fp8 format: flash_mla_with_kvcache"):
        flash_mla_sparse_fwd(x.q[0], pack_mla(x.cache[0]), indices, 1.0)
    with pytest.raises(AttentionError, match="d_v: found 256; expected 512"):
        flash_mla_sparse_fwd(x.q[0], x.cache[0], indices, 1.0, d_v=256)


@pytest.mark.parametrize("function", ["decode", "prefill"])
def test_two_caches_and_a_sink_are_rounded_once(function: str, backend: str) -> None:
    """Against the float32 call: about the error of its result in bfloat16. Two roundings are 1.4 times that, three
    1.7."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 16, 4, 576, generator=g).bfloat16()
    cache, extra = (torch.randn(3, 8, 1, 576, generator=g).bfloat16() for _ in range(2))
    indices = torch.randint(0, 24, (1, 16, 6), generator=g).int()
    sink = torch.tensor([0.5, -1.0, 1.0, 2.0])

    def call(q: Tensor, cache: Tensor, extra: Tensor) -> Tensor:
        if function == "prefill":
            return flash_mla_sparse_fwd(q[0], cache.flatten(0, 1), indices[0][:, None], 0.02, attn_sink=sink)[0]
        given: Any = {"extra_k_cache": extra, "extra_indices_in_kvcache": indices, "attn_sink": sink}
        meta, _ = get_mla_metadata()
        out, _ = flash_mla_with_kvcache(q, cache, None, None, 512, meta, None, 0.02, indices=indices, **given)
        return out

    out, exact = call(q, cache, extra), call(*(x.float() for x in (q, cache, extra)))
    assert out.dtype == torch.bfloat16
    error, least = ((x.float() - exact).square().mean().sqrt() for x in (out, exact.bfloat16()))
    assert error <= 1.2 * least


def test_no_indices() -> None:
    q, cache, none = torch.randn(2, 3, 4, 576), torch.randn(2, 8, 1, 576), torch.zeros(2, 3, 0, dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(q, cache, None, None, 512, get_mla_metadata()[0], indices=none)
    assert (out == 0).all()
    assert (lse == torch.inf).all()
    rest: Any = {"extra_k_cache": cache, "extra_indices_in_kvcache": none + torch.zeros(2, 3, 1, dtype=torch.int32)}
    flash_mla_with_kvcache(q, cache, None, None, 512, get_mla_metadata()[0], indices=none, **rest)
    out, most, lse = flash_mla_sparse_fwd(q[0], cache[0], none[0, :, None], 0.1)
    assert (out == 0).all()
    assert (most == -torch.inf).all()
    assert (lse == torch.inf).all()
