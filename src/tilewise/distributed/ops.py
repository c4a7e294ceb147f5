"""Attention over a plan as registered ops of torch, and its autograd Function.

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
    """(out, lse) of this rank's queries, both differentiable; and the largest score of each head if spec.max_logit. If
    `rehearsed`, those of all ranks in this process, on whole tensors (B, tokens, heads, dim)."""

    @staticmethod
    def forward(
        ctx: Any, number: int, ulysses_size: int, rehearsed: bool, spec: Spec, *tensors: Any
    ) -> tuple[Tensor, ...]:
        request = Request.of(spec, tensors)
        if rehearsed:
            found = _rehearse_forward(plan_of(number), request)
        else:
            found = torch.ops.tilewise_distributed.forward(*arguments(request), number, ulysses_size)
        n = 2 + int(spec.max_logit)
        results, saved = found[:n], found[n:]
        ctx.number, ctx.rehearsed, ctx.spec, ctx.n = number, rehearsed, spec, len(tensors)
        ctx.plan = None if torch.compiler.is_compiling() else plan_of(number)  # lives as long as the graph
        ctx.save_for_backward(*tensors, *(saved or results[:2]))
        ctx.mark_non_differentiable(*results[2:])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> Any:
        kept = ctx.saved_tensors  # read once: a checkpoint computes them again at each access
        tensors, saved = kept[: ctx.n], kept[ctx.n :]
        request = Request.of(ctx.spec, tensors)
        wanted = _wanted(request.spec, ctx.needs_input_grad[7:])
        if dout is None:
            dout = request.q.new_zeros((*request.q.shape[:-1], request.v.shape[-1]))
        if ctx.rehearsed:
            grads = _rehearse_backward(ctx.plan, request, saved, dout, dlse, wanted)
        else:
            grads = torch.ops.tilewise_distributed.backward(
                list(saved), dout, dlse, list(wanted), *arguments(request), ctx.number
            )
        terms = iter(grads[3:])
        found = (*grads[:3], *(next(terms) if wants else None for wants in wanted))
        n = len(tensors)
        return None, None, None, None, *found[:n], *(None,) * (n - len(found))


def _wanted(spec: Spec, needs_grad: Sequence[bool]) -> tuple[bool, ...]:
    """Whether bias, sinks and each of the score mod's tensors needs a gradient. `Request.tensors` omits absent tensors
    at the end."""
    n = num_differentiable(spec) - 3
    return (*needs_grad[:n], *(False,) * (n - len(needs_grad)))


def attend(plan: Plan, request: Request, rehearsed: bool = False) -> Any:
    """(out, lse) of this rank, or of all ranks if `rehearsed`, and the largest score of each head if the call returns
    it; through autograd only where a gradient may be needed."""
    if rehearsed or (torch.is_grad_enabled() and needs_grad(request)):
        if torch.compiler.is_compiling():  # a traced Function takes no tensor twice
            request = request._replace(k=request.k.view_as(request.k), v=request.v.view_as(request.v))
        call = plan.number, plan.ulysses_size, rehearsed, request.spec
        return Distributed.apply(*call, *request.tensors())  # type: ignore[no-untyped-call]
    found = torch.ops.tilewise_distributed.forward(*arguments(request), plan.number, plan.ulysses_size)
    return tuple(found[: 2 + int(request.spec.max_logit)])


def needs_grad(request: Request) -> bool:
    """Whether a tensor of the call requires a gradient."""
    return any(x is not None and x.requires_grad for x in request.tensors()[: num_differentiable(request.spec)])


def _rehearse_forward(plan: Plan, request: Request) -> list[Tensor]:
    """[out, lse], the largest score of each head if the call returns it, and of each rank the tensors of `Saved`."""
    ranks = range(plan.ranks)
    found = cluster.rehearse([execute.forward(plan, r, _shard_request(plan, request, r)) for r in ranks])
    max_logit = [torch.stack([x[3] for x in found]).amax(0)] if request.spec.max_logit else []
    saved = [tensor for x in found for tensor in x[2]]
    if plan.strategy == "tree":
        return [found[0][0], found[0][1], *max_logit, *saved]
    return [plan.unshard([x[0] for x in found]), plan.unshard([x[1] for x in found], 2), *max_logit, *saved]


def _rehearse_backward(
    plan: Plan, request: Request, saved: Sequence[Tensor], dout: Tensor, dlse: Tensor | None, wanted: tuple[bool, ...]
) -> list[Tensor]:
    """The gradients of q, k and v, and of the wanted terms."""
    steps, n = [], len(Saved._fields)
    for r in range(plan.ranks):
        given = plan.shard(dout, rank=r), None if dlse is None else plan.shard(dlse, dim=2, rank=r)
        own = Saved(*saved[n * r : n * (r + 1)])
        steps.append(execute.backward(plan, r, _shard_request(plan, request, r), own, *given, wanted))
    parts = [*zip(*cluster.rehearse(steps), strict=True)]
    grads = [plan.unshard(x) for x in parts[:3]]
    for i, (wants, each) in enumerate(zip(wanted, parts[3:], strict=True)):
        if wants:
            by_rows = i == 0 and request.bias is not None and request.bias.shape[2] > 1
            grads.append(plan.unshard(each, 2) if by_rows else sum(each))  # type: ignore[arg-type]
    return grads


def _shard_request(plan: Plan, request: Request, rank: int) -> Request:
    """The request of one rank."""
    q, k, v, bias = request.q, request.k, request.v, request.bias
    if plan.strategy != "tree":
        q = plan.shard(q, rank=rank)
        if bias is not None and bias.shape[2] > 1:
            bias = plan.shard(bias, dim=2, rank=rank)
    return request._replace(q=q, k=plan.shard(k, rank=rank), v=plan.shard(v, rank=rank), bias=bias)
