"""The derivation, in torch only, rung by rung: `softmax`, `matmul`, `attention`, `gradient`, `tiled`.

Every rung equals the one before it (or says that it is wrong). `tiled` is the last: the CPU backend, and in float64
the oracle of every kernel. `scored` is the same with every term: biases, mods, sinks, dropout.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.reference import attention, gradient, matmul, scored, softmax, tiled
from tilewise.reference.scored import differentiable, term_gradients
from tilewise.spec import NO_TERMS, Spec, Terms

__all__ = [
    "attention",
    "backward",
    "differentiable",
    "forward",
    "gradient",
    "matmul",
    "scored",
    "softmax",
    "term_gradients",
    "tiled",
]


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms = NO_TERMS,
    _launches: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if terms.is_empty(spec):
        return tiled.forward(q, k, v, cu_q, cu_k, spec)
    return scored.forward(q, k, v, cu_q, cu_k, spec, terms)


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec, terms: Terms = NO_TERMS, _launches: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if terms.is_empty(spec):
        return tiled.backward(dout, dlse, q, k, v, out, lse, cu_q, cu_k, spec)
    return scored.backward(dout, dlse, q, k, v, out, lse, cu_q, cu_k, spec, terms)
