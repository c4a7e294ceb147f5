"""The largest score of each head in the Hopper forward, in the emulator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.covering import cases
from tilewise.backends import reference
from tilewise.backends.common.launch import DeviceMemory
from tilewise.mods.builtin import softcap
from tilewise.request import Request, Spec
from tilewise_lab.emulator import launch

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_runs")


def request_of(name: str) -> Request:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 150, heads, 64).bfloat16() for heads in (4, 2, 2))
    spec = Spec(0.125, max_logit=True)
    match name:
        case "causal":
            return Request(q, k, v, spec._replace(after=0))
        case "negative scale":
            return Request(q, k, v, spec._replace(scale=-0.3))
        case "sinks":
            return Request(q, k, v, spec, sinks=torch.full((4,), 40.0))
        case "bias":
            return Request(q, k, v, spec, bias=torch.full((1, 1, 1, 1), -50.0))
        case "softcap":
            mod = softcap(2.0)
            return Request(q, k, v, spec._replace(score_mod=mod.key, score_numbers=mod.numbers))
        case "packed":
            cu = torch.tensor([0, 40, 130], dtype=torch.int32)
            q[0, 130:] *= 100.0  # past the last sequence
            k[0, 130:] *= 100.0
            return Request(q[0], k[0], v[0], spec._replace(after=0), cu_q=cu, cu_k=cu)
    raise AssertionError(name)


@cases("name", ["causal", "bias", "packed"], ["negative scale", "sinks", "softcap"])
def test_as_the_reference(name: str) -> None:
    from tilewise.backends.hopper.launches import forward_launches, new_state

    request = request_of(name)
    q, v = request.q, request.v
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype)
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.nan)
    found = torch.full(lse.shape[:-1], -math.inf)
    state = new_state(DeviceMemory(q.device), request)
    job: Any = forward_launches(request, out, lse, state, 2, found)[0]
    launch(job.kernel, job.programs, job.args, job.options)
    wide = request._replace(q=q.float(), k=request.k.float(), v=v.float())
    _, expected_lse, expected = reference.forward(wide)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    inside = expected_lse > -math.inf
    torch.testing.assert_close(lse[inside], expected_lse[inside], rtol=1e-3, atol=1e-3)
