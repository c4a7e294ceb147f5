"""Tensors of more than 2^31 elements, checked where their offsets are largest and smallest."""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tilewise
from tests import budget
from tests.cases import Case, Inputs, run
from tilewise.backends.hopper.support import unsupported
from tilewise.request import Request, gpu_of

pytestmark = pytest.mark.xdist_group("large")
NEEDED, PATIENCE = 60e9, 20.0  # bytes, seconds
SHAPE = Case(1, 1024, 1024, 8, 8, 64, 64, "float16", after=0, lse_gradient=False)
MANY = 4200  # sequences of this shape are more than 2^31 elements


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """One of these tests at a time, whatever the workers, and only with the memory it needs."""
    with (Path(tempfile.gettempdir()) / "tilewise-large.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        end = time.monotonic() + PATIENCE
        while torch.cuda.mem_get_info()[0] < NEEDED and time.monotonic() < end:
            torch.cuda.empty_cache()
            time.sleep(0.5)
        free = torch.cuda.mem_get_info()[0]
        if free < NEEDED:
            pytest.skip(
                f"{free / 1e9:.0f} GB of GPU memory are free after {PATIENCE:.0f} s, of the {NEEDED / 1e9:.0f} needed"
            )
        yield
        torch.cuda.empty_cache()


@pytest.fixture(params=["triton", "hopper"])
def backend(request: pytest.FixtureRequest) -> str:
    probe = torch.zeros(1, 16, 1, 64, device="cuda", dtype=torch.float16)
    if (
        request.param == "hopper"
        and (missing := unsupported(Request(probe, probe, probe, SHAPE.spec), gpu_of(probe.device))) is not None
    ):
        pytest.skip(missing)
    return str(request.param)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float16)


def grads(out: Tensor, leaves: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    assert min(out.numel(), leaves[0].numel()) > 2**31
    return torch.autograd.grad(out, leaves, dout)


def check_part(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, *d: Tensor) -> None:
    inputs = Inputs(case, q, k, v, dout, None, None, None)
    budget.check((out, lse, *d), inputs)


def test_batch(backend: str) -> None:
    q, k, v, dout = (normal(MANY, 1024, 8, 64) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = tilewise.attention(*leaves, causal=True, return_lse=True, backend=backend)
    found = grads(out, leaves, dout)
    for b in (0, MANY // 2, MANY - 1):
        tensors = (x.detach()[b : b + 1] for x in (q, k, v, dout, out, lse, *found))
        check_part(SHAPE, *tensors)


def test_tokens(backend: str) -> None:
    """Packed sequences, with one KV head, so that only the queries are many."""
    tokens = MANY * 1024
    q, dout = normal(tokens, 8, 64), normal(tokens, 8, 64)
    k, v = normal(tokens, 1, 64), normal(tokens, 1, 64)
    cu = torch.arange(0, tokens + 1, 1024, dtype=torch.int32, device="cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = tilewise.attention_varlen(*leaves, cu, cu, causal=True, return_lse=True, backend=backend)
    found = grads(out, leaves, dout)
    for b in (0, MANY - 1):
        part = slice(1024 * b, 1024 * (b + 1))
        tensors = (x.detach()[None, part] for x in (q, k, v, dout, out))
        gradients = (x[None, part] for x in found)
        check_part(replace(SHAPE, kv_heads=1), *tensors, lse.detach()[None, :, part], *gradients)


def test_one_long_sequence(backend: str) -> None:
    """A window over one sequence of four million tokens; its last tokens see only each other."""
    tokens, seen = MANY * 1024, 512
    q, dout = normal(1, tokens, 8, 64), normal(1, tokens, 8, 64)
    k, v = normal(1, tokens, 1, 64), normal(1, tokens, 1, 64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = tilewise.attention(*leaves, window=(seen, 0), return_lse=True, backend=backend)
    dq, _, _ = grads(out, leaves, dout)
    last, keys = slice(tokens - 100, None), slice(tokens - 100 - seen, None)
    case = replace(SHAPE, n_q=100, n_k=100 + seen, kv_heads=1, before=seen)
    inputs = Inputs(case, q.detach()[:, last], *(x.detach()[:, keys] for x in (k, v)), dout[:, last], None, None, None)
    _, _, _, dk, dv = run(inputs, "reference")
    budget.check(
        (out.detach()[:, last], lse.detach()[..., last], dq[:, last], dk, dv), inputs, names=("out", "lse", "dq")
    )


def test_heads(backend: str) -> None:
    """(B, H, S, D) memory of many heads, seen as (B, S, H, D)."""
    q, dout = (normal(1, 8 * MANY, 1024, 64).transpose(1, 2) for _ in range(2))
    k, v = (normal(1, MANY, 1024, 64).transpose(1, 2) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = tilewise.attention(*leaves, causal=True, return_lse=True, backend=backend)
    dq, dk, dv = grads(out, leaves, dout)
    for g in (0, MANY - 1):
        heads, kv = slice(8 * g, 8 * g + 8), slice(g, g + 1)
        check_part(
            replace(SHAPE, kv_heads=1),
            *(x.detach()[:, :, h] for x, h in ((q, heads), (k, kv), (v, kv), (dout, heads), (out, heads))),
            lse.detach()[:, heads], dq[:, :, heads], dk[:, :, kv], dv[:, :, kv],
        )  # fmt: skip
