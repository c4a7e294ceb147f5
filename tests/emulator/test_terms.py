"""Score terms in the Hopper forward, in the emulator: random combinations against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import features, features_budget
from tilewise import ops, reference
from tilewise.emulator import launch
from tilewise.spec import NO_TERMS

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_runs")

PLAIN = features.Features(dtype="bfloat16")
ONE = {
    "softcap": {"softcap": True},
    "alibi": {"alibi": "h", "band": (False, True)},
    "alibi per batch": {"alibi": "bh", "packed": True},
    "sinks": {"sinks": True, "band": (False, True)},
    "sinks without keys": {"sinks": True, "packed": True, "dtype": "float16"},
    "bias": {"bias": "bhij", "dv": 128},
    "bias of keys": {"bias": "j", "packed": True, "band": (False, True)},
    "mod": {"mod": "distance_table", "d": 128},
    "mod per key": {"mod": "per_key", "band": (True, True)},
    "mask": {"mask": "document"},
    "mask and band": {"mask": "prefix_lm", "band": (True, True), "packed": True},
    "many": {"softcap": True, "mod": "gated", "alibi": "h", "bias": "hi", "sinks": True, "mask": "dilated_window"},
}


def forward(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, spec: Any, terms: Any = NO_TERMS) -> Any:
    from tilewise.kernels.hopper.launch import forward_launches, new_state

    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype)
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.nan)
    if k.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    job = forward_launches(q, k, v, out, lse, cu_q, cu_k, spec, new_state(torch.device("cpu")), 2, terms)[0]
    launch(job.kernel, job.programs, job.args, job.options)
    return out, lse


@pytest.mark.parametrize("name", ONE)
def test_within_budget(name, monkeypatch):
    backend = SimpleNamespace(forward=forward, backward=reference.backward, term_gradients=reference.term_gradients)
    monkeypatch.setattr(ops, "_backend", lambda *_: backend)
    chosen = features.replace(PLAIN, **ONE[name])
    call = features.make(chosen, 5, longest=200, device="cpu")
    _, faults = features_budget.judge(call, "reference")
    assert not faults, "\n".join(faults)
