"""Forward mode: how out and lse move when q, k and v do, in one pass over the keys and O(S) memory.

With p = exp(s - lse) from the saved lse, and a dot for the movement:
    s. = scale * (q. k^T + q k.^T)        lse. = sum p s.        o. = sum (p s.) v + p v. - lse. o
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .device.mask import visible
from .device.matmul import dot, inner, raise_flag
from .device.score import scores
from .device.softmax import unit_of
from .device.structs import ANY_SIZE, LOG2E, Law, Rows
from .device.tile_io import load_rows, row_pointers, store_rows
from .device.tile_range import band, locate
from .pdl import gdc_launch_dependents


class Moving(NamedTuple):
    """Views of q, k and v, and of their movements."""

    q: tl.tuple
    k: tl.tuple
    v: tl.tuple
    dq: tl.tuple
    dk: tl.tuple
    dv: tl.tuple


@triton.jit
def moves(moving, lse, n_q, heads, w, law, PLAN: tl.constexpr, CAREFUL: tl.constexpr):
    """lse. and sum (p s.) v + p v. of the tile of queries at w."""
    STEP: tl.constexpr = 16 if CAREFUL else PLAN.BLOCK_N
    h_kv = w.h // PLAN.GROUP
    i = w.first + tl.arange(0, PLAN.BLOCK_M)
    q_rows = Rows(moving.q, w.b, w.h, w.q0, w.first, w.n_q)
    dq_rows = Rows(moving.dq, w.b, w.h, w.q0, w.first, w.n_q)
    q_tile = load_rows(q_rows, PLAN.D, PLAN.BLOCK_M, PLAN.BLOCK_D, False)
    dq_tile = load_rows(dq_rows, PLAN.D, PLAN.BLOCK_M, PLAN.BLOCK_D, False)
    lse_i = tl.load(row_pointers(lse, n_q, heads, w.b, w.h, w.q0, i, PLAN.PACKED), mask=i < w.n_q, other=float("-inf"))
    lse2_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E)
    at = w.first + w.n_k - w.n_q
    span = band(at, at + PLAN.BLOCK_M - 1, w.n_k, law.before, law.after, PLAN.BLOCK_N)
    moved = tl.full([PLAN.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([PLAN.BLOCK_M, PLAN.BLOCK_DV], 0.0, tl.float32)
    for first in tl.range(span.lo, span.hi, STEP, num_stages=1 if CAREFUL else None, disable_licm=True):
        j = first + tl.arange(0, STEP)
        k_rows = Rows(moving.k, w.b, h_kv, w.k0, first, w.n_k)
        dk_rows = Rows(moving.dk, w.b, h_kv, w.k0, first, w.n_k)
        k_tile = load_rows(k_rows, PLAN.D, STEP, PLAN.BLOCK_D, False)
        dk_tile = load_rows(dk_rows, PLAN.D, STEP, PLAN.BLOCK_D, False)
        product = inner(q_tile, k_tile, q_rows, k_rows, PLAN.D, PLAN)
        ds = inner(dq_tile, k_tile, dq_rows, k_rows, PLAN.D, PLAN)
        ds += inner(q_tile, dk_tile, q_rows, dk_rows, PLAN.D, PLAN)
        ds *= law.scale
        s = scores(product, w, w.h, i[:, None], j[None, :], law.scale, PLAN.FOLD)
        sees = visible(i[:, None], j[None, :], w, law.before, law.after)
        p = tl.where(sees, tl.exp2(s * unit_of(law.scale, PLAN.FOLD) - lse2_i[:, None]), 0.0)
        pds = tl.where(sees, p * ds, 0.0)
        moved += tl.sum(pds, 1)
        met = sees if CAREFUL else None
        v_tile = load_rows(Rows(moving.v, w.b, h_kv, w.k0, first, w.n_k), PLAN.DV, STEP, PLAN.BLOCK_DV, False)
        acc = dot(pds.to(v_tile.dtype), v_tile, acc, met, PLAN)
        dv_tile = load_rows(Rows(moving.dv, w.b, h_kv, w.k0, first, w.n_k), PLAN.DV, STEP, PLAN.BLOCK_DV, False)
        acc = dot(p.to(v_tile.dtype), dv_tile, acc, met, PLAN)
    return moved, acc


@triton.jit
def store_moves(moved, acc, o, do, dlse, n_q, heads, w, PLAN: tl.constexpr):
    i = w.first + tl.arange(0, PLAN.BLOCK_M)
    o_rows = Rows(o, w.b, w.h, w.q0, w.first, w.n_q)
    o_tile = load_rows(o_rows, PLAN.DV, PLAN.BLOCK_M, PLAN.BLOCK_DV, False).to(tl.float32)
    acc = tl.fma(tl.broadcast_to(-moved[:, None], acc.shape), o_tile, acc)  # of the product, no tile is kept
    store_rows(Rows(do, w.b, w.h, w.q0, w.first, w.n_q), acc, PLAN.DV)
    tl.store(row_pointers(dlse, n_q, heads, w.b, w.h, w.q0, i, PLAN.PACKED), moved, mask=i < w.n_q)


@triton.jit(**ANY_SIZE)
def jvp_kernel(
    moving, o, lse, do, dlse, flags, cu_q, cu_k, n_q, n_k, before, after, scale, tiles, heads, batch,
    PLAN: tl.constexpr,
):  # fmt: skip
    """do and dlse; flags[program] = 1 where the sums have a nan, which `repair_jvp_kernel` looks into."""
    if PLAN.OVERLAP:
        gdc_launch_dependents()
    if flags is not None:
        tl.store(flags + tl.program_id(0), 0)
    w = locate(tl.program_id(0), tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, PLAN.BLOCK_M)
    if w.first < w.n_q:
        moved, acc = moves(moving, lse, n_q, heads, w, Law(before, after, scale, (), None, None), PLAN, False)
        pid = tl.program_id(0) * tl.num_programs(1)  # times 1: found again, not kept in registers since
        if flags is not None:
            raise_flag(flags + pid, acc)
        w = locate(pid, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu_q, PLAN.BLOCK_M)
        store_moves(moved, acc, o, do, dlse, n_q, heads, w, PLAN)
