"""A packed buffer may be longer than its sequences. Rows past the last one are empty rows; nobody else writes them."""

import triton
import triton.language as tl
from torch import Tensor

from .device.structs import ANY_SIZE
from .gpu import Gpu
from .launch import Launch, can_overlap, overlapped
from .pdl import gdc_wait


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


def clear_launches(
    x: Tensor, y: Tensor, z: Tensor | None, cu_x: Tensor | None, cu_y: Tensor | None, gpu: Gpu, y_value: float = 0.0
) -> list[Launch]:
    """Of packed results, whatever lies past the last sequence: 0, in y (head, token) or (token, head, dim) y_value."""
    if cu_x is None or cu_y is None:
        return []
    lines = y.shape[0] if y.dim() == 2 else 1
    sizes = [0 if t is None else t[0].numel() if t.dim() == 3 and len(t) else 1 for t in (x, y, z)]
    args = x, y, z, cu_x, cu_y, cu_x.shape[0] - 1, x.shape[0], y.shape[-1 if y.dim() == 2 else 0], lines, *sizes
    return [Launch(clear_kernel, 128, args, {"Y": y_value, "BLOCK": 1024} | overlapped(can_overlap(gpu)))]
