"""FlashAttention-2 in torch: forward and backward tile by tile, dense or packed, in any band, on any device.

This is the CPU backend, and in float64 the oracle of the kernels. A tile of scores exists only during its iteration of
the loop, so the extra memory is O(S). Heads are batched into one product, and the query heads that share a KV head
become rows of the same matrix:

    q (B, Sq, H, D)  -> q_tile (h, R, D)    h KV heads at a time,
    k (B, Sk, Hk, D) -> k_tile (h, C, D)    R = (H / Hk) * rows of the tile
    v (B, Sk, Hk, E) -> v_tile (h, C, E)

The forward and the backward share two functions: `scores` computes a tile of scale * q.k, and `key_tiles` lists the
tiles that some row sees, with their masks. Masked weights are replaced by 0, never multiplied by it, so a NaN in a
masked key has no effect. Heads, and in the forward also rows, are independent: threads divide them (`threads`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...request import BackwardInputs, Request, Spec
from .threads import each

LEAST_Q, TILE_Q = 128, 512  # rather more heads than more queries
TILE_K = 512
TILE_SCORES = 1 << 18  # scores of a tile over all heads: more exceed a core's cache, fewer cost too many calls
SUM_Q = 128  # queries summed at a time into dk and dv: in float32, sums of 512 had 2.5 times the error of torch's
PART_SCORES = 1 << 15  # fewer are not worth a thread
PART_KEYS = 1 << 23  # elements of k copied at once, over all heads of a part

ALL = slice(None)
LOG2E = math.log2(math.e)
MILD = 30.0  # scores whose exp, and that of their negative, is far from the ends of float32: m = 0 serves every row
LARGE_LSE = 256.0  # below, rounding lse = m + log l to float32 changes exp(S - lse) by less than 8e-6 of it
LARGE = 1e12  # what may be multiplied by exp(MILD), and with one another, in float32


class Part(NamedTuple):
    """Some heads of some sequences of the same length, as views: rows (b, h, G, Sq, D), keys (b, h, 1, Sk, D)."""

    rows: list[Tensor]
    keys: list[Tensor]
    n_q: int
    n_k: int
    tiles: list[slice]  # of queries


class Tile(NamedTuple):
    """The keys of a tile of scores. Row r sees the columns r + first to r + last; None: from the first column, or to
    the last."""

    start: int
    stop: int
    height: int
    first: int | None
    last: int | None

    def clear_(self, x: Tensor) -> Tensor:
        """x, (h, R, C), zero where the row does not see the key, whatever was there."""
        if self.first is None and self.last is None:
            return x
        by_query = x.unflatten(-2, (-1, self.height))
        if self.first is not None:
            by_query.triu_(self.first)
        if self.last is not None:
            by_query.tril_(self.last)
        return x

    def hidden(self, x: Tensor) -> Tensor | None:
        """True where the row does not see the key, (R, C); None where every row sees every key."""
        if self.first is None and self.last is None:
            return None
        return self.clear_(torch.ones_like(x[0], dtype=torch.bool)).logical_not_()


def forward(request: Request) -> tuple[Tensor, ...]:
    """out and lse = log Σ_j exp(s_ij). Dense (B, S, H, D) -> lse (B, H, Sq); packed (T, H, D) -> lse (H, T). If
    spec.max_logit also the largest score of each row, shaped as lse.

    Each tile updates (m, l, acc), the running maximum, denominator and numerator of its rows:
    m' = max(m, rowmax(S));  P = exp(S - m');  l' = exp(m - m')·l + rowsum(P);  acc' = exp(m - m')·acc + P V

    m keeps exp from overflowing. If |q·k| <= |q| |k| shows beforehand that no score can be large, m stays 0.
    """
    q, k, v, spec = request[:4]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=request.result_dtype)
    lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -torch.inf, dtype=dtype)
    largest = torch.full_like(lse, -torch.inf) if spec.max_logit else None  # of each row

    def attend(part: Part) -> None:
        q_view, out_view, lse_view, *largest_view = part.rows
        k_all, v_all = (load(x, ALL, dtype) for x in part.keys)
        (_, q_size), (_, k_size), (sane, v_size) = size(q_view), size(k_all), size(v_all)
        mild = are_mild(part, spec, q_size, k_size, v_size)
        buffer, keys_of = ScoreBuffer(k_all), tiles_of(k_all, v_all)
        for rows in part.tiles:
            q_tile = load(q_view, rows, dtype) * spec.scale
            acc = q_tile.new_zeros(*q_tile.shape[:-1], v.shape[-1])
            l = torch.zeros_like(acc[..., :1])
            m = l if mild else l - torch.finfo(dtype).max  # and not -inf, from which nothing can be subtracted
            top = torch.full_like(l, -torch.inf)
            for tile in key_tiles(part, rows, spec):
                k_tile, v_tile = keys_of(tile)
                s = scores(q_tile, k_tile, buffer)
                if largest_view:
                    top = torch.maximum(top, row_maxima(s, tile.hidden(s)))
                if mild:
                    p = tile.clear_(s.exp_())
                else:
                    hide = tile.hidden(s)
                    s = s if hide is None else s.masked_fill_(hide, -torch.inf)
                    m_old, m = m, torch.maximum(m, s.amax(-1, keepdim=True))
                    p = exp_(s.sub_(m))
                    alpha = torch.exp(m_old - m)
                    l, acc = l * alpha, acc.mul_(alpha)
                l = l + p.sum(-1, keepdim=True)
                accumulate_(acc, p, v_tile, None if sane else tile.hidden(p))
            store(out_view, rows, acc.div_(l.masked_fill(l == 0.0, 1.0)))
            store(lse_view, rows, m + l.log())
            for x in largest_view:
                store(x, rows, top)

    by_row = [lse] if largest is None else [lse, largest]
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        run(parts([q, out, *map(as_rows, by_row)], [k, v], request, by_rows=True), attend)
    return (out, lse) if largest is None else (out, lse, largest)


def row_maxima(s: Tensor, hide: Tensor | None) -> Tensor:
    """The largest visible score of each row, (.., R, C) -> (.., R, 1). NaNs do not count."""
    unseen = s.isnan() if hide is None else s.isnan() | hide
    s = s.masked_fill(unseen, -torch.inf)
    return s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)


def max_logit(largest: Tensor) -> Tensor:
    """The largest score of each head, (B, H) or packed (H,) float32, from those of the rows, shaped as lse."""
    found = largest.amax(-1) if largest.shape[-1] else largest.new_full(largest.shape[:-1], -torch.inf)
    return found.to(torch.float32)


def backward(request: Request, bwd_inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, with every tile of P computed again from lse.

    P = exp(S - lse);  dV = Pᵀ dO;  dP = dO Vᵀ;  dS = P∘(dP - rowsum(dO∘O) + dlse);  dQ = scale·dS K;  dK = scale·dSᵀ Q

    Where no score can be large, P = exp(S): dO and rowsum(dO∘O) - dlse are multiplied by exp(-lse) instead. Where lse
    is so large that rounding it loses log l, P = exp(S - m), and they are divided by l.
    """
    q, k, v, spec = request[:4]
    out, lse, dout, dlse = bwd_inputs
    dtype = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=request.result_dtype) for x in (q, k, v))
    stats = [as_rows(x) for x in (lse, dlse) if x is not None]

    def attend(part: Part) -> None:
        q_view, out_view, dout_view, dq_view, *stat_views = part.rows
        k_view, v_view, dk_view, dv_view = part.keys
        k_all, v_all = load(k_view, ALL, dtype), load(v_view, ALL, dtype)
        sane, (q_size, k_size, *sizes) = zip(
            *map(size, (q_view, k_all, v_all, dout_view, *stat_views[1:])), strict=True
        )
        mild = are_mild(part, spec, q_size, k_size, *sizes)
        dk_acc, dv_acc = k_all.new_zeros(k_all.shape), v_all.new_zeros(v_all.shape)
        p_buffer, ds_buffer = ScoreBuffer(k_all), ScoreBuffer(k_all)
        keys_of = tiles_of(k_all, v_all, dk_acc, dv_acc)
        for rows in part.tiles:
            q_tile, dout_tile = load(q_view, rows, dtype) * spec.scale, load(dout_view, rows, dtype)
            dq_acc = torch.zeros_like(q_tile)
            lse_tile, *dlse_tile = (load(x, rows, dtype) for x in stat_views)
            lse_tile = lse_tile.masked_fill(lse_tile == -torch.inf, torch.inf)
            delta = (dout_tile * load(out_view, rows, dtype)).sum(-1, keepdim=True)
            for x in dlse_tile:
                delta -= x
            if mild:
                dout_tile, delta = dout_tile * torch.exp(-lse_tile), delta * torch.exp(-lse_tile)
            elif (far := have_large_scores(lse_tile, spec)) is not None:
                m, l = maximum_and_sum(q_tile, keys_of, key_tiles(part, rows, spec), p_buffer)
                lse_tile, share = torch.where(far, m, lse_tile), torch.where(far, 1.0 / l, 1.0)
                dout_tile, delta = dout_tile * share, delta * share
            for tile in key_tiles(part, rows, spec):
                k_tile, v_tile, dk_tile, dv_tile = keys_of(tile)
                s = scores(q_tile, k_tile, p_buffer)
                p = tile.clear_(s.exp_() if mild else exp_(s.sub_(lse_tile)))
                ds = tile.clear_(ds_buffer.multiply(dout_tile, v_tile.mT).sub_(delta).mul_(p))
                hide = None if all(sane) else tile.hidden(p)
                hide_t = None if hide is None else hide.mT
                accumulate_(dv_tile, p.mT, dout_tile, hide_t, SUM_Q)
                accumulate_(dq_acc, ds, k_tile, hide)
                accumulate_(dk_tile, ds.mT, q_tile, hide_t, SUM_Q)
            store(dq_view, rows, dq_acc.mul_(spec.scale))
        store(dk_view, ALL, dk_acc)
        store(dv_view, ALL, dv_acc)

    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        run(parts([q, out, dout, dq, *stats], [k, v, dk, dv], request), attend)
    return dq, dk, dv


def have_large_scores(lse: Tensor, spec: Spec) -> Tensor | None:
    """True for the rows whose lse = m + log l is too large to hold log l as well; None if there are no such rows, or if
    the call is partial: its lse includes keys that the call does not have, so m and l cannot be computed again."""
    size = lse.abs()
    far = (size >= LARGE_LSE) & (size < torch.inf)
    return None if spec.partial or not bool(far.any()) else far


def maximum_and_sum(
    q_tile: Tensor, keys_of: Callable[[Tile], list[Tensor]], tiles: Iterator[Tile], buffer: ScoreBuffer
) -> tuple[Tensor, Tensor]:
    """m and l of the rows of a tile, as in `forward`, (h, R, 1); l is 1 where nothing is seen."""
    l = torch.zeros_like(q_tile[..., :1])
    m = l - torch.finfo(l.dtype).max
    for tile in tiles:
        s = scores(q_tile, keys_of(tile)[0], buffer)
        hide = tile.hidden(s)
        s = s if hide is None else s.masked_fill_(hide, -torch.inf)
        m_old, m = m, torch.maximum(m, s.amax(-1, keepdim=True))
        l = l * torch.exp(m_old - m) + exp_(s.sub_(m)).sum(-1, keepdim=True)
    return m, l.masked_fill(l == 0.0, 1.0)


def run(all_parts: Iterator[Part], work: Callable[[Part], None]) -> None:
    """work(part) for all parts, which are independent: on a CPU, by all threads. The last part starts first: in a
    causal call it is the longest."""
    listed = list(all_parts)[::-1]
    if listed and listed[0].rows[0].device.type == "cpu":
        each(listed, work)
    else:
        for part in listed:
            work(part)


def scores(q_tile: Tensor, k_tile: Tensor, buffer: ScoreBuffer) -> Tensor:
    """The scores of a tile before masks: (h, R, D), (h, C, D) -> (h, R, C). q_tile holds scale·q."""
    return buffer.multiply(q_tile, k_tile.mT)


def exp_(x: Tensor) -> Tensor:
    """exp, in place. exp2 has no slow path for values that underflow; torch's exp has one, up to a hundred times as
    slow. (To scale q by log2(e) instead would round it, for four times the error.)"""
    return x.mul_(LOG2E).exp2_()


class ScoreBuffer:
    """Memory for one tile of scores, reused for all tiles of a part: new pages cost more than the product."""

    def __init__(self, like: Tensor) -> None:
        self.memory = like.new_empty(0)
        self.views: dict[tuple[int, int, int], Tensor] = {}

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b, in this buffer: valid until the next call."""
        shape = a.shape[0], a.shape[1], b.shape[2]
        found = self.views.get(shape)
        if found is None:
            size = math.prod(shape)
            if self.memory.numel() < size:
                self.memory, self.views = self.memory.new_empty(size), {}
            found = self.views[shape] = self.memory[:size].view(shape)
        return torch.bmm(a, b, out=found)


def tiles_of(*keys: Tensor) -> Callable[[Tile], list[Tensor]]:
    """The keys of a tile in each of these, (h, Sk, D) -> (h, C, D): views, made once and not for every tile of rows."""
    views: dict[tuple[int, int], list[Tensor]] = {}

    def of(tile: Tile) -> list[Tensor]:
        at = tile.start, tile.stop
        if at not in views:
            views[at] = [x[:, tile.start : tile.stop] for x in keys]
        return views[at]

    return of


def accumulate_(acc: Tensor, a: Tensor, b: Tensor, hide: Tensor | None, step: int = TILE_K) -> None:
    """acc += a @ b, summing `step` terms at a time: (h, R, C), (h, C, D) -> (h, R, D)."""
    terms = b.shape[1]
    for start in range(0, terms, step):
        n = min(step, terms - start)
        a_n, b_n = (a, b) if n == terms else (a.narrow(-1, start, n), b.narrow(1, start, n))
        if hide is None:
            acc.baddbmm_(a_n, b_n)
        else:
            acc += product(a_n, b_n, hide.narrow(-1, start, n))


def size(x: Tensor) -> tuple[bool, float]:
    """Whether all entries are finite, and the largest norm of the rows that are: the dot product of two rows is at most
    the product of their norms."""
    lengths = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    longest = float(lengths.amax()) if lengths.numel() else 0.0
    if math.isfinite(longest):
        return True, longest
    return False, float(lengths.masked_fill(~x.isfinite().all(-1), 0.0).amax())


def are_mild(part: Part, spec: Spec, q_size: float, k_size: float, *others: float) -> bool:
    """Whether exp(S) can replace exp(S - m). Not where a row sees one key: its weight is exactly 1."""
    visible = part.n_k if spec.before is None or spec.after is None else min(part.n_k, spec.before + spec.after + 1)
    return visible > 1 and abs(spec.scale) * q_size * k_size < MILD and max(others) < LARGE


def product(a: Tensor, b: Tensor, hide: Tensor) -> Tensor:
    """a @ b. a is 0 at hidden pairs, and a NaN or inf in b has no effect there.

    0 * NaN = NaN, so where NaN appears the product is taken again without the non-finite entries of b, and NaN is
    written where a pair that is not hidden met one.
    """
    ab = torch.bmm(a, b)
    if not ab.sum().isfinite():  # a sum is ten times as fast as isfinite, and an overflow of it costs time alone
        bad = ~b.isfinite()
        ab = torch.bmm(a, b.masked_fill(bad, 0.0))
        ab.masked_fill_((~hide).to(a.dtype) @ bad.to(a.dtype) > 0, torch.nan)
    return ab


def parts(rows: list[Tensor], keys: list[Tensor], request: Request, by_rows: bool = False) -> Iterator[Part]:
    """Cut a call, dense (B, S, H, D) or packed (T, H, D), into parts whose tiles hold about TILE_SCORES scores: some
    heads, and if these are few and rows may be divided, some rows of them."""
    cu_q, cu_k, spec = request.cu_q, request.cu_k, request.spec
    if cu_q is None or cu_k is None:
        yield from _heads(rows, keys, spec, by_rows)
        return
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        yield from _heads([x[None, a:b] for x in rows], [x[None, c:d] for x in keys], spec, by_rows)


def _heads(rows: list[Tensor], keys: list[Tensor], spec: Spec, by_rows: bool) -> Iterator[Part]:
    (batch, n_q, heads), (n_k, heads_k) = rows[0].shape[:3], keys[0].shape[1:3]
    if min(batch, n_q, heads) == 0:
        return
    rows = [x.unflatten(2, (heads_k, -1)).permute(0, 2, 3, 1, 4) for x in rows]
    keys = [x.transpose(1, 2).unsqueeze(2) for x in keys]
    group, width = heads // heads_k, max(1, min(n_k, TILE_K))
    least = group * tile_height(n_q, group, spec, LEAST_Q) * width
    share = max(math.ceil(batch * heads_k / torch.get_num_threads()), PART_SCORES // least)
    most = min(TILE_SCORES // least, PART_KEYS // max(1, keys[0][0, :, 0].numel()))
    at_once = max(1, min(most, share))
    height = tile_height(n_q, group, spec, TILE_SCORES // (at_once * width))
    step_b, step_h = max(1, at_once // heads_k), min(at_once, heads_k)
    tiles = [slice(i, min(i + height, n_q)) for i in range(0, n_q, height)]
    pieces = math.ceil(batch / step_b) * math.ceil(heads_k / step_h)
    step_q = math.ceil(len(tiles) * min(1.0, pieces / (2 * torch.get_num_threads()))) if by_rows else len(tiles)
    for b in range(0, batch, step_b):
        for h in range(0, heads_k, step_h):
            at = slice(b, b + step_b), slice(h, h + step_h)
            views = [x[at] for x in rows], [x[at] for x in keys]
            for i in range(0, len(tiles), step_q):
                yield Part(*views, n_q, n_k, tiles[i : i + step_q])


def tile_height(n_q: int, group: int, spec: Spec, most: int) -> int:
    """Queries per tile: fewer where a group makes many rows of each, or a narrow band would hide most of the tile."""
    height = max(LEAST_Q, min(most, TILE_Q))
    if spec.before is not None and spec.after is not None:
        height = min(height, max(LEAST_Q, spec.before + spec.after))
    return min(n_q, max(16, height // group))


def key_tiles(part: Part, rows: slice, spec: Spec) -> Iterator[Tile]:
    """The tiles of keys that some of the rows see. Query i sits at key position i + n_k - n_q, and sees the keys from
    `before` before to `after` after it."""
    at, height = rows.start + part.n_k - part.n_q, rows.stop - rows.start
    lo = 0 if spec.before is None else max(0, at - spec.before)
    hi = part.n_k if spec.after is None else min(part.n_k, at + height + spec.after)
    for start in range(lo, hi, TILE_K):
        stop = min(start + TILE_K, hi)
        first = None if spec.before is None else at - spec.before - start
        last = None if spec.after is None else at + spec.after - start
        if first is not None and first + height - 1 <= 0:  # the last row sees the first key
            first = None
        if last is not None and last >= stop - start - 1:  # the first row sees the last key
            last = None
        yield Tile(start, stop, height, first, last)


def as_rows(stat: Tensor) -> Tensor:
    """(B, H, S) -> (B, S, H, 1), packed (H, T) -> (T, H, 1)"""
    return stat.mT.unsqueeze(-1)


def load(x: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """(b, h, G, S, D) -> (b h, G rows, D), a view if possible"""
    tile = x[..., rows, :].flatten(2, 3).flatten(0, 1).to(dtype)
    return tile if tile.stride(-1) == 1 else tile.contiguous()


def store(x: Tensor, rows: slice, tile: Tensor) -> None:
    view = x[..., rows, :]
    view.copy_(tile.view(view.shape))
