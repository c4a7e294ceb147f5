"""What is wrong with a call is said before anything runs; what only the device knows, by check_kv."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

import tilewise
from tests.conftest import INTERPRETED
from tests.covering import each_once
from tests.kv_cases import KvCase, inputs
from tilewise.backends.registry import choose
from tilewise.call.fields import CACHE
from tilewise.request import Gpu
from tilewise.validation import kv as checks

I32 = torch.int32


def given(**changes: Any) -> dict[str, Any]:
    call: dict[str, Any] = {
        "q": torch.zeros(2, 1, 4, 16),
        "k_cache": torch.zeros(3, 8, 2, 16),
        "v_cache": torch.zeros(3, 8, 2, 16),
        "lengths": torch.tensor([1, 2], dtype=I32),
    }
    return call | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": torch.zeros(4, 16)}, "shape of q"),
        ({"q": torch.zeros(2, 1, 3, 16)}, "heads of q: found 3; expected a multiple"),
        ({"q": torch.zeros(2, 1, 4, 8)}, "head dim of k_cache"),
        ({"q": torch.zeros(2, 4, 16)}, "cu_seqlens_q: found None, for packed tokens"),
        ({"q": torch.zeros(2, 1, 4, 16, dtype=torch.float16)}, "dtype of k_cache"),
        ({"v_cache": torch.zeros(3, 9, 2, 16)}, "shape of v_cache"),
        ({"lengths": torch.tensor([1, 2])}, "dtype of lengths: found torch.int64; expected torch.int32"),
        ({"lengths": torch.tensor([1], dtype=I32)}, "shape of lengths"),
        ({"lengths": -1}, "lengths: found -1"),
        ({"lengths": 2**40}, "lengths: found 1099511627776"),
        ({"k_cache": torch.zeros(1, 8, 2, 16), "v_cache": torch.zeros(1, 8, 2, 16)}, "rows of k_cache: found 1"),
        ({"page_table": torch.zeros(3, 4, dtype=I32)}, "shape of page_table"),
        ({"page_table": torch.zeros(2, 4)}, "dtype of page_table"),
        ({"page_table": (torch.zeros(2, dtype=I32), torch.zeros(4, dtype=I32))}, r"page_table\[0\]"),
        ({"page_table": torch.zeros(2, 4, dtype=I32), "cache_rows": torch.zeros(2, dtype=I32)}, "cache_rows"),
        ({"k_new": torch.zeros(2, 1, 2, 16)}, "v_new: found None; expected k_new and v_new"),
        ({"k_new": torch.zeros(2, 1, 2, 8), "v_new": torch.zeros(2, 1, 2, 16)}, "heads and dim of k_new"),
        ({"k_new": torch.zeros(1, 1, 2, 16), "v_new": torch.zeros(1, 1, 2, 16)}, "batch of k_new"),
        ({"slots": torch.zeros(2)}, "without new tokens"),
        ({"split": 100}, "split: found 100; expected a multiple of 128"),
        ({"tree": torch.zeros(2, 2, 2, dtype=torch.bool)}, "shape of tree"),
        ({"tree": torch.zeros(2, 1, 1)}, "dtype of tree"),
        ({"window": (-1, -1)}, "window left"),
        ({"cache_seqlens": 3}, "expected lengths"),
        ({"block_table": 3}, "expected page_table="),
        ({"windows": 3}, "expected window="),
        ({"backend": "hopper"}, "the tensors are on cpu"),
        ({"out": torch.zeros(2, 1, 4, 8)}, "out"),
        ({"out": [1]}, "out: found list"),
        ({"out": torch.zeros(1).expand(2, 1, 4, 16)}, "strides of out"),
        ({"plan": "auto"}, "plan: found str"),
        ({"sinks": torch.zeros(4, requires_grad=True)}, "requires_grad: found True for a score term"),
        (
            {n: torch.zeros(2, 1, 2, 16, requires_grad=True) for n in ("k_new", "v_new")},
            "requires_grad: found True for k_new",
        ),
        ({"sinks": torch.zeros(3)}, "shape of sinks"),
        ({"q": torch.zeros(2, 1, 4, 16, requires_grad=True)}, "requires_grad: found True for a call"),
        ({"max_seqlen_q": -1}, "max_seqlen_q"),
        ({"plan": 3}, "plan"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refused(changes: dict[str, Any], words: str) -> None:
    call = given(**changes)
    tensors = [call.pop(name) for name in ("q", "k_cache", "v_cache", "lengths")]
    with pytest.raises(tilewise.AttentionError, match=words):
        tilewise.attention_kv(*tensors, **call)


TURN = tilewise.Rotary(torch.zeros(16, 8), torch.zeros(16, 8))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k_cache": None}, "k_cache: found NoneType"),
        ({"v_cache": None}, "v_cache: found NoneType"),
        ({"v_cache": torch.zeros(2, 8, 2, 16)}, "shape of v_cache"),
        ({"k_cache": torch.zeros(8, 2, 16), "v_cache": torch.zeros(8, 2, 16)}, "shape of k_cache"),
        ({"window": (3, 0)}, "keyword argument: found window= of append_kv"),
        ({"k_cache": torch.zeros(1, 8, 2, 16).expand(3, 8, 2, 16)}, "strides of k_cache, which is written"),
        ({"q": "x"}, "q: found str"),
        ({"q": torch.zeros(2, 1, 4, 8), "rotary": TURN}, "shape of q"),
        ({"q": torch.zeros(1, 1, 4, 16), "rotary": TURN}, "sequences of q: found 1; expected 2"),
        ({"q": torch.zeros(5, 4, 16), "rotary": TURN}, "cu_seqlens_q: found None, for packed"),
        ({"q": torch.zeros(2, 1, 4, 16, dtype=torch.int32), "rotary": TURN}, "dtype of q"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_append_kv_refuses(changes: dict[str, Any], words: str) -> None:
    new = torch.zeros(2, 1, 2, 16)
    call = {name: x for name, x in given().items() if name != "q"} | {"k_new": new, "v_new": new} | changes
    with pytest.raises(tilewise.AttentionError, match=words):
        tilewise.append_kv(**call)


def test_transforms_are_refused() -> None:
    call = given()
    rest = [call[name] for name in ("k_cache", "v_cache", "lengths")]
    with pytest.raises(tilewise.AttentionError, match="forward-mode AD: found a tangent of a call with a KV cache"):
        torch.func.jvp(lambda q: tilewise.attention_kv(q, *rest), (call["q"],), (call["q"],))
    with pytest.raises(tilewise.AttentionError, match="vmap: found over a call with a KV cache"):
        torch.func.vmap(lambda q: tilewise.attention_kv(q, *rest))(call["q"][None])


@pytest.mark.parametrize("plan", ["auto", 3])
def test_a_plan_is_one_of_plan_kv(plan: Any) -> None:
    with pytest.raises(tilewise.AttentionError, match="plan: found"):
        tilewise.plan_kv(**given(plan=plan))


def test_an_int_is_everybodys_length() -> None:
    x = inputs(KvCase((5, 5), dim=16))
    a, b = (tilewise.attention_kv(x.q, x.k, x.v, n, **x.options) for n in (x.lengths, 5))
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        (KvCase((5, 100), page=8, dim=16), lambda x: x.lengths.fill_(1000), "tokens of sequence 0: found 1000"),
        (KvCase((5, 9), page=8, dim=16), lambda x: x.lengths[1].fill_(-1), r"lengths[1]: found -1"),
        (KvCase((5, 9), page=8, dim=16), lambda x: x.options["page_table"][1, 1].fill_(99), "page 1 of sequence 1"),
        (KvCase((5, 9), page=8, dim=16, csr=True), lambda x: x.options["page_table"][1][2].fill_(-5), "page 1 of seq"),
        (KvCase((5, 9), page=0, dim=16), lambda x: x.options["cache_rows"].fill_(4), "cache_rows[0]: found 4"),
        (KvCase((5, 9), starts=(0, 3), dim=16), lambda x: x.options["starts"].fill_(7), "starts[0]: found 7"),
        (
            KvCase((5, 9), queries=(1, 2), dim=16),
            lambda x: x.options["cu_seqlens_q"][2].fill_(9),
            "end of cu_seqlens_q",
        ),
        (
            KvCase((15, 9), new=2, page=8, dim=16),
            lambda x: x.options["page_table"][0].copy_(x.options["page_table"][0, 0].clone()),
            "key 0 of sequence 0",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_contents_are_checked_when_asked(case: KvCase, change: Any, words: str) -> None:
    x = inputs(case)
    tilewise.check_kv(x.q, x.k, x.v, x.lengths, **x.options)
    change(x)
    with pytest.raises(tilewise.AttentionError, match=re.escape(words)):
        tilewise.check_kv(x.q, x.k, x.v, x.lengths, **x.options)


def test_check_kv_checks_new_tokens_out_and_trees() -> None:
    x = inputs(KvCase((5, 9), new=2, dim=16))
    tilewise.check_kv(x.q, x.k, x.v, x.lengths, **x.options)
    for name, value in {"v_new": x.options["v_new"][:, :1], "out": x.q[:, :, :1]}.items():
        with pytest.raises(tilewise.AttentionError, match=name):
            tilewise.check_kv(x.q, x.k, x.v, x.lengths, **x.options | {name: value})
    x = inputs(KvCase((5, 9), queries=(1, 2), new=(1, 2), dim=16))
    cu = torch.tensor([0, 1, 4], dtype=I32)  # k_new has three tokens
    with pytest.raises(tilewise.AttentionError, match="end of cu_seqlens_new: found 4"):
        tilewise.check_kv(x.q, x.k, x.v, x.lengths, **x.options | {"cu_seqlens_new": cu})
    q, cu = torch.randn(66, 1, 16), torch.tensor([0, 65, 66], dtype=I32)
    bits = torch.full((66,), -1)
    cache, lengths = torch.randn(2, 80, 1, 16), torch.tensor([70, 70], dtype=I32)
    with pytest.raises(tilewise.AttentionError, match="tree: found 64 drafts; expected 65"):
        tilewise.check_kv(q, cache, cache, lengths, cu_seqlens_q=cu, tree=bits)


def test_more_queries_than_new_tokens_see_keys_that_are_overwritten() -> None:
    """A page table in which a page occurs twice is a circular buffer."""
    cache, table = torch.randn(2, 4, 1, 16), torch.tensor([[0, 1, 0]], dtype=I32)
    q, new, cu_q = torch.randn(5, 1, 16), torch.randn(1, 1, 16), torch.tensor([0, 5], dtype=I32)
    cu_new, lengths = torch.tensor([0, 1], dtype=I32), torch.tensor([8], dtype=I32)
    given = {"page_table": table, "k_new": new, "v_new": new, "cu_seqlens_q": cu_q, "cu_seqlens_new": cu_new}
    tilewise.check_kv(q, cache, cache, lengths, window=(3, 0), **given)  # the first query sees keys 1 to 4
    with pytest.raises(tilewise.AttentionError, match="key 0 of sequence 0"):
        tilewise.check_kv(q, cache, cache, lengths, window=(4, 0), **given)


@pytest.mark.usefixtures("triton_runs")
def test_a_plan_of_another_backend_raises() -> None:
    """Backends divide the keys differently, and their schedules may have the same size."""
    x = inputs(KvCase((20, 3), dim=16))
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, backend="triton")
    assert plan.backend == "triton"
    other = plan._replace(backend="hopper")
    with pytest.raises(
        tilewise.AttentionError, match="plan: found one for the backend 'hopper'; expected one for 'tri"
    ):
        tilewise.attention_kv(x.q, x.k, x.v, x.lengths, backend="triton", plan=other)


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


def test_one_graph_with_the_writes_declared() -> None:
    """torch.compile sees one graph, and the cache changes in it as it does without."""
    x, y = (inputs(KvCase((20, 3), new=1, page=8, dim=16)) for _ in range(2))

    def step(q, k, v, lengths, table, new):
        out = tilewise.attention_kv(q, k, v, lengths, page_table=table, k_new=new, v_new=new)
        return out + k.nan_to_num().sum()

    new = torch.randn(2, 1, 2, 16)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    a = compiled(x.q, x.k, x.v, x.lengths, x.options["page_table"], new)
    b = step(y.q, y.k, y.v, y.lengths, y.options["page_table"], new)
    assert torch.equal(a, b)
    assert torch.equal(x.k.nan_to_num(), y.k.nan_to_num())


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


@pytest.mark.usefixtures("triton_runs")
def test_a_plan_of_another_backend() -> None:
    x = inputs(KvCase((20, 3), dim=16))
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **x.options, backend="reference")
    with pytest.raises(tilewise.AttentionError, match=r"plan: found one made for .*reference"):
        tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **x.options, backend="triton", plan=plan)


def test_what_differs_from_a_plan() -> None:
    x = inputs(KvCase((20, 3), dim=16))
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **x.options)

    def refused(words: str, q: torch.Tensor = x.q, **options: Any) -> None:
        with pytest.raises(tilewise.AttentionError, match=words):
            tilewise.attention_kv(q, x.k, x.v, x.lengths, **x.options | options, plan=plan)

    refused("plan: found one made for heads of q 4; expected heads of q 2, as in this call", x.q[:, :, :2])
    refused(
        "one made for keys before a query in the window None, split None; expected keys before a query in the window 3,"
        " split 128",
        window=(3, 0),
        split=128,
    )
    refused("one made for shared_prefix given False; expected shared_prefix given True", shared_prefix="auto")
    packed = {"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=I32)}
    refused("one made for .*cu_seqlens_q given False; expected .*cu_seqlens_q given True", x.q[:, 0], **packed)


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
@pytest.mark.parametrize("what", ["starts", "cu_seqlens_q"])
def test_a_plan_of_other_offsets(what: str) -> None:
    x = inputs(KvCase((20, 9), queries=(2, 4), dim=16))
    starts = torch.zeros(2, dtype=I32)
    words = x.options | {"backend": "triton", "starts": starts}
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **words)
    tilewise.check_kv(x.q, x.k, x.v, x.lengths, plan=plan, **words)
    if what == "starts":
        starts[1] = 3
    else:
        words["cu_seqlens_q"] = torch.tensor([0, 3, 6], dtype=I32)
    with pytest.raises(tilewise.AttentionError, match="plan, made for sequence"):
        tilewise.check_kv(x.q, x.k, x.v, x.lengths, plan=plan, **words)


@pytest.mark.usefixtures("triton_runs")
def test_every_call_checks_its_plan_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(KvCase((20, 3), dim=16))
    words = x.options | {"backend": "triton"}
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **words)
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    tilewise.attention_kv(x.q, x.k, x.v, x.lengths, plan=plan, **words)
    with pytest.raises(tilewise.AttentionError, match="plan, made for sequence 0"):
        tilewise.attention_kv(x.q, x.k, x.v, x.lengths - 1, plan=plan, **words)


@pytest.mark.parametrize("gpu", [Gpu("cuda", 90), Gpu("cuda", 80), Gpu("hip", "gfx942")], ids=str)
def test_who_serves_a_cache(gpu: Gpu) -> None:
    q, cache, lengths = torch.zeros(2, 1, 4, 16), torch.zeros(2, 32, 2, 16), torch.tensor([5, 20]).int()

    def chosen(q: torch.Tensor, **more: Any) -> str:
        x = cache.to(q.dtype)
        return choose(checks.attend_request(q, x, x, lengths, CACHE.completed(more)), gpu).backend.name

    assert chosen(q) == chosen(q, backend="triton") == "triton"
    hopper = "hopper" if gpu == Gpu("cuda", 90) else "triton"
    cache = torch.zeros(2, 512, 2, 64)
    many = torch.zeros(2, 300, 4, 64, dtype=torch.bfloat16)
    assert chosen(many) == hopper
    assert chosen(many[:, :30]) == "triton"
    packed = {"cu_seqlens_q": torch.tensor([0, 299, 300]).int()}
    assert chosen(many[0], **packed, max_seqlen_q=299) == hopper  # and the portable kernels for the other one
    assert chosen(many[0], **packed, max_seqlen_q=30) == "triton"
    # a table of tokens, which the kernels read for MLA alone
    assert chosen(many, token_table=torch.zeros(2, 32, dtype=torch.int32), causal=False) == "reference"
