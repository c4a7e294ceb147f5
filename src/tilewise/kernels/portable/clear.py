"""A packed buffer may be longer than its sequences. Rows past the last one are empty rows; nobody else writes them."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..overlap import gdc_wait


class Tail(NamedTuple):
    """A tensor whose last tokens are cleared: `lines` of `length` elements, `unit` of them per token.
    (token, head, dim) is one line, (head, token) has one for each head."""

    ptr: tl.tensor
    lines: tl.tensor
    length: tl.tensor
    unit: tl.tensor


@triton.jit
def fill(x, used, value, BLOCK: tl.constexpr):
    """x from token `used` on."""
    if x.ptr is not None:
        start = tl.maximum(used, 0).to(tl.int64) * x.unit + tl.program_id(0) * BLOCK
        length = tl.cast(x.length, tl.int64)
        if start < length:
            for line in range(x.lines):
                for first in range(start, length, tl.num_programs(0) * BLOCK):
                    at = first + tl.arange(0, BLOCK)
                    tl.store(x.ptr + line * length + at, value, mask=at < length)


@triton.jit(do_not_specialize=["batch"])
def clear_kernel(x, y, z, cu_x, cu_y, batch, Y: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """x = 0 past the tokens that cu_x counts, y = Y and z = 0 past those of cu_y. OVERLAP: beside the last programs of
    the kernel before, which does not write there, and no shorter."""
    fill(x, tl.load(cu_x + batch), 0.0, BLOCK)
    fill(y, tl.load(cu_y + batch), Y, BLOCK)
    fill(z, tl.load(cu_y + batch), 0.0, BLOCK)
    if OVERLAP:
        gdc_wait()
