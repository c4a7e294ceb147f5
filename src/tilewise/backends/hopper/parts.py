"""Tiles of the Hopper backward whose columns are one or two parts, each a power of two: 64 and 32 for head dim 96.

A tile, a descriptor or an accumulator is a tuple of its parts. Every function of parts does one thing for each of them.

And float32 tiles in global memory in register order: each thread's values in fours, which it writes at once.

`postprocess_kernel` restores the order of rows and columns. Rows that are added to other rows, one by one, keep their
order, and only their columns change places: see `in_fours`.
"""

import triton.language as tl

from .gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .pipeline import tma_coordinates


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


@gluon.jit
def allocate_boxes(desc, N: gl.constexpr):
    """Shared memory for N of a descriptor's boxes."""
    return gl.allocate_shared_memory(desc.dtype, [N] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def allocate_parts(x, N: gl.constexpr):
    """The same for each column part."""
    if len(x) == 1:
        return (allocate_boxes(x[0], N),)
    else:
        return allocate_boxes(x[0], N), allocate_boxes(x[1], N)


@gluon.jit
def tile_at(tiles, n):
    """Tile n as (rows, columns)."""
    rank: gl.constexpr = len(tiles.shape)
    return tiles.index(n).reshape([tiles.shape[rank - 2], tiles.shape[rank - 1]])


@gluon.jit
def parts_at(tiles, n):
    """The column parts of tile n."""
    if len(tiles) == 1:
        return (tile_at(tiles[0], n),)
    else:
        return tile_at(tiles[0], n), tile_at(tiles[1], n)


@gluon.constexpr_function
def total(parts):
    """The columns of all parts."""
    return sum(parts)


@gluon.jit
def expect_boxes(bar, x, y, N: gl.constexpr):
    """Announces N boxes of each column part of the descriptors x and y."""
    BYTES_X: gl.constexpr = x[0].block_type.nbytes + (x[1].block_type.nbytes if len(x) == 2 else 0)
    BYTES_Y: gl.constexpr = y[0].block_type.nbytes + (y[1].block_type.nbytes if len(y) == 2 else 0)
    mbarrier.expect(bar, N * (BYTES_X + BYTES_Y))


@gluon.jit
def load_parts(x, tokens, first, full, tiles, n):
    """Loads all columns of the rows from `first` on."""
    tma_load(x[0], tma_coordinates(x[0], tokens, first), full, tiles[0].index(n))
    if len(x) == 2:
        WIDTH: gl.constexpr = tiles[0].shape[len(tiles[0].shape) - 1]
        tma_load(x[1], tma_coordinates(x[1], tokens, first, WIDTH), full, tiles[1].index(n))


@gluon.constexpr_function
def acc_layout(columns):
    """The registers of a [64, columns] product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def zero_acc(WIDTHS: gl.constexpr):
    """0 for each column part."""
    if len(WIDTHS) == 1:
        return (zero_part(WIDTHS[0]),)
    else:
        return zero_part(WIDTHS[0]), zero_part(WIDTHS[1])


@gluon.jit
def zero_part(COLUMNS: gl.constexpr):
    return gl.zeros([64, COLUMNS], gl.float32, acc_layout(COLUMNS))


@gluon.jit
def issue_abt(a, b):
    """Issues a b^T of a [64, dim] and a [N, dim] tile in shared memory, one wgmma for each column part."""
    N: gl.constexpr = b[0].shape[0]
    s = warpgroup_mma(a[0], b[0].permute((1, 0)), zero_part(N), use_acc=False, is_async=True)
    if len(a) == 2:
        s = warpgroup_mma(a[1], b[1].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def operands(a, acc):
    """a, one or two halves of the columns of a tile in registers, as left operands: both for each part of `acc`."""
    found = ()
    for i in gl.static_range(len(acc)):
        for half in gl.static_range(len(a)):
            found = found + (operand(a[half], acc[i]),)  # noqa: RUF005
    return found


@gluon.jit
def operand(a, acc):
    return gl.convert_layout(a, gl.DotOperandLayout(0, acc.type.layout, 2), assert_trivial=True)


@gluon.jit
def issue_parts(a, b, acc):
    """Issues acc + a b for each column part; a: for each of them, one operand or two halves."""
    HALVES: gl.constexpr = len(a) // len(acc)
    ROWS: gl.constexpr = b[0].shape[0] // HALVES
    found = ()
    for i in gl.static_range(len(acc)):
        x = acc[i]
        for half in gl.static_range(HALVES):
            x = warpgroup_mma(a[i * HALVES + half], b[i].slice(half * ROWS, ROWS, dim=0), x, is_async=True)
        found = found + (x,)  # noqa: RUF005
    return found


@gluon.jit
def wait_parts(PENDING: gl.constexpr, acc, a):
    """acc, once all but the last PENDING wgmmas are done; the operands `a` stay in their registers until then."""
    if len(acc) + len(a) == 1:
        return (warpgroup_mma_wait(PENDING, deps=acc),)
    else:
        done = warpgroup_mma_wait(PENDING, deps=acc + a)
        return done[: len(acc)]


@gluon.jit
def flag_nonfinite(flag, parts):
    """Sets *flag if one of the parts has a value that is not finite."""
    for i in gl.static_range(len(parts)):
        x = parts[i]
        bad = gl.sum(x * 0.0, 1)
        gl.store(flag + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout)) * 0, 1, mask=bad != bad)


@gluon.jit
def scaled(acc, scale):
    if len(acc) == 1:
        return (acc[0] * scale,)
    else:
        return acc[0] * scale, acc[1] * scale


@gluon.jit
def reinterpret_parts(memory, x, ELEMENTS: gl.constexpr):
    """ELEMENTS elements of shared memory as boxes of each column part of the descriptors x."""
    if len(x) == 1:
        return (reinterpret_boxes(memory, x[0], ELEMENTS),)
    else:
        return reinterpret_boxes(memory, x[0], ELEMENTS), reinterpret_boxes(memory, x[1], ELEMENTS)


@gluon.jit
def reinterpret_boxes(memory, desc, ELEMENTS: gl.constexpr):
    BOXES: gl.constexpr = ELEMENTS // (desc.block_type.nbytes // 2)
    return reinterpret(memory, desc.dtype, [BOXES] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def store_parts(x, acc, tiles, tokens, first, WG: gl.constexpr):
    """Stores the rows from `first` on by TMA, through warpgroup WG's half of the memory of `tiles`: one part behind the
    other or, where they do not fit, after the other."""
    COUNT: gl.constexpr = tiles[0].shape[0]
    store_part(x[0], acc[0], tiles[0].index(WG * COUNT // 2), tma_coordinates(x[0], tokens, first))
    if len(acc) == 2:
        WIDTH: gl.constexpr = acc[0].shape[1]
        BEHIND: gl.constexpr = WIDTH // acc[1].shape[1]
        if COUNT == 2:
            tma.store_wait(0)
        n: gl.constexpr = WG * tiles[1].shape[0] // 2 + (0 if COUNT == 2 else BEHIND)
        store_part(x[1], acc[1], tiles[1].index(n), tma_coordinates(x[1], tokens, first, WIDTH))


@gluon.jit
def store_part(desc, x, tile, where):
    """Stores x through a tile in shared memory."""
    tile.reshape(x.shape).store(x.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, where, tile)


@gluon.jit
def loaded_operands(tiles, n, COLUMNS: gl.constexpr):
    """The column parts of tile n as left operands of a [64, COLUMNS] product, in registers."""
    found = ()
    for i in gl.static_range(len(tiles)):
        found = found + (tile_at(tiles[i], n).load(gl.DotOperandLayout(0, acc_layout(COLUMNS), 2)),)  # noqa: RUF005
    return found
