"""Second derivatives: the derivative of dq, dk and dv along tangents of q, k and v (a Hessian-vector product), tile by
tile, in O(S) memory.

With p = exp(s - lse) from the saved lse, dp = do v^T, delta = rowsum(do * o) - dlse, ds = p * (dp - delta), and a dot
for the tangent; `jvp.py` computes o. and lse. before:
    s. = scale * (q. k^T + q k.^T)        p. = p * (s. - lse.)        dp. = do v.^T        delta. = rowsum(do * o.)
    ds. = p. * (dp - delta) + p * (dp. - delta.)
    dq. = scale * (ds. k + ds k.)        dk. = scale * (ds.^T q + ds^T q.)        dv. = p.^T do
do and dlse are constant. The Hessian is symmetric, so these are also the gradients of <dq, q.> + <dk, k.> + <dv, v.>
with respect to q, k and v; those with respect to do and dlse are o. and lse. As in `device/gradients.py`, no sum is
split between programs, and tiles of keys are computed transposed. On Hopper one pass may compute all three
(`hopper/hvp.py`): it leaves float32 sums of dk. and dv., which `hvp_key_kernel` rounds.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .device.gradients import recompute_p
from .device.mask import visible
from .device.matmul import dot, dot_nt, raise_flag
from .device.score import dropout
from .device.structs import ANY_SIZE, Grid, Pairs, Rows, ScoreParams, Sequences, Work
from .device.tile_io import load_rows, row_pointers, statistic_pointers, store_rows
from .device.tile_range import key_range, locate, loop_range, query_range, tile_at
from .repair import CHECKED, begin, end_of_checked


class HvpTensors(NamedTuple):
    """Views of q, k, v and do, of the row statistics, and of the tangents of q, k and v; the tangents of lse, (batch,
    head, token), and of delta (a row statistic); views of the results; the flags of the NaN repair pass, or None; and
    in one pass the sums of dK. / rate and dV., contiguous (batch, KV head, token, dim)."""

    q: tl.tuple
    k: tl.tuple
    v: tl.tuple
    do: tl.tuple
    lse2: tl.tuple
    delta: tl.tuple
    tq: tl.tuple
    tk: tl.tuple
    tv: tl.tuple
    tlse: tl.tensor
    tdelta: tl.tuple
    dq: tl.tuple = None
    dk: tl.tuple = None
    dv: tl.tuple = None
    flags: tl.tensor = None
    dk_acc: tl.tensor = None
    dv_acc: tl.tensor = None


@triton.jit
def zero_kernel(sums, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + at, 0.0, mask=at < count)


@triton.jit
def load_sums(sums, heads, w, ROWS: tl.constexpr, D: tl.constexpr):
    """The sums of the ROWS keys at w."""
    row = (w.b * heads + w.h).to(tl.int64) * w.n_k + w.first
    exists = w.first + tl.arange(0, ROWS)[:, None] < w.n_k
    at = sums + row * D + (tl.arange(0, ROWS)[:, None] * D + tl.arange(0, D)[None, :])
    return tl.load(at, mask=exists, other=0.0)


@triton.jit
def load_tlse(tensors, seqs, heads, w, h, i, CONFIG: tl.constexpr):
    """lse. of the queries i of head h, 0 past the end of the sequence."""
    pointers = row_pointers(tensors.tlse, seqs.n_q, heads, w.b, h, w.q0, i, CONFIG.PACKED)
    return tl.load(pointers, mask=i < w.n_q, other=0.0)


@triton.jit
def query_tangent(tensors, grid, seqs, w, rate, params, CONFIG: tl.constexpr, NAN_SAFE: tl.constexpr):
    """dQ. / rate of the tile of queries at w. `rate` is the factor from q.k to the score."""
    STEP: tl.constexpr = 16 if NAN_SAFE else CONFIG.BLOCK_N
    LEAN: tl.constexpr = NAN_SAFE or CONFIG.PRECISION != "ieee"
    terms = params.terms
    h_kv = w.h // CONFIG.GROUP
    i = w.first + tl.arange(0, CONFIG.BLOCK_M)
    q_rows = Rows(tensors.q, w.b, w.h, w.q0, w.first, w.n_q)
    tq_rows = Rows(tensors.tq, w.b, w.h, w.q0, w.first, w.n_q)
    do_rows = Rows(tensors.do, w.b, w.h, w.q0, w.first, w.n_q)
    q_tile = load_rows(q_rows, CONFIG.D, CONFIG.BLOCK_M, CONFIG.BLOCK_D, False)
    tq_tile = load_rows(tq_rows, CONFIG.D, CONFIG.BLOCK_M, CONFIG.BLOCK_D, False)
    do_tile = load_rows(do_rows, CONFIG.DV, CONFIG.BLOCK_M, CONFIG.BLOCK_DV, False)
    lse2_i = tl.load(statistic_pointers(tensors.lse2, w, w.h, w.first, CONFIG.BLOCK_M, CONFIG.PACKED))
    delta_i = tl.load(statistic_pointers(tensors.delta, w, w.h, w.first, CONFIG.BLOCK_M, CONFIG.PACKED))
    tdelta_i = tl.load(statistic_pointers(tensors.tdelta, w, w.h, w.first, CONFIG.BLOCK_M, CONFIG.PACKED))
    tlse_i = load_tlse(tensors, seqs, grid.heads, w, w.h, i, CONFIG)
    span = key_range(w, params.before, params.after, CONFIG.BLOCK_M, CONFIG.BLOCK_N)
    acc = tl.full([CONFIG.BLOCK_M, CONFIG.BLOCK_D], 0.0, tl.float32)
    lo, hi = loop_range(span, w, w.h, terms.blocks, STEP)
    for at in tl.range(lo, hi, STEP, num_stages=1 if NAN_SAFE else None, disable_licm=LEAN):
        first, edge, partial = tile_at(at, span, terms.blocks, STEP, NAN_SAFE)
        k_rows = Rows(tensors.k, w.b, h_kv, w.k0, first, w.n_k)
        tk_rows = Rows(tensors.tk, w.b, h_kv, w.k0, first, w.n_k)
        v_rows = Rows(tensors.v, w.b, h_kv, w.k0, first, w.n_k)
        tv_rows = Rows(tensors.tv, w.b, h_kv, w.k0, first, w.n_k)
        k_tile = load_rows(k_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.EVEN)
        tk_tile = load_rows(tk_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.EVEN)
        v_tile = load_rows(v_rows, CONFIG.DV, STEP, CONFIG.BLOCK_DV, CONFIG.EVEN)
        tv_tile = load_rows(tv_rows, CONFIG.DV, STEP, CONFIG.BLOCK_DV, CONFIG.EVEN)
        pairs = Pairs(w, w.h, i[:, None], (first + tl.arange(0, STEP))[None, :])
        product = dot_nt(q_tile, k_tile, q_rows, k_rows, CONFIG.D, CONFIG)
        p, _ = recompute_p(product, pairs, lse2_i[:, None], edge, partial, params, CONFIG.FOLD)
        moved = dot_nt(tq_tile, k_tile, tq_rows, k_rows, CONFIG.D, CONFIG)
        moved += dot_nt(q_tile, tk_tile, q_rows, tk_rows, CONFIG.D, CONFIG)
        moved = moved * rate - tlse_i[:, None]
        dp = dot_nt(do_tile, v_tile, do_rows, v_rows, CONFIG.DV, CONFIG)
        ds = p * (dropout(dp, pairs, terms) - delta_i[:, None])
        tdp = dot_nt(do_tile, tv_tile, do_rows, tv_rows, CONFIG.DV, CONFIG)
        tds = ds * moved + p * (dropout(tdp, pairs, terms) - tdelta_i[:, None])
        sees = None
        if NAN_SAFE:
            sees = visible(pairs, params)
            ds = tl.where(sees, ds, 0.0)
            tds = tl.where(sees, tds, 0.0)
        if CONFIG.BLOCK_D > CONFIG.CHUNK:  # the tiles were not kept during the products
            k_tile = load_rows(k_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.EVEN)
        acc = dot(tds.to(k_tile.dtype), k_tile, acc, sees, CONFIG)
        if CONFIG.BLOCK_D > CONFIG.CHUNK:
            tk_tile = load_rows(tk_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.EVEN)
        acc = dot(ds.to(k_tile.dtype), tk_tile, acc, sees, CONFIG)
    return acc


@triton.jit
def key_tangents(tensors, grid, seqs, w, rate, params, CONFIG: tl.constexpr, NAN_SAFE: tl.constexpr):
    """dK. / rate and dV. of the tile of keys at w; zeros for one that is not computed (SUM_K, SUM_V). grid.heads counts
    KV heads."""
    STEP: tl.constexpr = 16 if NAN_SAFE else CONFIG.BLOCK_M
    LEAN: tl.constexpr = NAN_SAFE or CONFIG.PRECISION != "ieee"
    GROUP: tl.constexpr = CONFIG.GROUP
    terms = params.terms
    j = w.first + tl.arange(0, CONFIG.BLOCK_N)
    k_rows = Rows(tensors.k, w.b, w.h, w.k0, w.first, w.n_k)
    tk_rows = Rows(tensors.tk, w.b, w.h, w.k0, w.first, w.n_k)
    v_rows = Rows(tensors.v, w.b, w.h, w.k0, w.first, w.n_k)
    tv_rows = Rows(tensors.tv, w.b, w.h, w.k0, w.first, w.n_k)
    k_tile = load_rows(k_rows, CONFIG.D, CONFIG.BLOCK_N, CONFIG.BLOCK_D, False)
    tk_tile = load_rows(tk_rows, CONFIG.D, CONFIG.BLOCK_N, CONFIG.BLOCK_D, False)
    v_tile = k_tile
    tv_tile = k_tile
    if CONFIG.SUM_K:
        v_tile = load_rows(v_rows, CONFIG.DV, CONFIG.BLOCK_N, CONFIG.BLOCK_DV, False)
        tv_tile = load_rows(tv_rows, CONFIG.DV, CONFIG.BLOCK_N, CONFIG.BLOCK_DV, False)
    span = query_range(w, params.before, params.after, CONFIG.BLOCK_M, CONFIG.BLOCK_N)
    dk_acc = tl.full([CONFIG.BLOCK_N, CONFIG.BLOCK_D], 0.0, tl.float32)
    dv_acc = tl.full([CONFIG.BLOCK_N, CONFIG.BLOCK_DV], 0.0, tl.float32)
    for g in tl.range(GROUP, disable_licm=True):
        h = w.h * GROUP + g
        u = w
        if GROUP > 1:  # the batch row is computed in each iteration, so that it needs no register outside the loop
            line = w.b * grid.heads * GROUP + h
            h = line % (grid.heads * GROUP)
            u = Work(line // (grid.heads * GROUP), h, w.first, w.q0, w.n_q, w.k0, w.n_k, w.r0)
        lo, hi = loop_range(span, u, h, terms.blocks, STEP)
        for at in tl.range(lo, hi, STEP, num_stages=1 if NAN_SAFE else None, disable_licm=LEAN):
            first, edge, partial = tile_at(at, span, terms.blocks, STEP, NAN_SAFE)
            i = first + tl.arange(0, STEP)
            q_rows = Rows(tensors.q, u.b, h, u.q0, first, u.n_q)
            tq_rows = Rows(tensors.tq, u.b, h, u.q0, first, u.n_q)
            do_rows = Rows(tensors.do, u.b, h, u.q0, first, u.n_q)
            q_tile = load_rows(q_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.EVEN)
            tq_tile = load_rows(tq_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.EVEN)
            do_tile = load_rows(do_rows, CONFIG.DV, STEP, CONFIG.BLOCK_DV, CONFIG.EVEN)
            lse2_i = tl.load(statistic_pointers(tensors.lse2, u, h, first, STEP, CONFIG.PACKED))
            tlse_i = load_tlse(tensors, seqs, grid.heads * GROUP, u, h, i, CONFIG)
            pairs = Pairs(u, h, i[None, :], j[:, None])
            product = dot_nt(k_tile, q_tile, k_rows, q_rows, CONFIG.D, CONFIG)
            p, _ = recompute_p(product, pairs, lse2_i[None, :], edge, partial, params, CONFIG.FOLD)
            moved = dot_nt(k_tile, tq_tile, k_rows, tq_rows, CONFIG.D, CONFIG)
            moved += dot_nt(tk_tile, q_tile, tk_rows, q_rows, CONFIG.D, CONFIG)
            moved = moved * rate - tlse_i[None, :]
            sees = None
            if NAN_SAFE:
                sees = visible(pairs, params)
                p = tl.where(sees, p, 0.0)  # a mask mod may show a key to queries past the end
                moved = tl.where(sees, moved, 0.0)
            if CONFIG.SUM_V:
                tp = dropout(p * moved, pairs, terms)
                if CONFIG.BLOCK_DV > CONFIG.CHUNK:
                    do_tile = load_rows(do_rows, CONFIG.DV, STEP, CONFIG.BLOCK_DV, CONFIG.EVEN)
                dv_acc = dot(tp.to(do_tile.dtype), do_tile, dv_acc, sees, CONFIG)
            if CONFIG.SUM_K:
                delta_i = tl.load(statistic_pointers(tensors.delta, u, h, first, STEP, CONFIG.PACKED))
                tdelta_i = tl.load(statistic_pointers(tensors.tdelta, u, h, first, STEP, CONFIG.PACKED))
                dp = dot_nt(v_tile, do_tile, v_rows, do_rows, CONFIG.DV, CONFIG)
                ds = p * (dropout(dp, pairs, terms) - delta_i[None, :])
                tdp = dot_nt(tv_tile, do_tile, tv_rows, do_rows, CONFIG.DV, CONFIG)
                tds = ds * moved + p * (dropout(tdp, pairs, terms) - tdelta_i[None, :])
                if NAN_SAFE:
                    ds = tl.where(sees, ds, 0.0)
                    tds = tl.where(sees, tds, 0.0)
                if CONFIG.BLOCK_D > CONFIG.CHUNK:
                    q_tile = load_rows(q_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.EVEN)
                dk_acc = dot(tds.to(q_tile.dtype), q_tile, dk_acc, sees, CONFIG)
                if CONFIG.BLOCK_D > CONFIG.CHUNK:
                    tq_tile = load_rows(tq_rows, CONFIG.D, STEP, CONFIG.BLOCK_D, CONFIG.EVEN)
                dk_acc = dot(ds.to(q_tile.dtype), tq_tile, dk_acc, sees, CONFIG)
    return dk_acc, dv_acc


@triton.jit
def store_query_tangent(tensors, acc, w, rate, CONFIG: tl.constexpr):
    """Store dQ. = rate * acc."""
    store_rows(Rows(tensors.dq, w.b, w.h, w.q0, w.first, w.n_q), acc * rate, CONFIG.D)


@triton.jit
def store_key_tangents(tensors, dk_acc, dv_acc, w, rate, CONFIG: tl.constexpr):
    """Store dK. = rate * dk_acc and dV., those that are computed."""
    if CONFIG.SUM_K:
        store_rows(Rows(tensors.dk, w.b, w.h, w.k0, w.first, w.n_k), dk_acc * rate, CONFIG.D)
    if CONFIG.SUM_V:
        store_rows(Rows(tensors.dv, w.b, w.h, w.k0, w.first, w.n_k), dv_acc, CONFIG.DV)


@triton.jit(**ANY_SIZE)
def hvp_query_kernel(
    tensors,  # HvpTensors
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
    """dQ.; flags[program] = 1 if it has a nan, for `repair_hvp_query_kernel`."""
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    if tensors.flags is not None:
        tl.store(tensors.flags + pid, 0)
    grid = Grid(tiles, heads, batch)
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    w = locate(pid, grid, seqs, cu_q, CONFIG.BLOCK_M)
    if w.first < w.n_q:
        acc = query_tangent(
            tensors, grid, seqs, w, rate, ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD), CONFIG, False
        )
        if tensors.flags is not None:
            raise_flag(tensors.flags + pid, acc)
        store_query_tangent(tensors, acc, w, rate, CONFIG)


@triton.jit(**ANY_SIZE)
def hvp_key_kernel(
    tensors,  # HvpTensors
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
    """dK., dV., or both, or their sums rounded; flags as in `hvp_query_kernel`. `heads` counts KV heads; a program sums
    over the GROUP query heads that share its KV head."""
    if tensors.flags is not None:
        tl.store(tensors.flags + tl.program_id(0), 0)
    grid = Grid(tiles, heads, batch)
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    w = locate(tl.program_id(0), grid, seqs, cu_k, CONFIG.BLOCK_N)
    if w.first < w.n_k:
        if tensors.dk_acc is None:
            dk_acc, dv_acc = key_tangents(
                tensors,
                grid,
                seqs,
                w,
                rate,
                ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD),
                CONFIG,
                False,
            )
        else:
            dk_acc = load_sums(tensors.dk_acc, heads, w, CONFIG.BLOCK_N, CONFIG.D)
            dv_acc = load_sums(tensors.dv_acc, heads, w, CONFIG.BLOCK_N, CONFIG.DV)
        # num_programs(1) is 1, which the compiler does not know: the tile is located again, not kept in registers
        pid = tl.program_id(0) * tl.num_programs(1)
        w = locate(pid, grid, seqs, cu_k, CONFIG.BLOCK_N)
        if tensors.flags is not None:
            if CONFIG.SUM_K:
                raise_flag(tensors.flags + pid, dk_acc)
            if CONFIG.SUM_V:
                raise_flag(tensors.flags + pid, dv_acc)
        store_key_tangents(tensors, dk_acc, dv_acc, w, rate, CONFIG)


@triton.jit(**ANY_SIZE)
def repair_hvp_query_kernel(
    tensors,  # HvpTensors
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
    total,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    ROWS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Repairs dQ. of the flagged ones of `total` tiles of ROWS queries, BLOCK_M at a time."""
    begin(CONFIG.OVERLAP)
    grid = Grid(tiles, heads, batch)
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    for first in range(tl.program_id(0), total, tl.num_programs(0) * CHECKED):
        for n in range(first, end_of_checked(tensors.flags, first, total), tl.num_programs(0)):
            if tl.load(tensors.flags + n) > 0:
                w = locate(n, grid, seqs, cu_q, ROWS)
                for row in range(w.first, tl.minimum(w.first + ROWS, w.n_q), CONFIG.BLOCK_M):
                    u = Work(w.b, w.h, row, w.q0, w.n_q, w.k0, w.n_k, w.r0)
                    acc = query_tangent(
                        tensors,
                        grid,
                        seqs,
                        u,
                        rate,
                        ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD),
                        CONFIG,
                        True,
                    )
                    store_query_tangent(tensors, acc, u, rate, CONFIG)


@triton.jit(**ANY_SIZE)
def repair_hvp_key_kernel(
    tensors,  # HvpTensors
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
    total,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    ROWS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Repairs dK., dV., or both, of the flagged ones of `total` tiles of ROWS keys, BLOCK_N at a time."""
    begin(CONFIG.OVERLAP)
    grid = Grid(tiles, heads, batch)
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    for first in range(tl.program_id(0), total, tl.num_programs(0) * CHECKED):
        for n in range(first, end_of_checked(tensors.flags, first, total), tl.num_programs(0)):
            if tl.load(tensors.flags + n) > 0:
                w = locate(n, grid, seqs, cu_k, ROWS)
                for row in range(w.first, tl.minimum(w.first + ROWS, w.n_k), CONFIG.BLOCK_N):
                    u = Work(w.b, w.h, row, w.q0, w.n_q, w.k0, w.n_k, w.r0)
                    dk_acc, dv_acc = key_tangents(
                        tensors,
                        grid,
                        seqs,
                        u,
                        rate,
                        ScoreParams(before, after, scale, terms, SCORE_MOD, MASK_MOD),
                        CONFIG,
                        True,
                    )
                    store_key_tangents(tensors, dk_acc, dv_acc, u, rate, CONFIG)
