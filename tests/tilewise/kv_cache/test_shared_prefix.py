"""Sequences that begin with the same pages: the same results, and the shared pages are read once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.conftest import INTERPRETED
from tests.kv_cases import KvCase, KvInputs, compare
from tests.prefix_cases import shared_inputs
from tilewise.backends.common.kv import KvKernels, partition, portable_launches
from tilewise.backends.common.kv.partition import shares_prefix
from tilewise.call.fields import CACHE
from tilewise.kv_request import KvRequest
from tilewise.validation import kv as checks

CASE = KvCase((40, 50, 33, 90, 37, 36), page=4, heads=4, kv_heads=2, dim=16)
COMMON = (0, 8, 8, 0, 8, 8)  # pages: two groups of three
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs the kernels")
pytestmark = pytest.mark.usefixtures("triton_runs")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are shared however little that saves."""
    monkeypatch.setattr(partition, "MIN_SAVED", 0)
    monkeypatch.setattr(partition, "MIN_SHARED", 0)


def call(x: KvInputs, backend: str, plan: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
    options = {"shared_prefix": "auto"} | x.options | options | {"backend": backend}
    if plan:
        options["plan"] = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **options)
    out = torch.full((*x.q.shape[:-1], x.v.shape[-1]), torch.nan, dtype=x.q.dtype)
    found: tuple[Tensor, Tensor] = tilewise.attention_kv(x.q, x.k, x.v, x.lengths, return_lse=True, out=out, **options)
    return found


def request_of(x: KvInputs, **options: Any) -> KvRequest:
    given: Any = {"shared_prefix": "auto"} | x.options | options
    return checks.attend_request(x.q, x.k, x.v, x.lengths, CACHE.completed(given))


def shared_of(x: KvInputs, **options: Any) -> list[int]:
    """The keys of every sequence that are read for its group."""
    request = request_of(x, backend="triton", **options)
    plan = tilewise.plan_kv(
        x.q, x.k, x.v, x.lengths, backend="triton", **{"shared_prefix": "auto"} | x.options | options
    )
    tiles = KvKernels(portable_launches).planned(request, plan.schedule)
    own = {t.b: t.start for t in tiles if t.n_k == len(x.keys[t.b])}
    return [own[b] for b in sorted(own)]


@interpreted
@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize(
    ("case", "common", "options"),
    [
        (CASE, COMMON, {}),
        (CASE, (0,) * 6, {}),
        (CASE.but(lengths=(32,) * 6), (0,) + (8,) * 5, {}),
        (CASE.but(lengths=(60, 22, 61, 18, 64, 50)), (0, 5, 5, 4, 4, 11), {}),
        (CASE.but(queries=3, page=1), tuple(4 * n for n in COMMON), {}),
        (CASE.but(page=24, lengths=(60, 72, 49)), (0, 2, 2), {"causal": False}),
        (CASE.but(csr=True), COMMON, {"softcap": 3.0}),
        (CASE.but(queries=(2, 1, 0, 5, 1, 3), padding=4), COMMON, {"sinks": torch.linspace(-1, 2, 4)}),
        (CASE.but(new=2, queries=2), COMMON, {}),
        (CASE.but(heads=5, kv_heads=1, dim=20, dim_v=7), COMMON, {}),
        (CASE.but(layout="heads_first", heads=2), COMMON, {"scale": 0.4}),
    ],
    ids=["groups", "none", "all", "short", "queries", "wide", "csr", "packed", "append", "odd", "strides"],
)
def test_results(case: KvCase, common: tuple[int, ...], options: dict[str, Any], plan: bool) -> None:
    x = shared_inputs(case, common)
    compare(call(x, "triton", plan, **options), x, **options)


@pytest.mark.parametrize("backend", ["reference"])
def test_reference(backend: str) -> None:
    x = shared_inputs(CASE, COMMON)
    compare(call(x, backend), x)


@interpreted
def test_tree() -> None:
    """Drafts that see each other by a tree, after a shared prefix."""
    x = shared_inputs(CASE.but(queries=3), COMMON)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().expand(6, 3, 3)
    compare(call(x, "triton", tree=tree), x, tree=tree.tolist())


@interpreted
@pytest.mark.parametrize("scale", ["head", "token"])
def test_quantised(scale: str) -> None:
    x = shared_inputs(CASE, COMMON, torch.float16)
    k, v = (t.nan_to_num().mul(32).round().clamp(-127, 127).to(torch.int8) for t in (x.k, x.v))
    shape = (2,) if scale == "head" else k.shape[:3]
    options = {"k_scale": torch.full(shape, 1 / 32), "v_scale": torch.full(shape, 1 / 64)} | x.options
    expected, lse = tilewise.attention_kv(x.q, k, v, x.lengths, backend="reference", return_lse=True, **options)
    found = tilewise.attention_kv(
        x.q, k, v, x.lengths, backend="triton", return_lse=True, shared_prefix="auto", **options
    )
    torch.testing.assert_close(found, (expected, lse), atol=2e-3, rtol=2e-3)


@interpreted
@pytest.mark.parametrize(
    ("case", "common", "found"),
    [
        (CASE, COMMON, [32, 32, 32, 32, 32, 32]),
        (CASE, (0,) * 6, [0] * 6),
        (CASE, (0, 3, 8, 0, 8, 3), [0, 32, 32, 32, 32, 0]),  # 12 keys: less than a chunk
        (CASE.but(lengths=(100,) * 4), (0, 4, 20, 20), [0, 80, 80, 80]),  # the first shares 16: too few
        (CASE.but(lengths=(100, 10, 100, 100)), (0, 2, 2, 20), [0, 0, 80, 80]),
        (CASE.but(lengths=(33, 80, 80)), (0, 8, 20), [0, 64, 64]),  # 32 for all of them would be less
        (CASE.but(lengths=(33, 33), queries=3), (0, 8), [16, 16]),  # the last query of 3 is at key 32: 30 are before
    ],
)  # fmt: skip
def test_groups(case: KvCase, common: tuple[int, ...], found: list[int]) -> None:
    """Chunks have 16 keys in the interpreter."""
    x = shared_inputs(case, common)
    assert shared_of(x) == found
    compare(call(x, "triton"), x)


@interpreted
def test_too_little() -> None:
    """Nothing is shared that saves less than a number of bytes: 4 sequences save 32 keys of 256 bytes each."""
    x = shared_inputs(CASE, COMMON)
    for bytes_saved, found in ((4 * 32 * 256, 32), (4 * 32 * 256 + 1, 0)):
        partition.MIN_SAVED = bytes_saved
        assert shared_of(x) == [found] * 6
    partition.MIN_SAVED, partition.MIN_SHARED = 0, 48
    assert shared_of(x) == [0] * 6


@interpreted
def test_given() -> None:
    """Given numbers of keys are used as they are, limited to the keys before the queries."""
    x = shared_inputs(CASE, COMMON)
    given = torch.tensor([99, 32, 16, 0, 1000, 36], dtype=torch.int32)
    given[4:] = torch.tensor([32, 32])
    assert shared_of(x, shared_prefix=given) == [16, 16, 16, 32, 32, 32]
    compare(call(x, "triton", shared_prefix=given), x)
    x = shared_inputs(CASE.but(lengths=(40, 40)), (0, 10))
    far = torch.tensor([-5, 1000], dtype=torch.int32)
    assert shared_of(x, shared_prefix=far) == [32, 32]
    compare(call(x, "triton", shared_prefix=far), x)


@interpreted
def test_plan_is_made_again() -> None:
    """A plan overwritten for other tables and lengths."""
    x = shared_inputs(CASE, COMMON)
    options = x.options | {"backend": "triton", "shared_prefix": "auto"}
    plan = tilewise.plan_kv(x.q, x.k, x.v, x.lengths, **options)
    other = shared_inputs(CASE.but(lengths=(50, 40, 90, 36, 33, 37)), (0, 0, 9, 8, 2, 0), seed=3)
    x.lengths.copy_(other.lengths)
    table = torch.zeros_like(x.options["page_table"])
    width = min(table.shape[1], other.options["page_table"].shape[1])
    table[:, :width] = other.options["page_table"][:, :width]
    again = {**options, "page_table": table, "plan": plan}
    assert tilewise.plan_kv(other.q, other.k, other.v, x.lengths, **again) is plan
    found = tilewise.attention_kv(other.q, other.k, other.v, x.lengths, return_lse=True, **again)
    compare(found, other)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (9, 0)},
        {"starts": torch.ones(6, dtype=torch.int32)},
        {"split": 128},
        {"alibi_slopes": torch.ones(4)},
        {"mask_mod": tilewise.mods.document(ids=torch.zeros(6, 99, dtype=torch.int32))},
        {"return_max_logit": True},
        {"shared_prefix": None},
    ],
    ids=lambda options: next(iter(options)),
)
def test_not_shared(options: dict[str, Any]) -> None:
    x = shared_inputs(CASE, COMMON)
    assert shares_prefix(request_of(x))
    assert not shares_prefix(request_of(x, **options))


@interpreted
@pytest.mark.parametrize("options", [{"window": (9, 0)}, {"split": 128}], ids=["window", "split"])
def test_option_without_effect(options: dict[str, Any]) -> None:
    x = shared_inputs(CASE, COMMON)
    compare(call(x, "triton", True, **options), x, **{k: v for k, v in options.items() if k == "window"})


@pytest.mark.parametrize(
    "common", ["auto", torch.tensor([0, 32, 32, 0, 32, 32], dtype=torch.int32)], ids=["auto", "given"]
)
def test_compile(common: Any) -> None:
    x = shared_inputs(CASE, COMMON)

    def step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> Any:
        options: dict[str, Any] = {"page_table": table, "shared_prefix": common, "backend": "reference"}
        plan = tilewise.plan_kv(q, k, v, lengths, **options)
        return tilewise.attention_kv(q, k, v, lengths, plan=plan, return_lse=True, **options)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    compare(compiled(x.q, x.k, x.v, x.lengths, x.options["page_table"]), x)
