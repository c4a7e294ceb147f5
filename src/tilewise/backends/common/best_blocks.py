"""The blocks of keys with the largest weights, for each query."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...request import padded
from .device.structs import ANY_SIZE
from .kernel_call import view
from .launch import INTERPRETED, Launch

MOST_BLOCKS = 4096
MOST_GATED = 128  # blocks whose products with queries are one tile
ELEMENTS = 2048  # of a program's tile


class GateConfig(NamedTuple):
    """A tile has BLOCK_M queries of one head and all blocks, in BLOCK_N columns."""

    D: int
    BLOCK_D: int
    GROUP: int
    BLOCK_M: int
    BLOCK_N: int


@triton.jit
def store_best(x, r, exists, lo, hi, out, most):
    """The columns of the `most` largest numbers of the rows r of x, from lo (rows, 1) to hi - 1; -1 where there are
    fewer. Numbers and columns are sorted as one integer, so that of equal numbers the first is the largest."""
    c = tl.arange(0, x.shape[1])[None, :]
    bits = x.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the numbers
    NONE: tl.constexpr = -(2**63)
    key = tl.where((c >= lo) & (c < hi), bits.to(tl.int64) * 65536 + (65535 - c), NONE)
    for n in tl.range(0, most):
        best = tl.max(key, 1)
        found = tl.where(best == NONE, -1, 65535 - (best & 65535)).to(tl.int32)
        tl.store(out + r * most + n, found, mask=exists)
        key = tl.where(key == best[:, None], NONE, key)


@triton.jit(**ANY_SIZE)
def best_blocks_kernel(
    weight, first, own, out, rows, choosers, blocks, most, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    """A row is a token and one of its choosers."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.arange(0, BLOCK_N)[None, :]
    exists = r < rows
    lo = tl.load(first + r // choosers, mask=exists, other=0)[:, None]
    hi = tl.load(own + r // choosers, mask=exists, other=0)[:, None]
    x = tl.load(weight + r[:, None] * blocks + c, mask=exists[:, None] & (c < blocks), other=0.0)
    store_best(x, r, exists, lo, hi, out, most)


@triton.jit(**ANY_SIZE)
def mean_key_kernel(q, means, out, n, heads, blocks, block_size, most, CONFIG: tl.constexpr):
    """The blocks before each query with the largest q . mean. `means` (3, batch, blocks, KV heads, D): each mean as a
    sum of three numbers in the dtype of q, whose products are exact in float32."""
    tiles = tl.cdiv(n, CONFIG.BLOCK_M)
    pid = tl.program_id(0).to(tl.int64)
    first, h, b = pid % tiles * CONFIG.BLOCK_M, pid // tiles % heads, pid // tiles // heads
    i, d = first + tl.arange(0, CONFIG.BLOCK_M), tl.arange(0, CONFIG.BLOCK_D)
    c = tl.arange(0, CONFIG.BLOCK_N)
    rows = q.ptr + b * q.strides[0] + i[:, None] * q.strides[1] + h * q.strides[2]
    inside = d < CONFIG.D
    q_tile = tl.load(rows + d[None, :] * q.strides[3], mask=(i < n)[:, None] & inside[None, :], other=0.0)
    kv_heads = heads // CONFIG.GROUP
    batch = tl.num_programs(0) // (tiles * heads)
    s = tl.full([CONFIG.BLOCK_M, CONFIG.BLOCK_N], 0.0, tl.float32)
    for part in tl.static_range(3):
        line = ((part * batch + b) * blocks + c) * kv_heads + h // CONFIG.GROUP
        keys = tl.load(
            means + line[None, :] * CONFIG.D + d[:, None], mask=(c < blocks)[None, :] & inside[:, None], other=0
        )
        s = tl.dot(q_tile, keys, s)
    row = (b * n + i) * heads + h
    store_best(s, row, i < n, 0, (i // block_size)[:, None], out, most)


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


def blocks_by_mean_key(q: Tensor, means: Tensor, block_size: int, most: int) -> Tensor:
    """(B, S, H, most) int32: the blocks before each query's own with the largest q . mean; -1 where there are fewer.
    q is in a 16-bit dtype, `means` (B, blocks, Hk, D) in float32."""
    batch, n, heads, dim = q.shape
    blocks, kv_heads = means.shape[1:3]
    parts = []
    for _ in range(3):
        parts.append(means.to(q.dtype))
        means = means - parts[-1]
    out = torch.empty((batch, n, heads, most), dtype=torch.int32, device=q.device)
    columns = padded(blocks)
    rows = 16 if INTERPRETED else max(16, min(64, 4096 // columns))
    config = GateConfig(dim, padded(dim), heads // kv_heads, rows, columns)
    numbers = n, heads, blocks, block_size, most
    options = {"CONFIG": config, "num_warps": 4}
    Launch(mean_key_kernel, batch * heads * -(-n // rows), (view(q), torch.stack(parts), out, *numbers), options)()
    return out
