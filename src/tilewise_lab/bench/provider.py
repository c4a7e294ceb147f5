"""What takes part in a bench, and our own backends: a provider binds a case to a function of q, k, v that autograd can
follow; what need not be paid at every call (masks, plans, compilation) is done while binding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise.backends.registry import choose
from tilewise.call.fields import ATTENTION
from tilewise.errors import AttentionError
from tilewise.request import Request, Spec
from tilewise.validation import dense as checks
from tilewise_lab.bench.cases import Case, Inputs

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Answer = Callable[[], dict[str, Tensor]]
OURS = "tilewise"


class RefusedError(Exception):
    """A provider's own reason not to run a case."""


@dataclass(frozen=True)
class Provider:
    name: str
    about: str

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run on this machine at all."""
        return None

    def refuses(self, case: Case, which: str) -> str | None:
        """Why it will not run this case."""
        return None

    def same_bits(self, case: Case) -> str | None:
        """Why its backward will not give the same bits twice."""
        return "no switch of its own for a deterministic backward"

    def lse(self, case: Case, x: Inputs) -> Tensor | None:
        """The logsumexp of the call, (B, H, S) or packed (H, T), where the provider gives it."""
        return None

    def bind(self, case: Case, x: Inputs) -> Attention:
        raise NotImplementedError

    def forward(self, case: Case, x: Inputs) -> Answer:
        attention = self.bind(case, x)
        return lambda: {"out": attention(x.q, x.k, x.v)}

    def backward(self, case: Case, x: Inputs) -> Answer:
        """Only the backward: the forward and its graph are kept."""
        leaves = x.leaves()
        inputs = leaves[:3]
        out = self.bind(case, leaves)(*inputs)
        if not out.requires_grad:
            raise RefusedError("its output carries no gradient")
        return lambda: named(torch.autograd.grad(out, inputs, x.dout, retain_graph=True))

    def recorded(self, case: Case, x: Inputs) -> Answer:
        """A forward that leaves what its backward needs."""
        leaves = x.leaves()
        attention = self.bind(case, leaves)
        return lambda: {"out": attention(*leaves[:3]).detach()}

    def step(self, case: Case, x: Inputs) -> Answer:
        """Forward and backward, as in training."""
        leaves = x.leaves()
        inputs, attention = leaves[:3], self.bind(case, leaves)
        return lambda: named(torch.autograd.grad(attention(*inputs), inputs, x.dout))

    def answer(self, case: Case, which: str, x: Inputs) -> Answer:
        ways = {"forward": self.forward, "backward": self.backward, "recorded": self.recorded, "step": self.step}
        return ways[which](case, x)

    def version(self) -> str:
        return f"torch {torch.__version__}"


def named(grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))


@dataclass(frozen=True)
class Tilewise(Provider):
    backend: str = "auto"

    def missing(self, device: torch.device) -> str | None:
        if self.backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
            return "Triton's interpreter is on, and its speed means nothing"
        probe = torch.zeros(1, 128, 1, 64, device=device, dtype=torch.float16)
        try:
            choose(Request(probe, probe, probe, Spec.of(head_dim=64, backend=self.backend)))
        except AttentionError as error:
            return str(error)
        return None

    def same_bits(self, case: Case) -> str | None:
        return None

    def bind(self, case: Case, x: Inputs) -> Attention:
        attention: Attention = self._bind(case, x)
        return attention

    def lse(self, case: Case, x: Inputs) -> Tensor | None:
        found: Tensor = self._bind(case, x, return_lse=True)(x.q, x.k, x.v)[1]
        return found

    def _bind(self, case: Case, x: Inputs, **options: Any) -> Any:
        window = None if case.window is None else (case.window, 0)
        options |= {"causal": case.causal, "window": window, "backend": self.backend}
        options["deterministic"] = case.deterministic
        cu = x.cu
        if cu is not None:
            return lambda q, k, v: tilewise.attention_varlen(q, k, v, cu, cu, **options)
        return lambda q, k, v: tilewise.attention(q, k, v, **options)

    def version(self) -> str:
        return f"tilewise {tilewise.__version__}"


def auto(case: Case, x: Inputs) -> str:
    """The name of the provider that tilewise.attention runs with backend="auto"."""
    window = None if case.window is None else (case.window, 0)
    options = ATTENTION.completed({"causal": case.causal, "window": window})
    if x.cu is None:
        request = checks.dense(x.q, x.k, x.v, options)
    else:
        request = checks.packed(x.q, x.k, x.v, x.cu, x.cu, (case.longest, case.longest), options)
    return f"{OURS}-{choose(request).backend.name}"


def not_cuda(device: torch.device) -> str | None:
    """The reason why a provider that needs CUDA is missing on other devices."""
    return None if device.type == "cuda" else f"only for CUDA, and the tensors are on the {device.type}"


def first_line(error: BaseException) -> str:
    """
    >>> first_line(ValueError("no\\nbecause"))
    'ValueError: no'
    """
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0][:300]}" if words else type(error).__name__


def ends(case: Case, x: Inputs, tokens: int) -> Tensor:
    """Where the sequences end once they are packed, of `tokens` each unless they are packed already."""
    if x.cu is not None:
        return x.cu
    return torch.arange(0, (case.batch + 1) * tokens, tokens, device=x.q.device, dtype=torch.int32)
