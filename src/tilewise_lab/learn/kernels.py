"""The course's small Triton kernels, in the order in which it meets them. Each fits on a slide."""

import triton
import triton.language as tl

from tilewise.backends.common.device.softmax import softmax_step


@triton.jit
def vector_add(a, b, c, n, BLOCK: tl.constexpr):
    """c = a + b: program p owns the elements p · BLOCK .. (p + 1) · BLOCK, and leaves those past n alone."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    total = tl.load(a + i, mask=inside) + tl.load(b + i, mask=inside)
    tl.store(c + i, total, mask=inside)


@triton.jit
def matrix_add(a, b, c, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The same in two dimensions: a grid of programs, each with a tile."""
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (i < rows) & (j < columns)
    at = i * columns + j
    tl.store(c + at, tl.load(a + at, mask=inside) + tl.load(b + at, mask=inside), mask=inside)


@triton.jit
def softmax_rows(x, y, columns, BLOCK: tl.constexpr):
    """One program, one row: read once, written once; maximum and sum never leave the chip."""
    row = tl.program_id(0).to(tl.int64) * columns
    j = tl.arange(0, BLOCK)
    values = tl.load(x + row + j, mask=j < columns, other=float("-inf"))
    e = tl.exp(values - tl.max(values, 0))
    tl.store(y + row + j, e / tl.sum(e, 0), mask=j < columns)


@triton.jit
def matmul_naive(a, b, c, M, N, K, BLOCK_K: tl.constexpr):
    """One program, one output: a row of A and a column of B, read for it alone."""
    i, j = tl.program_id(0), tl.program_id(1)
    total = 0.0
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        row = tl.load(a + i * K + k, mask=k < K, other=0.0)
        column = tl.load(b + k * N + j, mask=k < K, other=0.0)
        total += tl.sum(row.to(tl.float32) * column.to(tl.float32), 0)
    tl.store(c + i * N + j, total)


@triton.jit
def matmul_tiled(
    a, b, c, M, N, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program, one tile of C: each element of A it loads meets BLOCK_N columns, each of B BLOCK_M rows."""
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        a_tile = tl.load(a + i * stride_a + k[None, :], mask=(i < M) & (k[None, :] < K), other=0.0)
        b_tile = tl.load(b + k[:, None] * stride_b + j, mask=(k[:, None] < K) & (j < N), other=0.0)
        acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
    tl.store(c + i * stride_c + j, acc.to(c.dtype.element_ty), mask=(i < M) & (j < N))


@triton.jit
def chain(x, y, n, BLOCK: tl.constexpr):
    """Four operations, one trip to memory: y = relu(2x + 1)² - 3."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    v = 2 * v + 1
    v = tl.maximum(v, 0.0)
    v = v * v
    tl.store(y + i, v - 3, mask=i < n)


@triton.jit
def read_apart(x, y, stride, N: tl.constexpr, BLOCK: tl.constexpr):
    """Neighbouring lanes read elements `stride` apart; every element of x is read once, whatever the stride."""
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = t * stride % N + t * stride // N  # strides that divide N: walk down a column, then the next
    total = tl.sum(tl.load(x + i), 0)
    tl.store(y + tl.program_id(0), total)


@triton.jit
def chase(x, y, steps):
    """Each load says where the next one is: nothing overlaps, and the time per step is the latency of memory.

    y holds the place to start from, and then the place that was reached: the next launch goes on from there.
    """
    i = tl.load(y)
    for _ in range(steps):
        i = tl.load(x + i)
    tl.store(y, i)


@triton.jit
def watch_softmax(s, m_out, l_out, alpha_out, p_out, columns, ROWS: tl.constexpr, COLS: tl.constexpr):
    """tilewise's own softmax step on (ROWS, columns) scores, COLS at a time; every step's state is stored."""
    i = tl.arange(0, ROWS)
    j = tl.arange(0, COLS)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for step in range(columns // COLS):
        tile = tl.load(s + i[:, None] * columns + step * COLS + j[None, :])
        p, alpha, m, l = softmax_step(m, l, tile, 1.4426950408889634, None, False)
        tl.store(m_out + step * ROWS + i, m * 0.6931471805599453)
        tl.store(l_out + step * ROWS + i, l)
        tl.store(alpha_out + step * ROWS + i, alpha)
        tl.store(p_out + i[:, None] * columns + step * COLS + j[None, :], p)
