"""What native sparse attention computes beside attention: the weights of blocks, and the gated sum of its branches."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...request import Gpu, padded
from .device.structs import ANY_SIZE, LOG2E
from .kernel_call import view
from .kernel_config import precision
from .launch import INTERPRETED, Launch

ROW_ELEMENTS = 2048  # of a tile of the gated sum


class WeightTensors(NamedTuple):
    """Views of q and of the compressed keys; lse (batch, heads, queries) and out, contiguous."""

    q: tl.tuple
    k: tl.tuple
    lse: tl.tensor
    out: tl.tensor


class WeightConfig(NamedTuple):
    """A tile has QUERIES of HEADS rows each: the query heads of a group, GROUP, padded."""

    D: int
    BLOCK_D: int
    GROUP: int
    HEADS: int
    QUERIES: int
    BLOCK_N: int
    PRECISION: str


@triton.jit(**ANY_SIZE)
def block_weights_kernel(tensors, n_q, count, kv_heads, block_size, scale, CONFIG: tl.constexpr):
    """sum over the heads of a group of exp(s - lse), for the blocks before a query's own; -1 for the others."""
    ROWS: tl.constexpr = CONFIG.QUERIES * CONFIG.HEADS
    q, k = tensors.q, tensors.k
    tiles = tl.cdiv(n_q, CONFIG.QUERIES)
    pid = tl.program_id(0).to(tl.int64)
    first, h_kv, b = pid % tiles * CONFIG.QUERIES, pid // tiles % kv_heads, pid // tiles // kv_heads
    r, d = tl.arange(0, ROWS), tl.arange(0, CONFIG.BLOCK_D)[None, :]
    i, g = first + r // CONFIG.HEADS, r % CONFIG.HEADS
    exists, h = (i < n_q) & (g < CONFIG.GROUP), h_kv * CONFIG.GROUP + g
    rows = q.ptr + b * q.strides[0] + i[:, None] * q.strides[1] + h[:, None] * q.strides[2]
    q_tile = tl.load(rows + d * q.strides[3], mask=exists[:, None] & (d < CONFIG.D), other=0.0)
    lse = tl.load(tensors.lse + (b * kv_heads * CONFIG.GROUP + h) * n_q + i, mask=exists, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    query = first + tl.arange(0, CONFIG.QUERIES)
    own = query // block_size
    for start in tl.range(0, count, CONFIG.BLOCK_N):
        c = start + tl.arange(0, CONFIG.BLOCK_N)
        weight = tl.full([CONFIG.QUERIES, CONFIG.BLOCK_N], -1.0, tl.float32)
        if start * block_size <= first + CONFIG.QUERIES:
            keys = k.ptr + b * k.strides[0] + c.to(tl.int64)[:, None] * k.strides[1] + h_kv * k.strides[2]
            k_tile = tl.load(keys + d * k.strides[3], mask=(c < count)[:, None] & (d < CONFIG.D), other=0.0)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=CONFIG.PRECISION) * scale
            p = tl.where(exists[:, None], tl.exp2((s - lse[:, None]) * LOG2E), 0.0)
            total = tl.sum(tl.reshape(p, [CONFIG.QUERIES, CONFIG.HEADS, CONFIG.BLOCK_N]), 1)
            weight = tl.where(c[None, :] < own[:, None], total, -1.0)
        out = tensors.out + ((b * n_q + query[:, None]) * kv_heads + h_kv) * count + c[None, :]
        tl.store(out, weight, mask=(query < n_q)[:, None] & (c < count)[None, :])


def block_weights(q: Tensor, keys: Tensor, lse: Tensor, block_size: int, scale: float, gpu: Gpu) -> Tensor:
    """(B, S, Hk, blocks) float32. `lse` (B, H, S) is contiguous."""
    batch, n, heads, d = q.shape
    count, kv_heads = keys.shape[1], keys.shape[2]
    out = torch.empty((batch, n, kv_heads, count), dtype=torch.float32, device=q.device)
    group, columns = heads // kv_heads, padded(d)
    each = padded(group, 1)
    rows = 16 if INTERPRETED else 128 if columns * q.element_size() <= 256 else 64
    queries = max(1, rows // each)
    tile = WeightConfig(
        d, columns, group, max(each, 16 // queries), queries, 16 if INTERPRETED else 64, precision(q, gpu)
    )
    numbers = n, count, kv_heads, block_size, scale
    options = {"CONFIG": tile, "num_warps": 8 if rows == 128 else 4, "num_stages": 2}
    tensors = WeightTensors(view(q), view(keys), lse, out)
    Launch(block_weights_kernel, batch * kv_heads * -(-n // queries), (tensors, *numbers), options)()
    return out


class GateTensors(NamedTuple):
    """Outputs (rows, D) and gates (rows,) of the branches, contiguous; their gradients, or None; and the sum, or its
    gradient."""

    outs: tl.tuple
    gates: tl.tuple
    douts: tl.tuple
    dgates: tl.tuple
    total: tl.tensor


class GateConfig(NamedTuple):
    D: int
    BLOCK_D: int
    BLOCK_R: int
    BRANCHES: int


@triton.jit(**ANY_SIZE)
def gated_sum_kernel(tensors, rows, CONFIG: tl.constexpr):
    """The sum of gate * out; or dout = gate * d and dgate = rowsum(out * d), where d is the gradient of the sum."""
    BRANCHES: tl.constexpr = CONFIG.BRANCHES
    r = tl.program_id(0).to(tl.int64) * CONFIG.BLOCK_R + tl.arange(0, CONFIG.BLOCK_R)
    d = tl.arange(0, CONFIG.BLOCK_D)[None, :]
    exists = r < rows
    inside, at = exists[:, None] & (d < CONFIG.D), r[:, None] * CONFIG.D + d
    total = tl.full([CONFIG.BLOCK_R, CONFIG.BLOCK_D], 0.0, tl.float32)
    if tensors.douts is not None:
        total = tl.load(tensors.total + at, mask=inside, other=0.0).to(tl.float32)
    for n in tl.static_range(BRANCHES):
        out = tl.load(tensors.outs[n] + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(tensors.gates[n] + r, mask=exists, other=0.0).to(tl.float32)
        if tensors.douts is None:
            total += out * gate[:, None]
        else:
            dtype = tensors.dgates[n].dtype.element_ty
            tl.store(tensors.douts[n] + at, (total * gate[:, None]).to(tensors.douts[n].dtype.element_ty), mask=inside)
            tl.store(tensors.dgates[n] + r, tl.sum(total * out, 1).to(dtype), mask=exists)
    if tensors.douts is None:
        tl.store(tensors.total + at, total.to(tensors.total.dtype.element_ty), mask=inside)


def gated_launch(tensors: GateTensors) -> Launch:
    d = tensors.total.shape[-1]
    rows, columns = tensors.total.numel() // max(1, d), padded(d)
    block = max(1, (256 if INTERPRETED else ROW_ELEMENTS) // columns)
    config = GateConfig(d, columns, block, len(tensors.outs))
    return Launch(gated_sum_kernel, -(-rows // block), (tensors, rows), {"CONFIG": config, "num_warps": 4})
