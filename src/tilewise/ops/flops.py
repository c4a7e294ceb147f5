"""What torch's FlopCounterMode counts of the registered ops, by its own convention: every pair, seen or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..request import ARGUMENTS, request_of

COUNTER = "torch.utils.flop_counter"


FORMULAS: dict[str, Callable[..., int]] = {}


def counted(op: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Marks a function that says what a call of the op costs."""

    def marked(formula: Callable[..., int]) -> Callable[..., int]:
        formula._get_raw = True  # type: ignore[attr-defined]  # given the tensors, not their shapes
        FORMULAS[op] = formula
        return formula

    return marked


def count_them() -> None:
    """Tell the FLOP counters at work what the ops cost; those that come later find it in torch's registry. (It is not
    done on import: torch.utils.flop_counter takes longer to import than all of this.)"""
    if torch.compiler.is_compiling() or COUNTER not in sys.modules:
        return
    known = {getattr(torch.ops.tilewise, name): formula for name, formula in FORMULAS.items()}
    sys.modules[COUNTER].flop_registry.update(known)
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if isinstance(registry, dict):  # a copy of torch's, as it was
            registry.update(known)


@counted("forward")
def _forward(*call: Any, out_val: Any = None, **_: Any) -> int:
    """Two products, of head dims D and Dv, for each pair."""
    q, v = call[0], call[2]
    return 2 * pairs(*call) * int(q.shape[-1] + v.shape[-1])


@counted("backward")
def _backward(*call: Any, out_val: Any = None, **_: Any) -> int:
    """Five: the scores again, dP, dV, dQ, dK."""
    call = call[-ARGUMENTS:]
    q, v = call[0], call[2]
    return 2 * pairs(*call) * int(3 * q.shape[-1] + 2 * v.shape[-1])


def pairs(*call: Any) -> int:
    """(query, key) pairs of a call, over batch and heads. Of packed sequences their lengths are read; where there is
    nothing to read (meta and fake tensors), they are taken for equal."""
    request = request_of(*call)
    q, k = request.q, request.k
    if request.cu_q is None or request.cu_k is None:
        return int(q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1])
    if not readable(request.cu_q, request.cu_k):
        return int(q.shape[1] * q.shape[0] * k.shape[0] // max(1, request.cu_q.shape[0] - 1))
    with unwatched():
        lengths = (x.diff().tolist() for x in (request.cu_q, request.cu_k))
        return int(q.shape[1] * sum(a * b for a, b in zip(*lengths, strict=True)))


def readable(*tensors: Tensor | None) -> bool:
    """Whether the tensors have numbers in them."""
    return not any(x is not None and (x.is_meta or type(x).__name__ == "FakeTensor") for x in tensors)


def unwatched() -> Any:
    """To read lengths in a formula, which the counter is not to see."""
    return torch.utils._python_dispatch._disable_current_modes()
