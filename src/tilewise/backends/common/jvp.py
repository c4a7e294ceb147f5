"""Forward mode: the tangents of out and lse for tangents of q, k and v, in one pass over the keys and O(S) memory.

With p = exp(s - lse) from the saved lse, and a dot for the tangent:
    s. = scale * (q. k^T + q k.^T)        lse. = sum p s.        o. = sum (p s.) v + p v. - lse. o
With a score mod, s. is multiplied by its derivative. With dropout, o. is summed over the kept p, lse. over all.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .device.gradients import recompute_p
from .device.mask import visible
from .device.matmul import dot, dot_nt, raise_flag
from .device.score import dropout, times_derivative
from .device.structs import ANY_SIZE, LOG2E, Grid, Pairs, Rows, ScoreParams, Sequences
from .device.tile_io import load_rows, row_pointers, store_rows
from .device.tile_range import key_range, locate, loop_range, tile_at
from .pdl import gdc_launch_dependents


class JvpTensors(NamedTuple):
    """Views of q, k, v and their tangents; o and lse, and their tangents; the flags of the NaN repair pass, or None."""

    q: tl.tuple
    k: tl.tuple
    v: tl.tuple
    dq: tl.tuple
    dk: tl.tuple
    dv: tl.tuple
    o: tl.tuple
    lse: tl.tensor
    do: tl.tuple
    dlse: tl.tensor
    flags: tl.tensor


@triton.jit
def jvp_tile(tensors, grid, seqs, w, rate, params, CONFIG: tl.constexpr, NAN_SAFE: tl.constexpr):
    """lse. and sum (p s.) v + p v. of the tile of queries at w. `rate` is the factor from q.k to the score."""
    terms = params.terms
    STEP: tl.constexpr = 16 if NAN_SAFE else CONFIG.BLOCK_N
    h_kv = w.h // CONFIG.GROUP
    i = w.first + tl.arange(0, CONFIG.BLOCK_M)
    q_rows = Rows(tensors.q, w.b, w.h, w.q0, w.first, w.n_q)
    dq_rows = Rows(tensors.dq, w.b, w.h, w.q0, w.first, w.n_q)
    q_tile = load_rows(q_rows, CONFIG.D, CONFIG.BLOCK_M, CONFIG.BLOCK_D, False)
    dq_tile = load_rows(dq_rows, CONFIG.D, CONFIG.BLOCK_M, CONFIG.BLOCK_D, False)
    exists = i < w.n_q
    lse_pointers = row_pointers(tensors.lse, seqs.n_q, grid.heads, w.b, w.h, w.q0, i, CONFIG.PACKED)
    lse_i = tl.load(lse_pointers, mask=exists, other=float("-inf"))
    lse2_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E)
    span = key_range(w, params.before, params.after, CONFIG.BLOCK_M, CONFIG.BLOCK_N)
    dlse = tl.full([CONFIG.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([CONFIG.BLOCK_M, CONFIG.BLOCK_DV], 0.0, tl.float32)
    lo, hi = loop_range(span, w, w.h, terms.blocks, STEP)
    for at in tl.range(lo, hi, STEP, num_stages=1 if NAN_SAFE else None, disable_licm=True):
        first, edge, partial = tile_at(at, span, terms.blocks, STEP, NAN_SAFE)
        j = first + tl.arange(0, STEP)
        k_rows = Rows(tensors.k, w.b, h_kv, w.k0, first, w.n_k)
        dk_rows = Rows(tensors.dk, w.b, h_kv, w.k0, first, w.n_k)
        k_tile = load_rows(k_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.EVEN)
        dk_tile = load_rows(dk_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.EVEN)
        product = dot_nt(q_tile, k_tile, q_rows, k_rows, CONFIG.D, CONFIG)
        ds = dot_nt(dq_tile, k_tile, dq_rows, k_rows, CONFIG.D, CONFIG)
        ds += dot_nt(q_tile, dk_tile, q_rows, dk_rows, CONFIG.D, CONFIG)
        ds *= rate
        pairs = Pairs(w, w.h, i[:, None], j[None, :])
        p, derivative = recompute_p(product, pairs, lse2_i[:, None], edge, partial, params, CONFIG.FOLD)
        pds = times_derivative(p, derivative, terms) * ds
        sees = None
        if NAN_SAFE:
            sees = visible(pairs, params)
            p = tl.where(sees, p, 0.0)
            pds = tl.where(sees, pds, 0.0)
        dlse += tl.sum(pds, 1)
        v_rows = Rows(tensors.v, w.b, h_kv, w.k0, first, w.n_k)
        v_tile = load_rows(v_rows, CONFIG.DV, STEP, CONFIG.BLOCK_DV, CONFIG.EVEN)
        acc = dot(dropout(pds, pairs, terms).to(v_tile.dtype), v_tile, acc, sees, CONFIG)
        dv_rows = Rows(tensors.dv, w.b, h_kv, w.k0, first, w.n_k)
        dv_tile = load_rows(dv_rows, CONFIG.DV, STEP, CONFIG.BLOCK_DV, CONFIG.EVEN)
        acc = dot(dropout(p, pairs, terms).to(v_tile.dtype), dv_tile, acc, sees, CONFIG)
    return dlse, acc


@triton.jit
def store_jvp_tile(dlse, acc, tensors, grid, seqs, w, CONFIG: tl.constexpr):
    """Store o. and lse. of the tile of queries at w."""
    i = w.first + tl.arange(0, CONFIG.BLOCK_M)
    o_rows = Rows(tensors.o, w.b, w.h, w.q0, w.first, w.n_q)
    o_tile = load_rows(o_rows, CONFIG.DV, CONFIG.BLOCK_M, CONFIG.BLOCK_DV, False).to(tl.float32)
    acc = tl.fma(tl.broadcast_to(-dlse[:, None], acc.shape), o_tile, acc)  # no registers are left for the product
    store_rows(Rows(tensors.do, w.b, w.h, w.q0, w.first, w.n_q), acc, CONFIG.DV)
    exists = i < w.n_q
    tl.store(row_pointers(tensors.dlse, seqs.n_q, grid.heads, w.b, w.h, w.q0, i, CONFIG.PACKED), dlse, mask=exists)


@triton.jit(**ANY_SIZE)
def jvp_kernel(
    tensors,  # JvpTensors
    cu_q,
    cu_k,
    n_q,
    n_k,
    before,
    after,
    scale,
    rate,
    tiles,
    heads,
    batch,
    terms,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """do and dlse; flags[program] = 1 if do has a nan, for `repair_jvp_kernel`."""
    if CONFIG.OVERLAP:
        gdc_launch_dependents()
    if tensors.flags is not None:
        tl.store(tensors.flags + tl.program_id(0), 0)
    grid = Grid(tiles, heads, batch)
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    w = locate(tl.program_id(0), grid, seqs, cu_q, CONFIG.BLOCK_M)
    if w.first < w.n_q:
        dlse, acc = jvp_tile(
            tensors,
            grid,
            seqs,
            w,
            rate,
            ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD),
            CONFIG,
            False,
        )
        # num_programs(1) is 1, which the compiler does not know: the tile is located again, not kept in registers
        pid = tl.program_id(0) * tl.num_programs(1)
        if tensors.flags is not None:
            raise_flag(tensors.flags + pid, acc)
        w = locate(pid, grid, seqs, cu_q, CONFIG.BLOCK_M)
        store_jvp_tile(dlse, acc, tensors, grid, seqs, w, CONFIG)
