"""The Hopper kernel at work, without a GPU: what each of its units does when."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.backends.common.launch import DeviceMemory
from tilewise.backends.hopper.launches import forward_launches, new_state
from tilewise.request import Request, Spec
from tilewise_lab.emulator import launch


def timeline(tokens: int, d: int) -> dict[str, Any]:
    """{"spans": [[unit, what, start, end], ...], "length": cycles} of one program of the forward."""
    make = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, tokens, 1, d, generator=make).to(torch.float16)
    out, lse = torch.empty_like(q), torch.empty(1, 1, tokens)
    request = Request(q, k, v, Spec.of(head_dim=d))
    (one,) = forward_launches(request, out, lse, new_state(DeviceMemory(q.device), request), num_sms=1)
    machine = launch(one.kernel, one.programs, one.args, one.options)
    spans = [list(span[1:]) for span in machine.timeline]
    return {"spans": spans, "length": max(span.end for span in machine.timeline)}
