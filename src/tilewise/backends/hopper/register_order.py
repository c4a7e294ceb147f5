"""Float32 tiles in global memory in register order: each thread's values in fours, which it writes at once.

`postprocess_kernel` restores the order of rows and columns. Rows that are added to other rows, one by one, keep their
order, and only their columns change places: see `in_fours`.
"""

import triton.language as tl

from .gluon_compat import gl, gluon


@gluon.jit
def in_register_order(x):
    """[64, N] as [N / 4, 256] with each thread's values in fours."""
    N: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, N // 8, 4, 2])  # warp, half of its rows, row, group of columns, pair, column
    return x.permute((3, 0, 2, 4, 1, 5)).reshape([N // 4, 256])


@gluon.jit
def from_register_order(x, LAYOUT: gl.constexpr):
    """The inverse of `in_register_order`."""
    N: gl.constexpr = x.shape[0] * 4
    x = x.reshape([N // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, N])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def register_order_pointers(ptr, x, tile, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Pointers to the columns FIRST and on of tile `tile` of a float32 buffer of [64, COLUMNS] tiles, and x, [64, N],
    in their order."""
    GROUPS: gl.constexpr = x.shape[1] // 8
    x = in_register_order(x).reshape([GROUPS, 512])  # the row is known at compile time, the column from the thread
    r = gl.arange(0, GROUPS, gl.SliceLayout(1, x.type.layout))[:, None]
    zero = gl.where(tile < 0, 512, 0)  # a known 0 would keep the sum of pointer and column in registers
    c = gl.arange(0, 512, gl.SliceLayout(0, x.type.layout))[None, :] + zero
    first = ptr + (tl.cast(tile, tl.int64) * COLUMNS + FIRST) * 64
    return first + c.to(gl.int64) + r.to(gl.int64) * 512, x


@gluon.jit
def in_fours(x):
    """[64, N] as two of [32, N], the upper and the lower 8 of each 16 rows, with the columns in an order in which a
    thread has four next to each other: of 16 columns 8 b + 2 l + e, which lane l of a row holds for all b and e, the
    column goes to 4 l + 2 b + e."""
    N: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, N // 16, 2, 4, 2]).permute((0, 2, 3, 5, 4, 6, 1))
    upper, lower = gl.split(x)
    return upper.reshape([32, N]), lower.reshape([32, N])


@gluon.jit
def halves_of_rows(x):
    """[64] as two of [32], as `in_fours`."""
    upper, lower = gl.split(x.reshape([4, 2, 8]).permute((0, 2, 1)))
    return upper.reshape([32]), lower.reshape([32])
