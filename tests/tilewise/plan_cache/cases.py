"""What the tests of plans share: a backend that computes nothing, mods, a setting of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise.request import BackwardInputs, Request

Q = torch.zeros(1, 128, 4, 64, dtype=torch.bfloat16)


class StubBackend:
    """Supports every call and computes nothing.

    Attributes:
        requests: those that a runner was made for.
        given: the tensors that each run of a forward was given.
    """

    name, reason, kv = "stub", "a test", None

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.given: list[Sequence[Tensor | None]] = []
        self.gradients: list[tuple[tuple[bool, ...] | None, Sequence[Tensor | None]]] = []

    def unsupported(self, request: Any, gpu: Any) -> str | None:
        return None

    def declines(self, request: Any, gpu: Any) -> str | None:
        return None

    def has_backward(self, request: Request) -> bool:
        return True

    def forward_runner(self, request: Request, needs_lse: bool = True) -> Any:
        self.requests.append(request._replace(q=None, k=None, v=None))  # type: ignore[arg-type]

        def run(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            self.given.append(tensors)
            q, v = tensors[0], tensors[2]
            return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1], dtype=torch.float32)

        return run

    def backward_runner(self, request: Request, bwd_inputs: BackwardInputs) -> Any:
        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            self.gradients.append((None, tensors))
            return [torch.full_like(x, 7) for x in tensors[:3]]

        return run

    def term_gradients_runner(self, request: Request, bwd_inputs: BackwardInputs, wanted: tuple[bool, ...]) -> Any:
        spec = request.spec

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            self.gradients.append((wanted, tensors))
            request = Request.of(spec, tensors[:-4])
            terms = request.bias, request.sinks, *request.score
            return [torch.full_like(x, 3) for x, wants in zip(terms, wanted, strict=True) if wants and x is not None]

        return run


@tilewise.score_mod
def scaled(score, b, h, q_idx, kv_idx, table, by):  # type: ignore[no-untyped-def]
    return score * table[h] * by


@contextmanager
def fp32_precision(setting: str) -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = setting
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
