"""Products of tiles."""

import triton
import triton.language as tl

from .tile_io import load_columns, load_rows


@triton.jit
def dot_nt(a_tile, b_tile, a, b, D: tl.constexpr, CONFIG: tl.constexpr):
    """a b^T of the tiles of the rows a and b. Tiles of more than CHUNK columns are loaded again, CHUNK columns at a
    time: the operands, in float32 two halves each, would not fit into the registers. a_tile and b_tile are
    then not used."""
    A: tl.constexpr = a_tile.shape[0]
    B: tl.constexpr = b_tile.shape[0]
    CHUNK: tl.constexpr = CONFIG.CHUNK
    if a_tile.shape[1] <= CHUNK:
        return tl.dot(a_tile, tl.trans(b_tile), input_precision=CONFIG.PRECISION)
    else:
        acc = tl.zeros([A, B], tl.float32)
        for c in tl.range(0, D, CHUNK, num_stages=1, disable_licm=True):
            b_columns = load_columns(b, c, D, B, CHUNK)
            acc = tl.dot(load_columns(a, c, D, A, CHUNK), tl.trans(b_columns), acc, input_precision=CONFIG.PRECISION)
        return acc


@triton.jit
def zeros_in_pieces(ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr):
    """A (ROWS, D) sum in pieces: ceil(D / PIECE) tiles of (ROWS, PIECE) zeros, or one of (ROWS, BLOCK_D)."""
    COLS: tl.constexpr = PIECE if PIECE < BLOCK_D else BLOCK_D
    pieces = (tl.full([ROWS, COLS], 0.0, tl.float32),)
    for _ in tl.static_range((D + COLS - 1) // COLS - 1):
        pieces += (tl.full([ROWS, COLS], 0.0, tl.float32),)
    return pieces


@triton.jit
def load_pieces(
    rows, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr, EVEN: tl.constexpr
):
    """The D columns of the rows in pieces of (ROWS, PIECE), or in one of (ROWS, BLOCK_D). Columns past D are zero."""
    COLS: tl.constexpr = PIECE if PIECE < BLOCK_D else BLOCK_D
    pieces = (load_rows(rows, D, ROWS, COLS, EVEN),)
    for n in tl.static_range(1, (D + COLS - 1) // COLS):
        pieces += (load_rows(rows, D, ROWS, COLS, EVEN, n * COLS),)
    return pieces


@triton.jit
def dot_nt_pieces(a_tiles, b_tiles, a, b, D: tl.constexpr, CONFIG: tl.constexpr):
    """a b^T, (A, B), of tiles in pieces, (A, PIECE) and (B, PIECE) each."""
    tl.static_assert(len(a_tiles) == 1 or a_tiles[0].shape[1] <= CONFIG.CHUNK)  # else `dot_nt` loads all columns
    acc = dot_nt(a_tiles[0], b_tiles[0], a, b, D, CONFIG)
    for n in tl.static_range(1, len(a_tiles)):
        acc = tl.dot(a_tiles[n], tl.trans(b_tiles[n]), acc, input_precision=CONFIG.PRECISION)
    return acc


@triton.jit
def dot_pieces(a, b_tiles, acc, visible, CONFIG: tl.constexpr):
    """acc + a @ b, of pieces of the columns of b and of acc."""
    new = (dot(a, b_tiles[0], acc[0], visible, CONFIG),)
    for n in tl.static_range(1, len(acc)):
        new += (dot(a, b_tiles[n], acc[n], visible, CONFIG),)
    return new


@triton.jit
def dot(a, b, acc, visible, CONFIG: tl.constexpr):
    """acc + a @ b. `visible` (None, or which row of a sees which row of b): rows of b that are not finite make the rows
    that see them nan, and no others. tl.dot alone cannot do that: 0 * nan is nan."""
    if visible is None:
        return tl.dot(a, b, acc, input_precision=CONFIG.PRECISION)
    else:
        finite = tl.abs(b.to(tl.float32)) < float("inf")
        acc = tl.dot(a, tl.where(finite, b, 0.0).to(b.dtype), acc, input_precision=CONFIG.PRECISION)
        bad = tl.max(tl.where(finite, 0, 1), 1)
        sees_bad = tl.max(tl.where(visible, bad[None, :], 0), 1)
        return tl.where(sees_bad[:, None] > 0, float("nan"), acc)


@triton.jit
def raise_flag(flag, x):
    """Set *flag, which this program has set to 0, to 1 if the sum of some row of x is nan: if an element is, or if
    infinities of both signs meet. Every row stores for itself: a reduction over warps takes time, and crashes Triton
    3.6 for sm_100."""
    raise_flag_of_pieces(flag, (x,))


@triton.jit
def raise_flag_of_pieces(flag, pieces):
    """`raise_flag` of a tile in pieces of its columns."""
    rows = tl.sum(pieces[0], 1)
    for n in tl.static_range(1, len(pieces)):
        rows += tl.sum(pieces[n], 1)
    bad = rows != rows
    tl.debug_barrier()  # the store of 0 comes first
    tl.store(flag + bad.to(tl.int32) * 0, 1, mask=bad)
