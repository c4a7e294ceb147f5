"""Products of tiles, of wide ones too, and beside values that are not finite."""

import triton
import triton.language as tl

from .tile_io import load_columns


@triton.jit
def inner(a_tile, b_tile, a, b, D: tl.constexpr, PLAN: tl.constexpr):
    """a b^T of the tiles at a and b; of more than CHUNK columns, so many at a time, read when their turn comes: wide
    operands, of float32 in two halves each, would not fit into the registers. Then nobody needs the whole tiles."""
    A: tl.constexpr = a_tile.shape[0]
    B: tl.constexpr = b_tile.shape[0]
    CHUNK: tl.constexpr = PLAN.CHUNK
    if a_tile.shape[1] <= CHUNK:
        return tl.dot(a_tile, tl.trans(b_tile), input_precision=PLAN.PRECISION)
    else:
        acc = tl.zeros([A, B], tl.float32)
        for c in tl.range(0, D, CHUNK, num_stages=1, disable_licm=True):
            b_columns = load_columns(b, c, D, B, CHUNK)
            acc = tl.dot(load_columns(a, c, D, A, CHUNK), tl.trans(b_columns), acc, input_precision=PLAN.PRECISION)
        return acc


@triton.jit
def dot(a, b, acc, met, PLAN: tl.constexpr):
    """acc + a @ b. With `met` (which rows of a meet which rows of b), a non-finite row of b makes the rows that see it
    nan and leaves the others alone. A matrix product by itself cannot keep that promise: 0 * nan is nan.
    """
    if met is None:
        return tl.dot(a, b, acc, input_precision=PLAN.PRECISION)
    else:
        finite = tl.abs(b.to(tl.float32)) < float("inf")
        acc = tl.dot(a, tl.where(finite, b, 0.0).to(b.dtype), acc, input_precision=PLAN.PRECISION)
        bad = tl.max(tl.where(finite, 0, 1), 1)
        spoilt = tl.max(tl.where(met, bad[None, :], 0), 1)
        return tl.where(spoilt[:, None] > 0, float("nan"), acc)


@triton.jit
def raise_flag(flag, x):
    """*flag, which this program has set to 0, = 1 where the sum of some row is nan: where an element is, and where
    infinities of both signs meet. Nothing is reduced over the warps, which would cost time, and the compiler for
    sm_100 (Triton 3.6) its life."""
    rows = tl.sum(x, 1)
    bad = rows != rows
    tl.debug_barrier()  # the 0 first
    tl.store(flag + bad.to(tl.int32) * 0, 1, mask=bad)
