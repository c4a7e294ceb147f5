"""Attention with every term, a block of query rows against the keys they may see, in torch alone.

    s = score_terms(scale * q.k)  softcap, score_mod, ALiBi, then the bias
    p = exp(s - lse)              hidden pairs 0; lse includes the sink
    o = (p * dropout_factor) v    0 or `dropout.kept_factor`

`forward`, `backward` and `term_gradients` leave hidden pairs out by selection, never by multiplication with 0, as
`tiled` does. `whole` has the same attention as one expression.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sequence_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...mods import PROGRAMS, dropout
from ...mods.expr import Expr, Place, evaluate, scatter_, sites
from ...mods.tile_lists import kinds_of
from ...request import BackwardInputs, Request, Spec
from .tiled import accumulate_, have_large_scores, row_maxima

ROWS = 1 << 22  # scores held at once
Keys = slice | Tensor  # all keys, or those of the tiles that a block mask lists


class Block(NamedTuple):
    """Query rows of one sequence, the keys they meet, and where they lie: index tensors that broadcast to (H, R, C)."""

    b: int
    tokens: slice  # rows of the sequence
    keys: Keys
    local: Place  # as the band counts them
    place: Place  # as mods and dropout do
    kinds: Tensor | None  # of the tiles of a block mask


class Sequence(NamedTuple):
    """One sequence: the views (H, n, D) of its query-side tensors, and of its keys repeated for their group."""

    rows: list[Tensor]
    keys: list[Tensor]
    blocks: list[Block]


def forward(request: Request) -> tuple[Tensor, ...]:
    """(out, lse), and if spec.max_logit the largest score of each row, shaped as lse."""
    request = with_padded_bias(request)
    q, k, v, spec = request[:4]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=request.result_dtype)
    lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -torch.inf, dtype=dtype)
    by_row = [lse, torch.full_like(lse, -torch.inf)] if spec.max_logit else [lse]  # and the largest score of each row
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for (q_all, out_all, lse_all, *largest), (k_all, v_all), blocks in sequences(
            [q, out, *(x.mT.unsqueeze(-1) for x in by_row)], [k, v], request
        ):
            for block in blocks:
                q_tile = q_all[:, block.tokens].to(dtype)
                k_tile, v_tile = k_all[:, block.keys], v_all[:, block.keys]
                s = score_terms(spec.scale * (q_tile @ k_tile.mT), block, request, dtype)
                hide = hidden(block, request).expand(s.shape)
                s = s.masked_fill(hide, -torch.inf)
                p, log_sum = softmax(s, request.sinks)
                factor = dropout_factor(block.place, request, dtype)
                acc = torch.zeros_like(p @ v_tile.new_zeros(v_tile.shape))
                accumulate_(acc, p if factor is None else p * factor, v_tile, hide)
                out_all[:, block.tokens] = acc.to(out.dtype)
                lse_all[:, block.tokens] = log_sum
                for x in largest:
                    x[:, block.tokens] = row_maxima(s, None)
    return out, *by_row


def weights_of(request: Request, rows: Tensor) -> Tensor:
    """(B, H, R, Sk): the weights, after dropout, of the queries `rows` of a dense call. Blocks without one of them are
    not computed."""
    request = with_padded_bias(request)
    q, k, spec = request.q, request.k, request.spec
    dtype = torch.promote_types(q.dtype, torch.float32)
    found = q.new_zeros(q.shape[0], q.shape[2], len(rows), k.shape[1], dtype=dtype)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for (q_all,), (k_all,), blocks in sequences([q], [k], request):
            for block in blocks:
                (at,) = torch.where((rows >= block.tokens.start) & (rows < block.tokens.stop))
                if not len(at):
                    continue
                raw = spec.scale * (q_all[:, block.tokens].to(dtype) @ k_all[:, block.keys].mT)
                s = score_terms(raw, block, request, dtype)
                p, _ = softmax(s.masked_fill(hidden(block, request).expand(s.shape), -torch.inf), request.sinks)
                factor = dropout_factor(block.place, request, dtype)
                p = (p if factor is None else p * factor)[:, rows[at] - block.tokens.start]
                columns = torch.arange(k.shape[1], device=q.device)[block.keys]
                found[block.b][:, at[:, None], columns] = p
    return found


class Pass(NamedTuple):
    """The backward of one block. Shapes are (H, R, C), (H, R, D) or (H, C, D)."""

    block: Block
    q_tile: Tensor
    k_tile: Tensor
    dout_tile: Tensor
    raw: Tensor
    hide: Tensor
    weights: Tensor  # p, after dropout
    ds: Tensor  # the gradient of the scores as the softmax saw them
    sink: Tensor  # the gradient of the sink's score, (H, R, 1)


def _passes(
    request: Request, bwd_inputs: BackwardInputs, more_rows: list[Tensor]
) -> Iterator[tuple[Pass, list[Tensor]]]:
    """dS = P∘(dP - rowsum(dO∘O) + dlse), block by block; with the views of `more_rows` at the block's sequence."""
    q, k, v, spec = request[:4]
    out, lse, dout, dlse = bwd_inputs
    dtype = torch.promote_types(q.dtype, torch.float32)
    stats = [x.mT.unsqueeze(-1) for x in (lse, dlse) if x is not None]
    rows = [q, out, dout, *stats]
    for views, (k_all, v_all), blocks in sequences([*rows, *more_rows], [k, v], request):
        for block in blocks:
            k_tile, v_tile = k_all[:, block.keys], v_all[:, block.keys]
            q_tile, out_tile, dout_tile, lse_tile, *dlse_tile = (
                x[:, block.tokens].to(dtype) for x in views[: len(rows)]
            )
            raw = spec.scale * (q_tile @ k_tile.mT)
            hide = hidden(block, request).expand(raw.shape)
            safe_lse = lse_tile.masked_fill(lse_tile == -torch.inf, torch.inf)
            p = torch.exp(score_terms(raw, block, request, dtype) - safe_lse).masked_fill(hide, 0.0)
            sink_p = torch.zeros_like(lse_tile)
            if request.sinks is not None:
                sink_p = torch.exp(request.sinks.to(dtype)[:, None, None] - safe_lse)
            far = have_large_scores(lse_tile, spec)
            if far is not None:
                share = torch.where(far, 1.0 / (p.sum(-1, keepdim=True) + sink_p), 1.0)
                p, sink_p = p * share, sink_p * share
            factor = dropout_factor(block.place, request, dtype)
            dp = dout_tile @ v_tile.mT
            delta = (dout_tile * out_tile).sum(-1, keepdim=True) - (dlse_tile[0] if dlse_tile else 0.0)
            ds = (p * ((dp if factor is None else dp * factor) - delta)).masked_fill(hide, 0.0)
            weights = p if factor is None else p * factor
            yield Pass(block, q_tile, k_tile, dout_tile, raw, hide, weights, ds, -sink_p * delta), views[len(rows) :]


def backward(request: Request, bwd_inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
    """dV = Pᵀ dO;  dQ = scale·(dS∘f) K;  dK = scale·(dS∘f)ᵀ Q, f being the derivative of the score mod."""
    request = with_padded_bias(request)
    q, k, v, spec = request[:4]
    cu_k = request.cu_k
    dtype = torch.promote_types(q.dtype, torch.float32)
    dq = q.new_zeros(q.shape, dtype=request.result_dtype)
    group = q.shape[-2] // max(1, k.shape[-2])
    dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (k, v))
    if q.numel() == 0:
        return dq, dk.to(dq.dtype), dv.to(dq.dtype)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for x, (dq_all,) in _passes(request, bwd_inputs, [dq]):
            ds = x.ds
            if spec.score_mod is not None:
                ds = ds * score_derivative(x.raw, x.block.place, request, dtype)
                ds = ds.masked_fill(x.hide, 0.0)
            dq_tile, dk_tile, dv_tile = (torch.zeros_like(t) for t in (x.q_tile, x.k_tile, x.k_tile))
            dv_tile = dv_tile.new_zeros(*x.k_tile.shape[:-1], v.shape[-1])
            accumulate_(dq_tile, ds, x.k_tile, x.hide)
            accumulate_(dk_tile, ds.mT, x.q_tile, x.hide.mT)
            accumulate_(dv_tile, x.weights.mT, x.dout_tile, x.hide.mT)
            dq_all[:, x.block.tokens] = (dq_tile * spec.scale).to(dq.dtype)
            for total, tile, factor in (dk, dk_tile, spec.scale), (dv, dv_tile, 1.0):
                view = total[x.block.b] if cu_k is None else total[_tokens(cu_k, x.block.b)]  # (n_k, Hk, D)
                view[x.block.keys] += factor * tile.unflatten(0, (-1, group)).sum(1).transpose(0, 1)
    return dq, dk.to(dq.dtype), dv.to(dq.dtype)


def term_gradients(request: Request, bwd_inputs: BackwardInputs, wanted: Sequence_[bool]) -> list[Tensor]:
    """The gradients of the wanted ones among bias, sinks and the score mod's tensors."""
    q, spec = request.q, request.spec
    dtype = torch.promote_types(q.dtype, torch.float32)
    inputs = (request.bias, request.sinks, *request.score)
    request = with_padded_bias(request)
    grads = [
        None if x is None or not w else x.new_zeros(x.shape, dtype=dtype)
        for x, w in zip((request.bias, *inputs[1:]), wanted, strict=True)
    ]
    bias, sinks, *score = grads
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for x, _ in _passes(request, bwd_inputs, []):
            place = x.block.place
            if bias is not None:
                view, keys = bias_rows(bias, x.block)
                view[..., keys] += x.ds.sum_to_size(view[..., keys].shape)
            if sinks is not None:
                sinks += x.sink.sum((1, 2))
            if spec.score_mod is None:
                continue
            for load, derivative in PROGRAMS[spec.score_mod].sites:
                total, known = score[load.value], dict[Expr, Any]()
                for at in sites(load, place, request.score) if total is not None else ():
                    (d,) = values([derivative], x.raw, at, request, dtype, known)
                    scatter_(total, load, (x.ds * d).masked_fill(x.hide, 0.0), at, request.score, spec.score_numbers)
    return [
        without_padding(g, x).to(x.dtype) for g, x in zip(grads, inputs, strict=True) if g is not None and x is not None
    ]


def score_terms(raw: Tensor, block: Block, request: Request, dtype: torch.dtype) -> Tensor:
    """The scores before masks: the score program applied to scale * q.k, then the bias."""
    s, key = raw, request.spec.score_mod
    if key is not None:
        (s,) = values([PROGRAMS[key].root], raw, block.place, request, dtype)
        s = s.expand(raw.shape)
    if request.bias is not None:
        view, keys = bias_rows(request.bias, block)
        s = s + view[..., keys].to(dtype)
    return s


def score_derivative(raw: Tensor, place: Place, request: Request, dtype: torch.dtype) -> Tensor:
    assert request.spec.score_mod is not None
    (value,) = values([PROGRAMS[request.spec.score_mod].derivative], raw, place, request, dtype)
    result: Tensor = torch.as_tensor(value, dtype=dtype, device=raw.device)
    return result


def values(
    roots: list[Expr],
    raw: Tensor,
    place: Place,
    request: Request,
    dtype: torch.dtype,
    known: dict[Expr, Any] | None = None,
) -> list[Tensor]:
    return evaluate(roots, place, raw, request.score, request.spec.score_numbers, dtype, known)


def with_padded_bias(request: Request) -> Request:
    """The request with its bias padded by zeros to the longest of the packed sequences."""
    bias, ends = request.bias, (request.cu_k, request.cu_q)
    if bias is None or ends[0] is None or 0 in bias.shape:
        return request
    missing: list[int] = []
    for cu, size in zip(ends, (bias.shape[3], bias.shape[2]), strict=True):
        longest = 0 if cu is None or cu.shape[0] < 2 else int(cu.diff().max())
        missing += 0, max(0, longest - size) if size > 1 else 0
    return request._replace(bias=torch.nn.functional.pad(bias, missing)) if any(missing) else request


def without_padding(grad: Tensor, of: Tensor) -> Tensor:
    """The gradient of a tensor from that of the padded one."""
    return grad[tuple(slice(n) for n in of.shape)]


def bias_rows(bias: Tensor, block: Block) -> tuple[Tensor, Keys]:
    """The view (H, R, Sk) of a (B, H, Sq, Sk) bias, axes of size 1 kept, at a block's rows; and which of its keys."""
    rows = block.tokens if bias.shape[2] > 1 else slice(None)
    return bias[block.b if bias.shape[0] > 1 else 0][:, rows], block.keys if bias.shape[3] > 1 else slice(None)


def hidden(block: Block, request: Request) -> Tensor:
    """True where the query does not see the key; broadcasts to (H, R, C)."""
    spec, local = request.spec, block.local
    at = local.i + (local.n_k - local.n_q)
    hide = torch.zeros_like(at == local.j)
    if spec.before is not None:
        hide = hide | (local.j < at - spec.before)
    if spec.after is not None:
        hide = hide | (local.j > at + spec.after)
    if spec.mask_mod is not None:
        (visible,) = evaluate([PROGRAMS[spec.mask_mod].root], block.place, None, request.mask, spec.mask_numbers)
        visible = torch.as_tensor(visible, device=hide.device)
        if block.kinds is not None:
            visible = (block.kinds > 1) | ((block.kinds == 1) & visible)
        hide = hide | ~visible
    return hide


def dropout_factor(place: Place, request: Request, dtype: torch.dtype) -> Tensor | None:
    """The factor of each weight, 0 or `kept_factor`; None without dropout."""
    spec = request.spec
    if request.seed is None:
        return None
    keep = dropout.keep(spec.dropout_p, request.seed, place.b, place.h, place.i, place.j)
    return keep.to(dtype) * dropout.kept_factor(spec.dropout_p)


def softmax(s: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(p, lse) over the last axis of s (H, R, C), hidden pairs -inf, with the sink as one more column."""
    column = s.new_full((*s.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        column = sinks.to(s.dtype)[:, None, None].expand(column.shape)
    s = torch.cat([s, column], -1)
    m = s.detach().amax(-1, keepdim=True)
    m = m.masked_fill(m == -torch.inf, 0.0)
    p = torch.exp(s - m)
    l = p.sum(-1, keepdim=True)
    empty = l == 0
    some = l.masked_fill(empty, 1.0)
    return (p / some)[..., :-1], (m + some.log()).masked_fill(empty, -torch.inf)


def sequences(rows: list[Tensor], keys: list[Tensor], request: Request, whole: bool = False) -> Iterator[Sequence]:
    """Sequence by sequence: rows and keys as (H, n, D), the keys in the dtype of the sums; and the blocks of rows."""
    cu_q, cu_k, spec = request.cu_q, request.cu_k, request.spec
    dtype = torch.promote_types(rows[0].dtype, torch.float32)
    group = rows[0].shape[-2] // max(1, keys[0].shape[-2])
    batch = rows[0].shape[0] if cu_q is None else cu_q.shape[0] - 1
    kinds = kinds_of(request.blocks, spec.mask_block[2:]) if request.blocks else None
    tiles = None if kinds is None or whole else _visited(kinds)
    for b in range(batch):
        if cu_q is None or cu_k is None:
            row_views, key_views = [x[b] for x in rows], [x[b] for x in keys]
        else:
            row_views, key_views = [x[_tokens(cu_q, b)] for x in rows], [x[_tokens(cu_k, b)] for x in keys]
        row_views = [x.transpose(0, 1) for x in row_views]
        key_views = [x.transpose(0, 1).to(dtype).repeat_interleave(group, 0) for x in key_views]
        heads, n_q = row_views[0].shape[:2]
        n_k = key_views[0].shape[1]
        if whole:
            blocks = [_block(b, slice(0, n_q), slice(0, n_k), heads, n_q, n_k, request, kinds)]
        else:
            blocks = [
                _block(b, slice(i, min(i + step, stop)), columns, heads, n_q, n_k, request, kinds)
                for start, stop, columns in _strips(b, n_q, n_k, spec, tiles, rows[0].device)
                for step in [max(1, ROWS // max(1, heads * (n_k if isinstance(columns, slice) else len(columns))))]
                for i in range(start, stop, step)
            ]
        yield Sequence(row_views, key_views, blocks)


def _strips(
    b: int, n_q: int, n_k: int, spec: Spec, tiles: list[list[list[int]]] | None, device: torch.device
) -> Iterator[tuple[int, int, Keys]]:
    """(first row, end, keys): all rows and all keys, or each row of tiles and the keys of the tiles that it visits."""
    if tiles is None:
        yield 0, n_q, slice(0, n_k)
        return
    height, width = spec.mask_block[:2]
    for row, visited in zip(range(0, n_q, height), tiles[b % len(tiles)], strict=False):
        parts = [torch.arange(t * width, min((t + 1) * width, n_k), device=device) for t in visited]
        yield row, min(row + height, n_q), torch.cat([torch.arange(0, device=device), *parts])


def _visited(kinds: Tensor) -> list[list[list[int]]]:
    """For each batch row (or the one that stands for all) and row of tiles: the tiles that some head visits."""
    return [[row.nonzero()[:, 0].tolist() for row in rows] for rows in (kinds > 0).any(1).cpu()]


def _block(
    b: int, tokens: slice, keys: Keys, heads: int, n_q: int, n_k: int, request: Request, kinds: Tensor | None
) -> Block:
    device = request.q.device
    h, i = torch.arange(heads, device=device), torch.arange(tokens.start, tokens.stop, device=device)
    j = torch.arange(n_k, device=device)[keys]
    local = Place(b, h[:, None, None], i[:, None], j, n_q, n_k)
    if kinds is not None:
        height, width = request.spec.mask_block[:2]
        kinds = kinds[b % len(kinds)][:, (i // height)[:, None], j // width]
    return Block(b, tokens, keys, local, local.within(request.position_offsets), kinds)


def _tokens(cu: Tensor, b: int) -> slice:
    return slice(int(cu[b]), int(cu[b + 1]))
