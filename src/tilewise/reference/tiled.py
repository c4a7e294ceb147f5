"""The last rung: attention tile by tile, forward and backward, dense or packed, in any band, on any device.

This is the CPU backend, and in float64 the oracle of the kernels. A tile of scores lives only as long as its turn in
the loop, so the extra memory is O(S). Heads are batched into one product, and the query heads that share a kv head
become rows of the same matrix:

    q (B, Sq, H, D)  -> q_tile (h, R, D)    h kv heads at a time, R = (H / Hk) * rows of the tile
    k (B, Sk, Hk, D) -> k_tile (h, C, D)
    v (B, Sk, Hk, E) -> v_tile (h, C, E)

Two functions decide what a tile means, forward and backward: `scores` (what is a pair worth) and `hidden` (who does
not see whom). A key that a row does not see is selected away, never multiplied by zero, so its NaN stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.spec import Request, Spec, Upstream

TILE_Q = 256
TILE_K = 1024
TILE_SCORES = 1 << 20  # scores held at once, over all heads of a tile
PART_KEYS = 1 << 23  # elements of k copied at once, over all heads of a part
SUM_Q = 64  # queries summed at a time into dk and dv: in float32, sums of 512 had 2.5 times the error of torch's
ALIGN = 64  # interior tiles begin and end at multiples of this

ALL = slice(None)
LOG2E = math.log2(math.e)


class Span(NamedTuple):
    """The keys of a query tile: [lo, hi) are seen by some of its rows, [full_lo, full_hi) by all of them."""

    lo: int
    full_lo: int
    full_hi: int
    hi: int


class Part(NamedTuple):
    """Some heads of some sequences of the same length, as views: rows (b, h, G, Sq, D), keys (b, h, 1, Sk, D)."""

    rows: list[Tensor]
    keys: list[Tensor]
    n_q: int
    n_k: int


class Tile(NamedTuple):
    """A tile of scores: query positions `i` (R, 1), key positions `columns`, and whether some pair may be hidden."""

    i: Tensor
    columns: slice
    edge: bool


def forward(request: Request) -> tuple[Tensor, Tensor]:
    """out and lse = log Σ_j exp(s_ij). Dense (B, S, H, D) -> lse (B, H, Sq); packed (T, H, D) -> lse (H, T).

    Each tile updates (m, l, acc), the running maximum, denominator and numerator of its rows:
    m' = max(m, rowmax(S));  P = exp(S - m');  l' = exp(m - m')·l + rowsum(P);  acc' = exp(m - m')·acc + P V
    """
    q, k, v, spec = request[:4]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=request.result_dtype)
    lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -torch.inf, dtype=dtype)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for part in parts([q, out, as_rows(lse)], [k, v], request):
            q_view, out_view, lse_view = part.rows
            k_view, v_view = part.keys
            k_all, v_all = load_columns(k_view, part, dtype), load(v_view, ALL, dtype)
            room = tile_room(part, spec, dtype)
            for rows in row_tiles(part, spec):
                q_tile = load(q_view, rows, dtype) * spec.scale
                acc = q_tile.new_zeros(*q_tile.shape[:-1], v.shape[-1])
                l = torch.zeros_like(acc[..., :1])
                m, pivot = l - torch.inf, l
                for tile in key_tiles(part, rows, spec):
                    k_tile, v_tile = k_all[:, tile.columns], v_all[:, tile.columns]
                    hide = hidden(tile, part, spec)
                    s = scores(q_tile, k_tile, room)
                    if hide is not None:
                        s.masked_fill_(hide, -torch.inf)
                    m_old, m = m, torch.maximum(m, s.amax(-1, keepdim=True))
                    pivot = m.masked_fill(m == -torch.inf, 0.0)
                    p = exp_(s.sub_(pivot))
                    alpha = torch.exp(m_old - pivot)
                    l = alpha * l + p.sum(-1, keepdim=True)
                    accumulate_(acc.mul_(alpha), p, v_tile, hide)
                store(out_view, rows, acc / l.masked_fill(l == 0, 1.0))
                store(lse_view, rows, pivot + l.log())
    return out, lse


def backward(request: Request, upstream: Upstream) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, with every tile of P computed again from lse.

    P = exp(S - lse);  dV = Pᵀ dO;  dP = dO Vᵀ;  dS = P∘(dP - rowsum(dO∘O) + dlse);  dQ = scale·dS K;  dK = scale·dSᵀ Q
    """
    q, k, v, spec = request[:4]
    out, lse, dout, dlse = upstream
    dtype = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=request.result_dtype) for x in (q, k, v))
    stats = [as_rows(x) for x in (lse, dlse) if x is not None]
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for part in parts([q, out, dout, dq, *stats], [k, v, dk, dv], request):
            q_view, out_view, dout_view, dq_view, *stat_views = part.rows
            k_view, v_view, dk_view, dv_view = part.keys
            k_all, k_columns = load(k_view, ALL, dtype), load_columns(k_view, part, dtype)
            v_columns = load_columns(v_view, part, dtype)
            dk_acc, dv_acc = (q.new_zeros(x.shape, dtype=dtype).flatten(0, 2) for x in (dk_view, dv_view))
            p_room, ds_room = tile_room(part, spec, dtype), tile_room(part, spec, dtype)
            for rows in row_tiles(part, spec):
                q_tile = load(q_view, rows, dtype) * spec.scale
                dout_tile = load(dout_view, rows, dtype)
                dq_acc = torch.zeros_like(q_tile)
                lse_tile, *dlse_tile = (load(x, rows, dtype) for x in stat_views)
                lse_tile = lse_tile.masked_fill(lse_tile == -torch.inf, torch.inf)
                delta = (dout_tile * load(out_view, rows, dtype)).sum(-1, keepdim=True)
                for x in dlse_tile:
                    delta -= x
                for tile in key_tiles(part, rows, spec):
                    hide = hidden(tile, part, spec)
                    hide_t = None if hide is None else hide.mT
                    p = exp_(scores(q_tile, k_columns[:, tile.columns], p_room).sub_(lse_tile))
                    if hide is not None:
                        p.masked_fill_(hide, 0.0)
                    accumulate_(dv_acc[:, tile.columns], p.mT, dout_tile, hide_t, SUM_Q)
                    ds = multiply(dout_tile, v_columns[:, tile.columns].mT, ds_room).sub_(delta).mul_(p)
                    if hide is not None:
                        ds.masked_fill_(hide, 0.0)
                    accumulate_(dq_acc, ds, k_all[:, tile.columns], hide)
                    accumulate_(dk_acc[:, tile.columns], ds.mT, q_tile, hide_t, SUM_Q)
                store(dq_view, rows, dq_acc * spec.scale)
            store(dk_view, ALL, dk_acc)
            store(dv_view, ALL, dv_acc)
    return dq, dk, dv


def scores(q_tile: Tensor, k_tile: Tensor, room: Tensor) -> Tensor:
    """What each pair of a tile is worth, before masks: (h, R, D), (h, C, D) -> (h, R, C). q_tile holds scale·q."""
    return multiply(q_tile, k_tile.mT, room)


def hidden(tile: Tile, part: Part, spec: Spec) -> Tensor | None:
    """(R, C), True where the row does not see the key; None where every row of the tile sees every key."""
    if not tile.edge:
        return None
    j = torch.arange(tile.columns.start, tile.columns.stop, device=tile.i.device)
    p = tile.i + (part.n_k - part.n_q)
    hide = torch.zeros(p.shape[0], j.shape[0], dtype=torch.bool, device=j.device)
    if spec.before is not None:
        hide |= j < p - spec.before
    if spec.after is not None:
        hide |= j > p + spec.after
    return hide


def span(i_lo: int, i_hi: int, n_q: int, n_k: int, spec: Spec) -> Span:
    """The keys that queries [i_lo, i_hi) see, query i sitting at key position i + n_k - n_q.

    >>> span(512, 1024, 4096, 4096, Spec(scale=1.0, after=0))
    Span(lo=0, full_lo=0, full_hi=512, hi=1024)
    """
    first, last = i_lo + n_k - n_q, i_hi - 1 + n_k - n_q
    lo, full_lo, full_hi, hi = 0, 0, n_k, n_k
    if spec.before is not None:
        lo, full_lo = max(first - spec.before, 0), math.ceil(max(last - spec.before, 0) / ALIGN) * ALIGN
    if spec.after is not None:
        full_hi, hi = min((first + spec.after + 1) // ALIGN * ALIGN, n_k), max(min(last + spec.after + 1, n_k), 0)
    if full_lo >= full_hi:
        full_lo = full_hi = hi
    return Span(min(lo, hi), full_lo, full_hi, hi)


def exp_(x: Tensor) -> Tensor:
    """exp, in place; exp2 is 1.5 times as fast, even with the product before it."""
    return x.mul_(LOG2E).exp2_()


def multiply(a: Tensor, b: Tensor, room: Tensor) -> Tensor:
    """a @ b, written into room."""
    shape = a.shape[0], a.shape[1], b.shape[2]
    return torch.bmm(a, b, out=room[: math.prod(shape)].view(shape))


def accumulate_(acc: Tensor, a: Tensor, b: Tensor, hide: Tensor | None, step: int = TILE_K) -> None:
    """acc += a @ b, summing `step` terms at a time: (h, R, C), (h, C, D) -> (h, R, D)."""
    for start in range(0, b.shape[1], step):
        terms = slice(start, start + step)
        if hide is None:
            acc.baddbmm_(a[..., terms], b[:, terms])
        else:
            acc += product(a[..., terms], b[:, terms], hide[..., terms])


def product(a: Tensor, b: Tensor, hide: Tensor) -> Tensor:
    """a @ b, where a is 0 at hidden pairs and the b of a hidden pair, be it NaN or inf, must not count.

    0 * NaN = NaN, so where NaN appears the product is taken again without the non-finite entries of b, and NaN is
    written where a pair that is not hidden met one.
    """
    ab = torch.bmm(a, b)
    if ab.sum().isnan():  # a sum is ten times as fast as isnan; inf - inf only takes the long way for nothing
        bad = ~b.isfinite()
        ab = torch.bmm(a, b.masked_fill(bad, 0.0))
        ab.masked_fill_((~hide).to(a.dtype) @ bad.to(a.dtype) > 0, torch.nan)
    return ab


def parts(rows: list[Tensor], keys: list[Tensor], request: Request) -> Iterator[Part]:
    """Cut a call, dense (B, S, H, D) or packed (T, H, D), into parts whose tiles hold about TILE_SCORES scores."""
    cu_q, cu_k, spec = request.cu_q, request.cu_k, request.spec
    if cu_q is None or cu_k is None:
        yield from _heads(rows, keys, spec)
        return
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        yield from _heads([x[None, a:b] for x in rows], [x[None, c:d] for x in keys], spec)


def _heads(rows: list[Tensor], keys: list[Tensor], spec: Spec) -> Iterator[Part]:
    (batch, n_q, heads), (n_k, heads_k) = rows[0].shape[:3], keys[0].shape[1:3]
    if min(batch, n_q, heads) == 0:
        return
    rows = [x.unflatten(2, (heads_k, -1)).permute(0, 2, 3, 1, 4) for x in rows]
    keys = [x.transpose(1, 2).unsqueeze(2) for x in keys]
    group = heads // heads_k
    scores_of_head = group * tile_height(n_q, group, spec) * min(n_k, TILE_K)
    at_once = max(1, min(TILE_SCORES // max(1, scores_of_head), PART_KEYS // max(1, keys[0][0, :, 0].numel())))
    step_b, step_h = max(1, at_once // heads_k), min(at_once, heads_k)
    for b in range(0, batch, step_b):
        for h in range(0, heads_k, step_h):
            at = slice(b, b + step_b), slice(h, h + step_h)
            yield Part([x[at] for x in rows], [x[at] for x in keys], n_q, n_k)


def tile_height(n_q: int, group: int, spec: Spec) -> int:
    """Queries per tile: fewer where a group makes many rows of each, or a narrow band would hide most of the tile."""
    height = TILE_Q
    if spec.before is not None and spec.after is not None:
        height = min(height, max(128, spec.before + spec.after))
    return min(n_q, max(16, height // group))


def tile_room(part: Part, spec: Spec, dtype: torch.dtype) -> Tensor:
    """Memory for one tile of scores, used for every tile of the part: fresh pages would cost a tenth of the time."""
    b, h, group = part.rows[0].shape[:3]
    height, width = tile_height(part.n_q, group, spec), min(part.n_k, TILE_K)
    return part.rows[0].new_empty(b * h * group * height * width, dtype=dtype)


def row_tiles(part: Part, spec: Spec) -> Iterator[slice]:
    height = tile_height(part.n_q, part.rows[0].shape[2], spec)
    for i in range(0, part.n_q, height):
        yield slice(i, min(i + height, part.n_q))


def key_tiles(part: Part, rows: slice, spec: Spec) -> Iterator[Tile]:
    """Edge, interior and edge again; only a tile at an edge has pairs to hide."""
    i = torch.arange(rows.start, rows.stop, device=part.rows[0].device).repeat(part.rows[0].shape[2])[:, None]
    lo, full_lo, full_hi, hi = span(rows.start, rows.stop, part.n_q, part.n_k, spec)
    for start, stop, edge in (lo, full_lo, True), (full_lo, full_hi, False), (full_hi, hi, True):
        for j in range(start, stop, TILE_K):
            yield Tile(i, slice(j, min(j + TILE_K, stop)), edge)


def as_rows(stat: Tensor) -> Tensor:
    """(B, H, S) -> (B, S, H, 1), packed (H, T) -> (T, H, 1)"""
    return stat.mT.unsqueeze(-1)


def load(x: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """(b, h, G, S, D) -> (b h, G rows, D)"""
    return x[..., rows, :].flatten(2, 3).flatten(0, 1).to(dtype).contiguous()


def load_columns(x: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
    """All keys, by columns where there are rows enough to repay it: x.mT is then row-major, which is fastest."""
    x_all = load(x, ALL, dtype)
    return x_all.mT.contiguous().mT if part.n_q * part.rows[0].shape[2] >= 64 else x_all


def store(x: Tensor, rows: slice, tile: Tensor) -> None:
    view = x[..., rows, :]
    view.copy_(tile.view(view.shape))
