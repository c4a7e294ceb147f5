"""What is wrong with a call is said before anything runs; what only the device knows, by check_kv."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import tilewise
from tests.conftest import INTERPRETED
from tests.covering import each_once
from tests.kv_cases import KvCase, inputs

I32 = torch.int32


def test_an_int_is_everybodys_length() -> None:
    x = inputs(KvCase((5, 5), dim=16))
    a, b = (tilewise.attention_kv(x.q, x.k, x.v, n, **x.options) for n in (x.lengths, 5))
    assert torch.equal(a, b)


def test_more_queries_than_new_tokens_see_keys_that_are_overwritten() -> None:
    """A page table in which a page occurs twice is a circular buffer."""
    cache, table = torch.randn(2, 4, 1, 16), torch.tensor([[0, 1, 0]], dtype=I32)
    q, new, cu_q = torch.randn(5, 1, 16), torch.randn(1, 1, 16), torch.tensor([0, 5], dtype=I32)
    cu_new, lengths = torch.tensor([0, 1], dtype=I32), torch.tensor([8], dtype=I32)
    given = {"page_table": table, "k_new": new, "v_new": new, "cu_seqlens_q": cu_q, "cu_seqlens_new": cu_new}
    tilewise.check_kv(q, cache, cache, lengths, window=(3, 0), **given)  # the first query sees keys 1 to 4
    with pytest.raises(tilewise.AttentionError, match="key 0 of sequence 0"):
        tilewise.check_kv(q, cache, cache, lengths, window=(4, 0), **given)


NAMED = {
    "lengths": r"(lengths\[|tokens of sequence \d)",
    "table": "(page . of sequence|key . of sequence|new tokens of)",
    "indptr": r"page_table\[0\]",
    "starts": r"starts\[",
    "cu_q": "cu_seqlens_q",
    "cu_new": "cu_seqlens_new",
    "cache_rows": r"cache_rows\[",
    "slots": "slots",
}
DEFINED = {  # skipped, or there
    ("cache_rows", 4),
    ("slots", 4),
    ("starts", 4),
    *(("slots", x) for x in (-(10**9), -(2**31), -3)),
    ("lengths", 4),
}


@pytest.mark.meets
@each_once(
    name=["lengths", "table", "indptr", "starts", "cu_q", "cu_new", "cache_rows", "slots"],
    garbage=[10**9, -(10**9), 2**31 - 1, -(2**31), 4, -3, None],
    ids=str,
)
def test_garbage_is_clamped(name: str, garbage: int | None, backend: str) -> None:
    """Lengths beyond the cache, pages that do not exist, offsets that run backwards: kernels return wrong numbers, but
    do not crash. Without kernels a CPU reads contents, and the call raises."""
    x = inputs(
        KvCase(
            (5, 9, 17),
            page=0 if name == "cache_rows" else 8,
            dim=16,
            csr=name == "indptr",
            starts=(1, 0, 3),
            queries=(1, 3, 2) if name in ("cu_q", "cu_new") else 2,
            new=(1, 3, 2) if name == "cu_new" else 2,
        )
    )
    if name == "cu_q":
        x.options["k_new"] = x.options["v_new"] = torch.zeros(3, 2, 2, 16)
    table = x.options.get("page_table")
    victims = {
        "lengths": x.lengths,
        "table": table,
        "indptr": table[0] if isinstance(table, tuple) else None,
        "starts": x.options["starts"],
        "cu_q": x.options.get("cu_seqlens_q"),
        "cu_new": x.options.get("cu_seqlens_new"),
        "cache_rows": x.options.get("cache_rows"),
        "slots": torch.zeros(6, dtype=torch.int64),
    }
    victim = victims[name]
    assert isinstance(victim, torch.Tensor)
    if garbage is None:
        victim.copy_(torch.tensor([10**9, -5, 3, 2, 10**9, 1])[torch.arange(victim.numel()) % 6].view(victim.shape))
    else:
        victim.fill_(garbage)
    if name == "slots":
        x.options["slots"] = victim
    rotary = tilewise.Rotary(torch.ones(32, 4), torch.ones(32, 4))
    call = partial(tilewise.attention_kv, x.q, x.k, x.v, x.lengths, **x.options, rotary=rotary, backend=backend)
    if backend == "triton":
        call()
        return
    if (name, garbage) in DEFINED:
        pytest.skip("a page, a row, or a slot that is skipped")
    with pytest.raises(tilewise.AttentionError, match=rf"{NAMED[name]}.*: found"):
        call()


@pytest.mark.usefixtures("triton_runs")
def test_a_plan_of_other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers would be looked for where others lie."""
    if not INTERPRETED:
        pytest.skip("tiles of the interpreter")
    from tilewise.backends.common.kv import partition

    x = inputs(KvCase((20, 3), dim=16))
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **x.options, backend="triton")
    monkeypatch.setattr(partition, "INTERPRETED_PROCESSORS", 7)
    with pytest.raises(tilewise.AttentionError, match="sizes of the plan"):
        tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, backend="triton", plan=plan)
    with pytest.raises(tilewise.AttentionError, match="sizes of the plan"):
        tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **x.options, backend="triton", plan=plan)


PLANNED = [
    KvCase((20, 3), dim=16),
    KvCase((40, 0, 7), dim=16, page=8),
    KvCase((20, 3), dim=16, options={"window": (5, 0)}),
    KvCase((20, 3, 40), queries=(1, 4, 0), dim=16),
]


@pytest.mark.usefixtures("triton_runs")
@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_a_plan_of_other_lengths(case: KvCase) -> None:
    """Its numbers are right for one step and wrong for the next, and no shape tells."""
    x = inputs(case)
    words = x.options | {"backend": "triton"}
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **words)
    tilewise.check_kv(x.q, x.k, x.v, x.lengths, plan=plan, **words)
    shorter = x.lengths - (x.lengths > 0).int()
    with pytest.raises(tilewise.AttentionError, match=r"plan, made for sequence 0: .* keys; expected .* keys, as this"):
        tilewise.check_kv(x.q, x.k, x.v, shorter, plan=plan, **words)
    again = tilewise.plan_kv(x.q, x.k, x.v, shorter, plan=plan, **words)
    tilewise.check_kv(x.q, x.k, x.v, shorter, plan=again, **words)
    with pytest.raises(tilewise.AttentionError, match="plan: found one made for"):
        tilewise.check_kv(x.q, x.k, x.v, shorter, plan=again, **words | {"window": (3, 0)})


@pytest.mark.usefixtures("triton_runs")
def test_every_call_checks_its_plan_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(KvCase((20, 3), dim=16))
    words = x.options | {"backend": "triton"}
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **words)
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    tilewise.attention_kv(x.q, x.k, x.v, x.lengths, plan=plan, **words)
    with pytest.raises(tilewise.AttentionError, match="plan, made for sequence 0"):
        tilewise.attention_kv(x.q, x.k, x.v, x.lengths - 1, plan=plan, **words)
