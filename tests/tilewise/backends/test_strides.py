"""Tensors that are not laid out as a kernel would like them, and sequences that are not where they should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import tilewise
from tests.conftest import DEVICE
from tests.covering import cases, each_once


def results(backend: str, leaves: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, lse = tilewise.attention(*leaves, return_lse=True, backend=backend, **options)
    return [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), leaves)]


@each_once(layout=["every other", "all the same"], n_q=[20, 1])
def test_sinks_of_any_stride(layout: str, n_q: int) -> None:
    torch.manual_seed(0)
    heads = 4
    leaves = [torch.randn(1, n, heads, 8, device=DEVICE) for n in (n_q, 150, 150)]
    many = torch.linspace(-2, 3, 2 * heads, device=DEVICE)
    sinks = many[::2] if layout == "every other" else many[5:6].expand(heads)
    for x, y in zip(*(results(b, leaves, causal=True, sinks=sinks) for b in ("triton", "reference")), strict=True):
        assert_close(x, y)


@tilewise.mask_mod
def late_queries(b, h, q_idx, kv_idx):
    """Nobody sees the keys from 9 on but queries that do not exist."""
    return (kv_idx < 9) | (q_idx >= 20)


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_key_that_no_query_sees_has_no_gradient(name: str) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(1, 20, 2, 8, device=DEVICE) for _ in range(3)]
    clean = results("triton", leaves, mask_mod=late_queries())
    leaves["qkv".index(name)][:, 9:] = torch.nan
    for x, y in zip(results("triton", leaves, mask_mod=late_queries()), clean, strict=True):
        assert_close(x, y)


CUTS = {
    "past the end": [0, 13, 22, 90],
    "below 0": [-30, 13, 22, 40],
    "backwards": [0, 22, 13, 40],
    "all past the end": [50, 60, 70, 2000000000],
    "starts late": [21, 30, 31, 40],
}


@cases("name", ["past the end", "backwards"], CUTS)
def test_sequences_do_not_leave_their_tensors(name: str) -> None:
    """Nothing is written around the results, nor is read around the inputs, where all is NaN."""
    cu = torch.tensor(CUTS[name], dtype=torch.int32, device=DEVICE)
    torch.manual_seed(0)

    def inside() -> torch.Tensor:
        room = torch.full((40 + 2 * 100, 2, 8), torch.nan, device=DEVICE)
        room[100:140] = torch.randn(40, 2, 8, device=DEVICE)
        return room

    from tilewise.backends.common.clear import clear_launches
    from tilewise.backends.common.kernel_config import flag_count
    from tilewise.backends.common.launch import DeviceMemory, target_of
    from tilewise.backends.common.preprocess import row_statistics
    from tilewise.backends.common.repair import repair_forward_kernel
    from tilewise.backends.common.repair_launches import repairs
    from tilewise.backends.triton import launches as launch
    from tilewise.backends.triton.backward_launches import backward_launches, backward_repairs
    from tilewise.request import BackwardInputs, Request, Spec

    q, k, v, dout, out, dq, dk, dv = rooms = [inside() for _ in range(8)]
    before = [x.clone() for x in rooms]
    lse = torch.full((240, 2), torch.nan, device=DEVICE)
    q, k, v, dout, out, dq, dk, dv = (x[100:140] for x in rooms)
    rows = lse[100:140].mT
    request = Request(q, k, v, Spec(0.3, None, 0), cu_q=cu, cu_k=cu)
    target, memory = target_of(q.device), DeviceMemory(q.device)
    gpu = target.gpu
    flags = memory.empty((flag_count(request),), torch.int32)
    made = [launch.forward_launch(request, out, rows, gpu, flags=flags)]
    made += repairs(repair_forward_kernel, made[0], target)
    made += clear_launches(out, rows.contiguous(), None, cu, cu, gpu)
    bwd_inputs = BackwardInputs(out, rows, dout, None)
    flags = memory.empty((flag_count(request, both=True),), torch.int32)
    passes = backward_launches(request, bwd_inputs, (dq, dk, dv), row_statistics(request, memory), flags, gpu)
    made += [*passes, *backward_repairs(passes, target), *clear_launches(dq, dk, dv, cu, cu, gpu)]
    for each in made:
        each()
    for x, y in zip(rooms, before, strict=True):
        for around in (slice(0, 100), slice(140, 240)):
            assert_close(x[around], y[around], equal_nan=True, rtol=0, atol=0)
    assert lse[:100].isnan().all()
    assert lse[140:].isnan().all()
    covered = torch.zeros(40, dtype=torch.bool)
    for start, end in zip(CUTS[name], CUTS[name][1:], strict=False):
        covered[min(max(start, 0), 40) : min(max(end, 0), 40)] = True
    assert out[covered.to(DEVICE)].isfinite().all()
