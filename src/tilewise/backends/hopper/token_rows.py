"""Where the rows of a tile lie in global memory: for TMA, and for loads and stores without it."""

from typing import NamedTuple

import triton
import triton.language as tl

from .gluon_compat import column_indices, gl, gluon, opaque, opaque64

TMA_EXTENT: gl.constexpr = gl.constexpr(1 << 30)  # size of a packed descriptor's token axes
GRID_BOX: gl.constexpr = gl.constexpr(128)  # tokens of a box of a grid


class Tokens(NamedTuple):
    """The tokens of one sequence and head: `n` from token `start` of batch row b."""

    b: tl.tensor
    h: tl.tensor
    start: tl.tensor
    n: tl.tensor


class GlobalTensor(NamedTuple):
    """A tensor in global memory, if `ptr` is not None: strides of (batch, token, head), number of columns. Of a grid of
    tokens the second stride is that of its slow axis, and more follow: stride and length of the fast axis, and the
    tokens of a box along both."""

    ptr: tl.tensor = None
    strides: tl.tuple = (0, 0, 0)
    columns: tl.tensor = 0


@gluon.jit
def tma_coordinates(desc, tokens, row, column=0):
    """Coordinates of row `row` and column `column` of `tokens`. Rows past the end read as zero and are not written.

    A dense descriptor has the axes (batch, head, token, dim) and ends where the sequence ends. A packed one has
    (TMA_EXTENT, TMA_EXTENT, head, TMA_EXTENT, dim) with the strides (-token, token, head, token, 1), modulo 2^64 bytes:
    of the many coordinates of one row, these put the sequence's last row just before the end of the axis. One of a grid
    has (batch, head, slow axis, fast axis, dim): `row` is then the first of a box, or of one of its equal parts along
    the slow axis.
    """
    if len(desc.block_type.shape) == 4:
        return [tokens.b, tokens.h, row, column]
    elif desc.block_type.shape[2] > 1:
        slow, fast = grid_place(row, desc.shape[3], box_height(desc.block_type.shape), desc.block_type.shape[3])
        return [tokens.b, tokens.h, slow, fast, column]
    else:
        return [TMA_EXTENT, tokens.start + tokens.n, tokens.h, TMA_EXTENT - tokens.n + row, column]


@gluon.constexpr_function
def box_height(shape):
    """Tokens of a box along the slow axis, from the shape of a part of it."""
    return GRID_BOX.value // shape[3]


@triton.jit
def grid_place(row, length, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Where row `row` of a grid of tokens lies along its slow and its fast axis, of `length`. Rows are counted box by
    box, and in a box, by the slow axis first."""
    box = row // (HEIGHT * WIDTH)
    inside = row % (HEIGHT * WIDTH)
    across = tl.cast(length, tl.int32) // WIDTH
    return box // across * HEIGHT + inside // WIDTH, box % across * WIDTH + inside % WIDTH


@gluon.jit
def tensor_of(ptr, desc):
    """The tensor at `ptr` that a TMA descriptor describes."""
    if len(desc.block_type.shape) == 4:
        return GlobalTensor(ptr, (desc.strides[0], desc.strides[2], desc.strides[1]), desc.shape[3])
    elif desc.block_type.shape[2] > 1:
        strides = (desc.strides[0], desc.strides[2], desc.strides[1])
        fast = (desc.strides[3], desc.shape[3], box_height(desc.block_type.shape), desc.block_type.shape[3])
        return GlobalTensor(ptr, strides + fast, desc.shape[4])
    else:
        return GlobalTensor(ptr, (0, desc.strides[3], desc.strides[2]), desc.shape[4])


@gluon.jit
def global_rows(x, b, h, start, i):
    """Pointers to the rows i of the sequence that starts at row `start`."""
    offset = tl.cast(b, tl.int64) * x.strides[0] + tl.cast(h, tl.int64) * x.strides[2]
    if len(x.strides) == 3:
        offset += (tl.cast(start, tl.int64) + tl.cast(i, tl.int64)) * x.strides[1]
    else:
        slow, fast = grid_place(i, x.strides[4], x.strides[5], x.strides[6])
        offset += tl.cast(slow, tl.int64) * x.strides[1] + tl.cast(fast, tl.int64) * x.strides[3]
    return x.ptr + opaque64(offset)


@gluon.jit
def load_global(x, tokens, first, column, like):
    """x at the rows `first` and on of `tokens` and the columns `column` and on, with the shape and layout of `like`;
    0 outside of x."""
    i = first + gl.arange(0, like.shape[0], gl.SliceLayout(1, like.type.layout))
    c = column_indices(opaque(gl.to_tensor(column)), like)
    p = global_rows(x, tokens.b, tokens.h, tokens.start, i)[:, None] + c[None, :]
    return gl.load(p, mask=(i < tokens.n)[:, None] & (c < x.columns)[None, :], other=0.0)


@gluon.jit
def store_global(out, x, tokens, first, column):
    """Stores x at the rows `first` and on of `tokens` and the columns `column` and on."""
    i = first + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    c = column_indices(opaque(gl.to_tensor(column)), x)
    p = global_rows(out, tokens.b, tokens.h, tokens.start, i)[:, None] + c[None, :]
    gl.store(p, x.to(out.ptr.dtype.element_ty), mask=(i < tokens.n)[:, None] & (c < out.columns)[None, :])
