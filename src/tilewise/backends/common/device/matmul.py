"""Products of tiles."""

import triton
import triton.language as tl

from .tile_io import load_columns


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
    rows = tl.sum(x, 1)
    bad = rows != rows
    tl.debug_barrier()  # the store of 0 comes first
    tl.store(flag + bad.to(tl.int32) * 0, 1, mask=bad)
