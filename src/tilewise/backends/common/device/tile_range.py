"""Which program am I, and which tiles do I visit?"""

import triton
import triton.language as tl

from .structs import PAD, Span, Work


@triton.jit
def locate(pid, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu, BLOCK: tl.constexpr, ROWS: tl.constexpr = 1):
    """The pid-th of tiles * heads * batch programs; the tiles of one head are neighbours, so its K and V stay in L2.

    `cu` is the cu_seqlens of the side being tiled, whose tokens have ROWS each. Packed sequences share one row of
    tiles: sequence b starts at tile cu[b] * ROWS // BLOCK + b, which leaves it as many tiles as it needs, and tells the
    grid's size without its lengths. Then n_q and n_k are the tokens of all, which no sequence leaves, whatever cu_q and
    cu_k say.
    """
    tile = pid % tiles
    h = pid // tiles % heads
    b = pid // tiles // heads
    if cu is None:
        return Work(b, h, tile * BLOCK, 0, n_q, 0, n_k, 0)
    else:
        above = batch
        while above - b > 1:  # the last b whose first tile is not past this one
            mid = (b + above) // 2
            past = tl.load(cu + mid) * ROWS // BLOCK + mid > tile
            b = tl.where(past, b, mid)
            above = tl.where(past, mid, above)
        start = tl.where(b == 0, 0, tl.load(cu + b) * ROWS // BLOCK)
        return sequence(b, h, (tile - start - b) * BLOCK, cu_q, cu_k, n_q, n_k)


@triton.jit
def sequence(b, h, first, cu_q, cu_k, n_q, n_k):
    """The Work at row `first` of the packed sequence b, in buffers of n_q and n_k tokens."""
    q0, n_q = stretch(cu_q + b, n_q)
    k0, n_k = stretch(cu_k + b, n_k)
    return Work(b, h, first, q0, n_q, k0, n_k, (q0 // PAD + b) * PAD)


@triton.jit
def stretch(cu, n):
    """The tokens from cu[0] to cu[1], of the n that exist: the first, and how many; fewer than 0 are none."""
    start = tl.minimum(tl.maximum(tl.load(cu), 0), n)
    return start, tl.minimum(tl.load(cu + 1), n) - start


@triton.jit
def clamp(x, lo, hi):
    return tl.minimum(tl.maximum(x, lo), hi)


@triton.jit
def head_of(w, r, HEADS: tl.constexpr):
    """Of row r: the program's or, of several, its own."""
    if HEADS == 1:
        return w.h
    else:
        return w.h * HEADS + r % HEADS


@triton.jit
def band(first, last, n, before, after, BLOCK: tl.constexpr):
    """The columns that rows first..last see when row r sees the columns r - before .. r + after of 0 .. n - 1."""
    lo = 0
    full_lo = 0
    hi = n
    full_hi = n
    if before is not None:
        lo = tl.maximum(first - before, 0)
        full_lo = tl.maximum(last - before, 0)
    if after is not None:
        hi = tl.minimum(last + after + 1, n)
        full_hi = tl.minimum(first + after + 1, n)
    lo = lo // BLOCK * BLOCK
    return Span(lo, full_lo, full_hi, tl.maximum(hi, lo))


@triton.jit
def share(span, part, parts, BLOCK: tl.constexpr):
    """One of so many parts of the columns, as even as whole blocks allow."""
    each = tl.cdiv(tl.cdiv(span.hi - span.lo, parts), BLOCK) * BLOCK
    lo = tl.minimum(span.lo + part * each, span.hi)
    return Span(lo, span.full_lo, span.full_hi, tl.minimum(lo + each, span.hi))


@triton.jit
def walk(span, w, h, blocks, BLOCK: tl.constexpr):
    """What the loop over columns counts: columns, or with tile lists the columns of the listed tiles, end to end. The
    band may begin within the first of them and end within the last (the upper half of a causal tile's rows see nothing
    of its right half)."""
    if blocks.offsets is None:
        return span.lo, span.hi
    else:
        tile = tl.minimum(w.first >> blocks.own, blocks.rows // 16 - 1)  # of sequences that it was not made for, some
        row = blocks.offsets + (tile + (w.b * blocks.batch_rows + h * blocks.head_rows) // 16)
        lo = tl.load(row)
        hi = tl.load(row + 1)
        width = 1 << blocks.other
        start = tl.load(blocks.entries + lo, mask=lo < hi, other=0) >> 2 << blocks.other
        end = ((tl.load(blocks.entries + (hi - 1), mask=lo < hi, other=0) >> 2) + 1) << blocks.other
        skip = tl.minimum(tl.maximum(span.lo - start, 0), width) // BLOCK * BLOCK
        drop = tl.minimum(tl.maximum(end - span.hi, 0), width) // BLOCK * BLOCK
        return (lo << blocks.other) + skip, (hi << blocks.other) - drop


@triton.jit
def listed(at, blocks, BLOCK: tl.constexpr, SOME: tl.constexpr = True):
    """The first column of the tile at this place of the walk, and whether the mask mod may hide some pair of it
    (`picky`). Not SOME: at places below 0, of rows that list nothing, there is none."""
    if blocks.offsets is None:
        return at, True
    else:
        entry = tl.load(blocks.entries + (at >> blocks.other), mask=None if SOME else at >= 0)
        first = tl.multiple_of((entry >> 2 << blocks.other) + (at & ((1 << blocks.other) - 1)), BLOCK)
        return first, entry & 2 == 0


@triton.jit
def column(at, span, blocks, BLOCK: tl.constexpr, CAREFUL: tl.constexpr):
    """`listed`, and whether the band may hide some pair of the tile (`edge`)."""
    first, picky = listed(at, blocks, BLOCK)
    edge = CAREFUL or (first < span.full_lo) or (first + BLOCK > span.full_hi)
    return first, edge, picky
