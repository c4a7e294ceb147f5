"""Score terms on a GPU: random combinations on each backend, sets of compile-time choices with 18 calls each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tests import features, features_budget
from tests.covering import cases
from tilewise.backends.registry import BACKENDS
from tilewise.errors import AttentionError

PORTABLE = next(backend for backend in BACKENDS if backend.name == "triton")
DTYPES = ("float16", "bfloat16", "bfloat16", "float32")


CALLS = 18


def judge_calls(chosen: features.Features, seed: int, backend: str, record_property: Any) -> None:
    judged, wrong = [], []
    for n in range(CALLS):
        call = features.make(chosen, seed + n, longest=300 if n % 3 else 700, device="cuda")
        try:
            ratios, faults = features_budget.judge(call, backend)
        except AttentionError as error:
            pytest.skip(str(error))
        judged.append(([f"{backend} {name}" for name in chosen.names], ratios))
        wrong += [f"{call.lengths}: {fault}" for fault in faults]
    record_property("features", judged)
    assert not wrong, f"{chosen}, {len(wrong)} results of {CALLS} calls:\n" + "\n".join(wrong)


@cases("number", range(8), range(20))
def test_random_combinations_on_hopper(number: int, record_property: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the terms that the Hopper kernels take, forward and backward, with sums of dQ in any order and, for odd
    numbers, in a fixed one. The portable backward must not be asked."""
    monkeypatch.setattr(PORTABLE, "backward_runner", None)
    chosen = features.Features.random(2000 + number, dims=(32, 64, 128, 256), dtypes=DTYPES[:3], blocks=0)
    chosen = chosen.having(number)
    torch.use_deterministic_algorithms(number % 2 == 1, warn_only=True)
    try:
        judge_calls(features.replace(chosen, dropout=False), 100 * number, "hopper", record_property)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", features.MASKS)
def test_tile_lists_on_hopper(name: str, d: int, record_property: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PORTABLE, "backward_runner", None)
    band = (d == 64, True) if name in ("document", "prefix_lm") else (False, False)
    chosen = features.Features(dtype="bfloat16", d=d, dv=d, mask=name, blocks=128, band=band, softcap=d == 64)
    judge_calls(chosen, d, "hopper", record_property)


@pytest.mark.parametrize("number", [1003, 1007, 1012, 1020])
def test_two_runs_agree_bit_for_bit(number: int) -> None:
    chosen = features.Features.random(number, dims=(64,), dtypes=("bfloat16",), blocks=128)
    call = features.make(chosen, number, longest=500, device="cuda")
    first, second = features.run(call, "triton"), features.run(call, "triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_dropout_mask_is_the_public_one() -> None:
    q, k = (torch.zeros(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.eye(300, 512, device="cuda", dtype=torch.bfloat16)[None, :, None].expand(2, -1, 4, -1)
    out = tilewise.attention(q, k, v, dropout_p=0.25, seed=2**40 + 3, backend="triton")
    keep = tilewise.dropout_mask(2, 4, 300, 300, p=0.25, seed=2**40 + 3, device="cuda")
    assert torch.equal(out[..., :300].transpose(1, 2) > 0, keep)


def test_compiled_with_mods() -> None:
    slopes = torch.rand(4, device="cuda", requires_grad=True)
    q, k, v = (torch.randn(2, 200, 4, 64, device="cuda", requires_grad=True) for _ in range(3))

    def loss(q, k, v, slopes):
        mod = features.relative(slopes)
        return tilewise.attention(q, k, v, causal=True, softcap=20.0, score_mod=mod, backend="triton").square().sum()

    inputs = (q, k, v, slopes)
    eager = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*inputs), inputs)
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b)
