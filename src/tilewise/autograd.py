"""The autograd Functions of attention. The backward recomputes the softmax from the saved lse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .backends.reference import ReferenceBackend
from .backends.reference.derivatives import reference_jvp, reference_vjp
from .errors import AttentionError
from .ops import dense as ops
from .plan_cache import CallPlan, at_wanted, can_use_plan, is_transformed, needs_registered_op
from .request import TENSOR_TYPES, BackwardInputs, Request, Spec, arguments, has_address, is_dtensor, num_differentiable
from .torch_internals import batched, eager_apply, forward_mode_level, profiler_enabled, transform_level, unbatched

REFERENCE = ReferenceBackend.name  # torch itself differentiates its results, to any order
TERMS = "derivatives of a bias, sinks or a mod's tensors"


def attend(spec: Spec, plan: CallPlan | None, tensors: Sequence[Tensor | None], with_lse: bool = True) -> Any:
    """(out, lse), through an autograd Function if a derivative may be needed; and the largest score of each head if
    spec.max_logit.

    Args:
        spec: the checked options.
        plan: how the call runs; None if it is traced, and a tracer or dispatch mode must see the registered op.
        tensors: `Request.tensors()`.
        with_lse: whether lse is wanted. If not, None may be returned for it.
    """
    if plan is not None and profiler_enabled():
        with torch.profiler.record_function("tilewise::forward"):
            return _attend(spec, plan, tensors, with_lse)
    return _attend(spec, plan, tensors, with_lse)


def _attend(spec: Spec, plan: CallPlan | None, tensors: Sequence[Tensor | None], with_lse: bool) -> Any:
    if spec.precision is not None:
        check_forward_only(spec, tensors)
    if is_transformed():
        request = Request.of(spec, tensors)
        if is_by_torch(request):
            return ReferenceBackend.differentiable(request)
        return TransformedAttention.apply(NonTensor(plan or spec), *tensors)  # type: ignore[no-untyped-call]
    wanted = tensors[: num_differentiable(spec)]
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in wanted)):
        return run_forward(plan or spec, tensors)
    if torch.compiler.is_compiling():  # torch.compile does not allow one tensor as two arguments of a Function
        tensors = [x if x is None or n == 0 else x.view_as(x) for n, x in enumerate(tensors)]
    if with_lse or spec.max_logit:
        return AttentionWithLse.apply(plan or spec, *tensors)  # type: ignore[no-untyped-call]
    return Attention.apply(plan or spec, *tensors), None  # type: ignore[no-untyped-call]


def is_by_torch(request: Request) -> bool:
    """Whether torch differentiates a call to any order: the reference does, and "auto" gives it the calls of the
    backend "torch", whose kernels have first derivatives alone."""
    chosen = ops.chosen(request)
    return chosen.name == REFERENCE or (request.spec.backend == "auto" and isinstance(chosen, ReferenceBackend))


def check_forward_only(spec: Spec, tensors: Sequence[Tensor | None]) -> None:
    """Raises if a derivative of a call with a `precision` is needed."""
    wanted = tensors[: num_differentiable(spec)]
    needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in wanted)
    if needed or forward_mode_level() >= 0:
        found = "tensors that require a gradient" if needed else "forward-mode differentiation"
        hint = "forward only: q.detach() and so on, or torch.no_grad(); precision=None has gradients"
        raise AttentionError(f"precision={spec.precision!r}", found, hint)


def run_plan(plan: CallPlan, arguments: Sequence[Tensor]) -> Any:
    """`attend` of an eager call whose plan was found by its signature, without forward-mode derivatives. If
    plan.returns_out, the lse is None."""
    tensors = arguments if len(arguments) == 3 else plan.tensors(arguments)
    if profiler_enabled():
        return attend(plan.spec, plan, tensors, not plan.returns_out)
    if not plan.requires_grad or not torch.is_grad_enabled():
        return plan.forward(tensors)
    if plan.spec.precision is not None:
        check_forward_only(plan.spec, tensors)
    if plan.returns_out:
        return _apply(plan, *tensors), None
    return _apply_with_lse(plan, *tensors)


def run_forward(call: CallPlan | Spec, tensors: Sequence[Tensor | None]) -> Any:
    """(out, lse), and the largest score of each head if spec.max_logit, by the plan or by the registered op."""
    if isinstance(call, CallPlan):
        return tuple(call.forward(tensors))
    request = Request.of(call, tensors)
    if is_dtensor(*request[:3]):
        from .ops import dtensor

        return dtensor.forward(request)
    return ops.registered(ops.forward_op(call))(*arguments(request))


class AttentionWithLse(torch.autograd.Function):
    """(out, lse), both differentiable, and the largest score of each head if spec.max_logit.

    Arguments: the plan of the call, or its spec if it is traced; and `Request.tensors()`.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Any) -> Any:
        results = run_forward(call, tensors)
        _save(ctx, call, tensors, results)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None, *_: None) -> tuple[Tensor | None, ...]:
        call, saved = ctx.call, ctx.saved_tensors  # read once: a checkpoint recomputes them
        has_no_terms = len(saved) == 5  # q, k, v, out and lse
        is_usual = has_no_terms and dlse is None and type(call) is CallPlan
        if is_usual and not torch.is_grad_enabled() and not profiler_enabled() and can_use_plan():
            grads = call.prepared_gradients(saved, dout)
            if grads is not None:
                return None, *grads
        return _backward(ctx, saved, dout, dlse)


class Attention(AttentionWithLse):
    """out alone: one result less to wrap, and torch.compile makes no zeros for the gradient of lse."""

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Any) -> Any:
        out, lse = call.forward(tensors) if type(call) is CallPlan else run_forward(call, tensors)
        ctx.call = call
        ctx.save_for_backward(*tensors, out, lse)
        return out


_apply, _apply_with_lse = eager_apply(Attention), eager_apply(AttentionWithLse)


class NonTensor:
    """An argument of a Function that is no tensor. torch.func takes tuples apart, and a Spec is one."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class TransformedAttention(AttentionWithLse):
    """Attention within torch.func or forward mode. torch.compile does not trace a Function that has a jvp, so this is a
    class of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: NonTensor, *tensors: Any) -> Any:  # type: ignore[override]
        return run_forward(call.value, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        call, *tensors = inputs
        _save(ctx, call.value, tensors, output)
        ctx.save_for_forward(*tensors, *output[:2])

    @staticmethod
    def jvp(ctx: Any, _call: Any, *tangents: Any) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        request = Request.of(spec_of(ctx.call), tensors)
        lacking = TERMS if any(t is not None for t in tangents[3:]) else ops.chosen(request).lacks_jvp(request)
        if use_reference_or_raise("forward mode", request, lacking):
            spec = request.spec._replace(max_logit=False)
            found = reference_jvp(lambda *x: ReferenceBackend.differentiable(Request.of(spec, x)), tensors, tangents)
            return (*found, None) if request.spec.max_logit else tuple(found)
        given = [torch.zeros_like(x) if t is None else t for x, t in zip(request[:3], tangents, strict=False)]
        tangents_of = torch.ops.tilewise.jvp(out, lse, given, *arguments(request))
        return (*tangents_of, None) if request.spec.max_logit else tangents_of


def spec_of(call: CallPlan | Spec) -> Spec:
    return call.spec if isinstance(call, CallPlan) else call


def _save(ctx: Any, call: Any, tensors: Any, results: Any) -> None:
    ctx.call = call
    ctx.save_for_backward(*tensors, *results[:2])
    if spec_of(call).max_logit:
        ctx.mark_non_differentiable(results[2])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, saved: Sequence[Any], dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of a Function's arguments."""
    *tensors, out, lse = saved
    spec = spec_of(ctx.call)
    n = min(num_differentiable(spec), len(tensors))
    wanted = ctx.needs_input_grad[1 : 1 + n]

    def gradients(dout: Tensor | None, dlse: Tensor | None) -> Any:
        bwd_inputs = BackwardInputs(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        if not is_higher_order(dout, dlse, *tensors[:n]):
            return run_backward(wanted, ctx.call, bwd_inputs, tensors)
        request = Request.of(spec, tensors)
        if is_by_torch(request):
            every = (*wanted, *(False,) * (num_differentiable(spec) - n))
            return ReferenceBackend.differentiable_backward(request, bwd_inputs, every)[:n]
        # Out and lse get no gradient; if torch knew where they come from, it would run this backward with zeros.
        constants = out.detach(), lse.detach()
        return FirstDerivative.apply(NonTensor(wanted), NonTensor(spec), *constants, *bwd_inputs[2:], *tensors)  # type: ignore[no-untyped-call]

    return None, *for_each_batched_gradient(gradients, dout, dlse), *(None,) * (len(tensors) - n)


def is_batched(*tensors: Tensor | None) -> bool:
    """Whether one is a stack of gradients for which autograd runs one backward: `is_grads_batched`, gradcheck's and
    torch.autograd.functional's vectorised derivatives. (Not torch.vmap, which transforms ops.)"""
    for x in tensors:
        if x is not None and type(x) in TENSOR_TYPES and not has_address(x):
            return transform_level() is None
    return False


def for_each_batched_gradient(
    function: Callable[..., Sequence[Tensor | None]], *tensors: Tensor | None
) -> Sequence[Tensor | None]:
    """Returns function(*tensors), a tuple. If some of `tensors` are stacks of gradients (`is_batched`), calls the
    function once for each entry and returns stacks of its results. Their level is 1: autograd does not nest them."""
    if torch.compiler.is_compiling() or not is_batched(*tensors):
        return function(*tensors)
    plain = [unbatched(x, 1, 1, 0) if x is not None and is_batched(x) else x for x in tensors]
    size = next(p.shape[0] for p, x in zip(plain, tensors, strict=True) if p is not None and p is not x)
    each = [
        function(*(x if p is x or p is None else p[i] for p, x in zip(plain, tensors, strict=True)))
        for i in range(size)
    ]
    return tuple(None if parts[0] is None else batched(torch.stack(parts), 0, 1) for parts in zip(*each, strict=True))


def first_gradients(request: Request, bwd_inputs: BackwardInputs) -> Any:
    """dq, dk and dv of a call without other tensors that have gradients, differentiable again where torch asks for it.
    Out and lse count as constants: the gradient with respect to q, k and v is the whole derivative."""
    if not is_higher_order(bwd_inputs.dout, *request[:3]):
        return ops.registered("backward")(*bwd_inputs, *arguments(request))
    wanted, spec = NonTensor((True,) * 3), NonTensor(request.spec)
    return FirstDerivative.apply(wanted, spec, *bwd_inputs, *request.tensors())  # type: ignore[no-untyped-call]


class FirstDerivative(torch.autograd.Function):
    """The gradients of the kernels where torch might differentiate them again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(wanted: NonTensor, spec: NonTensor, out: Any, lse: Any, dout: Any, dlse: Any, *tensors: Any) -> Any:
        return run_backward(wanted.value, spec.value, BackwardInputs(out, lse, dout, dlse), tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        wanted, spec, *tensors = inputs
        ctx.wanted, ctx.spec = wanted.value, spec.value
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, ...]:
        """Out and lse get no gradient: that of q, k and v is the whole derivative."""
        out, lse, dout, dlse, *tensors = ctx.saved_tensors
        request = Request.of(ctx.spec, tensors)
        terms = any(x is not None for x in cotangents[3:]) or any(ctx.needs_input_grad[9:])
        by_reference = use_reference_or_raise("a gradient of the gradient", request, lacks_second(request, terms))

        def second(*given: Tensor | None) -> tuple[Tensor | None, ...]:
            if by_reference:
                inputs = dout, dlse, *tensors
                return reference_vjp(_reference_gradients(ctx), inputs, given, ctx.needs_input_grad[4:])
            moved = _tangents(given[:3], tensors)
            tout, tlse, *grads = SecondDerivative.apply(NonTensor(ctx.spec), out, lse, dout, dlse, *moved, *tensors)  # type: ignore[no-untyped-call]
            return tout, None if dlse is None else tlse, *grads, *(None,) * (len(tensors) - 3)

        return None, None, None, None, *for_each_batched_gradient(second, *cotangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The gradients are linear in dout and dlse."""
        out, lse, dout, dlse, *tensors = ctx.saved_tensors
        tdout, tdlse, *others = tangents[4:]
        request, terms = Request.of(ctx.spec, tensors), any(x is not None for x in others[3:])
        lacking = lacks_second(request, terms or any(ctx.wanted[3:]))
        if use_reference_or_raise("a derivative of the gradient", request, lacking):
            return tuple(reference_jvp(_reference_gradients(ctx), (dout, dlse, *tensors), tangents[4:]))
        grads = [torch.zeros_like(x) for x in request[:3]]
        if any(x is not None for x in others[:3]):
            moved = _tangents(others[:3], tensors)
            grads = torch.ops.tilewise.hvp(out, lse, dout, dlse, moved, *arguments(request))[2:]
        if tdout is not None or tdlse is not None:
            tdout = torch.zeros_like(out) if tdout is None else tdout
            more = ops.registered("backward")(out, lse, tdout, tdlse, *arguments(request))
            grads = [x + y for x, y in zip(grads, more, strict=True)]
        return *grads, *(None,) * (len(ctx.wanted) - 3)


class SecondDerivative(torch.autograd.Function):
    """The tangents of out, lse, dq, dk and dv for tangents of q, k and v: the gradients of the gradients with respect
    to dout, dlse, q, k and v. Raises if torch differentiates them again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        spec: NonTensor, out: Any, lse: Any, dout: Any, dlse: Any, tq: Any, tk: Any, tv: Any, *tensors: Any
    ) -> Any:
        request = Request.of(spec.value, tensors)
        return ops.registered("hvp")(out, lse, dout, dlse, [tq, tk, tv], *arguments(request))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None: ...

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        _need_reference("a third derivative", "the kernels' two derivatives")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        _need_reference("a third derivative", "the kernels' two derivatives")


def _tangents(given: Sequence[Tensor | None], tensors: Sequence[Any]) -> list[Tensor]:
    """The tangents of q, k and v in their dtypes, zeros for those that are absent."""
    pairs = zip(given, tensors, strict=False)
    return [torch.zeros_like(x) if t is None else t.to(x.dtype) for t, x in pairs]


def lacks_second(request: Request, terms: bool) -> str | None:
    """Why the kernels have no second derivatives of a call, or None. `terms`: those of a bias, sinks or a mod's tensors
    are wanted."""
    return TERMS if terms else ops.chosen(request).lacks_hvp(request)


def use_reference_or_raise(what: str, request: Request, lacking: str | None) -> bool:
    """Whether the reference computes a derivative, because the kernels lack it and the backend is "auto".

    Raises:
        AttentionError: the kernels lack it and were named, or the tensors are DTensors.
    """
    if is_dtensor(*request[:3]):
        lacking = lacking or "DTensors"
    elif lacking is None or request.spec.backend == "auto":
        return lacking is not None
    _need_reference(what, lacking)


def _reference_gradients(ctx: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    """The gradients that a FirstDerivative has computed, as a function of dout, dlse and `Request.tensors()`."""
    out, lse, *_ = ctx.saved_tensors
    rest = (False,) * (num_differentiable(ctx.spec) - len(ctx.wanted))
    every = True, True, True, *ctx.wanted[3:], *rest  # as `run_backward`, which always computes those of q, k and v

    def gradients(dout: Tensor, dlse: Tensor | None, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        request, bwd_inputs = Request.of(ctx.spec, tensors), BackwardInputs(out, lse, dout, dlse)
        return ReferenceBackend.differentiable_backward(request, bwd_inputs, every)[: len(ctx.wanted)]

    return gradients


def _need_reference(what: str, found: str) -> NoReturn:
    raise AttentionError(what, found, f"backend={REFERENCE!r}, which has derivatives of every order")


def run_backward(
    wanted: Sequence[bool], call: CallPlan | Spec, bwd_inputs: BackwardInputs, tensors: Sequence[Any]
) -> Sequence[Tensor | None]:
    """The gradients of q, k and v, and of the wanted ones among bias, sinks and the score mod's tensors."""
    if not isinstance(call, CallPlan) or needs_registered_op(bwd_inputs.dout, *tensors[:3]):
        request = Request.of(spec_of(call), tensors)
        if is_dtensor(*request[:3]):
            from .ops import dtensor

            grads = dtensor.backward(bwd_inputs, request)
        else:
            grads = ops.registered("backward")(*bwd_inputs, *arguments(request))
        return *grads, *_traced_term_gradients(wanted[3:], bwd_inputs, request)
    if profiler_enabled():
        with torch.profiler.record_function("tilewise::backward"):
            return call.gradients(wanted, tensors, bwd_inputs)
    return call.gradients(wanted, tensors, bwd_inputs)


def _traced_term_gradients(
    wanted: Sequence[bool], bwd_inputs: BackwardInputs, request: Request
) -> tuple[Tensor | None, ...]:
    if not any(wanted):
        return (None,) * len(wanted)
    every = [*wanted, *[False] * (2 + len(request.score) - len(wanted))]
    if is_dtensor(*request[:3]):
        from .ops.dtensor import term_gradients

        return at_wanted(wanted, term_gradients(bwd_inputs, every, request))
    return at_wanted(wanted, torch.ops.tilewise.term_gradients(*bwd_inputs, every, *arguments(request)))


def is_higher_order(*tensors: Tensor | None) -> bool:
    """Whether torch may differentiate what a backward computes from these tensors."""
    if forward_mode_level() >= 0:
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
