"""The last rung: attention tile by tile, forward and backward, with every feature, on any device.

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

from tilewise.spec import Spec

TILE_Q = 512
TILE_K = 1024
TILE_SCORES = 1 << 20  # scores held at once, over all heads of a tile
ALIGN = 64  # edges of interior tiles; odd widths cost the matrix product a tenth of its speed

LOG2E = math.log2(math.e)


class Span(NamedTuple):
    """The keys of a query tile: [lo, hi) are seen by some of its rows, [full_lo, full_hi) by all of them."""

    lo: int
    full_lo: int
    full_hi: int
    hi: int


class Tile(NamedTuple):
    """A tile of scores: query positions `i` (R,), key positions [start, stop), and whether some pair may be hidden."""

    i: Tensor
    start: int
    stop: int
    edge: bool


class Part(NamedTuple):
    """Some heads of some sequences of equal lengths, as views: rows (b, h, G, Sq, D), keys (b, h, Sk, D)."""

    rows: list[Tensor]
    keys: list[Tensor]
    n_q: int
    n_k: int
    group: int


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec
) -> tuple[Tensor, Tensor]:
    """out and lse = log Σ_j exp(s_ij). Dense (B, S, H, D) -> lse (B, H, Sq); packed (T, H, D) -> lse (H, T).

    Each tile updates (m, l, acc), the running maximum, denominator and numerator of its rows:
    m' = max(m, rowmax(S));  P = exp(S - m');  l' = l·exp(m - m') + rowsum(P);  acc' = acc·exp(m - m') + P V
    """
    dtype = _accumulator(q)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -torch.inf, dtype=dtype)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for part in _parts([q, out, lse.mT[..., None]], [k, v], cu_q, cu_k, spec):
            q_view, out_view, lse_view = part.rows
            k_all, v_all = (_flat(x, dtype) for x in part.keys)
            for rows in _row_tiles(part, spec):
                q_tile = _load(q_view, rows, dtype) * spec.scale
                acc = q_tile.new_zeros(*q_tile.shape[:-1], v.shape[-1])
                m = torch.full_like(acc[..., :1], -torch.inf)
                l = torch.zeros_like(m)
                pivot = l
                for tile in _key_tiles(part, rows, spec, q.device):
                    k_tile, v_tile = k_all[:, tile.start : tile.stop], v_all[:, tile.start : tile.stop]
                    hide = hidden(tile, part, spec)
                    s = scores(q_tile, k_tile)
                    if hide is not None:
                        s.masked_fill_(hide, -torch.inf)
                    m_new = torch.maximum(m, s.amax(-1, keepdim=True))
                    pivot = m_new.masked_fill(m_new == -torch.inf, 0.0)
                    p = exp_(s.sub_(pivot))
                    alpha = torch.exp(m - pivot)
                    l = l * alpha + p.sum(-1, keepdim=True)
                    accumulate_(acc.mul_(alpha), p, v_tile, hide)
                    m = m_new
                _store(out_view, rows, acc / l.masked_fill(l == 0, 1.0))
                _store(lse_view, rows, pivot + l.log())
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    spec: Spec,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, with every tile of P computed again from lse.

    P = exp(S - lse);  dV = Pᵀ dO;  dP = dO Vᵀ;  dS = P∘(dP - rowsum(dO∘O) + dlse);  dQ = scale·dS K;  dK = scale·dSᵀ Q
    """
    dtype = _accumulator(q)
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    stats = [lse] if dlse is None else [lse, dlse]
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for part in _parts([q, out, dout, dq, *(x.mT[..., None] for x in stats)], [k, v, dk, dv], cu_q, cu_k, spec):
            q_view, out_view, dout_view, dq_view, *stat_views = part.rows
            k_all, v_all = (_flat(x, dtype) for x in part.keys[:2])
            dk_all, dv_all = torch.zeros_like(k_all), torch.zeros_like(v_all)
            for rows in _row_tiles(part, spec):
                q_tile = _load(q_view, rows, dtype) * spec.scale
                dout_tile = _load(dout_view, rows, dtype)
                dq_tile = torch.zeros_like(q_tile)
                lse_tile, *dlse_tile = (_load(x, rows, dtype) for x in stat_views)
                lse_tile = lse_tile.masked_fill(lse_tile == -torch.inf, torch.inf)
                delta = (dout_tile * _load(out_view, rows, dtype)).sum(-1, keepdim=True)
                for x in dlse_tile:
                    delta -= x
                for tile in _key_tiles(part, rows, spec, q.device):
                    columns = slice(tile.start, tile.stop)
                    k_tile, v_tile = k_all[:, columns], v_all[:, columns]
                    hide = hidden(tile, part, spec)
                    hide_t = None if hide is None else hide.mT
                    p = exp_(scores(q_tile, k_tile).sub_(lse_tile))
                    if hide is not None:
                        p.masked_fill_(hide, 0.0)
                    accumulate_(dv_all[:, columns], p.mT, dout_tile, hide_t)
                    ds = torch.bmm(dout_tile, v_tile.mT).sub_(delta).mul_(p)
                    if hide is not None:
                        ds.masked_fill_(hide, 0.0)
                    accumulate_(dq_tile, ds, k_tile, hide)
                    accumulate_(dk_all[:, columns], ds.mT, q_tile, hide_t)
                _store(dq_view, rows, dq_tile * spec.scale)
            for view, x in zip(part.keys[2:], (dk_all, dv_all), strict=True):
                view.copy_(x.unflatten(0, view.shape[:2]))
    return dq, dk, dv


def scores(q_tile: Tensor, k_tile: Tensor) -> Tensor:
    """What each pair of a tile is worth, before masks: (h, R, D), (h, C, D) -> (h, R, C). q_tile holds scale·q."""
    return torch.bmm(q_tile, k_tile.mT)


def hidden(tile: Tile, part: Part, spec: Spec) -> Tensor | None:
    """(R, C), True where the row does not see the key; None where every row of the tile sees every key."""
    if not tile.edge:
        return None
    j = torch.arange(tile.start, tile.stop, device=tile.i.device)
    p = tile.i[:, None] + (part.n_k - part.n_q)
    hide = torch.zeros(len(tile.i), len(j), dtype=torch.bool, device=j.device)
    if spec.before is not None:
        hide |= j < p - spec.before
    if spec.after is not None:
        hide |= j > p + spec.after
    return hide


def span(i0: int, i1: int, n_q: int, n_k: int, spec: Spec) -> Span:
    """The keys that rows [i0, i1) see, row i sitting at key position i + n_k - n_q.

    >>> span(512, 1024, 4096, 4096, Spec(scale=1.0, after=0))
    Span(lo=0, full_lo=0, full_hi=512, hi=1024)
    """
    first, last = i0 + n_k - n_q, i1 - 1 + n_k - n_q
    lo = full_lo = 0
    full_hi = hi = n_k
    if spec.before is not None:
        lo, full_lo = max(first - spec.before, 0), -(-max(last - spec.before, 0) // ALIGN) * ALIGN
    if spec.after is not None:
        hi, full_hi = min(last + spec.after + 1, n_k), (first + spec.after + 1) // ALIGN * ALIGN
    hi = max(hi, 0)
    lo, full_hi = min(lo, hi), min(full_hi, n_k)
    if full_lo >= full_hi:
        full_lo = full_hi = hi
    return Span(lo, full_lo, full_hi, hi)


def exp_(x: Tensor) -> Tensor:
    """exp in place; exp2 is 1.5 times as fast as exp, even with the product before it."""
    return x.mul_(LOG2E).exp2_()


def accumulate_(acc: Tensor, a: Tensor, b: Tensor, hide: Tensor | None) -> None:
    """acc += a @ b, where a is 0 at hidden pairs and the b of a hidden pair, even NaN or inf, must not count.

    0 * NaN = NaN, so where NaN appears the product is taken again without the non-finite entries of b, and NaN is
    written where a pair that is not hidden met one.
    """
    if hide is None:
        acc.baddbmm_(a, b)
        return
    ab = torch.bmm(a, b)
    if ab.isnan().any():
        bad = ~b.isfinite()
        ab = torch.bmm(a, b.masked_fill(bad, 0.0))
        ab.masked_fill_((~hide).to(a.dtype) @ bad.to(a.dtype) > 0, torch.nan)
    acc += ab


def _accumulator(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _parts(
    rows: list[Tensor], keys: list[Tensor], cu_q: Tensor | None, cu_k: Tensor | None, spec: Spec
) -> Iterator[Part]:
    """Cut the call into parts; rows are (B, Sq, H, D) or packed (T, H, D), keys the same with Hk heads."""
    if cu_q is None or cu_k is None:
        yield from _heads(rows, keys, spec)
        return
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        yield from _heads([x[None, a:b] for x in rows], [x[None, c:d] for x in keys], spec)


def _heads(rows: list[Tensor], keys: list[Tensor], spec: Spec) -> Iterator[Part]:
    batch, n_q, heads = rows[0].shape[:3]
    n_k, heads_k = keys[0].shape[1:3]
    if min(batch, n_q, heads) == 0:
        return
    group = heads // heads_k
    rows = [x.unflatten(2, (heads_k, group)).permute(0, 2, 3, 1, 4) for x in rows]
    keys = [x.transpose(1, 2) for x in keys]
    size = group * _height(n_q, group, spec) * max(1, min(n_k, TILE_K))
    at_once = max(1, TILE_SCORES // size)
    step_b, step_h = max(1, at_once // heads_k), min(at_once, heads_k)
    for b in range(0, batch, step_b):
        for h in range(0, heads_k, step_h):
            part = slice(b, b + step_b), slice(h, h + step_h)
            yield Part([x[part] for x in rows], [x[part] for x in keys], n_q, n_k, group)


def _height(n_q: int, group: int, spec: Spec) -> int:
    """Queries per tile: fewer where a group makes many rows of each, or a narrow band would hide most of the tile."""
    height = TILE_Q
    if spec.before is not None and spec.after is not None:
        height = min(height, max(128, spec.before + spec.after))
    return min(n_q, max(16, height // group))


def _row_tiles(part: Part, spec: Spec) -> Iterator[slice]:
    height = _height(part.n_q, part.group, spec)
    for i in range(0, part.n_q, height):
        yield slice(i, min(i + height, part.n_q))


def _key_tiles(part: Part, rows: slice, spec: Spec, device: torch.device) -> Iterator[Tile]:
    i = torch.arange(rows.start, rows.stop, device=device).repeat(part.group)
    lo, full_lo, full_hi, hi = span(rows.start, rows.stop, part.n_q, part.n_k, spec)
    for start, stop, edge in (lo, full_lo, True), (full_lo, full_hi, False), (full_hi, hi, True):
        for j in range(start, stop, TILE_K):
            yield Tile(i, j, min(j + TILE_K, stop), edge)


def _flat(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(b, h, Sk, D) -> (b h, Sk, D)"""
    return x.flatten(0, 1).to(dtype).contiguous()


def _load(x: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """(b, h, G, Sq, D) -> (b h, G rows, D)"""
    return x[..., rows, :].flatten(2, 3).flatten(0, 1).to(dtype)


def _store(x: Tensor, rows: slice, tile: Tensor) -> None:
    view = x[..., rows, :]
    view.copy_(tile.reshape(view.shape))
