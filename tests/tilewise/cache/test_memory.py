"""Calls that look alike run what the first of them launched: with their own tensors, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tilewise
from tests.conftest import INTERPRETED
from tests.kv_cases import KvCase, KvInputs, inputs
from tilewise import torch_private
from tilewise.cache import checks, memory
from tilewise.dispatch import memory as calls
from tilewise.kv_spec import Ran

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="recordings are stood in for: a GPU makes its own")


class Located(int):
    """An address that knows whose it is: the interpreter wants tensors."""

    tensor: Tensor

    @staticmethod
    def of(x: Tensor) -> Located:
        found = Located(x.data_ptr())
        found.tensor = x
        return found


@pytest.fixture(autouse=True)
def recorded(triton_runs: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Launches are recorded as on a GPU, arguments with slots for tensors, and run again in the interpreter. Yields
    what was run again."""
    from tilewise.kernels import replay
    from tilewise.kernels.cuda import Job
    from tilewise.kernels.portable import kv_launch

    def launch(key: Any, tensors: Any, build: Any, recordings: Any, ahead: Any = None) -> Any:
        made = [x for x in build() if x.programs]
        for one in made:
            one()
        jobs = [Job(x._replace(args=()), x.programs, replay._template(x.args, tensors)) for x in made]
        return replay.Recording(jobs, None, -1)

    def run(self: Any, addresses: list[Located]) -> list[Tensor]:
        new = [torch.empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in self.made]
        given = [*(x.tensor for x in addresses), *new]
        for step in self.steps:
            ran.append(step.binary.kernel.__name__)
            step.binary._replace(args=replay._mapped(step.args, lambda slot: given[slot.n], lambda x: x))()
        return new

    ran: list[str] = []
    monkeypatch.setattr(calls, "runs_on_gpu", lambda q: True)
    monkeypatch.setattr(calls, "address", Located.of)
    monkeypatch.setattr(replay, "direct", lambda *_: None)
    monkeypatch.setattr(kv_launch.replay, "launch", launch)
    monkeypatch.setattr(replay.Recording, "run", run)
    calls._calls.clear()
    yield ran
    calls._calls.clear()


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
    assert [len(kept) for kept in calls._calls.values()] == [1, 1]  # the plan, the call
    attending = ["attend_kernel"] * (2 if isinstance(case.queries, tuple) else 1)  # then those with a nan once more
    each = ["plan_kernel"] + ["append_kernel"] * (case.new != 0) + [*attending, "combine_kernel"]
    assert recorded == each


def test_without_a_plan(recorded: list[str]) -> None:
    for seed in (0, 1):
        x = inputs(CASE, torch.float16, seed=seed)
        found, expected = call(x, plan=False), call(x, "reference", plan=False)
        assert_close(found[0], expected[0], atol=2e-3, rtol=2e-3)
        assert_close(found[1], expected[1], atol=2e-3, rtol=2e-3)
    assert recorded == ["plan_kernel", "attend_kernel", "combine_kernel"]


def test_appending(recorded: list[str]) -> None:
    """With queries to turn, and one tensor as both keys and values."""
    rotary = tilewise.Rotary(ANGLES.cos(), ANGLES.sin())
    lengths, written = torch.tensor([3, 0], dtype=torch.int32), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        new, q = torch.randn(2, 2, 1, 16).half(), torch.randn(2, 2, 3, 16).half()
        for backend in ("triton", "reference"):
            k, v = torch.zeros(2, 2, 8, 1, 16).half()
            turned = tilewise.append_kv(new, new, k, v, lengths, q=q, rotary=rotary, backend=backend)
            assert tilewise.append_kv(new, new, k, v, lengths + 2, backend=backend) is None
            assert tilewise.append_kv(new, new, k, v, lengths + 4, q=q, backend=backend) is q
            written.append((turned, k, v))
        for a, b in zip(*written[-2:], strict=True):
            assert_close(a, b)
    assert recorded == ["append_kernel"] * 3


def test_a_plan_made_again(recorded: list[str]) -> None:
    x = inputs(CASE, torch.float16)
    words = x.options | {"backend": "triton"}
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **words)
    for _ in range(2):
        assert tilewise.plan_kv(x.q, x.k, x.v, x.lengths, plan=plan, **words) is plan
    fresh = tilewise.plan_kv(x.q, x.k, x.v, x.lengths // 2, **words)
    assert recorded == ["plan_kernel"] * 2
    assert fresh.shape == plan.shape
    assert fresh.room.data_ptr() != plan.room.data_ptr()
    assert not torch.equal(fresh.ledger, plan.ledger)


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


SHAPE = (1, "of a plan")
NEW = torch.zeros(2, 1, 1, 8).half()


def said(**words: Any) -> tuple[list[Any], dict[str, Any]]:
    """The tensors and options of a call."""
    q, k, v, lengths = torch.zeros(2, 1, 2, 8), torch.zeros(4, 8, 1, 8), torch.zeros(4, 8, 1, 8), torch.zeros(2)
    given: dict[str, Any] = {"q": q.half(), "k": k.half(), "v": v.half(), "lengths": lengths.int(), "k_new": NEW}
    given |= {"plan": tilewise.KvPlan(*torch.zeros(3, 8), SHAPE), "v_new": NEW.clone(), "page_table": torch.zeros(2, 4)}
    given |= words
    return [given.pop(name) for name in ("q", "k", "v", "lengths")], given


def remember(**words: Any) -> None:
    look = memory.kv_look("attend", *said(**words))
    assert look is not None
    out = torch.zeros(2)
    recording = SimpleNamespace(run=lambda addresses: [out])
    ran = Ran(lambda *_: recording, None, [*look[1], out])
    memory.learn(look, [ran], [out], [out], lambda x: x)


def is_known(**words: Any) -> bool:
    look = memory.kv_look("attend", *said(**words))
    return memory.repeated(look) is not memory.UNKNOWN


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize(
    "other",
    [
        {"window": (5, 0)}, {"window": (5.0, 0)}, {"scale": 0.5}, {"scale": 1}, {"split": 128}, {"max_seqlen_q": 3},
        {"causal": False}, {"causal": 0}, {"softcap": 2.0}, {"starts": torch.zeros(3, dtype=torch.int32)},
        {"q": torch.zeros(3, 1, 2, 8).half()}, {"q": torch.zeros(2, 2, 1, 8).half().transpose(1, 2)},
        {"q": torch.zeros(2, 1, 2, 8).bfloat16()}, {"q": torch.zeros(33).half()[1:].view(2, 1, 2, 8)},
        {"q": torch.zeros(2, 1, 2, 8).half().requires_grad_()},
        {"q": torch.nn.Parameter(torch.zeros(2, 1, 2, 8).half(), False)},
        {"k": torch.zeros(4, 1, 8, 8).half().transpose(1, 2)}, {"v": torch.zeros(5, 8, 1, 8).half()},
        {"lengths": torch.zeros(2).long()}, {"lengths": torch.zeros(4).int()[::2]}, {"lengths": 5},
        {"v_new": NEW}, {"page_table": (torch.zeros(2, 4), torch.zeros(2, 4))}, {"page_table": torch.zeros(4, 2).T},
        {"plan": tilewise.KvPlan(*torch.zeros(3, 8), (2, "of another"))}, {"plan": None},
        {"rotary": tilewise.Rotary(torch.zeros(4, 4), torch.zeros(4, 4))}, {"score_mod": tilewise.mods.softcap(3.0)},
        {"page_table": (torch.zeros(2, 4),)}, {"page_table": ()}, {"out": torch.zeros(2, 1, 2, 8).half()},
        {"return_lse": True},
    ],
)  # fmt: skip
def test_other_calls(other: dict[str, Any], public: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is served by what is remembered of the first, nor the first by what is remembered of it; whether torch
    compares tensors for us, or its public functions do."""
    if public:
        monkeypatch.setattr(torch_private, "_Guards", None)
    remember()
    assert is_known()
    assert not is_known(**other)
    calls._calls.clear()
    if memory.kv_look("attend", *said(**other)) is not None:
        remember(**other)
        assert not is_known()


@pytest.mark.parametrize("public", [False, True])
def test_who_is_watched_is_not_remembered(public: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    if public:
        monkeypatch.setattr(torch_private, "_Guards", None)
    remember()
    with FlopCounterMode(display=False):
        assert not is_known()
        remember(split=0)
    seen = []
    torch.vmap(lambda x: seen.append(is_known()) or x)(torch.zeros(1))
    assert seen == [False]
    assert is_known()
    assert not is_known(split=0)


def test_one_tensor_in_two_places() -> None:
    remember(v_new=NEW)
    assert is_known(v_new=NEW)
    fresh = NEW.clone()
    assert is_known(k_new=fresh, v_new=fresh)
    assert not is_known(k_new=NEW, v_new=fresh)


def test_what_is_not_remembered() -> None:
    for other in ({"q": torch.zeros(2, 1, 2, 8)}, {"k": torch.zeros(4, 8, 1, 8).half().requires_grad_()}):
        remember(**other)
        assert not calls._calls
    x = inputs(CASE, torch.float16)
    with pytest.raises(tilewise.AttentionError, match="gradient"):
        call(replace(x, q=x.q.clone().requires_grad_()), plan=False)


def test_the_memory_is_bounded() -> None:
    for n in range(20):
        remember(v=torch.zeros(n + 1, 8, 1, 8).half())
    [kept] = calls._calls.values()
    assert len(kept) == calls.SAME_WORDS
    assert is_known(v=torch.zeros(20, 8, 1, 8).half())
    assert not is_known(v=torch.zeros(1, 8, 1, 8).half())


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
    assert not calls._calls
