"""Second derivatives on Hopper: dq., dk. and dv. of `common/hvp.py` in one pass, 10 products instead of 7 and 8.

A program has 128 queries of one head and streams the keys that they see, 64 at a time. By queries, because a program
then holds one sum, dq., where by keys it would hold two, which at D 128 leave too few registers. dk. and dv. of a block
are added to float32 sums by TMA; `hvp_key_kernel` rounds them. Eight warps compute, each warpgroup 64 of the queries:

    S = Q K^T    S. = Q. K^T + Q K.^T    P = exp2(scale_log2 S - lse2)    dP = dO V^T    dP. = dO V.^T
    dS = P (dP - delta)    dS. = dS (rate S. - lse.) + P (dP. - delta.)    dQ. += dS. K + dS K.
    dV. = (P (rate S. - lse.))^T dO    dK. = dS.^T Q + dS^T Q.        over the queries of both: through shared memory

Q, Q., dO, one block of K, K., V, V. and of the sums take 224 KB at D 128, so there is one buffer of each. dP and dP. of
the next block are issued before dK. of this one is stored: V and V. are free early, and K and K. are loaded meanwhile.
"""

from .gluon_compat import (
    barrier,
    downcast,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    opaque,
    tma,
    tma_load,
    tma_reduce_add,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .pipeline import ANY_VALUE, make_mbarriers

QUERIES: gl.constexpr = gl.constexpr(128)
KEYS: gl.constexpr = gl.constexpr(64)


@gluon.jit
def one_box(desc):
    return gl.allocate_shared_memory(desc.dtype, [1] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def tile_at(boxes, n):
    """Box n as (rows, columns)."""
    return boxes.index(n).reshape([boxes.shape[3], boxes.shape[4]])


@gluon.jit
def load_two(x, y, bar, boxes, place, pred):
    """Loads a block of two tensors if `pred`. `place`: batch row, head and first row."""
    b, h, row = place
    mbarrier.expect(bar, 2 * x.block_type.nbytes, pred=pred)
    tma_load(x, [b, h, row, 0], bar, boxes[0].index(0), pred=pred)
    tma_load(y, [b, h, row, 0], bar, boxes[1].index(0), pred=pred)


@gluon.jit
def store_tile(tile, x):
    """Stores x for the tensor cores and TMA, which have read what was there before."""
    tile.store(x)
    fence_async_shared()
    barrier()


@gluon.jit
def add_block(desc, box, x, b, h, row):
    """Adds x to the sums by TMA, through shared memory from which the last block has been sent."""
    tma.store_wait(0)
    barrier()
    store_tile(tile_at(box, 0), x)
    tma_reduce_add(desc, [b, h, row, 0], box.index(0))


@gluon.jit
def masked(p, i, at, n_k, before, after, EVEN: gl.constexpr):
    """p of a block of keys, 0 for hidden pairs. `i`: the positions of the queries among the keys."""
    if EVEN and before is None and after is None:
        return p
    else:
        j = at + gl.arange(0, KEYS, gl.SliceLayout(0, p.type.layout))
        last = i * 0 + (n_k - 1)
        if after is not None:
            last = gl.minimum(i + after, last)
        seen = j[None, :] <= last[:, None]
        if before is not None:
            seen = seen & (j[None, :] >= (i - before)[:, None])
        return gl.where(seen, p, 0.0)


@gluon.jit(**ANY_VALUE)
def hvp_kernel(
    q,
    tq,
    do,
    k,
    tk,
    v,
    tv,
    dq,
    dk_sums,
    dv_sums,
    lse2,
    delta,
    tdelta,
    tlse,
    flags,
    n_q,
    n_k,
    before,
    after,
    padded_tokens,
    heads,
    group,
    scale_log2,
    rate,
    D: gl.constexpr,
    EVEN: gl.constexpr,
):
    """dQ., and the sums of dK. / rate and dV. TMA descriptors of (batch, head, token, dim) from q to dv_sums; row
    statistics, padded, and lse., (batch, head, token); flags[program] = 1 if dQ. has a nan, if it is not None. EVEN:
    blocks of keys are whole."""
    DTYPE: gl.constexpr = q.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, KEYS, 16])
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    block_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    pid = gl.num_programs(0) - 1 - gl.program_id(0)  # the last queries see the most keys
    if flags is not None:
        gl.store(flags + pid, 0)
    tiles = (n_q + QUERIES - 1) // QUERIES
    first = pid % tiles * QUERIES
    h = pid // tiles % heads
    b = pid // tiles // heads
    h_kv = h // group
    q_box = one_box(q)
    tq_box = one_box(tq)
    do_box = one_box(do)
    k_box = one_box(k)
    tk_box = one_box(tk)
    v_box = one_box(v)
    tv_box = one_box(tv)
    sums = one_box(dk_sums)
    # dS^T-like operands: P. and then dS; dS.
    pairs = gl.allocate_shared_memory(DTYPE, [2, QUERIES, KEYS], gl.NVMMASharedLayout(128, 16, 2))
    bars = make_mbarriers(3, 1)
    fence_async_shared()
    barrier()
    position = first + n_k - n_q  # of the first query among the keys
    lo = gl.to_tensor(0)
    hi = n_k
    if before is not None:
        lo = gl.maximum(position - before, 0) // KEYS * KEYS
    if after is not None:
        hi = gl.minimum(n_k, position + QUERIES + after)
    mbarrier.expect(bars.index(0), 3 * q.block_type.nbytes)
    tma_load(q, [b, h, first, 0], bars.index(0), q_box.index(0))
    tma_load(tq, [b, h, first, 0], bars.index(0), tq_box.index(0))
    tma_load(do, [b, h, first, 0], bars.index(0), do_box.index(0))
    load_two(v, tv, bars.index(2), (v_box, tv_box), (b, h_kv, lo), True)
    load_two(k, tk, bars.index(1), (k_box, tk_box), (b, h_kv, lo), True)
    i = first + gl.arange(0, QUERIES, rows)
    row = (b * heads + h).to(gl.int64)
    lse2_i = gl.load(lse2 + row * padded_tokens + i)
    delta_i = gl.load(delta + row * padded_tokens + i)
    tdelta_i = gl.load(tdelta + row * padded_tokens + i)
    tlse_i = gl.load(tlse + row * n_q + i, mask=i < n_q, other=0.0)
    acc = gl.zeros([QUERIES, D], gl.float32, acc_layout)
    zero_s = gl.zeros([QUERIES, KEYS], gl.float32, scores)
    zero_block = gl.zeros([KEYS, D], gl.float32, block_layout)
    mbarrier.wait(bars.index(0), 0)
    mbarrier.wait(bars.index(1), 0)  # also if no key is visible: no load may end after the program
    mbarrier.wait(bars.index(2), 0)
    dp = warpgroup_mma(tile_at(do_box, 0), tile_at(v_box, 0).permute((1, 0)), zero_s, use_acc=False, is_async=True)
    tdp = warpgroup_mma(tile_at(do_box, 0), tile_at(tv_box, 0).permute((1, 0)), zero_s, use_acc=False, is_async=True)
    n = gl.to_tensor(0)
    for at in range(lo, hi, KEYS):
        has_next = at + KEYS < hi
        zero = opaque(gl.to_tensor(0))  # a known 0 would keep the descriptors of all tiles in registers
        q_tile = tile_at(q_box, zero)
        tq_tile = tile_at(tq_box, zero)
        do_tile = tile_at(do_box, zero)
        k_tile = tile_at(k_box, zero)
        tk_tile = tile_at(tk_box, zero)
        dp, tdp = warpgroup_mma_wait(0, deps=(dp, tdp))  # ptxas follows a wgmma across a back edge to a wait for all
        mbarrier.wait(bars.index(1), n & 1)
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        ts = warpgroup_mma(tq_tile, k_tile.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        ts = warpgroup_mma(q_tile, tk_tile.permute((1, 0)), ts, is_async=True)
        s = warpgroup_mma_wait(2, deps=(s,))
        p = gl.exp2(s * scale_log2 - lse2_i[:, None])
        edge = at + KEYS > n_k
        if before is not None:
            edge = edge | (at < position + QUERIES - 1 - before)
        if after is not None:
            edge = edge | (at + KEYS - 1 > position + after)
        if edge:
            p = masked(p, i + (n_k - n_q), at, n_k, before, after, EVEN)
        ts = warpgroup_mma_wait(0, deps=(ts,))
        ts = ts * rate - tlse_i[:, None]
        pairs.index(zero).store(downcast(p * ts, DTYPE))
        ds = p * (dp - delta_i[:, None])
        tds = downcast(ds * ts + p * (tdp - tdelta_i[:, None]), DTYPE)
        ds = downcast(ds, DTYPE)
        store_tile(pairs.index(zero + 1), tds)  # its barrier also says: both warpgroups have read V and V.
        load_two(v, tv, bars.index(2), (v_box, tv_box), (b, h_kv, at + KEYS), has_next)
        dv = warpgroup_mma(pairs.index(zero).permute((1, 0)), do_tile, zero_block, use_acc=False, is_async=True)
        acc = warpgroup_mma(gl.convert_layout(tds, operand), k_tile, acc, is_async=True)
        dk = warpgroup_mma(pairs.index(zero + 1).permute((1, 0)), q_tile, zero_block, use_acc=False, is_async=True)
        dv = warpgroup_mma_wait(2, deps=(dv,))
        barrier()  # both have read P.
        store_tile(pairs.index(zero), ds)
        acc = warpgroup_mma(gl.convert_layout(ds, operand), tk_tile, acc, is_async=True)
        dk = warpgroup_mma(pairs.index(zero).permute((1, 0)), tq_tile, dk, is_async=True)
        add_block(dv_sums, sums, dv, b, h_kv, at)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        barrier()  # both have read K and K.
        load_two(k, tk, bars.index(1), (k_box, tk_box), (b, h_kv, at + KEYS), has_next)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        n += 1
        mbarrier.wait(bars.index(2), n & 1, pred=has_next)
        # after the last block those of this one again, unused, instead of a branch around a wgmma
        dp = warpgroup_mma(do_tile, tile_at(v_box, zero).permute((1, 0)), zero_s, use_acc=False, is_async=True)
        tdp = warpgroup_mma(do_tile, tile_at(tv_box, zero).permute((1, 0)), zero_s, use_acc=False, is_async=True)
        add_block(dk_sums, sums, dk, b, h_kv, at)
    dp, tdp = warpgroup_mma_wait(0, deps=(dp, tdp))
    if flags is not None:
        bad = gl.sum(acc, 1)
        gl.store(flags + pid + gl.arange(0, QUERIES, gl.SliceLayout(1, acc_layout)) * 0, 1, mask=bad != bad)
    barrier()
    store_tile(tile_at(q_box, 0), downcast(acc * rate, DTYPE))
    tma_store(dq, [b, h, first, 0], q_box.index(0))
    tma.store_wait(0)
