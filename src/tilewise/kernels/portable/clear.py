"""A packed buffer may be longer than its sequences. Rows past the last one are empty rows; nobody else writes them."""

import triton
import triton.language as tl

from ..overlap import gdc_wait
from ..tile.tuples import ANY_SIZE


@triton.jit
def fill(x, used, value, lines, tokens, size, BLOCK: tl.constexpr):
    """x (lines, tokens, size) from token `used` on."""
    start = tl.maximum(used, 0).to(tl.int64) * size + tl.program_id(0) * BLOCK
    length = tl.cast(tokens, tl.int64) * size
    if start < length:
        for line in range(lines):
            for first in range(start, length, tl.num_programs(0) * BLOCK):
                at = first + tl.arange(0, BLOCK)
                tl.store(x + line * length + at, value, mask=at < length)


@triton.jit(**ANY_SIZE)
def clear_kernel(
    x, y, z, cu_x, cu_y, batch, n_q, n_k, lines, x_size, y_size, z_size,
    Y: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x = 0 past the tokens that cu_x counts, of n_q, and y = Y and z = 0 past those of cu_y, of n_k; y has `lines` of
    them. OVERLAP: beside the last programs of the kernel before, which does not write there, and no shorter."""
    fill(x, tl.load(cu_x + batch), 0.0, 1, n_q, x_size, BLOCK)
    fill(y, tl.load(cu_y + batch), Y, lines, n_k, y_size, BLOCK)
    if z is not None:
        fill(z, tl.load(cu_y + batch), 0.0, 1, n_k, z_size, BLOCK)
    if OVERLAP:
        gdc_wait()
