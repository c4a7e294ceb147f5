"""Causal attention of the queries that chose a block of keys over this block, for blocks that are one tile of keys.

A program keeps one block of one KV head and loops over its choices, which are sorted by block: it gathers QUERIES of
them at a time, with the HEADS query heads of each. The forward stores (out, lse) of every choice, to be merged by
`combine_parts`. The backward, given lse and delta = rowsum(dO * O) of the merged result, stores the part of dq of every
choice, and the sums dk and dv of the block.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...request import padded
from .device.softmax import logsumexp, softmax_step
from .device.structs import ANY_SIZE, LOG2E
from .kernel_call import view
from .launch import INTERPRETED, Launch

FORWARD_TILE, BACKWARD_TILE = (64, 4, 3), (64, 4, 2)  # rows, warps, stages
RANGE = 2048  # tokens whose choices of any block the forward computes at about the same time: q is then in L2


class ChoiceTensors(NamedTuple):
    """Views of q, k and v (packed); lines (choices,): token * choosers + chooser; cu_q (kv_heads * blocks + 1,) the
    choices of each block, starts (blocks + 1,) its tokens."""

    q: tl.tuple
    k: tl.tuple
    v: tl.tuple
    lines: tl.tensor
    cu_q: tl.tensor
    starts: tl.tensor


class ChoiceGradients(NamedTuple):
    """A view of do; lse and delta (tokens, heads), and the results: dq by choice, dk and dv. All but do are
    contiguous."""

    do: tl.tuple
    lse: tl.tensor
    delta: tl.tensor
    dq: tl.tensor
    dk: tl.tensor
    dv: tl.tensor


class ChoiceConfig(NamedTuple):
    """A query has GROUP heads, which take HEADS rows of a tile, a power of two. A tile has QUERIES queries."""

    GROUP: int
    HEADS: int
    QUERIES: int
    BLOCK_N: int
    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int


class Chosen(NamedTuple):
    """The block of a program: KV head, first token, number of tokens, and its choices from `begin` to `end`."""

    h_kv: tl.tensor
    first: tl.tensor
    size: tl.tensor
    begin: tl.tensor
    end: tl.tensor


class ChoiceRows(NamedTuple):
    """The rows of a tile: choice, head of it, token, query head, and whether they exist."""

    choice: tl.tensor
    g: tl.tensor
    token: tl.tensor
    h: tl.tensor
    exists: tl.tensor


@triton.jit
def chosen_block(tensors, number, blocks, kv_heads):
    n, h_kv = number // kv_heads, number % kv_heads  # blocks with small numbers have the most choices: they come first
    first = tl.load(tensors.starts + n).to(tl.int64)
    size = (tl.load(tensors.starts + n + 1) - first).to(tl.int32)
    line = h_kv * blocks + n
    return Chosen(h_kv, first, size, tl.load(tensors.cu_q + line), tl.load(tensors.cu_q + line + 1))


@triton.jit(**ANY_SIZE)
def range_starts_kernel(lines, cu_q, out, segments, ranges, choosers, RANGE: tl.constexpr, BLOCK: tl.constexpr):
    """The first choice of every block, cu_q[n] to cu_q[n + 1] - 1 in the order of tokens, from each range of tokens on:
    a binary search."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    segment, least = n // ranges, n % ranges * RANGE
    exists = segment < segments
    lo = tl.load(cu_q + segment, mask=exists, other=0)
    hi = tl.load(cu_q + segment + 1, mask=exists, other=0)
    for _ in tl.range(0, 31):
        middle = (lo + hi) // 2
        line = tl.load(lines + middle, mask=exists & (lo < hi), other=0)
        is_before = (lo < hi) & (line // choosers < least)
        hi = tl.where(is_before, hi, middle)
        lo = tl.where(is_before, middle + 1, lo)
    tl.store(out + n, lo, mask=exists)


@triton.jit
def load_lines(tensors, start, end, CONFIG: tl.constexpr):
    """The lines of the rows of a tile. They are loaded an iteration ahead: else the loads of queries, which need them,
    begin after the products."""
    choice = start + tl.arange(0, CONFIG.QUERIES * CONFIG.HEADS) // CONFIG.HEADS
    return tl.load(tensors.lines + choice, mask=choice < end, other=0)


@triton.jit
def choice_rows(line, start, end, choosers, CONFIG: tl.constexpr):
    r = tl.arange(0, CONFIG.QUERIES * CONFIG.HEADS)
    choice, g = (start + r // CONFIG.HEADS).to(tl.int64), r % CONFIG.HEADS
    exists = (choice < end) & (g < CONFIG.GROUP)
    line = line.to(tl.int64)
    return ChoiceRows(choice, g, line // choosers, line % choosers * CONFIG.GROUP + g, exists)


@triton.jit
def load_choices(x, at, D: tl.constexpr, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)[None, :]
    pointers = x.ptr + at.token[:, None] * x.strides[1] + at.h[:, None] * x.strides[2] + d * x.strides[3]
    return tl.load(pointers, mask=at.exists[:, None] & (d < D), other=0.0)


@triton.jit
def load_block(x, block, BLOCK_N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    j, d = tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)[None, :]
    rows = x.ptr + (block.first + j)[:, None] * x.strides[1] + block.h_kv * x.strides[2]
    return tl.load(rows + d * x.strides[3], mask=(j < block.size)[:, None] & (d < D), other=0.0)


@triton.jit(**ANY_SIZE)
def block_forward_kernel(
    tensors, range_starts, out, out_lse, blocks, kv_heads, choosers, count, ranges, scale, CONFIG: tl.constexpr
):
    pid = tl.program_id(0)
    block = chosen_block(tensors, pid % (blocks * kv_heads), blocks, kv_heads)
    at_range = (block.h_kv * blocks + pid % (blocks * kv_heads) // kv_heads) * ranges + pid // (blocks * kv_heads)
    begin = tl.load(range_starts + at_range)
    end = tl.minimum(block.end, tl.load(range_starts + at_range + 1))
    k_tile = load_block(tensors.k, block, CONFIG.BLOCK_N, CONFIG.D, CONFIG.BLOCK_D)
    v_tile = load_block(tensors.v, block, CONFIG.BLOCK_N, CONFIG.DV, CONFIG.BLOCK_DV)
    j = tl.arange(0, CONFIG.BLOCK_N)[None, :]
    d = tl.arange(0, CONFIG.BLOCK_DV)[None, :]
    ROWS: tl.constexpr = CONFIG.QUERIES * CONFIG.HEADS
    line = load_lines(tensors, begin, end, CONFIG)
    for start in tl.range(begin, end, CONFIG.QUERIES):
        next_line = load_lines(tensors, start + CONFIG.QUERIES, end, CONFIG)
        at = choice_rows(line, start, end, choosers, CONFIG)
        q_tile = load_choices(tensors.q, at, CONFIG.D, CONFIG.BLOCK_D)
        visible = (j < block.size) & (block.first + j <= at.token[:, None])
        s = tl.where(visible, tl.dot(q_tile, tl.trans(k_tile)) * scale, float("-inf"))
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.full([ROWS], 0.0, tl.float32)
        p, _, m, l = softmax_step(m, l, s, LOG2E, 1, False)  # 1: m is a score, not in log2 units
        acc = tl.dot(p.to(v_tile.dtype), v_tile) / tl.where(l == 0.0, 1.0, l)[:, None]
        row = at.choice * CONFIG.GROUP + at.g
        dtype = out.dtype.element_ty
        tl.store(out + row[:, None] * CONFIG.DV + d, acc.to(dtype), mask=at.exists[:, None] & (d < CONFIG.DV))
        tl.store(out_lse + at.g * count + at.choice, m + logsumexp(0.0, l), mask=at.exists)
        line = next_line


@triton.jit
def store_block(x, block, tile, kv_heads, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):
    j, d = tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)[None, :]
    at = ((block.first + j)[:, None] * kv_heads + block.h_kv) * D + d
    inside = (j < block.size)[:, None] & (d < D)
    tl.store(x + at, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit(**ANY_SIZE)
def block_backward_kernel(tensors, gradients, blocks, kv_heads, choosers, scale, CONFIG: tl.constexpr):
    """dS = P * (dO V^T - delta);  dQ = scale * dS K;  dK += scale * dS^T Q;  dV += P^T dO"""
    block = chosen_block(tensors, tl.program_id(0), blocks, kv_heads)
    k_tile = load_block(tensors.k, block, CONFIG.BLOCK_N, CONFIG.D, CONFIG.BLOCK_D)
    v_tile = load_block(tensors.v, block, CONFIG.BLOCK_N, CONFIG.DV, CONFIG.BLOCK_DV)
    j = tl.arange(0, CONFIG.BLOCK_N)[None, :]
    dk = tl.full([CONFIG.BLOCK_N, CONFIG.BLOCK_D], 0.0, tl.float32)
    dv = tl.full([CONFIG.BLOCK_N, CONFIG.BLOCK_DV], 0.0, tl.float32)
    d = tl.arange(0, CONFIG.BLOCK_D)[None, :]
    line = load_lines(tensors, block.begin, block.end, CONFIG)
    for start in tl.range(block.begin, block.end, CONFIG.QUERIES):
        next_line = load_lines(tensors, start + CONFIG.QUERIES, block.end, CONFIG)
        at = choice_rows(line, start, block.end, choosers, CONFIG)
        q_tile = load_choices(tensors.q, at, CONFIG.D, CONFIG.BLOCK_D)
        do_tile = load_choices(gradients.do, at, CONFIG.DV, CONFIG.BLOCK_DV)
        statistic = at.token * (choosers * CONFIG.GROUP) + at.h
        lse = tl.load(gradients.lse + statistic, mask=at.exists, other=float("inf"))
        delta = tl.load(gradients.delta + statistic, mask=at.exists, other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile)) * scale
        visible = (j < block.size) & (block.first + j <= at.token[:, None])
        p = tl.where(visible, tl.exp2((s - lse[:, None]) * LOG2E), 0.0)
        dp = tl.dot(do_tile, tl.trans(v_tile))
        ds = (p * (dp - delta[:, None]) * scale).to(q_tile.dtype)
        dv = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, dv)
        dk = tl.dot(tl.trans(ds), q_tile, dk)
        dq = tl.dot(ds, k_tile)
        row = (at.choice * CONFIG.GROUP + at.g)[:, None] * CONFIG.D + d
        tl.store(gradients.dq + row, dq.to(gradients.dq.dtype.element_ty), mask=at.exists[:, None] & (d < CONFIG.D))
        line = next_line
    store_block(gradients.dk, block, dk, kv_heads, CONFIG.D, CONFIG.BLOCK_D, CONFIG.BLOCK_N)
    store_block(gradients.dv, block, dv, kv_heads, CONFIG.DV, CONFIG.BLOCK_DV, CONFIG.BLOCK_N)


class Choices(NamedTuple):
    """lines, cu_q and starts as in `ChoiceTensors`; C choosers of a token; the largest size of a block; and the scale
    of scores."""

    lines: Tensor
    cu_q: Tensor
    starts: Tensor
    choosers: int
    block_size: int
    scale: float


def _options(q: Tensor, v: Tensor, choices: Choices, tile: tuple[int, int, int]) -> dict[str, Any]:
    group = q.shape[1] // choices.choosers
    heads = padded(group, 1)
    rows, warps, stages = (16, 4, 1) if INTERPRETED else tile
    sizes = q.shape[2], v.shape[2], padded(q.shape[2]), padded(v.shape[2])
    config = ChoiceConfig(group, heads, max(1, rows // heads), padded(choices.block_size), *sizes)
    return {"CONFIG": config, "num_warps": warps, "num_stages": stages}


def forward(q: Tensor, k: Tensor, v: Tensor, choices: Choices) -> tuple[Tensor, Tensor]:
    """(out, lse) of the choices, (count, G, Dv) and (G, count)."""
    count, kv_heads, blocks = len(choices.lines), k.shape[1], len(choices.starts) - 1
    options = _options(q, v, choices, FORWARD_TILE)
    config = options["CONFIG"]
    out = torch.empty((count, config.GROUP, v.shape[2]), dtype=q.dtype, device=q.device)
    lse = torch.empty((config.GROUP, count), dtype=torch.float32, device=q.device)
    tensors = ChoiceTensors(view(q), view(k), view(v), *choices[:3])
    ranges, segments = -(-len(q) // RANGE), blocks * kv_heads
    # the last entry is past the last choice, and the one after a block's last range is where the next block begins
    range_starts = torch.full((segments * ranges + 1,), count, dtype=torch.int32, device=q.device)
    search = choices.lines, choices.cu_q, range_starts, segments, ranges, choices.choosers
    Launch(range_starts_kernel, -(-segments * ranges // 128), search, {"RANGE": RANGE, "BLOCK": 128, "num_warps": 4})()
    numbers = blocks, kv_heads, choices.choosers, count, ranges, choices.scale
    Launch(block_forward_kernel, segments * ranges, (tensors, range_starts, out, lse, *numbers), options)()
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, choices: Choices, saved: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq of the choices, dk, dv). `saved`: dout, and lse and delta of the merged result."""
    dout, *statistics = saved
    kv_heads, blocks = k.shape[1], len(choices.starts) - 1
    options = _options(q, v, choices, BACKWARD_TILE)
    config = options["CONFIG"]
    dq = torch.empty((len(choices.lines), config.GROUP, q.shape[2]), dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))  # tokens past the last block: 0
    tensors = ChoiceTensors(view(q), view(k), view(v), *choices[:3])
    gradients = ChoiceGradients(view(dout), *statistics, dq, dk, dv)
    numbers = blocks, kv_heads, choices.choosers, choices.scale
    Launch(block_backward_kernel, blocks * kv_heads, (tensors, gradients, *numbers), options)()
    return dq, dk, dv
