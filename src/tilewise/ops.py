"""The one boundary between torch and the backends: two registered ops, their fakes, and the autograd rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import choose
from .spec import AttentionError, Spec

_library = torch.library.Library("tilewise", "DEF")
_tensors = "Tensor q, Tensor k, Tensor v"
_packing = "Tensor? cu_q, Tensor? cu_k"
_library.define(f"forward({_tensors}, {_packing}, {Spec.SCHEMA}) -> (Tensor, Tensor)")
_library.define(
    f"backward(Tensor dout, Tensor? dlse, {_tensors}, Tensor out, Tensor lse, {_packing}, {Spec.SCHEMA})"
    " -> (Tensor, Tensor, Tensor)"
)


def _backend(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Any:
    if choose(q, k, v, spec).backend == "reference":
        from . import reference

        return reference
    from . import kernels

    return kernels


@torch.library.impl(_library, "forward", "CompositeExplicitAutograd")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, *scalars: Any
) -> tuple[Tensor, Tensor]:
    spec = Spec(*scalars)
    result: tuple[Tensor, Tensor] = _backend(q, k, v, spec).forward(q, k, v, cu_q, cu_k, spec)
    return result


@torch.library.impl(_library, "backward", "CompositeExplicitAutograd")
def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, *scalars: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    spec = Spec(*scalars)
    grads: tuple[Tensor, Tensor, Tensor]
    grads = _backend(q, k, v, spec).backward(dout, dlse, q, k, v, out, lse, cu_q, cu_k, spec)
    return grads


@torch.library.register_fake("tilewise::forward", lib=_library)
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    *batch, n_q, heads, _d = q.shape
    statistic = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*batch, n_q, heads, v.shape[-1])), q.new_empty((*batch, heads, n_q), dtype=statistic)


@torch.library.register_fake("tilewise::backward", lib=_library)
def _backward_fake(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class Attention(torch.autograd.Function):
    """out and lse are both differentiable; the backward recomputes the weights from lse."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, *scalars: Any) -> Any:
        return torch.ops.tilewise.forward(q, k, v, cu_q, cu_k, *scalars)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, cu_q, cu_k, *ctx.scalars = inputs
        ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (dout, dlse)):
            raise AttentionError("a gradient of the gradient", "create_graph=True", "first derivatives only")
        q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        grads = torch.ops.tilewise.backward(dout, dlse, q, k, v, out, lse, cu_q, cu_k, *ctx.scalars)
        return (*grads, *(None for _ in range(2 + len(ctx.scalars))))


def attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec) -> Any:
    """(out, lse), through autograd only where a gradient will be asked for."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return Attention.apply(q, k, v, cu_q, cu_k, *spec.args())  # type: ignore[no-untyped-call]
    return torch.ops.tilewise.forward(q, k, v, cu_q, cu_k, *spec.args())
