"""What torch's FlopCounterMode counts of the registered ops, by its own convention: every pair, seen or not."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ..spec import ARGUMENTS, request_of

COUNTER = "torch.utils.flop_counter"


def count_them() -> None:
    """Tell the FLOP counters at work what the ops cost; those that come later find it in torch's registry. (It is not
    done on import: torch.utils.flop_counter takes longer to import than all of this.)"""
    known = {torch.ops.tilewise.forward: _forward, torch.ops.tilewise.backward: _backward}
    sys.modules[COUNTER].flop_registry.update(known)
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if isinstance(registry, dict):  # a copy of torch's, as it was
            registry.update(known)


def _forward(*call: Any, out_val: Any = None, **_: Any) -> int:
    """Two products, of head dims D and Dv, for each pair."""
    q, v = call[0], call[2]
    return 2 * pairs(*call) * int(q.shape[-1] + v.shape[-1])


def _backward(*call: Any, out_val: Any = None, **_: Any) -> int:
    """Five: the scores again, dP, dV, dQ, dK."""
    call = call[-ARGUMENTS:]
    q, v = call[0], call[2]
    return 2 * pairs(*call) * int(3 * q.shape[-1] + 2 * v.shape[-1])


def pairs(*call: Any) -> int:
    """(query, key) pairs of a call, over batch and heads. Of packed sequences their lengths are read."""
    request = request_of(*call)
    q, k = request.q, request.k
    if request.cu_q is None or request.cu_k is None:
        return int(q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1])
    lengths = (_lengths(x) for x in (request.cu_q, request.cu_k))
    return int(q.shape[1] * sum(a * b for a, b in zip(*lengths, strict=True)))


def _lengths(cu: Tensor) -> list[int]:
    with torch.utils._python_dispatch._disable_current_modes():
        found: list[int] = cu.diff().tolist()
    return found


for _formula in (_forward, _backward):
    _formula._get_raw = True  # type: ignore[attr-defined]  # given the tensors, not their shapes
