"""Sums of the rows of parts that belong to one row of a result: outputs weighted by their lse, or gradients. And the
products of rows, rowsum(dO * O)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...request import padded
from .device.structs import ANY_SIZE, LOG2E
from .launch import INTERPRETED, Launch

LN2 = tl.constexpr(0.6931471805599453)
ELEMENTS = 2048  # of a program's tile


class PartTensors(NamedTuple):
    """base (lines, G, D) or None, and parts (count, G, D), contiguous; their lse (lines, G) and (G, count), or None for
    a plain sum; positions (lines, most): the parts of each line, `count` or more for none; and the results."""

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
    acc = tl.full([CONFIG.BLOCK_R, CONFIG.BLOCK_D], 0.0, tl.float32)
    m = tl.full([CONFIG.BLOCK_R], float("-inf"), tl.float32)
    l = tl.full([CONFIG.BLOCK_R], 0.0, tl.float32)
    if tensors.base is not None:
        acc = tl.load(tensors.base + r[:, None] * CONFIG.D + d, mask=inside, other=0.0).to(tl.float32)
    if tensors.lse is not None:
        m = tl.load(tensors.lse + r, mask=exists, other=0.0) * LOG2E
        l += 1.0
    for slot in tl.range(0, most):
        at = tl.load(tensors.positions + line * most + slot, mask=exists, other=0).to(tl.int64)
        named = exists & (at < count)
        row = at * CONFIG.GROUP + g
        part = tl.load(tensors.parts + row[:, None] * CONFIG.D + d, mask=named[:, None] & (d < CONFIG.D), other=0.0)
        if tensors.part_lse is None:
            acc += part.to(tl.float32)
        else:
            log = tl.load(tensors.part_lse + g * count + at, mask=named, other=float("-inf")) * LOG2E
            top = tl.maximum(m, log, propagate_nan=tl.PropagateNan.ALL)
            base = tl.where(top == float("-inf"), 0.0, top)
            a, b = tl.exp2(m - base), tl.exp2(log - base)
            acc = acc * a[:, None] + part.to(tl.float32) * b[:, None]
            m, l = top, l * a + b
    if tensors.part_lse is not None:
        acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        tl.store(tensors.out_lse + r, (m + tl.log2(l)) * LN2, mask=exists)
    tl.store(tensors.out + r[:, None] * CONFIG.D + d, acc.to(tensors.out.dtype.element_ty), mask=inside)


def combine(
    base: Tensor | None,
    lse: Tensor | None,
    parts: Tensor,
    part_lse: Tensor | None,
    positions: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(out in `dtype`, lse; lse is empty for a plain sum)"""
    (lines, most), (count, group, d) = positions.shape, parts.shape
    out = torch.empty((lines, group, d), dtype=dtype, device=parts.device)
    logs = torch.empty(0 if part_lse is None else (lines, group), dtype=torch.float32, device=parts.device)
    block = max(1, (256 if INTERPRETED else ELEMENTS) // padded(d))
    tensors = PartTensors(base, lse, parts, part_lse, positions, out, logs)
    options = {"CONFIG": PartConfig(group, d, block, padded(d)), "num_warps": 4}
    Launch(combine_kernel, -(-lines * group // block), (tensors, lines * group, count, most), options)()
    return out, logs


@triton.jit(**ANY_SIZE)
def add_sums_kernel(base, sums, out, rows, scale, CONFIG: tl.constexpr):
    """out = base + scale * sums, whose columns are in the order of `hopper/parts.in_fours`."""
    r = tl.program_id(0).to(tl.int64) * CONFIG.BLOCK_R + tl.arange(0, CONFIG.BLOCK_R)
    d = tl.arange(0, CONFIG.BLOCK_D)[None, :]
    place = (d & -16) + ((d & 6) << 1) + ((d & 8) >> 2) + (d & 1)
    exists = (r < rows)[:, None]
    x = tl.load(base + r[:, None] * CONFIG.D + d, mask=exists, other=0.0).to(tl.float32)
    y = tl.load(sums + r[:, None] * CONFIG.D + place, mask=exists, other=0.0)
    tl.store(out + r[:, None] * CONFIG.D + d, (x + scale * y).to(out.dtype.element_ty), mask=exists)


def add_sums(base: Tensor, sums: Tensor, scale: float) -> Tensor:
    """base + scale * sums in base's dtype. Head dims are powers of two, both tensors contiguous."""
    out = torch.empty_like(base)
    d, rows = base.shape[-1], base.numel() // base.shape[-1]
    block = max(1, (256 if INTERPRETED else ELEMENTS) // d)
    options = {"CONFIG": PartConfig(1, d, block, d), "num_warps": 4}
    Launch(add_sums_kernel, -(-rows // block), (base, sums, out, rows, scale), options)()
    return out


@triton.jit(**ANY_SIZE)
def gather_kernel(x, lines, out, count, CONFIG: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * CONFIG.BLOCK_R + tl.arange(0, CONFIG.BLOCK_R)
    d = tl.arange(0, CONFIG.BLOCK_D)[None, :]
    line = tl.load(lines + r, mask=r < count, other=0).to(tl.int64)
    inside = (r < count)[:, None] & (d < CONFIG.D)
    tl.store(out + r[:, None] * CONFIG.D + d, tl.load(x + line[:, None] * CONFIG.D + d, mask=inside), mask=inside)


def gather(x: Tensor, lines: Tensor) -> Tensor:
    """x[lines] of a contiguous x: torch's kernel has a quarter of the memory's rate for rows of 256 bytes."""
    d = x.numel() // len(x)
    out = torch.empty((len(lines), *x.shape[1:]), dtype=x.dtype, device=x.device)
    block = max(1, (256 if INTERPRETED else 2 * ELEMENTS) // padded(d))
    options = {"CONFIG": PartConfig(1, d, block, padded(d)), "num_warps": 4}
    Launch(gather_kernel, -(-len(lines) // block), (x, lines, out, len(lines)), options)()
    return out


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
