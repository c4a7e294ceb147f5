"""Attention with every term as one expression over the whole score matrix, and its gradients as another, in operations
that torch can differentiate again and transform: derivatives of any order, torch.func, forward mode. O(Sq Sk) memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import AttentionError
from ...mods import PROGRAMS
from ...mods.expr import Expr, scattered, sites
from ...request import BackwardInputs, Request
from .scored import (
    Block,
    bias_rows,
    dropout_factor,
    hidden,
    score_derivative,
    score_terms,
    sequences,
    softmax,
    values,
    with_padded_bias,
    without_padding,
)
from .tiled import max_logit, row_maxima


def differentiable(request: Request) -> tuple[Tensor, ...]:
    """(out, lse) as torch sees them: differentiable to any order, forward and backward, in O(Sq Sk) memory. And the
    largest score of each head if the call returns it."""
    _check_offsets(request)
    request = with_padded_bias(request)
    q, cu_q = request.q, request.cu_q
    dtype = torch.promote_types(q.dtype, torch.float32)
    request = _widened(request, dtype)
    outs = [q.new_zeros(0, q.shape[-2], request.v.shape[-1])]
    logs = [q.new_zeros(q.shape[-2], 0, dtype=dtype)]
    tops = []
    with torch.autocast(q.device.type, enabled=False):
        for whole in _wholes(request, []):
            outs.append(masked_product(whole.weights, whole.v, whole.hide).transpose(0, 1).to(q.dtype))  # (n_q, H, Dv)
            logs.append(whole.lse.squeeze(-1))  # (H, n_q)
            tops.append(max_logit(whole.top))
    if cu_q is None:
        if not q.shape[0]:
            return _nothing(request)
        found = torch.stack(outs[1:]), torch.stack(logs[1:])
        return (*found, torch.stack(tops)) if request.spec.max_logit else found
    rest = q.shape[0] - sum(len(x) for x in outs)  # of a buffer that is longer than its sequences
    outs.append(q.new_zeros(rest, *outs[0].shape[1:]))
    logs.append(logs[0].new_full((q.shape[-2], rest), -torch.inf))
    found = torch.cat(outs), torch.cat(logs, -1)
    if not request.spec.max_logit:
        return found
    nothing = torch.full((q.shape[-2],), -torch.inf, dtype=torch.float32, device=q.device)
    return *found, torch.stack([nothing, *tops]).amax(0)


def _widened(request: Request, dtype: torch.dtype) -> Request:
    """The request with its terms in the dtype of the sums: every sequence adds to their gradients, which are rounded
    once, at the end."""
    bias, sinks, *score = (
        x.to(dtype) if x is not None and x.is_floating_point() else x
        for x in (request.bias, request.sinks, *request.score)
    )
    return request._replace(bias=bias, sinks=sinks, score=tuple(x for x in score if x is not None))


def _nothing(request: Request) -> tuple[Tensor, ...]:
    """The results of an empty batch."""
    q, v = request.q, request.v
    out = q[..., :1].expand(*q.shape[:-1], v.shape[-1])
    lse = q[..., 0].transpose(1, 2).to(torch.promote_types(q.dtype, torch.float32))
    top = torch.empty((0, q.shape[2]), dtype=torch.float32, device=q.device)
    return (out, lse, top) if request.spec.max_logit else (out, lse)


def differentiable_backward(
    request: Request, bwd_inputs: BackwardInputs, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, bias, sinks and the score mod's tensors where wanted, as torch sees them: the formulas
    of `backward` and `term_gradients` over whole matrices, out of place, so that they can be differentiated again."""
    given, request = request.bias, with_padded_bias(request)
    q, k, v, spec = request[:4]
    inputs = q, k, v, request.bias, request.sinks, *request.score
    dtype = torch.promote_types(q.dtype, torch.float32)
    grads = [
        None if x is None or not w else torch.zeros_like(x, dtype=dtype) for x, w in zip(inputs, wanted, strict=True)
    ]
    heads_kv = k.shape[-2]
    group = q.shape[-2] // max(1, heads_kv)
    rows: list[list[Tensor]] = [[], [], []]
    rows_of = [bwd_inputs.dout, *([] if bwd_inputs.dlse is None else [bwd_inputs.dlse.mT.unsqueeze(-1)])]
    with torch.autocast(q.device.type, enabled=False):
        for whole in _wholes(request, rows_of):
            place, hide, p = whole.block.place, whole.hide, whole.p
            dout, *dlse = (x.to(dtype) for x in whole.rows)
            dp = pairwise_product(dout, whole.v, hide).masked_fill(hide, 0.0)
            dp = dp if whole.factor is None else dp * whole.factor
            delta = (p * dp).sum(-1, keepdim=True) - (dlse[0] if dlse else 0.0)
            ds = (p * (dp - delta)).masked_fill(hide, 0.0)
            raw_ds = ds
            if spec.score_mod is not None:
                raw_ds = (ds * score_derivative(whole.raw, place, request, dtype)).masked_fill(hide, 0.0)
            found = (
                spec.scale * masked_product(raw_ds, whole.k, hide),
                spec.scale * masked_product(raw_ds.mT, whole.q, hide.mT),
                masked_product(whole.weights.mT, dout, hide.mT),
            )
            for n, x in enumerate(found):
                rows[n].append((x if n == 0 else x.unflatten(0, (heads_kv, group)).sum(1)).transpose(0, 1))
            if grads[3] is not None:
                view, keys = bias_rows(request.bias, whole.block)  # type: ignore[arg-type]
                one = ds.sum_to_size(view[..., keys].shape)
                b = whole.block.b if request.bias.shape[0] > 1 else 0  # type: ignore[union-attr]
                pads = [size - found for size, found in zip(grads[3].shape[2:], one.shape[1:], strict=True)]
                one = torch.nn.functional.pad(one, (0, pads[1], 0, pads[0]))
                at = torch.arange(grads[3].shape[0], device=one.device) == b
                grads[3] = grads[3] + at[:, None, None, None] * one
            if grads[4] is not None:
                sink = request.sinks.to(dtype)[:, None, None]  # type: ignore[union-attr]
                safe = whole.lse.masked_fill(whole.lse == -torch.inf, torch.inf)
                grads[4] = grads[4] - (torch.exp(sink - safe) * delta).sum((1, 2))
            if spec.score_mod is not None:
                for load, derivative in PROGRAMS[spec.score_mod].sites:
                    n = 5 + load.value
                    known: dict[Expr, Any] = {}
                    for spot in sites(load, place, request.score) if grads[n] is not None else ():
                        (d,) = values([derivative], whole.raw, spot, request, dtype, known)
                        at_site = (ds * d).masked_fill(hide, 0.0)
                        grads[n] = scattered(grads[n], load, at_site, spot, request.score, spec.score_numbers)
    if grads[3] is not None and given is not None:
        grads[3] = without_padding(grads[3], given)
    for n, x in enumerate((q, k, v)):
        if wanted[n] and rows[n]:
            grads[n] = _concatenated(rows[n], x, request.cu_q is not None)
    if not rows[0]:  # without a sequence the gradients are 0, but autograd still needs a graph
        nothing = sum(x.sum().to(dtype) for x in (q, k, v, bwd_inputs.dout))
        grads = [None if g is None else g + nothing for g in grads]
    return tuple(None if g is None or x is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True))


def _concatenated(rows: list[Tensor], x: Tensor, packed: bool) -> Tensor:
    """The rows of the sequences as one tensor like x, zero past the last."""
    if not packed:
        return torch.stack(rows)
    rest = x.shape[0] - sum(len(part) for part in rows)
    return torch.cat([*rows, rows[0].new_zeros(rest, *x.shape[1:])])


class Whole(NamedTuple):
    """All of one sequence: (H, n, D) and (H, n_q, n_k)."""

    block: Block
    q: Tensor
    k: Tensor
    v: Tensor
    rows: list[Tensor]
    raw: Tensor
    hide: Tensor
    p: Tensor
    lse: Tensor
    factor: Tensor | None
    top: Tensor  # (H, n_q): the largest score of each row

    @property
    def weights(self) -> Tensor:
        return self.p if self.factor is None else self.p * self.factor


def _check_offsets(request: Request) -> None:
    """Raise where torch.vmap maps over offsets: they are read here, and mapped tensors cannot be."""
    for cu in (request.cu_q, request.cu_k):
        try:
            _ = cu is None or int(cu[0])
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            what_works = (
                "in_dims=None for them; or one call with the sequences of all rows, each row's offsets shifted by the"
                " tokens before it; or backend='triton', which runs one row after the other"
            )
            raise AttentionError("torch.vmap on the reference backend", "cu_seqlens mapped over", what_works) from error


def _wholes(request: Request, more_rows: list[Tensor]) -> Iterator[Whole]:
    q, k, v, spec = request[:4]
    dtype = torch.promote_types(q.dtype, torch.float32)
    for (q_all, *rows), (k_all, v_all), (block,) in sequences([q, *more_rows], [k, v], request, whole=True):
        q_all = q_all.to(dtype)
        hide = hidden(block, request).expand(len(q_all), q_all.shape[1], k_all.shape[1])
        raw = spec.scale * pairwise_product(q_all, k_all, hide)
        s = score_terms(raw, block, request, dtype).masked_fill(hide, -torch.inf)
        p, lse = softmax(s, request.sinks)
        factor, top = dropout_factor(block.place, request, dtype), row_maxima(s.detach(), None).squeeze(-1)
        yield Whole(block, q_all, k_all, v_all, rows, raw, hide, p, lse, factor, top)


def pairwise_product(a: Tensor, b: Tensor, hide: Tensor) -> Tensor:
    """a @ b^T. If a row of a or b is not finite, its visible pairs and their derivatives are nan. Other pairs do not
    change."""
    bad_a, bad_b = (~x.isfinite().all(-1, keepdim=True) for x in (a, b))
    met = torch.where((bad_a | bad_b.mT) & ~hide, torch.nan, 1.0).to(a.dtype)
    return (a.masked_fill(bad_a, 0.0) @ b.masked_fill(bad_b, 0.0).mT) * met


def masked_product(a: Tensor, b: Tensor, hide: Tensor) -> Tensor:
    """a @ b. a is 0 at hidden pairs, and a NaN or inf in b has no effect there. NaN is added to the result, so that the
    gradients of its finite terms are not lost."""
    bad = ~b.isfinite()
    met = (~hide).to(a.dtype) @ bad.to(a.dtype) > 0
    return a @ b.masked_fill(bad, 0.0) + torch.where(met, torch.nan, 0.0).to(a.dtype)
