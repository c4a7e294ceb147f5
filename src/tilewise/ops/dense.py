"""The registered ops of attention: schemas, implementations, fake tensors, vmap.

Compiled programs, dispatch modes and torch.func call these. Eager calls use the plan directly (`autograd.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.protocol import Backend
from ..backends.registry import choose
from ..plan_cache import CallPlan, aligned, plan_of, prepare_backward_inputs
from ..request import ARGUMENTS, SCHEMA, BackwardInputs, Request, Spec, lse_dtype, request_from_arguments
from .flops import register_formulas

_library = torch.library.Library("tilewise", "DEF")
_bwd_inputs = "Tensor out, Tensor lse, Tensor dout, Tensor? dlse"
_library.define(f"forward({SCHEMA}) -> (Tensor, Tensor)")
_library.define(f"forward_max_logit({SCHEMA}) -> (Tensor, Tensor, Tensor)")
_library.define(f"backward({_bwd_inputs}, {SCHEMA}) -> (Tensor, Tensor, Tensor)")
_library.define(f"term_gradients({_bwd_inputs}, bool[] wanted, {SCHEMA}) -> Tensor[]")
_library.define(f"jvp(Tensor out, Tensor lse, Tensor[] tangents, {SCHEMA}) -> (Tensor, Tensor)")
_library.define(f"hvp({_bwd_inputs}, Tensor[] tangents, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")


def registered(name: str) -> Callable[..., Any]:
    """A registered op. Tells active FLOP counters what it costs."""
    register_formulas()
    op: Callable[..., Any] = getattr(torch.ops.tilewise, name)
    return op


def forward_op(spec: Spec) -> str:
    """The name of the forward's op."""
    return "forward_max_logit" if spec.max_logit else "forward"


def chosen(request: Request) -> Backend:
    """The backend that runs a call."""
    return choose(request).backend


def _plan(*call: Any) -> CallPlan:
    settings = repr(call[4:])  # as values, 0.0 and -0.0 would be one key
    return plan_of("op", lambda: request_from_arguments(*call), _tensors(*call), settings)


def _tensors(q: Tensor, k: Tensor, v: Tensor, others: Sequence[Tensor | None] | None, *_: Any) -> tuple[Any, ...]:
    """`Request.tensors()` of an op. AOTInductor passes None for an empty list."""
    return q, k, v, *(others or ())


@torch.library.impl(_library, "forward", "CompositeExplicitAutograd")
def _forward(*call: Any) -> tuple[Tensor, Tensor]:
    out, lse = _plan(*call).forward(_tensors(*call))
    return out, lse


@torch.library.impl(_library, "forward_max_logit", "CompositeExplicitAutograd")
def _forward_max_logit(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, max_logit = _plan(*call).forward(_tensors(*call))
    return out, lse, max_logit


@torch.library.impl(_library, "backward", "CompositeExplicitAutograd")
def _backward(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    bwd_inputs = prepare_backward_inputs(BackwardInputs(out, lse, dout, dlse))
    dq, dk, dv = _plan(*call).backward((*_tensors(*call), *bwd_inputs))
    return dq, dk, dv


@torch.library.impl(_library, "term_gradients", "CompositeExplicitAutograd")
def _term_gradients(
    out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: list[bool], *call: Any
) -> list[Tensor]:
    """The gradients of the wanted ones among bias, sinks and the score mod's tensors, in this order."""
    bwd_inputs = prepare_backward_inputs(BackwardInputs(out, lse, dout, dlse))
    return list(_plan(*call).term_gradients(tuple(wanted), _tensors(*call), bwd_inputs))


@torch.library.impl(_library, "jvp", "CompositeExplicitAutograd")
def _jvp(out: Tensor, lse: Tensor, tangents: list[Tensor], *call: Any) -> tuple[Tensor, Tensor]:
    request = request_from_arguments(*call)
    return chosen(request).jvp(request, out, lse, tangents)


@torch.library.impl(_library, "hvp", "CompositeExplicitAutograd")
def _hvp(
    out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, tangents: list[Tensor], *call: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The tangents of out, lse, dq, dk and dv for tangents of q, k and v."""
    bwd_inputs = prepare_backward_inputs(BackwardInputs(out, lse, dout, dlse))
    tout, tlse, tdq, tdk, tdv = _plan(*call).hvp(_tensors(*call), bwd_inputs, [*map(aligned, tangents)])
    return tout, tlse, tdq, tdk, tdv


@torch.library.register_fake("tilewise::forward", lib=_library)
def _forward_fake(*call: Any) -> tuple[Tensor, Tensor]:
    request = request_from_arguments(*call)
    q, dtype = request.q, request.result_dtype
    *batch, n_q, heads, _d = q.shape
    out = q.new_empty((*batch, n_q, heads, request.v.shape[-1]), dtype=dtype)
    return out, q.new_empty((*batch, heads, n_q), dtype=lse_dtype(q))


@torch.library.register_fake("tilewise::forward_max_logit", lib=_library)
def _forward_max_logit_fake(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = _forward_fake(*call)
    return out, lse, lse.new_empty(lse.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("tilewise::backward", lib=_library)
def _backward_fake(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *call: Any) -> tuple[Tensor, ...]:
    request = request_from_arguments(*call)
    return tuple(x.new_empty(x.shape, dtype=request.result_dtype) for x in request[:3])


@torch.library.register_fake("tilewise::term_gradients", lib=_library)
def _term_gradients_fake(
    out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: list[bool], *call: Any
) -> list[Tensor]:
    request = request_from_arguments(*call)
    terms = request.bias, request.sinks, *request.score
    return [x.new_empty(x.shape) for x, wants in zip(terms, wanted, strict=True) if wants and x is not None]


@torch.library.register_fake("tilewise::jvp", lib=_library)
def _jvp_fake(out: Tensor, lse: Tensor, *_: Any) -> Any:
    return out.new_empty(out.shape), lse.new_empty(lse.shape)


@torch.library.register_fake("tilewise::hvp", lib=_library)
def _hvp_fake(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, tangents: Any, *call: Any) -> Any:
    return *_jvp_fake(out, lse), *_backward_fake(out, lse, dout, dlse, *call)


def _mapped(name: str) -> None:
    """torch.vmap of an op. Of a dense call without score terms the new axis becomes part of the batch, which all its
    tensors begin with; otherwise, where the batch row has a number that terms may know, one call follows another."""
    op: Callable[..., Any] = getattr(torch.ops.tilewise, name)

    def rule(info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        n = info.batch_size
        call = request_from_arguments(*args[-ARGUMENTS:])
        if call.is_plain and call.cu_q is None and n > 0:
            found = op(*(_with_axis(x, dim, n, lambda y: y.flatten(0, 1)) for x, dim in zip(args, dims, strict=True)))
            found = [x.unflatten(0, (n, -1)) for x in found]
        else:
            each = [op(*(_at(x, dim, i) for x, dim in zip(args, dims, strict=True))) for i in range(n)]
            found = [torch.stack(x) for x in zip(*each, strict=True)]
        return (found, [0] * len(found)) if name == "term_gradients" else (tuple(found), (0,) * len(found))

    torch.library.register_vmap(f"tilewise::{name}", rule, lib=_library)


def _with_axis(x: Any, dim: Any, n: int, then: Callable[[Tensor], Tensor]) -> Any:
    """Each tensor with the new axis first, repeated where it had none."""
    if isinstance(x, (list, tuple)):
        dims = dim if isinstance(dim, (list, tuple)) else (dim,) * len(x)
        return [_with_axis(y, d, n, then) for y, d in zip(x, dims, strict=True)]
    if not isinstance(x, Tensor):
        return x
    return then(x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0))


def _at(x: Any, dim: Any, i: int) -> Any:
    if isinstance(x, (list, tuple)):
        return [_at(y, d, i) for y, d in zip(x, dim, strict=True)] if isinstance(dim, (list, tuple)) else x
    return x if dim is None or not isinstance(x, Tensor) else x.select(dim, i)


for _name in ("forward", "forward_max_logit", "backward", "term_gradients", "jvp", "hvp"):
    _mapped(_name)
