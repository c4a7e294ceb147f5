"""New tokens are written into their own places alone, whatever a plan, a bound or a page table says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.kv_cases import KvCase, compare, inputs
from tilewise import AttentionError, append_kv, attention_kv, check_kv

I32 = torch.int32


def ints(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=I32)


@pytest.mark.parametrize("lengths", [(0, 0), (600, 200)], ids=str)  # more than 512 keys are divided
@pytest.mark.parametrize("processors", [5, 40])
def test_a_bound_of_queries_that_is_too_small(
    lengths: tuple[int, int], processors: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes the tiles, not the result; check_kv finds it."""
    from tilewise.backends.common.kv import partition

    monkeypatch.setattr(partition, "INTERPRETED_PROCESSORS", processors)
    for new in ((2, 1), (0, 0)):
        x = inputs(KvCase(lengths, queries=(2, 1), new=new, heads=4, dim=16, page=16))
        found = attention_kv(x.q, x.k, x.v, x.lengths, **x.options, max_seqlen_q=1, return_lse=True, backend=backend)
        compare(found, x)
        with pytest.raises(AttentionError, match="max_seqlen_q: found 1; expected at least 2"):
            check_kv(x.q, x.k, x.v, x.lengths, **x.options, max_seqlen_q=1, backend=backend)


@pytest.mark.parametrize("page", [0, 1, 4, "ragged"])
@pytest.mark.parametrize("lengths", [(7, 2), (5, 8), (3, 16)], ids=str)
@pytest.mark.usefixtures("triton_runs")
@pytest.mark.meets  # the plan says that other programs read what one writes here
def test_a_plan_of_other_lengths(page: Any, lengths: tuple[int, int]) -> None:
    """Results are those of the plan, but the new token goes where it belongs, or nowhere if the cache is full."""
    q, new = torch.randn(2, 1, 2, 8), torch.randn(2, 2, 1, 1, 8)
    size = page if isinstance(page, int) else 4
    caches = torch.zeros(2, 32 // size if size else 2, size or 16, 1, 8)
    options: Any = {"k_new": new[0], "v_new": new[1], "backend": "triton"}
    if size:
        table = torch.randperm(32 // size).int().view(2, -1)
        options["page_table"] = (ints(0, *[table.shape[1] * n for n in (1, 2)]), table.flatten())
        if page != "ragged":
            options["page_table"] = table
    plan = tilewise.plan_kv(q, *caches, ints(5, 4), **options)
    expected = caches.clone()
    append_kv(*new, *expected, ints(*lengths), page_table=options.get("page_table"), backend="reference")
    attention_kv(q, *caches, ints(*lengths), plan=plan, **options)
    assert torch.equal(caches, expected)


@pytest.mark.meets  # a page that does not exist is read as the nearest one, which another sequence writes
@pytest.mark.parametrize("wrong", [99, -5, 2])
@pytest.mark.parametrize("by", ["pages", "ragged pages", "rows", "slots"])
def test_places_that_do_not_exist(wrong: int, by: str, backend: str) -> None:
    """Kernels write nothing there, nor into the first or the last page. Without kernels a CPU reads contents, and the
    call raises."""
    new, q = torch.ones(2, 1, 1, 8), torch.ones(2, 1, 1, 8)
    new[1] = 2
    lengths = ints(1, 1)
    options: Any = {
        "pages": {"page_table": ints([1], [wrong])},
        "ragged pages": {"page_table": (ints(0, 1, 2), ints(1, wrong))},
        "rows": {"cache_rows": ints(1, wrong)},
        "slots": {"slots": torch.tensor([5, 4 * wrong]), "page_table": ints([1], [0])},
    }[by]
    for call in (append_kv, attention_kv):
        caches = torch.zeros(2, 2, 4, 1, 8)
        if backend == "reference" and (by, wrong) != ("slots", -5):  # a negative slot is not written
            given: Any = (new, new, *caches) if call is append_kv else (q, *caches)
            more: Any = {} if call is append_kv else {"k_new": new, "v_new": new}
            with pytest.raises(AttentionError, match=r"(page 0 of sequence 1|cache_rows\[1\]|slots): found -?[0-9]+;"):
                call(*given, lengths, **options, **more, backend=backend)
            assert not caches.any()
            continue
        if call is append_kv:
            append_kv(new, new, *caches, lengths, **options, backend=backend)
        else:
            attention_kv(q, *caches, lengths, k_new=new, v_new=new, **options, backend=backend)
        assert caches[0, ..., 0, 0].tolist() == [[0] * 4, [0, 1, 0, 0]]
        assert torch.equal(caches[0], caches[1])


def test_pages_of_the_next_sequence(backend: str) -> None:
    """Of three with a page each, the second is full: its new token is not written, least of all to the third's page."""
    caches, new = torch.zeros(2, 3, 4, 1, 8), torch.ones(3, 1, 1, 8)
    options: Any = {"page_table": (ints(0, 1, 2, 3), ints(0, 1, 2)), "backend": backend}
    if backend == "reference":
        with pytest.raises(AttentionError, match="tokens of sequence 1: found 4 in the cache and 1 new"):
            append_kv(new, new, *caches, ints(0, 4, 2), **options)
        return
    append_kv(new, new, *caches, ints(0, 4, 2), **options)
    for cache in caches:
        assert cache[..., 0, 0].tolist() == [[1, 0, 0, 0], [0] * 4, [0, 0, 1, 0]]


def test_tokens_that_belong_to_no_sequence(backend: str) -> None:
    """Before the first sequence or past the last, a token has no position and no scale: it is not written, even at a
    slot."""
    new, scale = torch.ones(4, 2, 16), torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    slots = torch.tensor([0, 8, 1, 2])
    for offsets, slot, written in ((ints(0, 1, 2), slots, [0, 8]), (ints(1, 2, 4), slots, [1, 2, 8])):
        if backend == "reference" and offsets[0]:
            continue
        caches = torch.zeros(2, 2, 8, 2, 16, dtype=torch.int8)
        options: Any = {"cu_seqlens_new": offsets, "k_scale": scale, "v_scale": scale, "backend": backend}
        append_kv(new, new, *caches, ints(0, 0), slots=slot, **options)
        assert caches[0, ..., 0, 0].flatten().nonzero().flatten().tolist() == written
        assert torch.equal(caches[0], caches[1])
    caches = torch.zeros(2, 2, 8, 2, 16)
    if backend == "reference":  # contents are read
        with pytest.raises(AttentionError, match="start of cu_seqlens_new: found 1"):
            append_kv(new, new, *caches, ints(3, 3), cu_seqlens_new=ints(1, 2, 4), backend=backend)
        return
    append_kv(new, new, *caches, ints(3, 3), cu_seqlens_new=ints(1, 2, 4), backend=backend)
    assert caches[0, ..., 0, 0].nonzero().tolist() == [[0, 3], [1, 3], [1, 4]]


@pytest.mark.usefixtures("triton_runs")
@pytest.mark.parametrize("dim", [16, 576])
@pytest.mark.parametrize("cache", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_tree_that_hides_the_own_key_of_a_query(dim: int, cache: torch.dtype) -> None:
    """NaN in a hidden value does not reach the result."""
    if dim == 576 and cache != torch.float32:
        pytest.skip("an MLA cache of floats")
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 2, dim), torch.randn(1, 8, 1, dim)
    scales: Any = {}
    if cache == torch.float32:
        v = k[..., :512] if dim == 576 else torch.randn(1, 8, 1, dim)
        v[0, 3] = torch.nan
    else:
        k, v = k.to(cache), torch.ones(1, 8, 1, dim).to(cache)
        scales = {"k_scale": torch.ones(1, 8, 1), "v_scale": torch.ones(1, 8, 1)}
        scales["v_scale"][0, 3] = torch.nan
    tree = torch.zeros(1, 1, 1, dtype=torch.bool)
    outs = [attention_kv(q, k, v, ints(4), tree=tree, backend=x, **scales) for x in ("reference", "triton")]
    assert outs[1].isfinite().all()
    torch.testing.assert_close(*outs)


def test_check_of_append_kv(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setenv("TILEWISE_CHECK", "1")
    new, scale = torch.ones(2, 1, 1, 8), torch.ones(2, 4, 1)

    def call(lengths: Tensor = ints(1, 1), dtype: torch.dtype = torch.float32, **options: Any) -> None:  # noqa: B008
        append_kv(new, new, *torch.zeros(2, 2, 4, 1, 8).to(dtype), lengths, **options)

    call()
    call(ints(50, 50), slots=torch.tensor([0, -1]))  # with slots lengths are not used
    call(dtype=torch.int8, k_scale=scale, v_scale=scale.clone())
    for match, options in (
        (r"page 0 of sequence 1: found 99", {"page_table": ints([0], [99])}),
        (r"page 0 of sequence 0: found -1", {"page_table": (ints(0, 1, 2), ints(-1, 0))}),
        (r"slots: found 999", {"slots": torch.tensor([0, 999])}),
        (r"slots: found a slot for two", {"slots": torch.tensor([3, 3])}),
        (r"tokens of sequence 0: found 50 in the cache and 1 new; expected at most 4", {"lengths": ints(50, 1)}),
        (r"lengths\[1\]: found -1", {"lengths": ints(0, -1)}),
        (r"cache_rows\[1\]: found 2", {"cache_rows": ints(0, 2)}),
        (r"k_scale: found \[nan\]", {"dtype": torch.int8, "k_scale": torch.tensor(torch.nan), "v_scale": 1.0}),
    ):
        with pytest.raises(AttentionError, match=match):
            call(**options)
    with pytest.raises(AttentionError, match="cu_seqlens_new"):
        append_kv(new[0], new[0], *torch.zeros(2, 2, 4, 1, 8), ints(1), cu_seqlens_new=ints(0, 9))
