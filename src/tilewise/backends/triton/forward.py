"""The portable forward: each program computes BLOCK_M queries of one head over the keys that they see. Queries too few
to fill a tile share it with those of the other heads of their group, which see the same keys (CONFIG.HEADS).

With few queries, several programs compute a tile, each over a split of the keys, and `merge_kernel` combines their
results: softmax over a union of keys follows from (o, lse) over its parts (tilewise.merge).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.device.attend import attend
from ..common.device.softmax import logsumexp
from ..common.device.structs import ANY_SIZE, LOG2E, Grid, ScoreParams, Sequences
from ..common.pdl import gdc_launch_dependents, gdc_wait


@triton.jit(**ANY_SIZE)
def forward_kernel(
    tensors,  # attend.Tensors
    cu_q,
    cu_k,
    n_q,
    n_k,
    before,
    after,
    scale,
    tiles,
    heads,
    batch,
    splits,
    terms,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """o and lse. flags[program] = 1 if o has a nan, which may be 0 * nan of a value that the row does not see:
    `repair_forward_kernel` computes such tiles again."""
    if CONFIG.OVERLAP:
        gdc_launch_dependents()
    # the last tiles of a causal head see the most keys: they start first
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if tensors.flags is not None:
        tl.store(tensors.flags + pid, 0)
    grid = Grid(tiles, heads, batch)
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    attend(
        pid, tensors, grid, seqs, splits, ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD), CONFIG, False
    )


class MergeTensors(NamedTuple):
    """o and lse of all splits, and of their union; contiguous."""

    o_splits: tl.tensor
    lse_splits: tl.tensor
    o: tl.tensor
    lse: tl.tensor


class MergeConfig(NamedTuple):
    DV: int
    BLOCK_S: int  # powers of two that hold the splits and DV
    BLOCK_DV: int
    LARGE_SCORES: bool  # m and l are stored instead of lse: see `attend`
    OVERLAP: bool


@triton.jit(**ANY_SIZE)
def merge_kernel(tensors, splits, batch, n_q, heads, CONFIG: tl.constexpr):
    """o and lse of one query of one head over all keys."""
    if CONFIG.OVERLAP:
        gdc_wait()
    row = tl.program_id(0)  # of (batch, query, head)
    h = row % heads
    i = row // heads % n_q
    b = row // heads // n_q
    s = tl.arange(0, CONFIG.BLOCK_S)
    at = ((s * batch + b) * heads + h) * n_q + i
    x = tl.load(tensors.lse_splits + at, mask=s < splits, other=float("-inf"))
    m = tl.max(x, 0)
    m = tl.where(m == float("-inf"), 0.0, m)
    weight = tl.exp2((x - m) * LOG2E)
    if CONFIG.LARGE_SCORES:
        weight *= tl.load(tensors.lse_splits + (splits * batch * heads * n_q + at), mask=s < splits, other=0.0)
    l = tl.sum(weight, 0)
    d = tl.arange(0, CONFIG.BLOCK_DV)
    o_pointers = tensors.o_splits + (s[:, None] * batch * n_q * heads + row) * CONFIG.DV + d[None, :]
    o_splits = tl.load(o_pointers, mask=(s[:, None] < splits) & (d[None, :] < CONFIG.DV), other=0.0)
    o = tl.sum(o_splits * weight[:, None], 0) / tl.where(l == 0.0, 1.0, l)
    tl.store(tensors.o + row * CONFIG.DV + d, o.to(tensors.o.dtype.element_ty), mask=d < CONFIG.DV)
    tl.store(tensors.lse + (b * heads + h) * n_q + i, m + logsumexp(0.0, l))
