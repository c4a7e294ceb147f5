"""The Hopper backward without a GPU: its Gluon kernel in the emulator, the kernels around it in the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as altered
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.budget import check
from tests.cases import Case, Inputs, make
from tests.covering import cases, each_once
from tests.oracle import naive_grads
from tilewise.request import BackwardInputs, Request

pytestmark = [pytest.mark.usefixtures("triton_runs"), pytest.mark.slow]
emulator = pytest.importorskip("tilewise_lab.emulator")
hopper = pytest.importorskip("tilewise.backends.hopper.backward_launches")

from tilewise.backends.common.launch import DeviceMemory  # noqa: E402
from tilewise.backends.hopper import backward_schedule  # noqa: E402
from tilewise.backends.hopper.backward_schedule import Split  # noqa: E402

PLAIN = Case(n_q=150, n_k=150, heads=1, kv_heads=1, d=64, dv=64, dtype="bfloat16", lse_gradient=False)
WIDE = altered(PLAIN, d=256, dv=256)
TWO_PASSES = altered(PLAIN, d=192, dv=128)
PACKED = ((5, 0), (0, 60), (145, 210), (64, 80))
CASES = {
    "full": PLAIN,
    "causal": altered(PLAIN, after=0, n_q=200, n_k=200),
    "128": altered(PLAIN, d=128, dv=128, after=0, dtype="float16"),
    "wide k": altered(PLAIN, d=128, dv=64),
    "padded": altered(PLAIN, d=72, dv=40, after=0),
    "few queries": altered(PLAIN, n_q=40, n_k=300, after=0),
    "few keys": altered(PLAIN, n_q=300, n_k=40, after=0),
    "window": altered(PLAIN, n_q=300, n_k=300, before=70, after=30),
    "shared keys": altered(PLAIN, heads=4, kv_heads=2, after=0),
    "two rounds": altered(PLAIN, batch=3, n_q=200, n_k=200, heads=2, kv_heads=2, after=0),
    "lse": altered(PLAIN, after=0, lse_gradient=True),
    "negative scale": altered(PLAIN, scale=-0.2),
    "packed": altered(PLAIN, batch=4, n_q=214, n_k=350, lengths=PACKED, heads=2, kv_heads=1, after=0),
    "256 full": WIDE,
    "256 causal": altered(WIDE, after=0, n_q=200, n_k=200, dtype="float16"),
    "192 by 128": altered(WIDE, d=192, dv=128, after=0),
    "160 by 40": altered(WIDE, d=160, dv=40),
    "256 wide v": altered(WIDE, d=64, dv=200, after=0),
    "256 few queries": altered(WIDE, n_q=40, n_k=150, after=0),
    "256 few keys": altered(WIDE, n_q=150, n_k=40, after=0),
    "256 window": altered(WIDE, n_q=230, n_k=230, before=70, after=30),
    "256 shared keys": altered(WIDE, n_q=100, n_k=100, heads=4, kv_heads=2, after=0),
    "256 lse": altered(WIDE, n_q=70, n_k=70, after=0, lse_gradient=True),
    "256 packed": altered(WIDE, batch=4, n_q=214, n_k=350, lengths=PACKED, heads=2, kv_heads=1, after=0),
    "96": altered(PLAIN, d=96, dv=96, after=0, n_q=200, n_k=200),
    "80": altered(PLAIN, d=80, dv=80, dtype="float16"),
    "128 by 96": altered(PLAIN, d=128, dv=96, after=0),
    "96 by 64": altered(PLAIN, d=96, dv=64, n_q=230, n_k=230, before=70, after=30),
    "96 packed": altered(PLAIN, d=96, dv=80, batch=4, n_q=214, n_k=350, lengths=PACKED, heads=2, kv_heads=1, after=0),
    "192": altered(WIDE, d=192, dv=192, after=0, n_q=200, n_k=200),
    "192 window": altered(WIDE, d=192, dv=192, n_q=230, n_k=230, before=70, after=30),
    "192 by 128 window": altered(TWO_PASSES, n_q=230, n_k=230, before=70, after=30, dtype="float16"),
    "192 by 128 packed": altered(TWO_PASSES, batch=4, n_q=214, n_k=350, lengths=PACKED, heads=2, kv_heads=1, after=0),
    "192 by 128 rounds": altered(TWO_PASSES, batch=3, heads=2, kv_heads=1, lse_gradient=True),
    "512": altered(PLAIN, d=512, dv=512, n_q=100, n_k=100),
    "512 causal": altered(PLAIN, d=512, dv=512, after=0, dtype="float16", lse_gradient=True),
    "512 shared keys": altered(PLAIN, d=512, dv=512, heads=4, kv_heads=2, n_q=70, n_k=90, after=0),
    "384 by 320 window": altered(PLAIN, d=384, dv=320, n_q=230, n_k=200, before=70, after=30),
    "320 by 72 packed": altered(
        PLAIN, d=320, dv=72, batch=4, n_q=214, n_k=350, lengths=PACKED, heads=2, kv_heads=1, after=0
    ),
    "192 by 96": altered(TWO_PASSES, dv=96, n_q=40, n_k=150, after=0),
}


class NanMemory(DeviceMemory):
    """A workspace whose values are NaN until they are written."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return super().empty(shape, dtype).fill_(torch.nan if dtype.is_floating_point else 2**30)


def gradients(
    inputs: Inputs,
    *,
    deterministic: bool = False,
    partial: bool = False,
    split: Split | None = None,
    seed: int = 0,
    num_sms: int = 2,
    results: Sequence[Tensor] = (),
    **replaced: Any,
) -> list[Tensor]:
    """dq, dk and dv. `results`: out and lse, if not those of these inputs."""
    case, q, k, v, dout, dlse, cu_q, cu_k = inputs
    out, lse, *_ = results or naive_grads(q, k, v, case.spec, dout, dlse, cu_q, cu_k)
    spec = case.spec._replace(deterministic=deterministic, partial=partial)
    request = Request(q, k, v, spec, cu_q=cu_q, cu_k=cu_k)
    grads = [torch.full_like(x, torch.nan, dtype=request.result_dtype) for x in (q, k, v)]
    space = hopper.new_workspace(NanMemory(q.device), hopper.call_shape(request), split)
    bwd_inputs = BackwardInputs(out.to(q.dtype), lse.float(), dout, dlse)
    for launch in hopper.backward_launches(request, bwd_inputs, tuple(grads), space, num_sms).values():
        if hasattr(launch.kernel, "is_gluon") and launch.kernel.is_gluon():
            emulator.launch(*launch, seed=seed, replace=replaced)
        else:
            launch()
    return grads


@each_once(
    name=["causal", "shared keys", "192", "256 causal", "512 causal"],
    side=["queries", "keys"],
    split=[None, Split(1, 2)],
)
def test_only_gradients_that_depend_on_a_nan_get_one(name: str, side: str, split: Split | None) -> None:
    """The first queries, or the last keys, are NaN."""
    inputs = make(CASES[name], "cpu")
    case, q, k, v, dout, *_ = inputs
    out, lse, *_ = naive_grads(q, k, v, case.spec, dout, None)
    clean = gradients(inputs, split=split, results=(out, lse))
    for x in (k[:, -5:], v[:, -5:]) if side == "keys" else (q[:, :5], dout[:, :5]):
        x.fill_(torch.nan)
    i, j = torch.arange(case.n_q)[:, None], torch.arange(case.n_k)[None, :]
    sees = (j <= i + case.after) & (j >= i - (case.n_k if case.before is None else case.before))
    bad_q = sees[:, -5:].any(1) if side == "keys" else torch.arange(case.n_q) < 5
    bad_k = (sees & bad_q[:, None]).any(0)
    out[:, bad_q], lse[..., bad_q] = torch.nan, torch.nan
    found = gradients(inputs, split=split, results=(out, lse))
    for x, before, bad in zip(found, clean, (bad_q, bad_k, bad_k), strict=True):
        torch.testing.assert_close(x[:, ~bad], before[:, ~bad], atol=1e-2, rtol=1e-2)
        assert x[:, bad].isnan().all()
    assert not bad_q.all()


QUICK = [
    ("causal", False), ("wide k", True), ("few keys", True), ("packed", True), ("192 by 128", False),
    ("256 window", True), ("96 packed", False), ("512 causal", False),
]  # fmt: skip


@cases("case, deterministic", [(CASES[name], x) for name, x in QUICK], product(CASES.values(), (False, True)), ids=str)
def test_within_budget(case: Case, deterministic: bool) -> None:
    inputs = make(case, "cpu")
    unused = torch.zeros(())
    check([unused, unused, *gradients(inputs, deterministic=deterministic)], inputs, ("dq", "dk", "dv"))


@cases("case", [altered(PLAIN, n_q=500, n_k=500)], [altered(WIDE, n_q=300, n_k=300)], ids=str)
def test_ordered_sums_do_not_depend_on_timing(case: Case) -> None:
    inputs = make(altered(case, after=0), "cpu")
    first, *others = (gradients(inputs, deterministic=True, seed=seed) for seed in range(3))
    for grads in others:
        assert all(torch.equal(a, b) for a, b in zip(first, grads, strict=True))


@cases("name", ["packed"], ["full", "window", "shared keys", "packed", "256 shared keys"])
def test_ordered_sums_in_both_directions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head in a cohort: the tiles of the last are drawn first tile first, those of the others last tile first."""
    monkeypatch.setattr(backward_schedule, "L2_BYTES", 0)
    case = CASES[name]
    if case.lengths is None:
        case = altered(case, batch=2, n_q=300, n_k=300)
    inputs = make(altered(case, heads=3 * case.heads // case.kv_heads, kv_heads=3), "cpu")
    unused = torch.zeros(())
    check([unused, unused, *gradients(inputs, deterministic=True)], inputs, ("dq", "dk", "dv"))


@cases("case", [altered(PLAIN, n_q=500, n_k=500)], [altered(WIDE, n_q=400, n_k=400)], ids=str)
def test_without_semaphores_they_would(case: Case) -> None:
    inputs = make(altered(case, dtype="float16"), "cpu")
    options: Any = {"deterministic": True, "num_sms": 8, "semaphore_wait": lambda *_: None}
    runs = [gradients(inputs, seed=n, **options)[0] for n in range(4)]
    assert not all(torch.equal(runs[0], x) for x in runs[1:])


SPLIT = {
    "heads": (altered(PLAIN, heads=4, kv_heads=1, after=0), Split(2)),
    "each head": (altered(PLAIN, heads=6, kv_heads=2, d=128, dv=128), Split(3)),
    "blocks": (altered(PLAIN, n_q=500, n_k=300, after=0, dtype="float16"), Split(1, 2)),
    "128 blocks": (altered(PLAIN, n_q=330, n_k=200, d=128, dv=64, after=0), Split(1, 4)),
    "heads and blocks": (altered(PLAIN, n_q=300, n_k=300, heads=2, kv_heads=1, batch=2, after=0), Split(2, 2)),
    "fewer blocks than parts": (altered(PLAIN, n_q=70, n_k=300, after=0), Split(1, 8)),
    "window": (altered(PLAIN, n_q=400, n_k=400, before=70, after=30, d=128, dv=128), Split(1, 2)),
    "few queries": (altered(PLAIN, n_q=40, n_k=300, heads=2, kv_heads=1, after=0), Split(2)),
    "few keys": (altered(PLAIN, n_q=300, n_k=40, after=0), Split(1, 2)),
    "lse": (altered(PLAIN, heads=2, kv_heads=1, after=0, lse_gradient=True), Split(2)),
    "packed": (altered(CASES["packed"], heads=4, kv_heads=2), Split(2, 2)),
    "packed, 72 by 40": (altered(CASES["packed"], d=72, dv=40), Split(1, 2)),
    "256": (altered(WIDE, n_q=230, n_k=150, heads=2, kv_heads=1, after=0), Split(2)),
    "256 blocks": (altered(WIDE, n_q=330, n_k=150, after=0), Split(1, 2)),
    "256 full": (altered(WIDE, n_q=330, n_k=100), Split(1, 4)),
    "192 by 128, window": (altered(WIDE, n_q=230, n_k=230, d=192, dv=128, before=70, after=30), Split(1, 2)),
    "256 packed": (altered(CASES["256 packed"], heads=4, kv_heads=2), Split(2, 2)),
}


@cases(
    "case, split, deterministic",
    [(*SPLIT["window"], False), (*SPLIT["packed"], True), (*SPLIT["256"], True), (*SPLIT["lse"], False)],
    [(*pair, x) for pair in SPLIT.values() for x in (False, True)],
    ids=str,
)
def test_parts_add_up(case: Case, split: Split, deterministic: bool) -> None:
    inputs = make(case, "cpu")
    unused = torch.zeros(())
    found = gradients(inputs, deterministic=deterministic, split=split, num_sms=5)
    check([unused, unused, *found], inputs, ("dq", "dk", "dv"))


@each_once(name=["shared keys", "packed", "256 shared keys"], split=[Split(), Split(2)], ids=str)
def test_float32_gradients_are_added_without_rounding(name: str, split: Split) -> None:
    inputs = make(altered(CASES[name], dtype="bfloat16"), "cpu")
    found = gradients(inputs, partial=True, split=split)
    assert [x.dtype for x in found] == [torch.float32] * 3
    assert all(bool((x != x.bfloat16()).any()) for x in found)
    unused = torch.zeros(())
    check([unused, unused, *(x.to(inputs.q.dtype) for x in found)], inputs, ("dq", "dk", "dv"))


def test_float32_gradients_above_head_dim_256() -> None:
    inputs = make(CASES["512 shared keys"], "cpu")
    found = gradients(inputs, partial=True)
    assert [x.dtype for x in found] == [torch.float32] * 3
    assert all(bool((x != x.bfloat16()).any()) for x in found)
    unused = torch.zeros(())
    check([unused, unused, *(x.to(inputs.q.dtype) for x in found)], inputs, ("dq", "dk", "dv"))


@cases("name", ["packed"], ["heads and blocks", "128 blocks", "packed", "256 blocks"])
def test_ordered_parts_do_not_depend_on_timing(name: str) -> None:
    case, split = SPLIT[name]
    inputs = make(case, "cpu")
    options: Any = {"deterministic": True, "split": split}
    first, *others = (gradients(inputs, seed=seed, num_sms=2 + 3 * seed, **options) for seed in range(3))
    for grads in others:
        assert all(torch.equal(a, b) for a, b in zip(first, grads, strict=True))


def limping(name: str) -> Any:
    """`narrow`, by a warpgroup that now and then falls behind by a few blocks."""

    def downcast(x: Any, dtype: torch.dtype) -> Any:
        me = emulator.machine.current()
        if me.name == name and me.machine.random.random() < 0.3:
            me.clock += 20_000
        return x.to(dtype)

    return downcast


SYNCHRONISED = [(PLAIN, False), (PLAIN, True), (TWO_PASSES, False)]
SYNCHRONISED_IDS = ["fast", "ordered", "two passes"]


@cases("case, deterministic", SYNCHRONISED[1:2], SYNCHRONISED, ids=str)
def test_a_slow_warpgroup_changes_nothing(case: Case, deterministic: bool) -> None:
    inputs = make(altered(case, n_q=400, n_k=400), "cpu")
    even, uneven = (
        gradients(inputs, deterministic=deterministic, **x) for x in ({}, {"downcast": limping("consume 1")})
    )
    for a, b in zip(even, uneven, strict=True):
        torch.testing.assert_close(a, b)


def test_sums_that_come_late_change_nothing() -> None:
    """A warpgroup whose dQ is not taken from it meets the other one, which goes on to the next tile, all the same."""
    wait = emulator.language.NAMES["semaphore_wait"]

    def late(*args: Any) -> None:
        me = emulator.machine.current()
        me.clock += 50_000 * (me.name == "reduce_dq 4")
        wait(*args)

    inputs = make(altered(PLAIN, n_q=192, n_k=192, heads=2, kv_heads=2, d=128, dv=128), "cpu")
    even, uneven = (gradients(inputs, deterministic=True, num_sms=1, **x) for x in ({}, {"semaphore_wait": late}))
    assert all(torch.equal(a, b) for a, b in zip(even, uneven, strict=True))


@each_once(word=["bar_sync_dynamic", "bar_arrive_dynamic", "arrive", "fence_async_shared"], call=SYNCHRONISED, ids=str)
def test_missing_synchronisation_is_caught(word: str, call: tuple[Case, bool]) -> None:
    case, deterministic = call
    inputs = make(altered(case, n_q=400, n_k=400), "cpu")
    broken = {"downcast": limping("consume 1"), word: lambda *_: None}
    with pytest.raises((emulator.RaceError, emulator.DeadlockError)):
        all(gradients(inputs, deterministic=deterministic, seed=seed, **broken) for seed in range(4))


@cases("d, dv, heads", [(128, 128, 2)], [(64, 64, 1), (128, 64, 1)])
def test_scattered(d: int, dv: int, heads: int) -> None:
    """Queries that are copies of rows: dq is added to the rows, in another order of columns."""
    lengths = ((5, 40), (0, 60), (150, 130), (64, 80))
    case = altered(PLAIN, d=d, dv=dv, heads=heads, batch=4, n_q=219, n_k=310, lengths=lengths)
    _, q, k, v, dout, _, cu_q, cu_k = make(case, "cpu")
    out, lse, dq, dk, dv_ = naive_grads(q, k, v, case.spec, dout, None, cu_q, cu_k)
    lines = torch.randint(0, 100, (case.n_q,), generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(100, *dq.shape[1:], dtype=dq.dtype).index_add_(0, lines, dq)
    delta = (out * dout).sum(-1).mT.float().contiguous()
    request = Request(q, k, v, case.spec, cu_q=cu_q, cu_k=cu_k)
    sums = torch.zeros(64 + 100 * heads, d)
    grads = sums, torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
    bwd_inputs = BackwardInputs(dout, lse.float(), dout, -delta)
    for launch in hopper.scattered_launches(request, bwd_inputs, grads, lines.int(), 2, NanMemory(q.device)):
        if hasattr(launch.kernel, "is_gluon") and launch.kernel.is_gluon():
            emulator.launch(*launch)
        else:
            launch()
    found = sums[64:].view(-1, d // 16, 4, 2, 2).transpose(2, 3).reshape(expected.shape) * case.spec.scale
    assert not sums[:64].any()
    for x, y in ((found, expected), (grads[1], dk), (grads[2], dv_)):
        torch.testing.assert_close(x.double(), y.double(), atol=3e-2, rtol=3e-2)
