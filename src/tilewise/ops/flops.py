"""FLOPs of the registered ops for torch's FlopCounterMode, which counts every (query, key) pair, visible or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..request import ARGUMENTS, request_from_arguments
from ..torch_internals import dispatch_modes

COUNTER = "torch.utils.flop_counter"
FORMULAS: dict[str, Callable[..., int]] = {}  # by the name of the op


def counted(op: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorates the function that returns the FLOPs of a call of the op."""

    def decorate(formula: Callable[..., int]) -> Callable[..., int]:
        FORMULAS[op] = formula
        return formula

    return decorate


def register_formulas() -> None:
    """Register the formulas with torch and with the active FLOP counters, which have copied torch's registry. Not done
    on import: torch.utils.flop_counter imports Triton."""
    if torch.compiler.is_compiling() or COUNTER not in sys.modules:
        return
    counter = sys.modules[COUNTER]
    ops = [getattr(torch.ops.tilewise, name) for name in FORMULAS]
    for op, formula in zip(ops, FORMULAS.values(), strict=True):
        if op not in counter.flop_registry:
            counter.register_flop_formula(op, get_raw=True)(formula)
    for mode in dispatch_modes():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if isinstance(registry, dict):
            for op in ops:
                registry.setdefault(op, counter.flop_registry[op])


@counted("forward_max_logit")
@counted("forward")
def _forward(*call: Any, out_val: Any = None, **_: Any) -> int:
    """Two products, of head dims D and Dv, for each pair."""
    q, v = call[0], call[2]
    return 2 * pairs(*call) * int(q.shape[-1] + v.shape[-1])


@counted("backward")
def _backward(*call: Any, out_val: Any = None, **_: Any) -> int:
    """Five products: the scores again, dp, dv, dq, dk."""
    call = call[-ARGUMENTS:]
    q, v = call[0], call[2]
    return 2 * pairs(*call) * int(3 * q.shape[-1] + 2 * v.shape[-1])


@counted("hvp")
def _hvp(*call: Any, out_val: Any = None, **_: Any) -> int:
    """Fifteen products: s, two for s. and two for out.; then the first three again, dp and dp., two each for dq. and
    dk., and one for dv. Products that are computed again because a pass is divided do not count."""
    call = call[-ARGUMENTS:]
    q, v = call[0], call[2]
    return 2 * pairs(*call) * int(10 * q.shape[-1] + 5 * v.shape[-1])


def pairs(*call: Any) -> int:
    """(query, key) pairs of a call, over batch and heads. The lengths of packed sequences are read; if they cannot be
    (meta and fake tensors), all sequences count as equally long."""
    request = request_from_arguments(*call)
    q, k = request.q, request.k
    if request.cu_q is None or request.cu_k is None:
        return int(q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1])
    if not readable(request.cu_q, request.cu_k):
        return int(q.shape[1] * q.shape[0] * k.shape[0] // max(1, request.cu_q.shape[0] - 1))
    lengths = (x.diff().tolist() for x in (request.cu_q, request.cu_k))
    return int(q.shape[1] * sum(a * b for a, b in zip(*lengths, strict=True)))


def readable(*tensors: Tensor | None) -> bool:
    """Whether the tensors have values."""
    return not any(x is not None and (x.is_meta or type(x).__name__ == "FakeTensor") for x in tensors)
