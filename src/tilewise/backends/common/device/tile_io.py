"""Loads and stores of tiles, at any strides."""

import triton
import triton.language as tl

from .structs import Rows


@triton.jit
def index(x, i):
    """Indices of the view x as they are multiplied by its strides. 32 bits save registers in the backward."""
    if x.strides[4] is None:
        return i
    else:
        return i.to(tl.int64)


@triton.jit
def stride(x, AXIS: tl.constexpr):
    """A stride of the view x. Triton itself knows multiples of 16 alone, and loads rows of 72 elements one element at a
    time. If it knows that a stride is a multiple of 8, it loads 16 bytes."""
    if x.strides[5] is None:
        return x.strides[AXIS]
    else:
        return x.strides[AXIS] // 8 * 8


@triton.jit
def tile_pointers(rows, ROWS: tl.constexpr, COLS: tl.constexpr):
    x = rows.x
    r = tl.arange(0, ROWS)[:, None]
    d = index(x, tl.arange(0, COLS)[None, :])
    if rows.heads is None:
        r = index(x, r)
        p = x.ptr + rows.b.to(tl.int64) * stride(x, 0) + rows.h.to(tl.int64) * stride(x, 2)
        p += tl.cast(rows.t + rows.first, tl.int64) * stride(x, 1)
        return p + r * stride(x, 1) + d * x.strides[3]
    else:
        r += rows.first
        p = x.ptr + rows.b.to(tl.int64) * stride(x, 0) + (rows.t + r // rows.heads).to(tl.int64) * stride(x, 1)
        p += (rows.h * rows.heads + r % rows.heads).to(tl.int64) * stride(x, 2)
        return p + d * x.strides[3]


@triton.jit
def load_rows(rows, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, C: tl.constexpr = 0):
    """A (ROWS, COLS) tile, of the columns from C on: zero past the end of the sequence and past D columns."""
    p = tile_pointers(rows, ROWS, COLS)
    if C:
        p += C * rows.x.strides[3]
    r = tl.arange(0, ROWS)[:, None]
    d = C + tl.arange(0, COLS)[None, :]
    if EVEN:
        if D >= C + COLS:
            return tl.load(p)
        else:
            return tl.load(p, mask=d < D, other=0.0)
    else:
        return tl.load(p, mask=(rows.first + r < rows.n) & (d < D), other=0.0)


@triton.jit
def load_columns(rows, c, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The same of the columns c .. c + COLS."""
    p = tile_pointers(rows, ROWS, COLS) + tl.cast(c, tl.int64) * rows.x.strides[3]
    r = tl.arange(0, ROWS)[:, None]
    d = c + tl.arange(0, COLS)[None, :]
    return tl.load(p, mask=(rows.first + r < rows.n) & (d < D), other=0.0)


@triton.jit
def store_rows(rows, tile, D: tl.constexpr, C: tl.constexpr = 0):
    """Store a tile as the columns from C on, those below D, of the rows that exist."""
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    # num_programs(1) is 1, which the compiler does not know: addresses are computed again, not kept in registers
    first = rows.first * tl.num_programs(1)
    r = tl.arange(0, ROWS)[:, None]
    d = C + tl.arange(0, COLS)[None, :]
    p = tile_pointers(Rows(rows.x, rows.b, rows.h, rows.t, first, rows.n, rows.heads), ROWS, COLS)
    if C:
        p += C * rows.x.strides[3]
    tl.store(p, tile.to(rows.x.ptr.dtype.element_ty), mask=(first + r < rows.n) & (d < D))


@triton.jit
def store_pieces(rows, pieces, rate, D: tl.constexpr):
    """Store rate (None: 1) times the D columns of a tile in pieces, (ROWS, PIECE) each."""
    for n in tl.static_range(len(pieces)):
        store_rows(rows, pieces[n] if rate is None else pieces[n] * rate, D, n * pieces[n].shape[1])


@triton.jit
def store_columns(rows, tile, c, D: tl.constexpr):
    """The same of the columns c and on."""
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    r = tl.arange(0, ROWS)[:, None]
    d = c + tl.arange(0, COLS)[None, :]
    p = tile_pointers(rows, ROWS, COLS) + tl.cast(c, tl.int64) * rows.x.strides[3]
    tl.store(p, tile.to(rows.x.ptr.dtype.element_ty), mask=(rows.first + r < rows.n) & (d < D))


@triton.jit
def row_pointers(x, tokens, heads, b, h, t, i, PACKED: tl.constexpr):
    """Pointers to x[b, h, t + i] of a contiguous (batch, heads, tokens) tensor, or (heads, tokens) if PACKED. Its
    strides are no arguments: Triton would compile a kernel for multiples of 16 and another for the others."""
    line = tl.cast(h, tl.int64)
    if not PACKED:
        line += tl.cast(b, tl.int64) * heads
    return x + line * tokens + t + i


@triton.jit
def statistic_pointers(x, w, h, first, ROWS: tl.constexpr, PACKED: tl.constexpr):
    """Pointers to ROWS padded row statistics of head h, from row `first` of the sequence."""
    b = 0 if PACKED else w.b
    return (
        x.ptr
        + tl.cast(b, tl.int64) * x.strides[0]
        + h.to(tl.int64) * x.strides[1]
        + (w.r0 + first)
        + tl.arange(0, ROWS)
    )
