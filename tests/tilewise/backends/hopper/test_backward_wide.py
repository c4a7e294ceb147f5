"""Synchronisation of the Hopper backward for head dims above 128, in the emulator."""

from __future__ import annotations

from dataclasses import replace as altered
from typing import Any

import pytest
import torch

from tests.cases import make
from tests.covering import cases, each_once

from .test_backward import WIDE, emulator, gradients, limping

pytestmark = [pytest.mark.usefixtures("triton_runs"), pytest.mark.slow]


@cases("slow", ["consume 0"], ["consume 1"])
def test_a_slow_warpgroup_changes_nothing(slow: str) -> None:
    inputs = make(altered(WIDE, n_q=300, n_k=300), "cpu")
    for a, b in zip(gradients(inputs), gradients(inputs, downcast=limping(slow)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_slow_keeper_of_the_order_changes_nothing() -> None:
    release = emulator.language.NAMES["semaphore_release"]

    def late(semaphore: Any) -> None:
        emulator.machine.current().clock += 50_000
        release(semaphore)

    inputs = make(altered(WIDE, n_q=400, n_k=130), "cpu")
    even, uneven = (gradients(inputs, deterministic=True, **x) for x in ({}, {"semaphore_release": late}))
    assert all(torch.equal(a, b) for a, b in zip(even, uneven, strict=True))


@each_once(word=["bar_sync", "bar_arrive", "arrive", "fence_async_shared"], slow=["consume 0", "consume 1"])
def test_missing_synchronisation_is_caught(word: str, slow: str) -> None:
    inputs = make(altered(WIDE, n_q=300, n_k=300), "cpu")
    broken = {"downcast": limping(slow), word: lambda *_: None}
    with pytest.raises((emulator.RaceError, emulator.DeadlockError)):
        all(gradients(inputs, seed=seed, **broken) for seed in range(4))
