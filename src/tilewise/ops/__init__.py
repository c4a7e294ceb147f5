"""The one boundary between torch and the backends: the registered ops, their fakes, batching and autograd rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..dispatch import Call, call_of, called, choose, latest, named
from ..spec import (
    ARGUMENTS,
    SCHEMA,
    AttentionError,
    Request,
    Spec,
    Upstream,
    arguments,
    differentiable,
    request_of,
)
from ..torch_private import (
    apply_unchecked,
    each_of_batch,
    is_batched,
    is_disturbed,
    is_dtensor,
    is_forward_mode,
    is_profiled,
    is_transformed,
    is_watched,
)
from .flops import count_them

_library = torch.library.Library("tilewise", "DEF")
_upstream = "Tensor out, Tensor lse, Tensor dout, Tensor? dlse"
_library.define(f"forward({SCHEMA}) -> (Tensor, Tensor)")
_library.define(f"backward({_upstream}, {SCHEMA}) -> (Tensor, Tensor, Tensor)")
_library.define(f"term_gradients({_upstream}, bool[] wanted, {SCHEMA}) -> Tensor[]")
_library.define(f"jvp(Tensor out, Tensor lse, Tensor[] tangents, {SCHEMA}) -> (Tensor, Tensor)")


def _backward_of(request: Request, upstream: Upstream, call: Call | None = None) -> tuple[Tensor, Tensor, Tensor]:
    if call is None or not call.fits(request):
        call = call_of(request)
    out, lse, dout, dlse = upstream
    found = call.if_alike("backward", *call.tensors(request), out, lse, dout) if dlse is None else None
    dq, dk, dv, *_ = found or call.backend.backward(request, upstream, call.recordings)
    return dq, dk, dv


def _forward_of(spec: Any, call: Call, tensors: Any) -> tuple[Tensor, Tensor]:
    found = call.again("forward", *tensors) or call.backend.forward(Request.of(spec, tensors), call.recordings)
    out, lse, *_ = found
    return out, lse


@torch.library.impl(_library, "forward", "CompositeExplicitAutograd")
def _forward(q: Tensor, k: Tensor, v: Tensor, others: list[Tensor | None], *asked: Any) -> tuple[Tensor, Tensor]:
    call = latest(asked, q, others)
    found = None if call is None else call.if_alike("forward", q, k, v, *others)
    if found is None:
        request = request_of(q, k, v, others, *asked)
        call = called(request, others)
        tensors = call.tensors(request)
        found = call.if_alike("forward", *tensors) or call.backend.forward(request, call.recordings)
    out, lse, *_ = found
    return out, lse


@torch.library.impl(_library, "backward", "CompositeExplicitAutograd")
def _backward(
    out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    others: list[Tensor | None], *asked: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = latest(asked, q, others) if dlse is None else None
    found = None if call is None else call.if_alike("backward", q, k, v, *others, out, lse, dout)
    if found is None:
        request = request_of(q, k, v, others, *asked)
        return _backward_of(request, Upstream(out, lse, dout, dlse), called(request, others))
    dq, dk, dv, *_ = found
    return dq, dk, dv


@torch.library.impl(_library, "term_gradients", "CompositeExplicitAutograd")
def _term_gradients(
    out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: list[bool], *call: Any
) -> list[Tensor]:
    """The gradients of the wanted ones among bias, sinks and the score mod's tensors, in this order."""
    request = request_of(*call)
    found = call_of(request)
    upstream = Upstream(out, lse, dout, dlse)
    grads: list[Tensor] = found.backend.term_gradients(request, upstream, wanted, found.recordings)
    return grads


@torch.library.impl(_library, "jvp", "CompositeExplicitAutograd")
def _jvp(out: Tensor, lse: Tensor, tangents: list[Tensor], *call: Any) -> tuple[Tensor, Tensor]:
    request = request_of(*call)
    result: tuple[Tensor, Tensor] = call_of(request).backend.jvp(request, out, lse, tangents)
    return result


@torch.library.register_fake("tilewise::forward", lib=_library)
def _forward_fake(*call: Any) -> tuple[Tensor, Tensor]:
    request = request_of(*call)
    q, dtype = request.q, request.result_dtype
    *batch, n_q, heads, _d = q.shape
    statistic = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((*batch, n_q, heads, request.v.shape[-1]), dtype=dtype)
    return out, q.new_empty((*batch, heads, n_q), dtype=statistic)


@torch.library.register_fake("tilewise::backward", lib=_library)
def _backward_fake(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *call: Any) -> tuple[Tensor, ...]:
    request = request_of(*call)
    return tuple(x.new_empty(x.shape, dtype=request.result_dtype) for x in request[:3])


@torch.library.register_fake("tilewise::term_gradients", lib=_library)
def _term_gradients_fake(
    out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: list[bool], *call: Any
) -> list[Tensor]:
    request = request_of(*call)
    terms = request.bias, request.sinks, *request.score
    return [x.new_empty(x.shape) for x, wants in zip(terms, wanted, strict=True) if wants and x is not None]


@torch.library.register_fake("tilewise::jvp", lib=_library)
def _jvp_fake(out: Tensor, lse: Tensor, *_: Any) -> Any:
    return out.new_empty(out.shape), lse.new_empty(lse.shape)


def _mapped(name: str) -> None:
    """torch.vmap of an op. Of a dense call without score terms the new axis becomes part of the batch, which all its
    tensors begin with; otherwise, where the batch row has a number that terms may know, one call follows another."""
    op: Callable[..., Any] = getattr(torch.ops.tilewise, name)

    def rule(info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        n = info.batch_size
        call = request_of(*args[-ARGUMENTS:])
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


for _name in ("forward", "backward", "term_gradients", "jvp"):
    _mapped(_name)


class AttentionAndLse(torch.autograd.Function):
    """out and lse are both differentiable; the backward recomputes the weights from lse.

    Arguments: the spec, what is remembered of such calls, and `Request.tensors`; or q, k and v, if there are no others.
    """

    @staticmethod
    def forward(ctx: Any, spec: Any, call: Any, *tensors: Any) -> Any:
        output = _outputs(spec, call, tensors)
        _save(ctx, spec, call, tensors, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        return _propagated(ctx, dout, dlse)


class Attention(AttentionAndLse):
    """Where lse is not asked for: one result less to wrap; and torch.compile makes no zeros for its gradient."""

    @staticmethod
    def forward(ctx: Any, spec: Any, call: Any, *tensors: Any) -> Any:
        output = _outputs(spec, call, tensors)
        _save(ctx, spec, call, tensors, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> Any:  # type: ignore[override]
        return _propagated(ctx, dout, None)


class Transformed(AttentionAndLse):
    """Attention within torch.func or forward mode: a class of its own because torch.compile takes no Function with a
    jvp."""

    generate_vmap_rule = True

    @staticmethod
    def forward(spec: Any, call: Any, *tensors: Any) -> Any:  # type: ignore[override]
        return _outputs(spec, call, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        spec, call, *tensors = inputs
        _save(ctx, spec, call, tensors, output)
        ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def jvp(ctx: Any, _spec: Any, _call: Any, *tangents: Any) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        request = Request.of(ctx.spec, tensors)
        if any(t is not None for t in tangents[3:]):
            raise AttentionError("forward mode on these kernels", "a tangent of a term", "tangents of q, k and v only")
        along = [torch.zeros_like(x) if t is None else t for x, t in zip(request[:3], tangents, strict=False)]
        return torch.ops.tilewise.jvp(out, lse, along, *arguments(request))


def _propagated(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
    """What a backward returns."""
    *tensors, out, lse = ctx.saved_tensors
    if (
        ctx.call is not None
        and dout is not None
        and dlse is None
        and not torch.is_grad_enabled()
        and not is_disturbed()
    ):
        found = ctx.call.if_alike("backward", *tensors, out, lse, dout)
        if found is not None:
            terms = ctx.needs_input_grad[5 : 2 + differentiable(ctx.spec)]
            rest: tuple[Tensor | None, ...] = (None,) * (len(tensors) - 3)
            if any(terms):
                upstream = Upstream(out, lse, dout, None)
                of_terms = _of_terms(terms, ctx.call, upstream, Request.of(ctx.spec, tensors))
                rest = *of_terms, *rest[len(terms) :]
            return None, None, *found[:3], *rest
    request = Request.of(ctx.spec, tensors)
    every = differentiable(ctx.spec)
    n = min(every, len(tensors))
    wanted = ctx.needs_input_grad[2 : 2 + n]

    def gradients(dout: Tensor | None, dlse: Tensor | None) -> Any:
        upstream = Upstream(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        if not _is_higher_order(dout, dlse, *tensors[:n]):
            return _gradients(wanted, ctx.call, upstream, request)
        if choose(request).backend.name == REFERENCE:
            of_all = (*wanted, *(False,) * (every - n))
            return named(REFERENCE).differentiable_backward(request, upstream, of_all)[:n]
        flat: Any = (wanted, ctx.spec, *upstream, *tensors)
        return OneDerivative.apply(*flat)  # type: ignore[no-untyped-call]

    batched = is_batched(dout) or is_batched(dlse)
    grads = each_of_batch(gradients, dout, dlse) if batched else gradients(dout, dlse)
    return None, None, *grads, *(None,) * (len(tensors) - n)


def _save(ctx: Any, spec: Any, call: Any, tensors: Any, output: Any) -> None:
    ctx.spec, ctx.call = spec, call
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


class OneDerivative(torch.autograd.Function):
    """The kernels' gradients where torch would differentiate them again: refused when it does, not when it might."""

    generate_vmap_rule = True

    @staticmethod
    def forward(wanted: Any, spec: Any, out: Any, lse: Any, dout: Any, dlse: Any, *tensors: Any) -> Any:
        return _gradients(wanted, None, Upstream(out, lse, dout, dlse), Request.of(spec, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None: ...

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        _need_reference("a gradient of the gradient")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        _need_reference("a derivative of the gradient")


REFERENCE = "reference"  # the backend whose results torch itself can differentiate, to any order


def _need_reference(what: str) -> NoReturn:
    raise AttentionError(
        what, "the kernels' one derivative", f"backend={REFERENCE!r}, which has derivatives of every order"
    )


def _outputs(spec: Any, call: Call | None, tensors: Any) -> Any:
    """(out, lse): by the backend itself, or, where somebody watches and there is no call, by the registered op."""
    if call is None:
        request = Request.of(spec, tensors)
        if is_dtensor(*request[:3]):
            from . import dtensor  # noqa: F401 - its rules
        return _watched("forward")(*arguments(request))
    if is_profiled():
        with torch.profiler.record_function("tilewise::forward"):
            return _forward_of(spec, call, tensors)
    return _forward_of(spec, call, tensors)


def _watched(name: str) -> Callable[..., Any]:
    """The registered op, known to whoever counts FLOPs."""
    count_them()
    op: Callable[..., Any] = getattr(torch.ops.tilewise, name)
    return op


def _gradients(wanted: Any, call: Call | None, upstream: Upstream, request: Request) -> tuple[Tensor | None, ...]:
    """Of q, k and v, and of the wanted ones among bias, sinks and the score mod's tensors."""
    if is_profiled():
        with torch.profiler.record_function("tilewise::backward"):
            return _differentiated(wanted, call, upstream, request)
    return _differentiated(wanted, call, upstream, request)


def _differentiated(wanted: Any, call: Call | None, upstream: Upstream, request: Request) -> tuple[Tensor | None, ...]:
    grads: tuple[Tensor, ...]
    if is_watched(upstream.dout, *request[:3]):
        grads = _watched("backward")(*upstream, *arguments(request))
    else:
        grads = _backward_of(request, upstream, call)
    return *grads, *_of_terms(wanted[3:], call, upstream, request)


def _of_terms(wanted: Any, call: Call | None, upstream: Upstream, request: Request) -> tuple[Tensor | None, ...]:
    """The gradients of the wanted ones among bias, sinks and the score mod's tensors."""
    if not any(wanted):
        return (None,) * len(wanted)
    if is_dtensor(*request[:3]):
        from .dtensor import term_gradients

        found = iter(term_gradients(upstream, list(wanted), request))
    elif call is None or is_watched(upstream.dout, *request[:3]):
        found = iter(torch.ops.tilewise.term_gradients(*upstream, list(wanted), *arguments(request)))
    else:
        found = iter(call.backend.term_gradients(request, upstream, list(wanted), call.recordings))
    return tuple(next(found) if wants else None for wants in wanted)


def _is_higher_order(*tensors: Tensor | None) -> bool:
    if is_forward_mode():
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def repeat(call: Call, requires: bool, tensors: Any, addresses: list[int], lse: bool) -> Any:
    """`attend` of a call like an earlier one, by the memory of them, which says where its tensors are and whether one
    of them requires a gradient."""
    if is_disturbed():
        return attend(call.spec, call, tensors, lse)
    if not requires or not torch.is_grad_enabled():
        found = call.run("forward", addresses) if call.bare else None
        return _forward_of(call.spec, call, tensors) if found is None else found[:2]
    kind: Any = AttentionAndLse if lse else Attention
    found = apply_unchecked(kind, call.spec, call, *tensors)
    return found if lse else (found, None)


def attend(spec: Spec, call: Call | None, tensors: Any, lse: bool = True) -> Any:
    """(out, lse), through autograd only where a derivative will be asked for; where `lse` is not, maybe None. `call`
    is how calls like this run: None where somebody watches. `tensors` are all of `Request.tensors`, or q, k and v."""
    if is_forward_mode() or (call is None and is_transformed() and not torch.compiler.is_compiling()):
        request = Request.of(spec, tensors)
        if choose(request).backend.name == REFERENCE:
            return named(REFERENCE).differentiable(request)
        return Transformed.apply(spec, call, *tensors)  # type: ignore[no-untyped-call]
    wanted = tensors[: differentiable(spec)]
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in wanted)):
        return _outputs(spec, call, tensors)
    if torch.compiler.is_compiling():  # which lets no tensor be two arguments of a Function, as in self-attention
        tensors = [x if x is None or n == 0 else x.view_as(x) for n, x in enumerate(tensors)]
    kind: Any = AttentionAndLse if lse else Attention
    found = kind.apply(spec, None, *tensors) if call is None else apply_unchecked(kind, spec, call, *tensors)
    return found if lse else (found, None)
