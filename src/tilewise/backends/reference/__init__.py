"""Attention in torch operations, on any device: the CPU backend and, in float64, the oracle of every kernel.

`tiled` is FlashAttention-2 tile by tile; `scored` adds biases, mods, sinks and dropout; `whole` is the same in one
differentiable expression; `kv` reads a KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...request import BackwardInputs, Gpu, Request
from ..protocol import KvBackend, Runner
from . import fp8, scored, tiled, whole
from .kv import ReferenceCache


class ReferenceBackend:
    name = "reference"
    reason = "torch, on any device"
    kv: KvBackend | None = ReferenceCache()

    def unsupported(self, request: Any, gpu: Gpu | None) -> str | None:
        return "tokens in boxes" if request.spec.token_boxes else None

    def declines(self, request: Any, gpu: Gpu | None) -> str | None:
        return None

    def forward_runner(self, request: Request, needs_lse: bool = True) -> Runner:
        spec = request.spec
        return lambda tensors: forward(Request.of(spec, tensors))

    def has_backward(self, request: Request) -> bool:
        return True

    def backward_runner(self, request: Request, bwd_inputs: BackwardInputs) -> Runner:
        spec = request.spec

        def run(tensors: Sequence[Any]) -> Sequence[Tensor]:
            return backward(Request.of(spec, tensors[:-4]), BackwardInputs(*tensors[-4:]))

        return run

    def term_gradients_runner(self, request: Request, bwd_inputs: BackwardInputs, wanted: Sequence[bool]) -> Runner:
        spec = request.spec

        def run(tensors: Sequence[Any]) -> Sequence[Tensor]:
            return scored.term_gradients(Request.of(spec, tensors[:-4]), BackwardInputs(*tensors[-4:]), list(wanted))

        return run

    def lacks_jvp(self, request: Request) -> str | None:
        return "derivatives by torch instead"

    def jvp(self, request: Request, out: Tensor, lse: Tensor, tangents: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("torch differentiates the reference itself: see `differentiable`")

    def lacks_hvp(self, request: Request) -> str | None:
        return "derivatives by torch instead"

    def hvp_runner(self, request: Request, bwd_inputs: BackwardInputs, tangents: Sequence[Tensor]) -> Runner:
        raise NotImplementedError("torch differentiates the reference itself: see `differentiable_backward`")

    def evaluated_mask(self, request: Request) -> tuple[Tensor, ...]:
        return ()

    def launches(self, request: Request, gpu: Gpu, backward: bool) -> dict[str, Any]:
        return {}

    @staticmethod
    def differentiable(request: Request) -> tuple[Tensor, ...]:
        """Results that torch itself can differentiate, to any order."""
        if request.spec.precision is not None:
            return fp8.forward(request, whole.differentiable)
        return whole.differentiable(request)

    differentiable_backward = staticmethod(whole.differentiable_backward)


def forward(request: Request) -> tuple[Tensor, ...]:
    """(out, lse), and the largest score of each head if the call returns it."""
    if request.spec.precision is not None:
        return fp8.forward(request, forward)
    out, lse, *largest = tiled.forward(request) if request.is_plain else scored.forward(request)
    return out, lse, *map(tiled.max_logit, largest)


def backward(request: Request, bwd_inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)"""
    return tiled.backward(request, bwd_inputs) if request.is_plain else scored.backward(request, bwd_inputs)
