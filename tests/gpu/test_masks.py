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


@tilewise.mask_mod
def same(b, h, q_idx, kv_idx, ids):  # type: ignore[no-untyped-def]
    return ids[b, q_idx] == ids[b, kv_idx]


def documents(seed: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5, (2, tokens), generator=generator).sort(-1).values.cuda()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_mask_made_in_a_compiled_model(backend: str, mode: str | None) -> None:
    """Lists of static length, whose ends are padding: the results are those of the uncompiled call. CUDA graphs leave
    the op that makes them outside."""
    options: Any = {"causal": True, "backend": backend}

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        mask = tilewise.block_mask(same(ids), q.shape[1], k.shape[1], batch=2, causal=True)
        return tilewise.attention(tilewise.attention(q, k, v, mask_mod=mask, **options), k, v, mask_mod=mask, **options)

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(4):
            torch.manual_seed(seed)
            x = [torch.randn(2, 700, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2)]
            ids, found = documents(seed, 700), []
            for f in (compiled, model):
                out = f(*x, ids)
                found.append([out.clone(), *torch.autograd.grad(out.float().square().sum(), x)])
            for ours, theirs in zip(*found, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_decoding_with_a_block_mask(backend: str) -> None:
    """The rows of queries [start, stop) are those of the full call, within the error of torch's own in bfloat16."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 900, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    ids = documents(0, 900)
    full = tilewise.attention(q.double(), k.double(), v.double(), causal=True, mask_mod=same(ids))
    theirs = tilewise.attention(q, k, v, causal=True, mask_mod=same(ids), backend="reference")
    limit = 2 * float((theirs.double() - full).abs().max()) + 1e-3
    mask = tilewise.block_mask(same(ids), 600, 600, batch=2, causal=True)
    for start, stop in ((200, 500), (600, 601), (601, 602), (602, 900)):
        rows = q[:, start:stop], k[:, :stop], v[:, :stop]
        out = tilewise.attention(*rows, causal=True, mask_mod=mask.queries(start, stop), backend=backend)
        assert float((out.double() - full[:, start:stop]).abs().max()) <= limit
    grown = mask.grown(300)
    expected = tilewise.block_mask(same(ids), 900, 900, batch=2, causal=True)
    assert all(map(torch.equal, grown.lists, expected.lists))
