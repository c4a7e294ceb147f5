"""Calls that look alike run what the first of them launched: with their own tensors, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tilewise
from tests.conftest import INTERPRETED
from tests.kv_cases import KvCase, KvInputs, inputs
from tilewise.cache import checks, memory

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="recordings are stood in for: a GPU makes its own")


@pytest.fixture(autouse=True)
def recorded(triton_runs: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Launches are recorded as on a GPU, arguments with slots for tensors, and run again in the interpreter. Yields
    what was run again."""
    from tilewise.kernels import replay
    from tilewise.kernels.cuda import Slot
    from tilewise.kernels.portable import kv_launch

    def launch(key: Any, tensors: Any, build: Any, recordings: Any, ahead: Any = None) -> Any:
        made = [x for x in build() if x.programs]
        for one in made:
            one()
        return [x._replace(args=replay._template(x.args, tensors)) for x in made]

    def filled(x: Any, tensors: Any) -> Any:
        if isinstance(x, Slot):
            assert x.offset == 0
            return tensors[x.n]
        if isinstance(x, tuple):
            return replay._like(x, [filled(item, tensors) for item in x])
        return x

    def again(recording: Any, tensors: Any) -> None:
        for one in recording:
            ran.append(one.kernel.__name__)
            one._replace(args=filled(one.args, tensors))()

    ran: list[str] = []
    monkeypatch.setattr(memory, "runs_on_gpu", lambda q: True)
    monkeypatch.setattr(kv_launch.replay, "launch", launch)
    monkeypatch.setattr(kv_launch.replay, "again", again)
    memory._calls.clear()
    yield ran
    memory._calls.clear()


CASE = KvCase((5, 0, 18), dim=16, heads=2, kv_heads=1, page=8)


def call(x: KvInputs, backend: str = "triton", plan: bool = True, **words: Any) -> tuple[Tensor, Tensor]:
    words = x.options | words | {"backend": backend}
    if plan:
        words["plan"] = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **words)
    found: tuple[Tensor, Tensor] = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, return_lse=True, **words)
    return found


def alike(case: KvCase, seed: int, words: dict[str, Any]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """By the kernels, and by the reference."""
    ours, theirs = (inputs(case, torch.float16, seed=seed) for _ in range(2))
    found = call(ours, **words)
    expected = call(theirs, "reference", plan=False, **words)
    assert torch.equal(ours.k.nan_to_num(), theirs.k.nan_to_num())  # what was written
    return found, expected


ANGLES = torch.outer(torch.arange(64.0), 100 ** -(torch.arange(8) / 8))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (CASE, {}),
        (CASE.but(page=0), {"window": (5, 0)}),
        (CASE.but(queries=(2, 1, 1), new=(2, 1, 1), csr=True, padding=2), {"softcap": 0.7, "sinks": torch.randn(2)}),
        (CASE.but(new=1), {"rotary": tilewise.Rotary(ANGLES.cos(), ANGLES.sin())}),
    ],
    ids=["pages", "dense", "packed", "rotary"],
)
def test_other_tensors(case: KvCase, words: dict[str, Any], recorded: list[str]) -> None:
    for seed in (0, 1):
        found, expected = alike(case, seed, words)
        assert_close(found[0], expected[0], atol=2e-3, rtol=2e-3)
        assert_close(found[1], expected[1], atol=2e-3, rtol=2e-3)
    assert len(memory._calls) == 1
    each = ["append_kernel"] * (case.new != 0) + ["attend_kernel", "combine_kernel"]
    assert recorded == each


def test_where_to_write(recorded: list[str]) -> None:
    for seed in (0, 1):
        x = inputs(CASE, torch.float16, seed=seed)
        out = torch.full_like(x.q, torch.nan)
        found = call(x, out=out)[0]
        assert found is out
        assert_close(out, call(x, "reference", plan=False)[0], atol=2e-3, rtol=2e-3)
    assert recorded


def test_nothing_is_kept_alive_or_checked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    import gc
    import weakref

    x = inputs(CASE, torch.float16)
    words = x.options | {"backend": "triton"}
    words["plan"] = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **words)
    first = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **words)
    monkeypatch.setattr(checks, "attend_request", None)  # nobody asks
    assert torch.equal(tilewise.attention_kv(x.q, x.k, x.v, x.lengths, **words), first)
    watched = [weakref.ref(t) for t in (x.q, x.k, x.lengths, words["plan"].room, first)]
    del x, words, first
    gc.collect()
    assert [w() for w in watched] == [None] * 5


@pytest.mark.parametrize(
    "other",
    [
        {"window": (5, 0)}, {"window": (5.0, 0)}, {"scale": 0.5}, {"scale": 1}, {"split": 128}, {"max_seqlen_q": 3},
        {"causal": False}, {"causal": 0}, {"softcap": 2.0}, {"starts": torch.zeros(3, dtype=torch.int32)},
    ],
    ids=str,
)  # fmt: skip
def test_other_words_are_other_calls(other: dict[str, Any]) -> None:
    x = inputs(CASE, torch.float16)
    plain = x.options | {"plan": object()}
    one = memory.look_of(x.q, x.k, x.v, x.lengths, dict(plain, plan=tilewise.KvPlan(x.q, x.q, x.q, ())))
    two = memory.look_of(x.q, x.k, x.v, x.lengths, dict(plain | other, plan=tilewise.KvPlan(x.q, x.q, x.q, ())))
    assert one is not None
    assert two is not None
    assert one.key != two.key


def test_what_is_not_remembered() -> None:
    x = inputs(CASE, torch.float16)
    plan = {"plan": tilewise.KvPlan(x.q, x.q, x.q, ())}
    assert memory.look_of(x.q, x.k, x.v, x.lengths, {}) is None
    assert memory.look_of(x.q, x.k, x.v, 5, plan) is None
    assert memory.look_of(x.q.float(), x.k, x.v, x.lengths, plan) is None
    assert memory.look_of(x.q, x.k, x.v, x.lengths, plan | {"score_mod": tilewise.mods.softcap(3.0)}) is None
    assert memory.look_of(x.q.clone().requires_grad_(), x.k, x.v, x.lengths, plan) is None
    with pytest.raises(tilewise.AttentionError, match="gradient"):
        call(replace(x, q=x.q.clone().requires_grad_()), plan=False)


def test_a_plan_under_another_tile_is_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(CASE, torch.float16)
    words = x.options | {"backend": "triton"}
    monkeypatch.setenv("TILEWISE_KV_TILE", "16x16x4x1x1")
    one = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **words)
    monkeypatch.setenv("TILEWISE_KV_TILE", "16x16x8x1x1")
    assert one.shape != tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **words).shape
    with pytest.raises(tilewise.AttentionError, match="by plan_kv"):
        tilewise.attention_kv(x.q, x.k, x.v, x.lengths, plan=one, **words)


def test_derived_tensors_are_not_remembered() -> None:
    """A tree is packed into bits for each call."""
    tree = torch.tril(torch.ones(3, 2, 2, dtype=torch.bool))
    x = inputs(CASE.but(queries=2, new=2), torch.float16)
    call(x, tree=tree)
    assert not memory._calls
