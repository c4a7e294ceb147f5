"""The blocks of keys with the largest weights, for each query."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device.structs import ANY_SIZE
from .launch import INTERPRETED, Launch
from .shapes import padded

MOST_BLOCKS = 4096
ELEMENTS = 2048  # of a program's tile


@triton.jit(**ANY_SIZE)
def best_blocks_kernel(
    weight, first, own, out, rows, choosers, blocks, most, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    """A row is a token and one of its choosers. Weights and block numbers are sorted as one integer, so that of equal
    weights the first block is the largest."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.arange(0, BLOCK_N)[None, :]
    exists = r < rows
    lo = tl.load(first + r // choosers, mask=exists, other=0)[:, None]
    hi = tl.load(own + r // choosers, mask=exists, other=0)[:, None]
    x = tl.load(weight + r[:, None] * blocks + c, mask=exists[:, None] & (c < blocks), other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the numbers
    NONE: tl.constexpr = -(2**63)
    key = tl.where((c >= lo) & (c < hi), bits.to(tl.int64) * 65536 + (65535 - c), NONE)
    for n in tl.range(0, most):
        best = tl.max(key, 1)
        found = tl.where(best == NONE, -1, 65535 - (best & 65535)).to(tl.int32)
        tl.store(out + r * most + n, found, mask=exists)
        key = tl.where(key == best[:, None], NONE, key)


def best_blocks(weight: Tensor, first: Tensor, own: Tensor, most: int) -> Tensor:
    """(T, C, most) int32: of the weights (T, C, blocks) the largest among the blocks first[t] to own[t] - 1 of a token;
    -1 where there are fewer."""
    tokens, choosers, blocks = weight.shape
    out = torch.empty((tokens, choosers, most), dtype=torch.int32, device=weight.device)
    columns, rows = padded(blocks), tokens * choosers
    block = max(1, (256 if INTERPRETED else ELEMENTS) // columns)
    numbers = rows, choosers, blocks, most
    options = {"BLOCK_R": block, "BLOCK_N": columns, "num_warps": 4}
    Launch(best_blocks_kernel, -(-rows // block), (weight, first, own, out, *numbers), options)()
    return out
