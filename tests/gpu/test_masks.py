"""Dropout and block masks on the Hopper kernels, forward and backward, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tests import features, features_budget
from tilewise.backends.registry import BACKENDS

PORTABLE = next(backend for backend in BACKENDS if backend.name == "triton")
CALLS = 4
CASES: dict[str, dict[str, Any]] = {
    "dropout 64": {"dropout": True, "band": (False, True), "dtype": "float16"},
    "dropout 64 packed": {"dropout": True, "packed": True, "alibi": "h"},
    "dropout 96": {"dropout": True, "d": 96, "dv": 96, "mask": "document"},
    "dropout 128": {"dropout": True, "d": 128, "dv": 128, "band": (True, True), "sinks": True},
    "dropout 128 packed": {"dropout": True, "d": 128, "dv": 128, "packed": True, "band": (False, True)},
    "dropout 192": {"dropout": True, "d": 192, "dv": 192},
    "dropout 192 by 128": {"dropout": True, "d": 192, "dv": 128, "band": (False, True)},
    "dropout 256": {"dropout": True, "d": 256, "dv": 256, "band": (False, True), "packed": True},
    "dropout, tile lists": {"dropout": True, "d": 128, "dv": 128, "mask": "prefix_lm", "blocks": 128},
    "packed tile lists": {"mask": "prefix_lm", "blocks": 128, "packed": True, "band": (True, True)},
    "packed tile lists 128": {"mask": "document", "blocks": 128, "packed": True, "d": 128, "dv": 128, "softcap": True},
    "256 tile lists": {"mask": "document", "blocks": 128, "band": (False, True), "d": 256, "dv": 256},
    "192 tile lists": {"mask": "prefix_lm", "blocks": 128, "d": 192, "dv": 128, "mod": "gated", "packed": True},
}


def judge(name: str, deterministic: bool) -> list[str]:
    chosen = features.replace(features.Features(dtype="bfloat16"), **CASES[name])
    wrong = []
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        for n in range(CALLS):
            call = features.make(chosen, 50 + n, longest=300 if n % 2 else 900, device="cuda")
            wrong += [f"{call.lengths}: {fault}" for fault in features_budget.judge(call, "hopper")[1]]
    finally:
        torch.use_deterministic_algorithms(False)
    return wrong


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "ordered"])
@pytest.mark.parametrize("name", CASES)
def test_within_budget(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable backward must not be asked."""
    monkeypatch.setattr(PORTABLE, "backward_runner", None)
    assert not (wrong := judge(name, deterministic)), "\n".join(wrong)


@tilewise.mask_mod
def every_other_block(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (q_idx // 128 + kv_idx // 128 + h) % 2 == 0


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "ordered"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_heads_of_a_group_with_lists_of_their_own(d: int, deterministic: bool) -> None:
    torch.manual_seed(0)
    q, dout = (torch.randn(2, 700, 4, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, 700, 2, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = tilewise.block_mask(every_other_block(), 700, 700, heads=4, device="cuda")
    found = []
    for backend in ("hopper", "triton"):
        out = tilewise.attention(*leaves, mask_mod=mask, deterministic=deterministic, backend=backend)
        found.append([out, *torch.autograd.grad(out, leaves, dout)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-2, rtol=3e-2)
