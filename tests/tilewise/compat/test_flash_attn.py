"""flash-attn's functions: what they mean, against a few lines of torch; what an unchanged program finds."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tilewise
from tests.forks import python
from tilewise.adapters import flash_install as modules
from tilewise.compat import bert_padding, flash_attn, flash_attn_3


def naive(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False, left: int = -1,
    right: int = -1, softcap: float = 0.0, slopes: Tensor | None = None, qv: Tensor | None = None, chunk: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What flash-attn's documentation says, in float64: (B, S, H, D)."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    d = q.shape[-1] + (0 if qv is None else qv.shape[-1])
    s = torch.einsum("bihd,bjhd->bhij", q, k)
    if qv is not None:
        s = s + torch.einsum("bihd,bjhd->bhij", qv, v)
    s = s * (d**-0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    p = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    j = torch.arange(k.shape[1])
    if slopes is not None:
        s = s - slopes[..., None, None].double() * (p - j).abs()
    seen = torch.ones_like(p - j, dtype=torch.bool)
    right = 0 if causal else right
    seen = seen & (j >= p - left) if left >= 0 else seen
    seen = seen & (j <= p + right) if right >= 0 else seen
    seen = seen & (p // chunk == j // chunk) if chunk else seen
    lse = s.masked_fill(~seen, -torch.inf).logsumexp(-1)
    weights = torch.exp(s - lse[..., None]).masked_fill(~seen | (lse == -torch.inf)[..., None], 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def made(n_q: int = 7, n_k: int = 9, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(2, n_q, heads, 8, dtype=torch.float64)
    return q, *(torch.randn(2, n_k, kv_heads, 8, dtype=torch.float64) for _ in "kv")  # type: ignore[return-value]


WORDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"causal": True, "softmax_scale": 0.3}, {"causal": True, "scale": 0.3}),
    ({"window_size": (2, 1)}, {"left": 2, "right": 1}),
    ({"window_size": (3, -1), "causal": True}, {"left": 3, "causal": True}),
    ({"window_size": (-1, 1)}, {"right": 1}),
    ({"softcap": 2.0}, {"softcap": 2.0}),
    ({"deterministic": True}, {}),
]


@pytest.mark.parametrize(("theirs", "ours"), WORDS, ids=str)
def test_dense(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    q, k, v = made()
    out, lse, probs = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **theirs)
    assert_close((out, lse), naive(q, k, v, **ours))
    assert probs is None
    assert_close(flash_attn_3.flash_attn_func(q, k, v, **theirs), out)
    assert_close(flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **theirs), out)


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_alibi(shape: tuple[int, ...]) -> None:
    q, k, v = made()
    slopes = torch.rand(shape)
    assert_close(flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes), naive(q, k, v, slopes=slopes)[0])


def test_a_window_as_a_tensor() -> None:
    """flash-attn converts it to two ints."""
    q = torch.randn(1, 7, 2, 16)
    cu = torch.tensor([0, 7], dtype=torch.int32)
    for function, args in (
        (flash_attn.flash_attn_func, (q, q, q)),
        (flash_attn_3.flash_attn_func, (q, q, q)),
        (flash_attn.flash_attn_varlen_func, (*[q[0]] * 3, cu, cu, 7, 7)),
        (flash_attn.flash_attn_with_kvcache, (q, q, q)),
    ):
        call: Any = function
        found, wanted = (call(*args, window_size=x) for x in (torch.tensor([2, 1]), (2, 1)))
        assert_close(found, wanted, rtol=0, atol=0)
    for wrong in (torch.tensor([2.0, 1.0]), torch.tensor([2, 1, 0])):
        with pytest.raises(tilewise.AttentionError, match="window_size"):
            flash_attn.flash_attn_func(q, q, q, window_size=wrong)


def test_packed_together() -> None:
    q, k, v = made(9, 9, 4, 4)
    qkv = torch.stack([q, k, v], 2)
    expected = naive(q, k, v, causal=True)[0]
    assert_close(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    assert_close(flash_attn_3.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    grouped = torch.cat([q, k[:, :, :2], v[:, :, :2]], 2)
    assert_close(flash_attn_3.flash_attn_qkvpacked_func(grouped, num_heads_q=4), naive(q, k[:, :, :2], v[:, :, :2])[0])
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    flat = qkv.flatten(0, 1)
    for found in (
        flash_attn.flash_attn_varlen_qkvpacked_func(flat, cu, 9, causal=True),
        flash_attn.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], cu, cu, 9, 9, causal=True),
        flash_attn.flash_attn_varlen_func(*flat.unbind(1), cu, cu, 9, 9, causal=True),
        flash_attn_3.flash_attn_varlen_func(*flat.unbind(1), cu, cu, 9, 9, causal=True),
    ):
        assert_close(found.view_as(expected), expected)


def test_parts_of_sequences() -> None:
    q, k, v = made(9, 9)
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    used_q, used_k = torch.tensor([4, 9], dtype=torch.int32), torch.tensor([9, 5], dtype=torch.int32)
    out = flash_attn_3.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), cu, cu, 9, 9, seqused_q=used_q, seqused_k=used_k, causal=True
    ).view_as(q)
    for b, (n, m) in enumerate(zip(used_q.tolist(), used_k.tolist(), strict=True)):
        expected, _ = naive(q[b : b + 1, :n], k[b : b + 1, :m], v[b : b + 1, :m], causal=True)
        assert_close(out[b : b + 1, :n], expected)
        assert not out[b, n:].any()


def test_what_flash_attention_3_has_more() -> None:
    q, k, v = made()
    qv = torch.randn_like(q)
    assert_close(flash_attn_3.flash_attn_func(q, k, v, qv=qv, causal=True), naive(q, k, v, qv=qv, causal=True)[0])
    chunked = flash_attn_3.flash_attn_func(q, k, v, causal=True, attention_chunk=3)
    assert_close(chunked, naive(q, k, v, causal=True, chunk=3)[0])
    parts = [flash_attn_3.flash_attn_func(q, k[:, c], v[:, c], return_attn_probs=True) for c in (slice(4), slice(4, 9))]
    out, lse = flash_attn_3.flash_attn_combine(
        torch.stack([o for o, _ in parts]), torch.stack([l.mT for _, l in parts])
    )
    assert_close((out, lse.mT), naive(q, k, v))


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("left", [1.5, torch.nan, torch.inf])
def test_parts_that_saw_nothing_count_as_0(parts: int, left: float) -> None:
    """Whatever memory held there: kernels that see no key need not write."""
    torch.manual_seed(0)
    out, lse = torch.randn(parts, 2, 3, 3, 8), torch.randn(parts, 2, 3, 3)
    lse[0, 0, 1], lse[:, 1, 2] = -torch.inf, -torch.inf
    clean = out.masked_fill((lse == -torch.inf)[..., None], 0.0)
    weights = torch.softmax(lse, 0).nan_to_num(0.0)
    found, total = flash_attn_3.flash_attn_combine(clean.where((lse > -torch.inf)[..., None], left), lse)
    assert_close(found, (weights[..., None] * clean).sum(0))
    assert_close(total, lse.logsumexp(0))
    assert (found[1, 2] == 0).all()


def test_gradients_flow() -> None:
    leaves = [x.requires_grad_() for x in made()]
    ours = torch.autograd.grad(flash_attn.flash_attn_func(*leaves, causal=True).sin().sum(), leaves)
    assert_close(ours, torch.autograd.grad(naive(*leaves, causal=True)[0].sin().sum(), leaves))


def test_what_cannot_be_honoured_raises() -> None:
    q, k, v = made()
    cu = torch.tensor([0, 7], dtype=torch.int32)
    for call, words in (
        (lambda: flash_attn.flash_attn_func(q, k, v, dropout_p=0.1, return_attn_probs=True), "one of them"),
        (lambda: flash_attn.flash_attn_with_kvcache(q, k, v, rotary_cos=cu), "both"),
        (lambda: flash_attn_3.flash_attn_with_kvcache(q, k, v, qv=q[:1]), "shape of qv"),
        (lambda: flash_attn_3.flash_attn_func(q, k, v, q_descale=torch.ones(2, 2)), "FP8"),
        (lambda: flash_attn.flash_attn_qkvpacked_func(q), "5 axes"),
        (lambda: flash_attn_3.flash_attn_qkvpacked_func(q), "num_heads_q"),
    ):
        with pytest.raises(tilewise.AttentionError, match=words):
            call()


def test_a_cache_as_it_is() -> None:
    q, k, v = made(1)
    assert_close(flash_attn.flash_attn_with_kvcache(q, k, v, causal=True), naive(q, k, v)[0])


def turned(x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of x (B, S, H, D) at places (B, S)."""
    c, s = (t[places][:, :, None].double() for t in (cos, sin))
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    found = a * c - b * s, a * s + b * c
    return torch.stack(found, -1).flatten(-2) if interleaved else torch.cat(found, -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rotary", [True, False])
def test_a_cache_that_grows(rotary: bool, causal: bool, interleaved: bool) -> None:
    """New keys are written (and turned) at each sequence's length; queries are turned as flash-attn turns them."""
    q, k, v = made(3, 12)
    k_new, v_new = (torch.randn(2, 3, 2, 8, dtype=torch.float64) for _ in "kv")
    lengths = torch.tensor([4, 7], dtype=torch.int32)
    angles = torch.rand(12, 4, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    places = lengths[:, None].long() + torch.arange(3)
    expected = []
    for b, n in enumerate(lengths.tolist()):
        at = places[b : b + 1]
        new, ask = k_new[b : b + 1], q[b : b + 1]
        if rotary:
            new = turned(new, cos, sin, at, interleaved)
            ask = turned(ask, cos, sin, at if causal else at[:, :1].expand(-1, 3), interleaved)
        keys, values = torch.cat([k[b : b + 1, :n], new], 1), torch.cat([v[b : b + 1, :n], v_new[b : b + 1]], 1)
        expected.append(naive(ask, keys, values, causal=causal))
    words = {"rotary_cos": cos, "rotary_sin": sin} if rotary else {}
    for module in (flash_attn, flash_attn_3):
        caches = k.clone(), v.clone()
        out, lse = module.flash_attn_with_kvcache(
            q, *caches, k_new, v_new, cache_seqlens=lengths, causal=causal, rotary_interleaved=interleaved,
            return_softmax_lse=True, **words,
        )  # fmt: skip
        assert_close(out, torch.cat([o for o, _ in expected]))
        assert_close(lse, torch.cat([l for _, l in expected]), check_dtype=False)
        assert_close(caches[1][0, 4:7], v_new[0])


def test_pages() -> None:
    q, k, v = made(1, 12)
    table = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32)
    pages = [torch.full((6, 4, 2, 8), torch.nan, dtype=torch.float64) for _ in "kv"]
    for page, x in zip(pages, (k, v), strict=True):
        page[table.long().flatten()] = x.reshape(6, 4, 2, 8)
    lengths = torch.tensor([5, 12], dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, block_table=table, causal=True)
    cu_q, cu_k = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 5, 17], dtype=torch.int32)
    packed = flash_attn.flash_attn_varlen_func(q[:, 0], *pages, cu_q, cu_k, 1, 12, causal=True, block_table=table)
    for b, n in enumerate(lengths.tolist()):
        expected, _ = naive(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n])
        assert_close(out[b : b + 1], expected)
        assert_close(packed[b], expected[0, 0])


def test_rows_of_a_page_table() -> None:
    q, k, v = made(1, 12)
    table = torch.tensor([[9, 9, 9], [1, 4, 2], [3, 0, 5]], dtype=torch.int32)
    pages = [torch.full((6, 4, 2, 8), torch.nan, dtype=torch.float64) for _ in "kv"]
    for page, x in zip(pages, (k, v), strict=True):
        page[table.long()[[2, 1]].flatten()] = x.reshape(6, 4, 2, 8)
    words = {"cache_seqlens": torch.tensor([5, 12], dtype=torch.int32), "page_table": table}
    rows = torch.tensor([2, 1], dtype=torch.int32)
    out = flash_attn_3.flash_attn_with_kvcache(q, *pages, cache_batch_idx=rows, num_splits=1, **words)
    for b, n in enumerate((5, 12)):
        assert_close(out[b : b + 1], naive(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n])[0])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_rotation_by_lengths_of_its_own(causal: bool, packed: bool) -> None:
    """rotary_seqlens: where the new tokens' angles begin, whatever is in the cache."""
    q, k, v = made(3, 12)
    k_new, v_new = (torch.randn(2, 3, 2, 8, dtype=torch.float64) for _ in "kv")
    lengths, own = (torch.tensor(x, dtype=torch.int32) for x in ([4, 7], [1, 6]))
    angles = torch.rand(12, 4, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    at = own[:, None].long() + torch.arange(3)
    new, asked = (
        turned(k_new, cos, sin, at, True),
        turned(q, cos, sin, at if causal else at[:, :1].expand(-1, 3), True),
    )
    cu = torch.tensor([0, 3, 6], dtype=torch.int32)
    words = {"cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "max_seqlen_q": 3} if packed else {}
    given = [x.flatten(0, 1) if packed else x for x in (q, k_new, v_new)]
    out = flash_attn_3.flash_attn_with_kvcache(
        given[0], k.clone(), v.clone(), *given[1:], rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
        rotary_seqlens=own, causal=causal, **words,
    ).view(2, 3, 4, 8)  # fmt: skip
    for b, n in enumerate(lengths.tolist()):
        keys, values = torch.cat([k[b, :n], new[b]]), torch.cat([v[b, :n], v_new[b]])
        assert_close(out[b : b + 1], naive(asked[b : b + 1], keys[None], values[None], causal=causal)[0])


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["2", "3"])
@pytest.mark.parametrize("new", [1, 5])
def test_queries_turn_from_the_first_new_key_on(module: Any, new: int) -> None:
    """As flash-attn says: by cache_seqlens, cache_seqlens + 1 and so on, however many keys are new."""
    torch.manual_seed(0)
    q, lengths = torch.randn(2, 3, 4, 8), torch.tensor([4, 9], dtype=torch.int32)
    k, v = torch.randn(2, new, 2, 8), torch.randn(2, new, 2, 8)
    angles = torch.rand(32, 4) * 6
    caches = [torch.randn(2, 2, 16, 2, 8) for _ in range(2)]
    caches[1].copy_(caches[0])
    words = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": False}
    ours = module.flash_attn_with_kvcache(q, *caches[0], k, v, cache_seqlens=lengths, causal=True, **words)
    for b, n in enumerate(lengths.tolist()):
        at = n + torch.arange(3)
        x, y = q[b].chunk(2, -1)
        cos, sin = angles.cos()[at, None], angles.sin()[at, None]
        turned = torch.cat([x * cos - y * sin, y * cos + x * sin], -1)
        k_all, v_all = (cache[None, b, : n + new] for cache in caches[0])  # written by the call
        assert_close(ours[b], tilewise.attention(turned[None], k_all, v_all, causal=True)[0])


def test_a_page_table_without_lengths_is_full() -> None:
    torch.manual_seed(0)
    q, table = torch.randn(2, 1, 4, 8), torch.tensor([[0, 3], [2, 1]], dtype=torch.int32)
    k, v = torch.randn(2, 4, 16, 2, 8)
    for module, name in ((flash_attn, "block_table"), (flash_attn_3, "page_table")):
        ours = module.flash_attn_with_kvcache(q, k, v, **{name: table})
        assert_close(ours, tilewise.attention(q, k[table].flatten(1, 2), v[table].flatten(1, 2)))


def test_chunks_over_a_cache() -> None:
    q, k, v = made(3, 12)
    lengths = torch.tensor([5, 12], dtype=torch.int32)
    words = {"cache_seqlens": lengths, "causal": True, "attention_chunk": 4}
    out = flash_attn_3.flash_attn_with_kvcache(q, k, v, **words)
    for b, n in enumerate(lengths.tolist()):
        rows = q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n]
        assert_close(out[b : b + 1], flash_attn_3.flash_attn_func(*rows, causal=True, attention_chunk=4))


@pytest.mark.parametrize("n_q", [3, 9])
def test_chunks_are_counted_from_the_first_valid_key(n_q: int) -> None:
    """As in flash-attn: the padding on the left is no part of any chunk."""
    q, k, v = made(n_q, 12)
    lengths, starts = (torch.tensor(x, dtype=torch.int32) for x in ([7, 12], [3, 2]))
    words = {"causal": True, "attention_chunk": 4}
    out = flash_attn_3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, cache_leftpad=starts, **words)
    for b, (first, n) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        rows = q[b : b + 1], k[b : b + 1, first:n], v[b : b + 1, first:n]
        assert_close(out[b : b + 1], naive(*rows, causal=True, chunk=4)[0])


@pytest.mark.parametrize("layout", ["apart", "keys first", "values first"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("new", [False, True])
def test_queries_of_values_over_a_cache(new: bool, packed: bool, layout: str) -> None:
    """qv: scores are q.k + qv.v, over pages, after new tokens were written and turned (qv is not)."""
    torch.manual_seed(0)
    q, lengths = torch.randn(2, 3, 4, 8, dtype=torch.float64), torch.tensor([5, 9], dtype=torch.int32)
    qv, table = torch.randn(2, 3, 4, 6, dtype=torch.float64), torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
    pool = torch.full((6, 4, 2, 14), torch.nan, dtype=torch.float64)
    k_pool, v_pool = (pool[..., 6:], pool[..., :6]) if layout == "values first" else (pool[..., :8], pool[..., 8:])
    if layout == "apart":
        k_pool, v_pool = k_pool.clone(), v_pool.clone()
    k, v = torch.randn(2, 12, 2, 8, dtype=torch.float64), torch.randn(2, 12, 2, 6, dtype=torch.float64)
    for b, n in enumerate(lengths.tolist()):
        for j in range(n):
            k_pool[table[b, j // 4], j % 4], v_pool[table[b, j // 4], j % 4] = k[b, j], v[b, j]
    words: dict[str, Any] = {"cache_seqlens": lengths, "page_table": table, "causal": True}
    given, asked = [q, qv], q
    k_new, v_new = torch.randn(2, 3, 2, 8, dtype=torch.float64), torch.randn(2, 3, 2, 6, dtype=torch.float64)
    if new:
        angles = torch.rand(16, 4, dtype=torch.float64)
        cos, sin = angles.cos(), angles.sin()
        at = lengths[:, None].long() + torch.arange(3)
        asked = turned(q, cos, sin, at, True)
        words |= {"rotary_cos": cos, "rotary_sin": sin, "k": k_new, "v": v_new}
    if packed:
        cu = torch.tensor([0, 3, 6], dtype=torch.int32)
        words |= {"cu_seqlens_q": cu, "max_seqlen_q": 3} | ({"cu_seqlens_k_new": cu} if new else {})
        given = [x.flatten(0, 1) for x in given]
        words |= {name: words[name].flatten(0, 1) for name in ("k", "v") if name in words}
    out = flash_attn_3.flash_attn_with_kvcache(given[0], k_pool, v_pool, qv=given[1], **words).view(2, 3, 4, 6)
    for b, n in enumerate(lengths.tolist()):
        keys, values = k[b, :n], v[b, :n]
        if new:
            keys = torch.cat([keys, turned(k_new, cos, sin, at, True)[b]])
            values = torch.cat([values, v_new[b]])
        assert_close(
            out[b : b + 1], naive(asked[b : b + 1], keys[None], values[None], causal=True, qv=qv[b : b + 1])[0]
        )


def test_queries_of_values_under_transforms() -> None:
    """Keys and values that lie side by side, where they have no memory of their own."""
    kv, q = torch.randn(3, 2, 5, 2, 12), torch.randn(3, 2, 5, 2, 8)
    qv = torch.randn(3, 2, 5, 2, 4)

    def total(q: Tensor, kv: Tensor, qv: Tensor) -> Tensor:
        return flash_attn_3.flash_attn_func(q, kv[..., :8], kv[..., 8:], qv=qv).sin().sum()

    expected = torch.stack([total(*x) for x in zip(q, kv, qv, strict=True)])
    assert_close(torch.vmap(total)(q, kv, qv), expected)
    leaf = kv[0].clone().requires_grad_()
    apart = [x.clone().requires_grad_() for x in (kv[0, ..., :8], kv[0, ..., 8:])]
    total(q[0], leaf, qv[0]).backward()
    flash_attn_3.flash_attn_func(q[0], *apart, qv=qv[0]).sin().sum().backward()
    assert_close(leaf.grad, torch.cat([x.grad for x in apart], -1))


def test_queries_of_values_that_are_too_wide_change_nothing() -> None:
    """MLA's 64 + 512: said before the new tokens are written."""
    q, k, v = torch.zeros(1, 1, 2, 64), torch.zeros(1, 8, 1, 64), torch.zeros(1, 8, 1, 512)
    words = {"k": torch.ones(1, 1, 1, 64), "v": torch.ones(1, 1, 1, 512), "cache_seqlens": 3}
    with pytest.raises(tilewise.AttentionError, match=r"head dims of q and qv: found 64 \+ 512; expected at most 512"):
        flash_attn_3.flash_attn_with_kvcache(q, k, v, qv=torch.zeros(1, 1, 2, 512), **words)
    assert not k.any()
    with pytest.raises(tilewise.AttentionError, match="head dims of q and qv"):
        flash_attn_3.flash_attn_func(q, k, v, qv=torch.zeros(1, 1, 2, 512))


@pytest.mark.parametrize("slopes", [None, torch.rand(4), torch.rand(2, 4)], ids=["none", "by head", "by row"])
def test_pages_with_a_gradient(slopes: Tensor | None) -> None:
    """flash-attn runs them; its backward knows no pages. Here the queries get theirs, and so do the pages, if asked."""
    torch.manual_seed(0)
    lengths, table = (
        [5, 12],
        torch.tensor([[4, 0, 2**30], [1, 5, 2]], dtype=torch.int32),
    )  # what is past the end is never used
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5], [0, 5, 17]))
    q = torch.randn(5, 4, 8, dtype=torch.float64, requires_grad=True)
    pages = [torch.randn(6, 4, 2, 8, dtype=torch.float64) for _ in "kv"]
    pages[0][3] = torch.nan
    words: dict[str, Any] = {"causal": True, "return_attn_probs": True, "block_table": table, "alibi_slopes": slopes}
    with torch.no_grad():
        expected = flash_attn.flash_attn_varlen_func(q, *pages, cu_q, cu_k, 3, 12, **words)
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, *pages, cu_q, cu_k, 3, 12, **words)
    assert_close((out, lse), expected[:2])
    k, v = (
        torch.cat([x[table[b].long().clamp(max=5)].flatten(0, 1)[:n] for b, n in enumerate(lengths)]) for x in pages
    )
    same = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 12, causal=True, alibi_slopes=slopes)
    assert_close(*(torch.autograd.grad(x.sin().sum(), q) for x in (out, same)))
    pages[1].requires_grad_()
    flash_attn.flash_attn_varlen_func(q, *pages, cu_q, cu_k, 3, 12, **words)[0].sum().backward()
    assert pages[1].grad is not None
    assert pages[1].grad[3].abs().sum() == 0


def test_a_schedule_is_shared_by_layers() -> None:
    q, k, v = made(1, 12)
    lengths = torch.tensor([5, 12], dtype=torch.int32)
    schedule = flash_attn_3.get_scheduler_metadata(2, 1, 12, 4, 2, 8, lengths, torch.float64, causal=True)
    words = {"cache_seqlens": lengths, "causal": True}
    plain = flash_attn_3.flash_attn_with_kvcache(q, k, v, **words)
    for window in ((-1, -1), (-1, -1), (3, 0), (3, 0)):
        out = flash_attn_3.flash_attn_with_kvcache(q, k, v, window_size=window, scheduler_metadata=schedule, **words)
        assert torch.equal(out, plain) == (window == (-1, -1))
    assert len(schedule) == 2


# The parameters of flash-attn 2.8.3 and of FlashAttention-3, in their order.
REST = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
SIGNATURES = {
    flash_attn.flash_attn_func: "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
    " return_attn_probs",
    flash_attn.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p"
    " softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs block_table",
    flash_attn.flash_attn_with_kvcache: "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx"
    " cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits"
    " return_softmax_lse",
    flash_attn.flash_attn_kvpacked_func: f"q kv {REST}",
    flash_attn.flash_attn_qkvpacked_func: f"qkv {REST}",
    flash_attn.flash_attn_varlen_kvpacked_func: f"q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {REST}",
    flash_attn.flash_attn_varlen_qkvpacked_func: f"qkv cu_seqlens max_seqlen {REST}",
    flash_attn_3.flash_attn_func: "q k v softmax_scale causal qv q_descale k_descale v_descale window_size"
    " attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs",
    flash_attn_3.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k"
    " softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa"
    " deterministic sm_margin return_attn_probs",
    flash_attn_3.flash_attn_with_kvcache: "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx"
    " cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale"
    " softmax_scale causal window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits"
    " pack_gqa sm_margin return_softmax_lse",
    flash_attn_3.get_scheduler_metadata: "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim"
    " cache_seqlens qkv_dtype headdim_v cu_seqlens_q cu_seqlens_k_new cache_leftpad page_size max_seqlen_k_new causal"
    " window_size attention_chunk has_softcap num_splits pack_gqa sm_margin",
    flash_attn_3.flash_attn_qkvpacked_func: "qkv softmax_scale causal q_descale k_descale v_descale window_size"
    " attention_chunk softcap deterministic num_heads_q sm_margin return_attn_probs",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_signatures(function: Any) -> None:
    assert list(inspect.signature(function).parameters) == SIGNATURES[function].split()


def test_padding_and_back() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    x = torch.randn(3, 4, 2, requires_grad=True)
    tokens, places, cu, longest, lengths = bert_padding.unpad_input(x, mask)
    assert_close(tokens, x[mask.bool()])
    assert (cu.tolist(), longest, lengths.tolist()) == ([0, 2, 6, 6], 4, [2, 4, 0])
    back = bert_padding.pad_input(tokens, places, 3, 4)
    assert_close(back, x * mask[..., None])
    back.sum().backward()
    assert_close(x.grad, mask[..., None].expand_as(x).float())


def test_an_unchanged_program() -> None:
    script = """
import importlib.util
import torch, tilewise
tilewise.compat.flash_attn.install()
import flash_attn, flash_attn_interface
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import flash_attn_qkvpacked_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
assert importlib.util.find_spec("flash_attn") is not None
q = torch.randn(1, 5, 2, 8)
third = flash_attn_interface.flash_attn_func.__module__
print(flash_attn.__version__, flash_attn_func(q, q, q, causal=True).shape, third)
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_func
from flash_attn.ops.triton.rotary import apply_rotary
assert RotaryEmbedding(8)(torch.randn(1, 5, 3, 2, 8)).shape == (1, 5, 3, 2, 8)
"""
    done = python("-c", script)
    assert done.stdout.strip() == "2.8.3 torch.Size([1, 5, 2, 8]) tilewise.compat.flash_attn_3"


def test_modules_that_flash_attn_has_and_tilewise_has_not() -> None:
    """An import says what to use, a question (torch asks for flash_attn.cute) is answered with None."""
    script = """
import importlib, importlib.util, sys
import tilewise
for _ in range(2):
    tilewise.compat.flash_attn.install()
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(error)
for name in ("flash_attn.cute", "flash_attn.losses", "flash_attn.ops.rms_norm"):
    assert importlib.util.find_spec(name) is None
"""
    names = [*modules.INSTEAD, "flash_attn.losses.cross_entropy", "flash_attn.modules.mha", "flash_attn.utils"]
    done = python("-c", script, *names)
    told = done.stdout.splitlines()
    assert len(told) == len(names)
    for line, use in zip(told, modules.INSTEAD.values(), strict=False):
        assert f"; use {use}. Modules of flash_attn that work: flash_attn.bert_padding, " in line
    page = Path(__file__).parents[3].joinpath("docs", "from-flash-attn.md").read_text(encoding="utf-8")
    assert all(f"`{name.partition('.')[2]}`" in page for name in modules.INSTEAD)


def test_install_after_the_fact_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(sys)("flash_attn")
    real.__file__ = "flash_attn/__init__.py"
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    with pytest.raises(tilewise.AttentionError, match="before anything imports it"):
        flash_attn.install()
