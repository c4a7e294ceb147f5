"""The derivation, in torch only, rung by rung: `softmax`, `matmul`, `attention`, `gradient`, `tiled`.

Every rung equals the one before it (or says that it is wrong). `tiled` is the last: the CPU backend, and in float64
the oracle of every kernel. `scored` is the same with every term: biases, mods, sinks, dropout; `whole` the same in one
expression.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.reference import attention, gradient, matmul, scored, softmax, tiled, whole
from tilewise.reference.scored import term_gradients
from tilewise.reference.whole import differentiable, differentiable_backward
from tilewise.spec import Request, Upstream

__all__ = [
    "attention",
    "backward",
    "differentiable",
    "differentiable_backward",
    "forward",
    "gradient",
    "matmul",
    "scored",
    "softmax",
    "term_gradients",
    "tiled",
    "whole",
]


def forward(request: Request, _recordings: Any = None) -> tuple[Tensor, Tensor]:
    return tiled.forward(request) if request.is_plain else scored.forward(request)


def backward(request: Request, upstream: Upstream, _recordings: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    return tiled.backward(request, upstream) if request.is_plain else scored.backward(request, upstream)
