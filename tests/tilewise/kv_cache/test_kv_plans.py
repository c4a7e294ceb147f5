"""Plans of calls with a KV cache: equal calls run the launches of the first one, with their own tensors."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tests.conftest import INTERPRETED
from tests.kv_cases import KvCase, KvInputs, inputs
from tilewise import kv_cache
from tilewise.backends.common.kv import KvKernels
from tilewise.plan_cache import PlanCache, plans

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="CPU tensors are taken for those of a GPU")
CASE = KvCase((5, 0, 18), dim=16, heads=2, kv_heads=1, page=8)
ANGLES = torch.outer(torch.arange(64.0), 100 ** -(torch.arange(8) / 8))


@pytest.fixture(autouse=True)
def kept(triton_runs: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlanCache]:
    """The plan cache, empty, for tensors that say they are on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    plans.clear()
    yield plans
    plans.clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many runners of each kind the kernels made."""
    found: Counter[str] = Counter()

    def count(name: str) -> None:
        make = getattr(KvKernels, f"{name}_runner")
        monkeypatch.setattr(KvKernels, f"{name}_runner", lambda *x: found.update([name]) or make(*x))

    for name in ("attend", "append", "schedule"):
        count(name)
    return found


def call(x: KvInputs, backend: str = "triton", plan: bool = True, **options: Any) -> tuple[Tensor, Tensor]:
    options = x.options | options | {"backend": backend}
    if plan:
        options["plan"] = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **options)
    found: tuple[Tensor, Tensor] = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, return_lse=True, **options)
    return found


def compare(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("plan", [True, False])
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (CASE, {}),
        (CASE.but(page=0), {"window": (5, 0)}),
        (CASE.but(queries=(2, 1, 1), new=(2, 1, 1), csr=True, padding=2), {"softcap": 0.7, "sinks": torch.randn(2)}),
        (CASE.but(new=1), {"rotary": tilewise.Rotary(ANGLES.cos(), ANGLES.sin())}),
    ],
    ids=["pages", "dense", "packed", "rotary"],
)
def test_a_known_call_uses_its_own_tensors(
    case: KvCase, options: dict[str, Any], plan: bool, made: Counter[str]
) -> None:
    for seed in range(3):
        ours, theirs = (inputs(case, torch.float16, seed=seed) for _ in range(2))
        found = call(ours, plan=plan, **options)
        compare(found, call(theirs, "reference", plan=False, **options))
        assert torch.equal(ours.k.nan_to_num(), theirs.k.nan_to_num())  # what was written
        assert torch.equal(ours.v.nan_to_num(), theirs.v.nan_to_num())
    assert made == ({"attend": 1, "schedule": 1} if plan else {"attend": 1})


def test_a_known_append_uses_its_own_tensors(made: Counter[str]) -> None:
    """With queries to rotate, and one tensor as both keys and values."""
    rotary = tilewise.Rotary(ANGLES.cos(), ANGLES.sin())
    lengths, written = torch.tensor([3, 0], dtype=torch.int32), []
    for seed in range(3):
        torch.manual_seed(seed)
        new, q = torch.randn(2, 2, 1, 16).half(), torch.randn(2, 2, 3, 16).half()
        for backend in ("triton", "reference"):
            k, v = torch.zeros(2, 2, 8, 1, 16).half()
            rotated = tilewise.append_kv(new, new, k, v, lengths, q=q, rotary=rotary, backend=backend)
            assert tilewise.append_kv(new, new, k, v, lengths + 2, backend=backend) is None
            assert tilewise.append_kv(new, new, k, v, lengths + 4, q=q, backend=backend) is q
            written.append((rotated, k, v))
        for a, b in zip(*written[-2:], strict=True):
            assert_close(a, b)
    assert made == {"append": 3}  # one for each signature


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_append_with_norms_has_a_signature(requires_grad: bool, made: Counter[str], kept: PlanCache) -> None:
    """Parameters are detached, which makes other tensors: their calls have plans by the layouts of the request."""
    norm = tilewise.QkNorm(*torch.rand(2, 16, requires_grad=requires_grad))
    lengths, new = torch.tensor([3, 0], dtype=torch.int32), torch.randn(2, 2, 1, 16)
    for _ in range(2):
        k, v = torch.zeros(2, 2, 8, 1, 16)
        tilewise.append_kv(new, new, k, v, lengths, q=new, qk_norm=norm, backend="triton")
    assert made == {"append": 1}


def test_plans_of_steps_share_memory(made: Counter[str]) -> None:
    """Steps of two shapes in turn, whose plans are made in the same memory; a CUDA graph may still write the old one
    when it has grown."""
    memory = kv_cache.PlanMemory()
    small = KvCase((5, 0, 18), queries=(1, 1, 1), dim=16, heads=2, kv_heads=1, page=8)
    large = small.but(lengths=(50, 3, 0, 33, 7), queries=(1, 30, 2, 1, 5))
    addresses = []
    for seed, case in enumerate((small, large, small, large)):
        x, y = (inputs(case, torch.float16, seed=seed) for _ in range(2))
        options = x.options | {"backend": "triton"}
        plan = kv_cache.plan_kv_in(memory, x.q, x.k, x.v, x.lengths, **options)
        addresses.append([tensor.data_ptr() for tensor in plan[:3]])
        out = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, plan=plan, **options)
        compare((out,), call(y, "reference", plan=False)[:1])
        assert plan.shape == tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **options).shape
    assert addresses[1] == addresses[2] == addresses[3]  # it has grown once
    assert {name: len(blocks) for name, blocks in memory.blocks.items()} == {"schedule": 2, "workspace": 2, "lse": 2}
    assert made["attend"] == 2


@pytest.mark.parametrize("queries", [1, 3])
def test_a_plan_serves_many_layers(queries: int) -> None:
    """The programs of a divided sequence count their results in the plan, and leave it as it was."""
    case = KvCase((1200, 3, 0), queries=queries, dim=16, heads=4, kv_heads=2, page=8)
    x = inputs(case, torch.float16)
    options = x.options | {"backend": "triton"}
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **options)
    assert plan.schedule[0] == 1
    before = plan.schedule.clone()
    for seed in range(3):
        layer = inputs(case, torch.float16, seed=seed)
        given = layer.options | {"backend": "triton"}
        found = tilewise.attention_kv(layer.q, layer.k, layer.v, x.lengths, plan=plan, return_lse=True, **given)
        compare(found, call(layer, "reference", plan=False))
        assert torch.equal(plan.schedule, before)


@pytest.mark.parametrize("tokens", [1, 2, 16, 33])
def test_the_strides_of_an_lse_that_nobody_reads(tokens: int) -> None:
    """They do not depend on the number of tokens, so neither do the kernels."""
    x = inputs(CASE.but(lengths=(40,) * tokens, queries=(1,) * tokens), torch.float16)
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **x.options, backend="triton")
    assert plan.lse.shape == (2, tokens)
    assert plan.lse.stride() == (1, 2)


def test_a_plan_is_made_again_in_its_memory(made: Counter[str]) -> None:
    x = inputs(CASE, torch.float16)
    options = x.options | {"backend": "triton"}
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **options)
    for _ in range(2):
        assert tilewise.plan_kv(x.q, x.k, x.v, x.lengths, plan=plan, **options) is plan
    other = tilewise.plan_kv(x.q, x.k, x.v, x.lengths // 2, **options)
    assert made == {"schedule": 1}
    assert other.shape == plan.shape
    assert other.workspace.data_ptr() != plan.workspace.data_ptr()
    assert not torch.equal(other.schedule, plan.schedule)
    x.lengths //= 2
    tilewise.plan_kv(x.q, x.k, x.v, x.lengths, plan=plan, **options)
    assert torch.equal(other.schedule, plan.schedule)


def test_out_is_the_tensor_of_the_call(made: Counter[str]) -> None:
    for seed in range(3):
        x = inputs(CASE, torch.float16, seed=seed)
        out = torch.full_like(x.q, torch.nan)
        found = call(x, out=out)[0]
        assert found is out
        compare((out,), call(x, "reference", plan=False)[:1])
    assert made["attend"] == 1


def test_a_call_that_does_not_return_lse_uses_the_memory_of_the_plan() -> None:
    x = inputs(CASE, torch.float16)
    options = x.options | {"backend": "triton"}
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **options)
    expected = call(x, "reference", plan=False)
    for _ in range(2):
        plan.lse.fill_(7)
        out = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, plan=plan, **options)
        compare((out, plan.lse), expected)
        plan.lse.fill_(7)
        found = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, plan=plan, return_lse=True, **options)
        compare(found, expected)
        assert set(plan.lse.flatten().tolist()) == {7.0}


def test_a_known_call_keeps_no_tensor() -> None:
    x = inputs(CASE.but(new=1), torch.float16)
    options = x.options | {"backend": "triton"}
    options["plan"] = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **options)
    first = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **options)
    assert torch.equal(tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **options), first)
    alive = [weakref.ref(t) for t in (x.q, x.k, x.lengths, options["plan"].workspace, options["k_new"], first)]
    del x, options, first
    gc.collect()
    assert [ref() for ref in alive] == [None] * 6


def test_one_tensor_as_two_arguments(made: Counter[str]) -> None:
    """The places of the tensors among the arguments differ."""
    lengths = torch.tensor([3, 0], dtype=torch.int32)
    a, b = torch.randn(2, 2, 2, 1, 16).half()
    for k_new, v_new in ((a, a), (a, b), (b, a), (b, b)):
        k, v = torch.zeros(2, 2, 8, 1, 16).half()
        tilewise.append_kv(k_new, v_new, k, v, lengths, backend="triton")
        assert torch.equal(k[0, 3:5], k_new[0])
        assert torch.equal(v[0, 3:5], v_new[0])
        if k_new is v_new:
            tilewise.append_kv(k_new, v_new, k, k, lengths + 2, backend="triton")
            assert torch.equal(k[0, 5:7], k_new[0])
            continue
        with pytest.raises(tilewise.AttentionError, match="v_new: found other memory than k_new's"):
            tilewise.append_kv(k_new, v_new, k, k, lengths + 2, backend="triton")
    assert made == {"append": 3}


def test_memory_is_part_of_a_signature(made: Counter[str]) -> None:
    """Tensors of known layouts, but in shared memory, are checked as those of the first call were."""
    new, lengths = torch.randn(2, 2, 2, 1, 16).half(), torch.tensor([1, 0], dtype=torch.int32)
    pool = torch.zeros(8, 8, 1, 16).half()
    for first in (2, 4, 6):  # of one allocation, as the layers of some engines
        tilewise.append_kv(*new, pool[:2], pool[first : first + 2], lengths, backend="triton")
    tilewise.append_kv(*new, *torch.zeros(2, 2, 8, 1, 16).half(), lengths, backend="triton")
    with pytest.raises(tilewise.AttentionError, match="k_cache and v_cache: found in the same memory"):
        tilewise.append_kv(*new, pool[:2], pool[1:3], lengths, backend="triton")
    scales = torch.ones(3, 2, 8, 1)
    caches = torch.zeros(2, 2, 8, 1, 16, dtype=torch.int8)
    for k_scale, v_scale in ((scales[0], scales[1]), (scales[1], scales[2]), (scales[0], scales[2].clone())):
        tilewise.append_kv(*new, *caches, lengths, k_scale=k_scale, v_scale=v_scale, backend="triton")
    for k_scale, v_scale in ((scales[0], scales[0]), (scales[0], scales[0].view(2, 8, 1)), (scales[:2][0], scales[0])):
        with pytest.raises(tilewise.AttentionError, match="k_scale and v_scale: found in the same memory"):
            tilewise.append_kv(*new, *caches, lengths, k_scale=k_scale, v_scale=v_scale, backend="triton")


def test_layers_of_their_own_memory_share_a_plan(made: Counter[str]) -> None:
    """How far apart two allocations lie is no part of a signature."""
    new, lengths = torch.randn(2, 2, 2, 1, 16).half(), torch.tensor([1, 0], dtype=torch.int32)
    layers = [(torch.zeros(2, 8, 1, 16).half(), torch.zeros(2, 8, 1, 16).half()) for _ in range(5)]
    for k, v in (*layers, *zip((x for x, _ in layers), (x for _, x in reversed(layers)), strict=True)):
        tilewise.append_kv(*new, k, v, lengths, backend="triton")
    pools = [torch.zeros(2, 2, 8, 1, 16).half() for _ in range(3)]
    for pool in pools:  # keys and values of a page one after the other
        tilewise.append_kv(*new, *pool.unbind(1), lengths, backend="triton")
    assert made == {"append": 2}


def test_a_dispatch_mode_sees_the_ops_of_a_known_call() -> None:
    x = inputs(CASE, torch.float16)
    expected = call(x, plan=False)
    with FlopCounterMode(display=False) as counter:
        found = call(x, plan=False)
    assert counter.get_total_flops() > 0
    compare(found, expected)


def test_a_tensor_that_requires_a_gradient_is_checked_in_every_call(kept: PlanCache) -> None:
    """Whether it is an error depends on the grad mode."""
    x = inputs(CASE, torch.float16)
    leaf = replace(x, q=x.q.clone().requires_grad_())
    for _ in range(2):
        with torch.no_grad():
            found = call(leaf, plan=False)
        compare(found, call(x, "reference", plan=False))
        with pytest.raises(tilewise.AttentionError, match="requires_grad"):
            call(leaf, plan=False)


@pytest.mark.parametrize(
    "lengths", [5, torch.tensor([5, 5, 5, 5, 5, 5], dtype=torch.int32)[::2]], ids=["int", "strided"]
)
def test_tensors_made_by_the_library_are_made_for_every_call(lengths: Any, kept: PlanCache, made: Counter[str]) -> None:
    """A number of tokens becomes a tensor, strided lengths a contiguous one: such calls are checked every time,
    and their runner is kept by the checked call."""
    x = inputs(CASE.but(lengths=(5, 5, 5)), torch.float16)
    expected = call(x, "reference", plan=False)
    kept.clear()
    for _ in range(2):
        compare(call(replace(x, lengths=lengths), plan=False), expected)
    assert made == {"attend": 1}


def test_other_lengths_and_pages_are_the_same_call(made: Counter[str]) -> None:
    """The contents of tensors do not count."""
    for lengths in ((5, 0, 18), (1, 2, 18), (8, 8, 8)):
        x = inputs(CASE.but(lengths=lengths), torch.float16)
        pages = x.options["page_table"]
        table = torch.zeros(3, 5, dtype=torch.int32)
        table[:, : pages.shape[1]] = pages.clamp(0, x.k.shape[0] - 1)[:, :5]
        k, v = (torch.cat([t, t.new_zeros(20 - t.shape[0], *t.shape[1:])]) for t in (x.k, x.v))
        given = replace(x, k=k, v=v, options=x.options | {"page_table": table})
        compare(call(given, plan=False), call(given, "reference", plan=False))
    assert made == {"attend": 1}


# The registered ops, which compiled programs call


def test_ops_share_plans(made: Counter[str]) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, k_new: Tensor, v_new: Tensor, table: Tensor) -> Tensor:
        out: Tensor = tilewise.attention_kv(
            q, k, v, lengths, k_new=k_new, v_new=v_new, page_table=table, backend="triton"
        )
        return out

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    case = CASE.but(new=1)
    for seed in range(3):
        ours, theirs = (inputs(case, torch.float16, seed=seed) for _ in range(2))
        given = [ours.q, ours.k, ours.v, ours.lengths, *(ours.options[x] for x in ("k_new", "v_new", "page_table"))]
        found = compiled(*given)
        compare((found,), call(theirs, "reference", plan=False)[:1])
        assert torch.equal(ours.k.nan_to_num(), theirs.k.nan_to_num())
    assert made == {"append": 1, "schedule": 1, "attend": 1}
