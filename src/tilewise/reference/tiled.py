"""The last rung: attention tile by tile, forward and backward, dense or packed, in any band, on any device.

This is the CPU backend, and in float64 the oracle of the kernels. A tile of scores lives only as long as its turn in
the loop, so the extra memory is O(S). Heads are batched into one product, and the query heads that share a kv head
become rows of the same matrix:

    q (B, Sq, H, D)  -> q_tile (h, R, D)    h kv heads at a time, R = (H / Hk) * rows of the tile
    k (B, Sk, Hk, D) -> k_tile (h, C, D)
    v (B, Sk, Hk, E) -> v_tile (h, C, E)

Two functions decide what a tile means, forward and backward: `scores` (what is a pair worth) and `Curtains` (who does
not see whom). A key that a row does not see is selected away, never multiplied by zero, so its NaN stays where it is.
Heads, and in the forward also rows, are independent of one another: each thread takes some (`threads`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.reference.threads import each
from tilewise.spec import Request, Spec, Upstream

TILE_Q = 512
TILE_K = 512
TILE_SCORES = 1 << 18  # scores held at once, over all heads of a tile: they stay in a core's cache
PART_SCORES = 1 << 15  # fewer are not worth a thread
PART_KEYS = 1 << 23  # elements of k copied at once, over all heads of a part
SUM_Q = 128  # queries summed at a time into dk and dv: in float32, sums of 512 had 2.5 times the error of torch's
ALIGN = 64  # interior tiles begin and end at multiples of this

ALL = slice(None)
LOG2E = math.log2(math.e)
LARGEST = 3e38  # near that of a float32: below, sums of scores have no infinities


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
    tiles: list[slice]  # of queries


class Tile(NamedTuple):
    """A tile of scores: the positions of its queries and keys, and whether some pair may be hidden."""

    rows: slice
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
    curtains = Curtains(spec, dtype)

    def attend(part: Part) -> None:
        q_view, out_view, lse_view = part.rows
        k_all, v_all = (load(x, ALL, dtype) for x in part.keys)
        k_size, v_size = size(k_all), size(v_all)
        room = tile_room(part, spec, dtype)
        for rows in part.tiles:
            q_tile = load(q_view, rows, dtype) * spec.scale
            acc = q_tile.new_zeros(*q_tile.shape[:-1], v.shape[-1])
            l = torch.zeros_like(acc[..., :1])
            m = l - torch.finfo(dtype).max  # and not -inf, from which nothing can be subtracted
            tame = size(q_tile) * k_size + v_size < LARGEST
            for tile in key_tiles(part, rows, spec):
                k_tile, v_tile = k_all[:, tile.columns], v_all[:, tile.columns]
                s, hide = select_(scores(q_tile, k_tile, room), curtains.of(tile, part), tame)
                m_old, m = m, torch.maximum(m, s.amax(-1, keepdim=True))
                p = exp_(s.sub_(m))
                alpha = torch.exp(m_old - m)
                l = alpha * l + p.sum(-1, keepdim=True)
                accumulate_(acc.mul_(alpha), p, v_tile, hide)
            store(out_view, rows, acc.div_(l.clamp_min(1.0)))  # of a row that sees a key, l >= 1: that of its maximum
            store(lse_view, rows, m + l.log())

    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        run(parts([q, out, as_rows(lse)], [k, v], request, by_rows=True), attend)
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
    curtains = Curtains(spec, dtype)

    def attend(part: Part) -> None:
        q_view, out_view, dout_view, dq_view, *stat_views = part.rows
        k_view, v_view, dk_view, dv_view = part.keys
        k_all, v_all = load(k_view, ALL, dtype), load(v_view, ALL, dtype)
        k_size, v_size = size(k_all), size(v_all)
        dk_acc, dv_acc = k_all.new_zeros(k_all.shape), v_all.new_zeros(v_all.shape)
        p_room, ds_room = tile_room(part, spec, dtype), tile_room(part, spec, dtype)
        for rows in part.tiles:
            q_tile, dout_tile = load(q_view, rows, dtype) * spec.scale, load(dout_view, rows, dtype)
            dq_acc = torch.zeros_like(q_tile)
            lse_tile, *dlse_tile = (load(x, rows, dtype) for x in stat_views)
            lse_tile = lse_tile.masked_fill(lse_tile == -torch.inf, torch.inf)
            delta = (dout_tile * load(out_view, rows, dtype)).sum(-1, keepdim=True)
            for x in dlse_tile:
                delta -= x
            tame = size(q_tile) * k_size + size(dout_tile) * v_size + size(delta) < LARGEST
            for tile in key_tiles(part, rows, spec):
                k_tile, v_tile = k_all[:, tile.columns], v_all[:, tile.columns]
                s, hide = select_(scores(q_tile, k_tile, p_room), curtains.of(tile, part), tame)
                p = exp_(s.sub_(lse_tile))
                ds = multiply(dout_tile, v_tile.mT, ds_room).sub_(delta)
                if hide is not None:
                    p.masked_fill_(hide, 0.0)
                    ds.masked_fill_(hide, 0.0)
                ds.mul_(p)
                hide_t = None if hide is None else hide.mT
                accumulate_(dv_acc[:, tile.columns], p.mT, dout_tile, hide_t, SUM_Q)
                accumulate_(dq_acc, ds, k_tile, hide)
                accumulate_(dk_acc[:, tile.columns], ds.mT, q_tile, hide_t, SUM_Q)
            store(dq_view, rows, dq_acc.mul_(spec.scale))
        store(dk_view, ALL, dk_acc)
        store(dv_view, ALL, dv_acc)

    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        run(parts([q, out, dout, dq, *stats], [k, v, dk, dv], request), attend)
    return dq, dk, dv


def run(all_parts: Iterator[Part], work: Callable[[Part], None]) -> None:
    """No part reads what another writes: on a CPU, all threads take some."""
    listed = list(all_parts)
    if listed and listed[0].rows[0].device.type == "cpu":
        each(listed, work)
    else:
        for part in listed:
            work(part)


def scores(q_tile: Tensor, k_tile: Tensor, room: Tensor) -> Tensor:
    """What each pair of a tile is worth, before masks: (h, R, D), (h, C, D) -> (h, R, C). q_tile holds scale·q."""
    return multiply(q_tile, k_tile.mT, room)


class Curtains:
    """What hides the pairs of a tile: (rows, C), -inf where the row does not see the key, else 0. Most tiles of a call
    lie alike to the diagonal, and share one."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        self.spec, self.dtype = spec, dtype
        self.drawn: dict[tuple[int, int, int], Tensor] = {}

    def of(self, tile: Tile, part: Part) -> Tensor | None:
        """None where every row of the tile sees every key."""
        if not tile.edge:
            return None
        rows, columns = tile.rows, tile.columns
        at = rows.start + part.n_k - part.n_q - columns.start  # the column of the first row's own position
        key = at, rows.stop - rows.start, columns.stop - columns.start
        found = self.drawn.get(key)
        if found is None:
            if len(self.drawn) > 7:
                self.drawn.clear()
            found = self.drawn[key] = self.draw(*key, part.rows[0].device)
        return found

    def draw(self, at: int, rows: int, columns: int, device: torch.device) -> Tensor:
        before, after = self.spec.before, self.spec.after
        found = torch.zeros(rows, columns, dtype=self.dtype, device=device)
        if before is not None:
            found += torch.full_like(found, -torch.inf).tril_(at - before - 1)
        if after is not None:
            found += torch.full_like(found, -torch.inf).triu_(at + after + 1)
        return found


def select_(s: Tensor, drawn: Tensor | None, tame: bool) -> tuple[Tensor, Tensor | None]:
    """Scores, -inf where they are hidden; and where they are not tame, what is hidden, (R, C).

    Added, an infinity hides a number and nothing else: where there may be infinities or NaN, hidden or not, hidden
    pairs are selected away one by one. That is five times as slow.
    """
    if drawn is None:
        return s, None
    group = s.shape[1] // drawn.shape[0]
    if tame:
        s.unflatten(1, (group, -1)).add_(drawn)
        return s, None
    hide = (drawn != 0).repeat(group, 1)
    return s.masked_fill_(hide, -torch.inf), hide


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
    """exp, in place. exp2 has no slow way for what underflows, which torch's exp has: up to a hundred times as slow.
    (To scale q by log2(e) instead would round it, for four times the error.)"""
    return x.mul_(LOG2E).exp2_()


def multiply(a: Tensor, b: Tensor, room: Tensor) -> Tensor:
    """a @ b, written into room."""
    shape = a.shape[0], a.shape[1], b.shape[2]
    return torch.bmm(a, b, out=room[: math.prod(shape)].view(shape))


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


def size(x: Tensor) -> float:
    """No entry is larger, nor any product of a row with one of y than size(x) * size(y); NaN or inf where one is."""
    return float(x.norm())


def product(a: Tensor, b: Tensor, hide: Tensor) -> Tensor:
    """a @ b, where a is 0 at hidden pairs and the b of a hidden pair, be it NaN or inf, must not count.

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
    group = heads // heads_k
    height = tile_height(n_q, group, spec)
    scores_of_head = group * height * min(n_k, TILE_K)
    share = max(math.ceil(batch * heads_k / torch.get_num_threads()), PART_SCORES // max(1, scores_of_head))
    most = min(TILE_SCORES // max(1, scores_of_head), PART_KEYS // max(1, keys[0][0, :, 0].numel()))
    at_once = max(1, min(most, share))
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


def key_tiles(part: Part, rows: slice, spec: Spec) -> Iterator[Tile]:
    """Edge, interior and edge again; only a tile at an edge has pairs to hide."""
    lo, full_lo, full_hi, hi = span(rows.start, rows.stop, part.n_q, part.n_k, spec)
    for start, stop, edge in (lo, full_lo, True), (full_lo, full_hi, False), (full_hi, hi, True):
        for j in range(start, stop, TILE_K):
            yield Tile(rows, slice(j, min(j + TILE_K, stop)), edge)


def as_rows(stat: Tensor) -> Tensor:
    """(B, H, S) -> (B, S, H, 1), packed (H, T) -> (T, H, 1)"""
    return stat.mT.unsqueeze(-1)


def load(x: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """(b, h, G, S, D) -> (b h, G rows, D), the same memory where it can be"""
    tile = x[..., rows, :].flatten(2, 3).flatten(0, 1).to(dtype)
    return tile if tile.stride(-1) == 1 else tile.contiguous()


def store(x: Tensor, rows: slice, tile: Tensor) -> None:
    view = x[..., rows, :]
    view.copy_(tile.view(view.shape))
