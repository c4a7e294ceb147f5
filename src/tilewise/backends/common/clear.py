"""A packed buffer may be longer than its sequences. No other kernel writes the rows after the last sequence; this one
fills them as rows without visible keys. And the largest score of each head starts from -inf."""

import triton
import triton.language as tl
from torch import Tensor

from ...request import Gpu
from .device.structs import ANY_SIZE
from .launch import Launch, can_overlap, overlapped
from .pdl import gdc_wait

BLOCK: tl.constexpr = tl.constexpr(1024)
HEADS_AT_ONCE: tl.constexpr = tl.constexpr(1024)


@triton.jit
def fill(x, used, value, lines, tokens, size):
    """Fill x (lines, tokens, size) from token `used` on."""
    start = tl.maximum(used, 0).to(tl.int64) * size + tl.program_id(0) * BLOCK
    length = tl.cast(tokens, tl.int64) * size
    if start < length:
        for line in range(lines):
            for first in range(start, length, tl.num_programs(0) * BLOCK):
                at = first + tl.arange(0, BLOCK)
                tl.store(x + line * length + at, value, mask=at < length)


@triton.jit(**ANY_SIZE)
def clear_kernel(
    tensors, cu_x, cu_y, batch, n_q, n_k, lines, x_size, y_size, z_size, Y: tl.constexpr, OVERLAP: tl.constexpr
):
    """Of the tensors x, y and z (or None): x = 0 from token cu_x[batch] to n_q; y = Y and z = 0 from token cu_y[batch]
    to n_k. y is (lines, n_k, y_size). OVERLAP: starts before the previous kernel, which does not write there, ends, and
    ends after it."""
    fill(tensors[0], tl.load(cu_x + batch), 0.0, 1, n_q, x_size)
    fill(tensors[1], tl.load(cu_y + batch), Y, lines, n_k, y_size)
    if tensors[2] is not None:
        fill(tensors[2], tl.load(cu_y + batch), 0.0, 1, n_k, z_size)
    if OVERLAP:
        gdc_wait()


def clear_launches(
    x: Tensor, y: Tensor, z: Tensor | None, cu_x: Tensor | None, cu_y: Tensor | None, gpu: Gpu, y_value: float = 0.0
) -> list[Launch]:
    """The launch that fills packed results after the last sequence: x and z with 0, y, (head, token) or (token, head,
    dim), with y_value. None for a dense batch."""
    if cu_x is None or cu_y is None:
        return []
    lines = y.shape[0] if y.dim() == 2 else 1
    sizes = [0 if t is None else t[0].numel() if t.dim() == 3 and len(t) else 1 for t in (x, y, z)]
    args = (x, y, z), cu_x, cu_y, cu_x.shape[0] - 1, x.shape[0], y.shape[-1 if y.dim() == 2 else 0], lines, *sizes
    return [Launch(clear_kernel, 128, args, {"Y": y_value} | overlapped(can_overlap(gpu)))]


@triton.jit(**ANY_SIZE)
def clear_max_logit_kernel(max_logit, total):
    """Set max_logit to -inf. The attention kernels then raise it to the largest score of each tile."""
    at = tl.program_id(0) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    tl.store(max_logit + at, float("-inf"), mask=at < total)


def clear_max_logit(max_logit: Tensor | None) -> list[Launch]:
    """The launch before those that compute the largest score of each head, if the call returns it."""
    if max_logit is None:
        return []
    total = max_logit.numel()
    return [Launch(clear_max_logit_kernel, -(-total // HEADS_AT_ONCE.value), (max_logit, total), {"num_warps": 4})]
