"""New keys and values into a cache, where their sequences end or at given slots; keys, and queries, turned on the way.

One program has one token, of all heads.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.tile_range import clamp
from ..pdl import gdc_launch_dependents, gdc_wait
from .combine import columns


class Turn(NamedTuple):
    """cos and sin (positions, width / 2), and where tokens are, if they do not go by their places."""

    cos: tl.tensor = None
    sin: tl.tensor = None
    positions: tl.tensor = None
    q_positions: tl.tensor = None


class Token(NamedTuple):
    """A view that begins at a token."""

    ptr: tl.tensor
    strides: tl.tuple
    wide: tl.constexpr = None


@triton.jit
def sequence_of(t, cu, each, batch, SEARCH: tl.constexpr):
    """(b, i, n) of token t: its sequence, its number there, the sequence's tokens. All at once, not one look after
    another. Past the last sequence, b is `batch`."""
    if cu is None:
        return t // each, t % each, each
    else:
        b = t * 0
        for first in range(0, batch, SEARCH):
            n = first + tl.arange(0, SEARCH)
            b += tl.sum((tl.load(cu + 1 + n, mask=n < batch, other=2147483647) <= t).to(tl.int32), 0)
        start = tl.load(cu + b)
        return b, t - start, tl.load(cu + b + 1, mask=b < batch, other=0) - start


@triton.jit
def turned(x, h, d, keep, position, turn, limit, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The heads h of the token at x: each pair of dims turned by the angle of its position."""
    p = x.ptr + h.to(tl.int64) * x.strides[2]
    tile = tl.load(p + columns(x, d), mask=keep, other=0.0)
    if turn.cos is None:
        return tile
    else:
        if INTERLEAVED:
            first = d % 2 == 0
            pair = d ^ 1
            angle = d // 2
        else:
            first = d < HALF
            pair = tl.where(first, d + HALF, d - HALF)
            angle = tl.where(first, d, d - HALF)
        turns = d < 2 * HALF
        other = tl.load(p + columns(x, pair), mask=keep & turns, other=0.0).to(tl.float32)
        at = clamp(position, 0, limit - 1).to(tl.int64) * HALF + angle
        cos = tl.load(turn.cos + at, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(turn.sin + at, mask=turns, other=0.0).to(tl.float32)
        return tile.to(tl.float32) * cos + tl.where(first, -other, other) * sin


@triton.jit
def moved(x, b, t):
    """The view at a token."""
    return x.ptr + b.to(tl.int64) * x.strides[0] + t.to(tl.int64) * x.strides[1]


@triton.jit(do_not_specialize=["tokens", "n_new", "n_q", "batch", "limit", "stride", "count", "pages", "page"])
def append_kernel(
    k_new, v_new, k, v, q, q_turned, lengths, table, indptr, rows, cu_new, cu_q, slots, turn, tokens, n_new, n_q, batch,
    limit, stride, count, pages, page,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    SEARCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Of the programs, `tokens` have a new token each, those after them a query. n_new and n_q: of every sequence.
    `page` tokens are in a row of the cache, `count` rows in the cache; a table has `pages` for each sequence, or in
    all."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)[None, :]
    if t < tokens:
        b, i, n = sequence_of(t, cu_new, n_new, batch, SEARCH)
        real = (b < batch) & (i >= 0)
        place = tl.load(lengths + b, mask=real, other=0) + i
        position = place
        if turn.positions is not None:
            position = tl.load(turn.positions + t).to(tl.int32)
        if slots is not None:
            slot = tl.load(slots + t).to(tl.int64)
            row = slot // page
            place = (slot % page).to(tl.int32)
            real = (slot >= 0) & (row < count)
        elif table is None:
            row = b.to(tl.int64)
            if rows is not None:
                row = tl.load(rows + b, mask=real, other=0).to(tl.int64)
            real = real & (place >= 0) & (place < page)
        else:
            entry = place // page
            if indptr is None:
                real = real & (place >= 0) & (entry < pages)
                entries = table + b.to(tl.int64) * stride
            else:
                start = clamp(tl.load(indptr + b, mask=real, other=0), 0, pages)
                until = clamp(tl.load(indptr + b + 1, mask=real, other=0), 0, pages)
                real = real & (place >= 0) & (entry < until - start)
                entries = table + start
            row = tl.load(entries + entry, mask=real, other=0).to(tl.int64)
            place = place % page
        row = clamp(row, 0, count - 1)
        if real:
            own = b
            token = i
            if cu_new is not None:
                own = b * 0
                token = t
            for first in range(0, KV_HEADS, BLOCK_H):
                h = first + tl.arange(0, BLOCK_H)[:, None]
                keep = (h < KV_HEADS) & (d < D)
                x = Token(moved(k_new, own, token), k_new.strides, k_new.wide)
                tile = turned(x, h, d, keep, position, turn, limit, HALF, INTERLEAVED)
                p = k.ptr + row * k.strides[0] + place.to(tl.int64) * k.strides[1] + h.to(tl.int64) * k.strides[2]
                tl.store(p + columns(k, d), tile.to(k.ptr.dtype.element_ty), mask=keep)
                dv = tl.arange(0, BLOCK_DV)[None, :]
                keep = (h < KV_HEADS) & (dv < DV)
                p = moved(v_new, own, token) + h.to(tl.int64) * v_new.strides[2]
                tile = tl.load(p + columns(v_new, dv), mask=keep, other=0.0)
                p = v.ptr + row * v.strides[0] + place.to(tl.int64) * v.strides[1] + h.to(tl.int64) * v.strides[2]
                tl.store(p + columns(v, dv), tile.to(v.ptr.dtype.element_ty), mask=keep)
    elif q.ptr is not None:
        t -= tokens
        b, i, n = sequence_of(t, cu_q, n_q, batch, SEARCH)
        if turn.q_positions is not None:
            position = tl.load(turn.q_positions + t).to(tl.int32)
        elif turn.positions is not None:
            position = tl.load(turn.positions + t).to(tl.int32)
        else:
            real = b < batch
            gained = n_new
            if cu_new is not None:
                gained = tl.load(cu_new + b + 1, mask=real, other=0) - tl.load(cu_new + b, mask=real, other=0)
            position = tl.load(lengths + b, mask=real, other=0) + gained - n + i
        own = b
        token = i
        if cu_q is not None:
            own = b * 0
            token = t
        for first in range(0, HEADS, BLOCK_H):
            h = first + tl.arange(0, BLOCK_H)[:, None]
            keep = (h < HEADS) & (d < D)
            x = Token(moved(q, own, token), q.strides, q.wide)
            tile = turned(x, h, d, keep, position, turn, limit, HALF, INTERLEAVED)
            p = moved(q_turned, own, token) + h.to(tl.int64) * q_turned.strides[2]
            tl.store(p + columns(q_turned, d), tile.to(q_turned.ptr.dtype.element_ty), mask=keep)
