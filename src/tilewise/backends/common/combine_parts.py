"""Sums of the rows of parts that belong to one row of a result: outputs weighted by their lse, or gradients. And the
products of rows, rowsum(dO * O)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device.structs import ANY_SIZE, LOG2E
from .launch import INTERPRETED, Launch
from .shapes import padded

LN2 = tl.constexpr(0.6931471805599453)
ELEMENTS = 2048  # of a program's tile


class PartTensors(NamedTuple):
    """base (lines, G, D) and parts (count, G, D), contiguous; their lse (lines, G) and (G, count), or None for a plain
    sum; positions (lines, most): the parts of each line, `count` or more for none; and the results."""

    base: tl.tensor
    lse: tl.tensor
    parts: tl.tensor
    part_lse: tl.tensor
    positions: tl.tensor
    out: tl.tensor
    out_lse: tl.tensor


class PartConfig(NamedTuple):
    GROUP: int
    D: int
    BLOCK_R: int
    BLOCK_D: int


@triton.jit(**ANY_SIZE)
def combine_kernel(tensors, rows, count, most, CONFIG: tl.constexpr):
    """A row is a line and one of its G heads."""
    r = tl.program_id(0).to(tl.int64) * CONFIG.BLOCK_R + tl.arange(0, CONFIG.BLOCK_R)
    d = tl.arange(0, CONFIG.BLOCK_D)[None, :]
    exists, line, g = r < rows, r // CONFIG.GROUP, r % CONFIG.GROUP
    inside = exists[:, None] & (d < CONFIG.D)
    acc = tl.load(tensors.base + r[:, None] * CONFIG.D + d, mask=inside, other=0.0).to(tl.float32)
    m = tl.full([CONFIG.BLOCK_R], 0.0, tl.float32)
    l = tl.full([CONFIG.BLOCK_R], 1.0, tl.float32)
    if tensors.lse is not None:
        m = tl.load(tensors.lse + r, mask=exists, other=0.0) * LOG2E
    for slot in tl.range(0, most):
        at = tl.load(tensors.positions + line * most + slot, mask=exists, other=0).to(tl.int64)
        named = exists & (at < count)
        row = at * CONFIG.GROUP + g
        part = tl.load(tensors.parts + row[:, None] * CONFIG.D + d, mask=named[:, None] & (d < CONFIG.D), other=0.0)
        if tensors.lse is None:
            acc += part.to(tl.float32)
        else:
            log = tl.load(tensors.part_lse + g * count + at, mask=named, other=float("-inf")) * LOG2E
            top = tl.maximum(m, log, propagate_nan=tl.PropagateNan.ALL)
            base = tl.where(top == float("-inf"), 0.0, top)
            a, b = tl.exp2(m - base), tl.exp2(log - base)
            acc = acc * a[:, None] + part.to(tl.float32) * b[:, None]
            m, l = top, l * a + b
    if tensors.lse is not None:
        acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        tl.store(tensors.out_lse + r, (m + tl.log2(l)) * LN2, mask=exists)
    tl.store(tensors.out + r[:, None] * CONFIG.D + d, acc.to(tensors.out.dtype.element_ty), mask=inside)


def combine_launch(tensors: PartTensors) -> Launch:
    lines, group, d = tensors.base.shape
    columns = padded(d)
    block = max(1, (256 if INTERPRETED else ELEMENTS) // columns)
    config = PartConfig(group, d, block, columns)
    numbers = lines * group, tensors.parts.shape[0], tensors.positions.shape[1]
    return Launch(combine_kernel, -(-lines * group // block), (tensors, *numbers), {"CONFIG": config, "num_warps": 4})


def combine(
    base: Tensor, lse: Tensor | None, parts: Tensor, part_lse: Tensor | None, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(out in `dtype`, lse; lse is empty for a plain sum)"""
    out = torch.empty(base.shape, dtype=dtype, device=base.device)
    out_lse = torch.empty(0 if lse is None else base.shape[:2], dtype=torch.float32, device=base.device)
    combine_launch(PartTensors(base, lse, parts, part_lse, positions, out, out_lse))()
    return out, out_lse


@triton.jit(**ANY_SIZE)
def row_dots_kernel(a, b, out, rows, CONFIG: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * CONFIG.BLOCK_R + tl.arange(0, CONFIG.BLOCK_R)
    d = tl.arange(0, CONFIG.BLOCK_D)[None, :]
    inside, at = (r < rows)[:, None] & (d < CONFIG.D), r[:, None] * CONFIG.D + d
    x = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + r, tl.sum(x * y, 1), mask=r < rows)


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """The sums of a * b over the last axis, in float32. Both are contiguous."""
    out = torch.empty(a.shape[:-1], dtype=torch.float32, device=a.device)
    d, rows = a.shape[-1], out.numel()
    block = max(1, (256 if INTERPRETED else ELEMENTS) // padded(d))
    config = PartConfig(1, d, block, padded(d))
    Launch(row_dots_kernel, -(-rows // block), (a, b, out, rows), {"CONFIG": config, "num_warps": 4})()
    return out
