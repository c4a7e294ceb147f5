"""Attention over a plan as registered ops of torch, and its autograd Functions.

The ops take a plan by its number, so that one compiled graph serves the plans of many batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..request import ARGUMENTS, SCHEMA, Request, Spec, arguments, num_differentiable, request_from_arguments
from . import cluster, execute
from .execute import Saved
from .plans import COMPARED, Plan, compared, described, plan_of
from .ulysses import Ulysses

_library = torch.library.Library("tilewise_distributed", "DEF")
_library.define(f"forward({SCHEMA}, SymInt plan, int ulysses_size) -> Tensor[]")
_library.define(
    f"backward(Tensor[] saved, Tensor dout, Tensor? dlse, bool[] wanted, {SCHEMA}, SymInt plan) -> Tensor[]"
)


COMPARED_OF_CALL = (
    *COMPARED,
    *("batch, heads and dim", "dtype", "scale", "score_mod", "mask_mod", "dropout_p", "return_max_logit"),
    *("bias", "sinks"),
)


def _compared(plan: Plan, request: Request) -> tuple[Any, ...]:
    """The values that `COMPARED_OF_CALL` names. The seed is not one: a generator may give each rank its own."""
    q, k, v, spec, bias = request.q, request.k, request.v, request.spec, request.bias
    sizes = q.shape[0], *(tuple(x.shape[2:]) for x in (q, k, v))
    score = described(spec.score_mod, spec.score_numbers, request.score)
    mask = described(spec.mask_mod, spec.mask_numbers, request.mask)
    biased = None if bias is None else (*bias.shape[:2], bias.shape[2] > 1, bias.shape[3], bias.dtype)
    sinks = None if request.sinks is None else request.sinks.shape
    options = q.dtype, spec.scale, score, mask, spec.dropout_p, spec.max_logit, biased, sinks
    return *compared(plan), sizes, *options


@torch.library.impl(_library, "forward", "CompositeExplicitAutograd")
def _forward(*args: Any) -> list[Tensor]:
    """[out, lse], the largest score of each head if the call returns it, and with Ulysses the tensors of `Saved`:
    without it they are the inputs and results."""
    plan, request = plan_of(args[ARGUMENTS]), request_from_arguments(*args[:ARGUMENTS])
    cluster.compare_call(plan.group, COMPARED_OF_CALL, lambda: _compared(plan, request), request.q.device)
    with torch.no_grad():
        steps = execute.forward(plan, plan.rank, request)
        out, lse, saved, max_logit = cluster.run(plan.group, steps, request.q.device)
        found = [] if max_logit is None else [cluster.maximum(plan.group, max_logit)]
    return [out, lse.contiguous(), *found, *(saved if plan.ulysses_size > 1 else ())]


@torch.library.impl(_library, "backward", "CompositeExplicitAutograd")
def _backward(saved: list[Tensor], dout: Tensor, dlse: Tensor | None, wanted: list[bool], *args: Any) -> list[Tensor]:
    """The gradients of q, k and v, and of the wanted terms."""
    plan, request = plan_of(args[ARGUMENTS]), request_from_arguments(*args[:ARGUMENTS])
    kept = Saved(*saved) if plan.ulysses_size > 1 else Saved(*request[:3], *saved)
    with torch.no_grad():
        steps = execute.backward(plan, plan.rank, request, kept, dout, dlse, tuple(wanted))
        grads = cluster.run(plan.group, steps, request.q.device)
    return [g for g in grads if g is not None]


@torch.library.register_fake("tilewise_distributed::forward", lib=_library)
def _forward_fake(*args: Any) -> list[Tensor]:
    request, ulysses_size = request_from_arguments(*args[:ARGUMENTS]), args[-1]
    q, k, v = request[:3]

    def results(rows: Any, heads: int) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty((q.shape[0], rows, heads, v.shape[-1]))
        return out, q.new_empty((q.shape[0], heads, rows), dtype=dtype)

    found = [*results(q.shape[1], q.shape[2])]
    if request.spec.max_logit:
        found.append(q.new_empty((q.shape[0], q.shape[2]), dtype=torch.float32))
    if ulysses_size > 1:
        plan = plan_of(args[ARGUMENTS])
        ulysses = Ulysses(plan, plan.rank, q.shape[2], k.shape[2])
        rows, share = plan.rows(ulysses.ring_rank), ulysses.own
        heads, kv_heads = share.q1 - share.q0, len(share.repeats) if share.repeats else share.c1 - share.c0
        for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)):
            found.append(x.new_empty((x.shape[0], rows, n, x.shape[-1])))
        found += results(rows, heads)
    return found


@torch.library.register_fake("tilewise_distributed::backward", lib=_library)
def _backward_fake(saved: Any, dout: Any, dlse: Any, wanted: list[bool], *args: Any) -> list[Tensor]:
    request = request_from_arguments(*args[:ARGUMENTS])
    terms = zip((request.bias, request.sinks, *request.score), wanted, strict=True)
    return [x.new_empty(x.shape) for x in (*request[:3], *(x for x, wants in terms if wants and x is not None))]


class Distributed(torch.autograd.Function):
    """(out, lse) of this rank's queries, both differentiable; and the largest score of each head if spec.max_logit."""

    @staticmethod
    def forward(ctx: Any, number: int, ulysses_size: int, spec: Spec, *tensors: Any) -> tuple[Tensor, ...]:
        request = Request.of(spec, tensors)
        out, lse, *rest = torch.ops.tilewise_distributed.forward(*arguments(request), number, ulysses_size)
        max_logit, saved = rest[: int(spec.max_logit)], rest[int(spec.max_logit) :]
        ctx.number, ctx.spec, ctx.n = number, spec, len(tensors)
        ctx.plan = None if torch.compiler.is_compiling() else plan_of(number)  # lives as long as the graph
        ctx.save_for_backward(*tensors, *(saved or (out, lse)))
        ctx.mark_non_differentiable(*max_logit)
        ctx.set_materialize_grads(False)
        return out, lse, *max_logit

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors  # read once: a checkpoint computes them again at each access
        tensors, saved = kept[: ctx.n], kept[ctx.n :]
        request = Request.of(ctx.spec, tensors)
        wanted = _wanted(request.spec, ctx.needs_input_grad[6:])
        dout = _zeros_of_out(request) if dout is None else dout
        grads = torch.ops.tilewise_distributed.backward(
            list(saved), dout, dlse, list(wanted), *arguments(request), ctx.number
        )
        terms = iter(grads[3:])
        found = (*grads[:3], *(next(terms) if wants else None for wants in wanted))
        return None, None, None, *_padded(found, len(tensors))


def _wanted(spec: Spec, needs_grad: Sequence[bool]) -> tuple[bool, ...]:
    """Whether bias, sinks and each of the score mod's tensors needs a gradient. `Request.tensors` omits absent tensors
    at the end."""
    n = num_differentiable(spec) - 3
    return (*needs_grad[:n], *(False,) * (n - len(needs_grad)))


def _padded(grads: Sequence[Any], n: int) -> tuple[Any, ...]:
    """The gradients of n tensors, None for those past the end of `grads`."""
    return (*grads[:n], *(None,) * (n - len(grads)))


def _zeros_of_out(request: Request) -> Tensor:
    return request.q.new_zeros((*request.q.shape[:-1], request.v.shape[-1]))


def attend(plan: Plan, request: Request) -> Any:
    """(out, lse) of this rank, and the largest score of each head if the call returns it; through autograd only where a
    gradient may be needed."""
    if torch.is_grad_enabled() and needs_grad(request):
        if torch.compiler.is_compiling():  # a traced Function takes no tensor twice
            request = request._replace(k=request.k.view_as(request.k), v=request.v.view_as(request.v))
        return Distributed.apply(plan.number, plan.ulysses_size, request.spec, *request.tensors())  # type: ignore[no-untyped-call]
    found = torch.ops.tilewise_distributed.forward(*arguments(request), plan.number, plan.ulysses_size)
    return tuple(found[: 2 + int(request.spec.max_logit)])


def needs_grad(request: Request) -> bool:
    """Whether a tensor of the call requires a gradient."""
    return any(x is not None and x.requires_grad for x in request.tensors()[: num_differentiable(request.spec)])


class Rehearsed(torch.autograd.Function):
    """(out, lse) of all ranks in this process, on whole tensors (B, tokens, heads, dim); and the largest score of each
    head if spec.max_logit."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, spec: Spec, *tensors: Any) -> tuple[Tensor, ...]:
        request = Request.of(spec, tensors)
        ranks = range(plan.ranks)
        found = cluster.rehearse([execute.forward(plan, r, _shard_request(plan, request, r)) for r in ranks])
        ctx.plan, ctx.spec, ctx.n, ctx.saved = plan, spec, len(tensors), [x[2] for x in found]
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        max_logit = [torch.stack([x[3] for x in found]).amax(0)] if spec.max_logit else []
        ctx.mark_non_differentiable(*max_logit)
        if plan.strategy == "tree":
            return found[0][0], found[0][1], *max_logit
        return plan.unshard([x[0] for x in found]), plan.unshard([x[1] for x in found], 2), *max_logit

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        plan, request = ctx.plan, Request.of(ctx.spec, ctx.saved_tensors)
        wanted = _wanted(request.spec, ctx.needs_input_grad[5:])
        dout = _zeros_of_out(request) if dout is None else dout
        steps = []
        for r in range(plan.ranks):
            given = plan.shard(dout, rank=r), None if dlse is None else plan.shard(dlse, dim=2, rank=r)
            steps.append(execute.backward(plan, r, _shard_request(plan, request, r), ctx.saved[r], *given, wanted))
        found = cluster.rehearse(steps)
        grads: list[Any] = [plan.unshard([x[i] for x in found]) for i in range(3)]
        for i, wants in enumerate(wanted):
            parts = [x[3 + i] for x in found]
            if not wants:
                grads.append(None)
            elif i == 0 and request.bias is not None and request.bias.shape[2] > 1:
                grads.append(plan.unshard(parts, 2))
            else:
                grads.append(sum(parts))
        return None, None, *_padded(grads, ctx.n)


def _shard_request(plan: Plan, request: Request, rank: int) -> Request:
    """The request of one rank."""
    q, k, v, bias = request.q, request.k, request.v, request.bias
    if plan.strategy != "tree":
        q = plan.shard(q, rank=rank)
        if bias is not None and bias.shape[2] > 1:
            bias = plan.shard(bias, dim=2, rank=rank)
    return request._replace(q=q, k=plan.shard(k, rank=rank), v=plan.shard(v, rank=rank), bias=bias)
