"""Which tile a program computes, and over which columns it loops."""

import triton
import triton.language as tl

from .structs import PAD, Span, Work


@triton.jit
def locate(pid, grid, seqs, cu, BLOCK: tl.constexpr, HEADS: tl.constexpr = 1):
    """The tile of program pid. The tiles of one head are neighbours, so that its K and V stay in L2.

    `cu` is the cu_seqlens of the side that is tiled, whose tokens have HEADS rows each. Packed sequences share one row
    of tiles: sequence b starts at tile cu[b] * HEADS // BLOCK + b, which leaves it as many tiles as it needs, and the
    size of the grid does not depend on the lengths. No sequence extends past the tokens that exist, whatever cu_seqlens
    say.
    """
    tile = pid % grid.tiles
    h = pid // grid.tiles % grid.heads
    b = pid // grid.tiles // grid.heads
    if cu is None:
        return Work(b, h, tile * BLOCK, 0, seqs.n_q, 0, seqs.n_k, 0)
    else:
        above = grid.batch
        while above - b > 1:  # the last b whose first tile is not past this one
            mid = (b + above) // 2
            past = tl.load(cu + mid) * HEADS // BLOCK + mid > tile
            b = tl.where(past, b, mid)
            above = tl.where(past, mid, above)
        start = tl.where(b == 0, 0, tl.load(cu + b) * HEADS // BLOCK)
        return packed_tile(b, h, (tile - start - b) * BLOCK, seqs)


@triton.jit
def packed_tile(b, h, first, seqs):
    """The tile at row `first` of packed sequence b."""
    q0, n_q = sequence_bounds(seqs.cu_q + b, seqs.n_q)
    k0, n_k = sequence_bounds(seqs.cu_k + b, seqs.n_k)
    return Work(b, h, first, q0, n_q, k0, n_k, (q0 // PAD + b) * PAD)


@triton.jit
def sequence_bounds(cu, n):
    """The first token and the length (which may be negative) of the sequence from cu[0] to cu[1], of n tokens."""
    start = tl.minimum(tl.maximum(tl.load(cu), 0), n)
    return start, tl.minimum(tl.load(cu + 1), n) - start


@triton.jit
def clamp(x, lo, hi):
    return tl.minimum(tl.maximum(x, lo), hi)


@triton.jit
def head_of(w, r, HEADS: tl.constexpr):
    """The query head of row r."""
    if HEADS == 1:
        return w.h
    else:
        return w.h * HEADS + r % HEADS


@triton.jit
def band(first, last, n, before, after, BLOCK: tl.constexpr):
    """The columns that rows first..last see, if row r sees the columns r - before .. r + after of 0 .. n - 1."""
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
def key_range(w, before, after, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys that the tile of queries at w sees."""
    at = w.first + w.n_k - w.n_q
    return band(at, at + BLOCK_M - 1, w.n_k, before, after, BLOCK_N)


@triton.jit
def query_range(w, before, after, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The queries that see the tile of keys at w: the same window with its sides swapped."""
    at = w.first + w.n_q - w.n_k
    return band(at, at + BLOCK_N - 1, w.n_q, after, before, BLOCK_M)


@triton.jit
def split_range(span, split, splits, BLOCK: tl.constexpr):
    """One of `splits` parts of the columns, as even as whole blocks allow."""
    each = tl.cdiv(tl.cdiv(span.hi - span.lo, splits), BLOCK) * BLOCK
    lo = tl.minimum(span.lo + split * each, span.hi)
    return Span(lo, span.full_lo, span.full_hi, tl.minimum(lo + each, span.hi))


@triton.jit
def loop_range(span, w, h, blocks, BLOCK: tl.constexpr):
    """The range of the loop over columns: the columns, or with a block mask those of the listed tiles, concatenated.
    The window may start inside the first tile and end inside the last (the upper rows of a causal tile see nothing of
    its right half)."""
    if blocks.offsets is None:
        return span.lo, span.hi
    else:
        tile = tl.minimum(w.first >> blocks.own, (blocks.rows >> 4) - 1)  # stay inside the lists, whatever w.first is
        row = blocks.offsets + (tile + ((w.b * blocks.batch_rows + h * blocks.head_rows) >> 4))
        lo = tl.load(row)
        hi = tl.load(row + 1)
        width = 1 << blocks.other
        start = tl.load(blocks.entries + lo, mask=lo < hi, other=0) >> 2 << blocks.other
        end = ((tl.load(blocks.entries + (hi - 1), mask=lo < hi, other=0) >> 2) + 1) << blocks.other
        skip = tl.minimum(tl.maximum(span.lo - start, 0), width) // BLOCK * BLOCK
        drop = tl.minimum(tl.maximum(end - span.hi, 0), width) // BLOCK * BLOCK
        return (lo << blocks.other) + skip, (hi << blocks.other) - drop


@triton.jit
def block_at(at, blocks, BLOCK: tl.constexpr, NOT_EMPTY: tl.constexpr = True):
    """The first column of the tile at position `at` of the loop, and whether it may be partial: the mask mod may hide
    some of its pairs. Without a block mask this is always true, also where there is no mask mod. Not NOT_EMPTY: `at`
    may be negative, for rows without tiles."""
    if blocks.offsets is None:
        return at, True
    else:
        entry = tl.load(blocks.entries + (at >> blocks.other), mask=None if NOT_EMPTY else at >= 0)
        first = tl.multiple_of((entry >> 2 << blocks.other) + (at & ((1 << blocks.other) - 1)), BLOCK)
        return first, entry & 2 == 0


@triton.jit
def tile_at(at, span, blocks, BLOCK: tl.constexpr, NAN_SAFE: tl.constexpr):
    """(first column, edge, partial) of the tile at position `at` of the loop. `edge`: the window may hide some of its
    pairs; `partial`: the mask mod may."""
    first, partial = block_at(at, blocks, BLOCK)
    edge = NAN_SAFE or (first < span.full_lo) or (first + BLOCK > span.full_hi)
    return first, edge, partial
