"""The Hopper backward for head dims above 128 without a GPU: in the emulator, and what the compiler makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace as altered
from itertools import product
from typing import Any

import pytest
import torch

from tests.budget import check
from tests.cases import Case, make

from .test_backward import PACKED, PLAIN, emulator, gradients
from .test_compile import ROOT, TRITONS

pytestmark = pytest.mark.usefixtures("triton_runs")

WIDE = altered(PLAIN, d=256, dv=256)
CASES = {
    "full": WIDE,
    "causal": altered(WIDE, after=0, n_q=200, n_k=200, dtype="float16"),
    "192 by 128": altered(WIDE, d=192, dv=128, after=0),
    "160 by 40": altered(WIDE, d=160, dv=40),
    "wide v": altered(WIDE, d=64, dv=200, after=0),
    "few queries": altered(WIDE, n_q=40, n_k=150, after=0),
    "few keys": altered(WIDE, n_q=150, n_k=40, after=0),
    "window": altered(WIDE, n_q=230, n_k=230, before=70, after=30),
    "shared keys": altered(WIDE, n_q=100, n_k=100, heads=4, kv_heads=2, after=0),
    "lse": altered(WIDE, n_q=70, n_k=70, after=0, lse_gradient=True),
    "packed": altered(WIDE, batch=4, n_q=214, n_k=350, lengths=PACKED, heads=2, kv_heads=1, after=0),
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "ordered"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_within_budget(case: Case, deterministic: bool) -> None:
    inputs = make(case, "cpu")
    unused = torch.zeros(())
    check([unused, unused, *gradients(inputs, deterministic=deterministic)], inputs, ("dq", "dk", "dv"))


def test_ordered_sums_do_not_depend_on_timing() -> None:
    inputs = make(altered(WIDE, n_q=300, n_k=300, after=0), "cpu")
    first, *others = (gradients(inputs, deterministic=True, seed=seed) for seed in range(3))
    for grads in others:
        assert all(torch.equal(a, b) for a, b in zip(first, grads, strict=True))


def test_without_semaphores_they_would() -> None:
    inputs = make(altered(WIDE, n_q=400, n_k=400, dtype="float16"), "cpu")
    runs = [gradients(inputs, deterministic=True, seed=n, semaphore_wait=lambda *_: None)[0] for n in range(4)]
    assert not all(torch.equal(runs[0], x) for x in runs[1:])


def limping(name: str) -> Any:
    """`narrow`, by a warpgroup that now and then falls behind by a few blocks."""

    def narrow(x: Any, dtype: torch.dtype) -> Any:
        me = emulator.machine.current()
        if me.name == name and me.machine.random.random() < 0.3:
            me.clock += 20_000
        return x.to(dtype)

    return narrow


@pytest.mark.parametrize("slow", ["consume 0", "consume 1"])
def test_a_slow_warpgroup_changes_nothing(slow: str) -> None:
    inputs = make(altered(WIDE, n_q=300, n_k=300), "cpu")
    for a, b in zip(gradients(inputs), gradients(inputs, narrow=limping(slow)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_slow_keeper_of_the_order_changes_nothing() -> None:
    release = emulator.language.NAMES["semaphore_release"]

    def late(semaphore: Any) -> None:
        emulator.machine.current().clock += 50_000
        release(semaphore)

    inputs = make(altered(WIDE, n_q=400, n_k=130), "cpu")
    even, uneven = (gradients(inputs, deterministic=True, **x) for x in ({}, {"semaphore_release": late}))
    assert all(torch.equal(a, b) for a, b in zip(even, uneven, strict=True))


@pytest.mark.parametrize("slow", ["consume 0", "consume 1"])
@pytest.mark.parametrize("word", ["wait_turn", "pass_turn", "arrive", "fence_async_shared"])
def test_missing_synchronisation_is_caught(word: str, slow: str) -> None:
    inputs = make(altered(WIDE, n_q=300, n_k=300), "cpu")
    broken = {"narrow": limping(slow), word: lambda *_: None}
    with pytest.raises((emulator.RaceError, emulator.DeadlockError)):
        all(gradients(inputs, seed=seed, **broken) for seed in range(4))


CALLS = {
    "full": {},
    "causal": {"after": 0},
    "192 by 128, shared keys": {"d": 192, "dv": 128, "after": 0, "group": 4},
    "packed": {"after": 0, "packed": True, "dtype": "float16"},
    "ordered": {"deterministic": True},
}


@pytest.mark.parametrize(("name", "triton"), product(CALLS, TRITONS))
def test_no_spills_and_nothing_serialised(name: str, triton: str) -> None:
    path = os.pathsep.join(filter(None, [triton, str(ROOT / "src"), str(ROOT)]))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.hopper.compile_backward", json.dumps({"d": 256} | CALLS[name])],
        capture_output=True, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(done.stdout.splitlines()[-1])
    assert made["spills"] == 0
    assert made["warnings"] == []
    assert made["products"] > made["waits"] > 0
    assert made["shared"] <= 227 * 1024
