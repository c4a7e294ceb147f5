"""The forward pass on Hopper: persistent programs, one producer warp and one to three consumer warpgroups.

The producer draws tiles of queries, 64 for each warpgroup, and loads their Q and then K and V, block by block, into
shared memory. A warpgroup turns K_j into scores, scores into P, and P with V_j into O. The scores of one block and the
output of the block before are issued to the tensor cores together, so that the softmax of one block overlaps with the
products of another:

    issue S_j = Q K_j^T;  issue O += P_{j-1} V_{j-1};  wait S_j;  half of P_j = softmax(S_j);  wait O;  the other half

docs/hopper-forward.md has the timeline and says why each barrier is there.
"""

from typing import NamedTuple

import triton.language as tl

from ..common.device.fp8 import Fp8Scales
from ..common.device.softmax import log2_scale, rescale_exponent, row_maximum
from ..common.device.structs import Work
from .dropout import query_words
from .forward_repair import Repair, flag_pointer, record_tile, repair_tiles
from .forward_softmax import (
    ROWS,
    Inputs,
    acc_layout,
    broadcast_rows,
    epilogue,
    finish_pv,
    finite_max,
    issue_pv,
    issue_qk,
    masked_scores,
    p_operands,
    q_operands,
    rescale,
    row_max,
    split_columns,
    weights,
    zero_acc,
)
from .fp8 import fp8_key_tokens, fp8_query_tokens, key_scales, p_pivot, query_factor
from .gluon_compat import (
    arrive,
    barrier,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from .mask_words import load_key_block, seen_blocks
from .pipeline import (
    ANY_VALUE,
    KvCache,
    Pipeline,
    TileInfo,
    TileScheduler,
    allocate_tiles,
    as_parts,
    block_range,
    find_block,
    is_varlen,
    load_keys,
    load_tile,
    make_pipeline,
    make_tile_info,
    next_tile_id,
    phase,
    ping_pong_arrive,
    ping_pong_wait,
    read_tile_info,
    release,
    release_tile_info,
    tile_work,
    wait_full,
    wait_tile_info,
    write_tile_info,
)
from .token_rows import Tokens


class Params(NamedTuple):
    """What all warps read: lengths, band, scale, score terms, KV cache and scales of fp8 operands."""

    cu_q: tl.tensor
    cu_k: tl.tensor
    n_q: tl.tensor
    n_k: tl.tensor
    heads: tl.tensor
    before: tl.tensor
    after: tl.tensor
    scale: tl.tensor
    terms: tl.tuple
    cache: tl.tuple
    fp8: tl.tuple
    SCORE_MOD: tl.constexpr
    MASK_MOD: tl.constexpr


class Outputs(NamedTuple):
    """O, by a TMA descriptor or as float32; lse; what the NaN repair reads; the largest score of each head."""

    o: tl.tensor
    o_float32: tl.tuple
    lse: tl.tensor
    repair: tl.tuple
    max_logit: tl.tensor


class Shared(NamedTuple):
    """All of shared memory. `o`: a tile for each warpgroup, from which TMA stores O."""

    q: Pipeline
    k: Pipeline
    v: Pipeline
    o: gl.shared_memory_descriptor
    tile_info: TileInfo


@gluon.jit
def skip_blocks(shared, n, end, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Releases the uses n .. end - 1 of K and V: blocks that other warpgroups need and this one does not."""
    for use in range(n, end):
        wait_full(shared.k, use, CONFIG.STAGES)
        wait_full(shared.v, use, CONFIG.STAGES)
        barrier()  # no warp may still be waiting for a phase that the release lets pass
        release(shared.k, use, CONFIG.STAGES)
        release(shared.v, use, CONFIG.STAGES)
        ping_pong_wait(WG, CONFIG)  # a turn without products: the others count on one for each use
        ping_pong_arrive(WG, CONFIG)


@gluon.jit
def consume(shared, outputs, params, scheduler, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Consumer warpgroup WG: O and lse of its 64 queries of every tile."""
    VARLEN: gl.constexpr = is_varlen(params.cu_q, params.cache.lengths)
    if WG == 0:
        ping_pong_arrive(CONFIG.WARPGROUPS - 1, CONFIG)
    n = gl.to_tensor(0)  # blocks so far: use n of the K and V pipelines is the next one
    t = gl.to_tensor(0)  # tiles so far
    w = wait_tile_info(shared.tile_info, t, params.n_q, params.n_k, VARLEN)
    while w.first >= 0:
        n = attend_tile(shared, outputs, params, w, n, t, WG, CONFIG)
        release_tile_info(shared.tile_info, t)
        t += 1
        w = wait_tile_info(shared.tile_info, t, params.n_q, params.n_k, VARLEN)
    if outputs.repair.pointers.flags is None:
        tma.store_wait(0)
    else:
        # w ends the loop. Its b is the id of the last tile.
        repair_tiles(w.b, outputs, params, scheduler, WG, CONFIG)


@gluon.jit
def own_uses(n, lo, hi, first, w, params, CONFIG: gl.constexpr):
    """A tile's blocks lo .. hi - 1 are the uses n .. n + hi - lo - 1 of the K and V pipelines. Returns the first use
    and the end of those that the 64 queries from `first` on need, at least one; and their span of keys."""
    # `skip_blocks` needs two stages: it waits for V_n before it releases K_n, and V_n is loaded after K_{n+1}
    SKIPS_NONE: gl.constexpr = CONFIG.BLOCK_M == ROWS and params.terms.mask_seen is None
    gl.static_assert(CONFIG.STAGES > 1 or SKIPS_NONE, "with one stage all warpgroups must visit the same blocks")
    own_lo, own_hi, span = seen_blocks(first, w, params, CONFIG.BLOCK_N)
    own_hi = gl.where(first < w.n_q, own_hi, own_lo)  # a warpgroup without queries visits one block
    own_lo = gl.minimum(own_lo if params.terms.blocks.offsets is None else gl.maximum(own_lo, lo), hi - 1)
    first_use = n + own_lo - lo
    return first_use, n + gl.minimum(gl.maximum(own_hi, own_lo + 1), hi) - lo, span


@gluon.jit
def attend_tile(shared, outputs, params, w, n, t, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Attention of this warpgroup's queries of the t-th tile, whose first block is use n of the K and V pipelines.
    Returns the use after its last block."""
    STAGES: gl.constexpr = CONFIG.STAGES
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    terms = params.terms
    lo, hi, _span = block_range(w.first, w, params, CONFIG.BLOCK_M, BLOCK_N)
    SLOT: gl.constexpr = WG % (CONFIG.BLOCK_M // ROWS)
    first = w.first + SLOT * ROWS
    first_use, end_use, span = own_uses(n, lo, hi, first, w, params, CONFIG)
    skip_blocks(shared, n, first_use, WG, CONFIG)

    tile = (w, first, span)
    key, partial = find_block(first_use - n + lo, w, terms.blocks, BLOCK_N)
    block = load_key_block(first_use - n + lo, (key, partial), first, terms, BLOCK_N, BLOCK_N, acc_layout(BLOCK_N))
    q_factor = query_factor(w, first, params, CONFIG)
    k_factor, v_factor = key_scales(w, key, params, CONFIG)
    # fp8 has no block mask (support.unsupported_fp8), so that the next block begins here
    next_factors = key_scales(w, key + BLOCK_N, params, CONFIG)
    factor = q_factor * k_factor
    scale_log2 = log2_scale(params.scale * factor, CONFIG.FOLD_SCALE)
    dropout_words = query_words(w, first, gl.SliceLayout(1, acc_layout(BLOCK_N)), ROWS, terms)
    q_slot = t % CONFIG.Q_STAGES * (CONFIG.BLOCK_M // ROWS) + SLOT
    mbarrier.wait(shared.q.full.index(q_slot), phase(t, CONFIG.Q_STAGES))
    wait_full(shared.k, first_use, STAGES)
    q = q_operands(shared.q, q_slot, CONFIG)
    s = warpgroup_mma_wait(0, deps=(issue_qk(q, shared.k, first_use, CONFIG),))
    release(shared.k, first_use, STAGES)
    s = masked_scores(s, factor, tile, block, params, CONFIG)
    m_i = row_maximum(row_max(s), scale_log2, terms.large_scores)
    left, right = split_columns(s)
    pivot = p_pivot(finite_max(m_i), terms, CONFIG)
    p_left, l_left = weights(left, pivot, scale_log2, dropout_words, key, terms)
    p_right, l_i = weights(right, pivot, scale_log2, dropout_words, key + BLOCK_N // 2, terms)
    l_i += l_left
    p = p_operands(p_left, p_right, outputs.o.dtype, CONFIG)
    acc = zero_acc(CONFIG)
    # `alpha` and `rescaling` are factors of acc, 1 here. Computed from m_i, because a constant changes the loop's code.
    if CONFIG.RESCALE_LATE:
        alpha = finite_max(m_i) * 0.0 + 1.0
    rescaling = gl.where(m_i == m_i, 1.0, 0.0) if CONFIG.FP8 else 1.0
    wait_full(shared.k, first_use + 1, STAGES, first_use + 1 < end_use)
    # The steps of the first block, interleaved with the product P V of the block before.
    for use in range(first_use + 1, end_use):
        key, partial = find_block(use - n + lo, w, terms.blocks, BLOCK_N)
        if CONFIG.FP8:
            factor = q_factor * next_factors[0]
            v_factor_old = v_factor
            v_factor = next_factors[1]
            scale_log2 = log2_scale(params.scale * factor, CONFIG.FOLD_SCALE)
        ping_pong_wait(WG, CONFIG)
        if not CONFIG.Q_IN_REGISTERS:
            q = q_operands(shared.q, q_slot, CONFIG)
        s_pending = issue_qk(q, shared.k, use, CONFIG)
        if CONFIG.RESCALE_LATE:
            acc = rescale(acc, alpha, CONFIG.LAZY_RESCALE)
        wait_full(shared.v, use - 1, STAGES)
        acc_pending = issue_pv(p, shared.v, use - 1, acc, WG, CONFIG)
        ping_pong_arrive(WG, CONFIG)
        block = load_key_block(use - n + lo, (key, partial), first, terms, BLOCK_N, BLOCK_N, acc_layout(BLOCK_N))
        if CONFIG.FP8:
            next_factors = key_scales(w, key + BLOCK_N, params, CONFIG)  # a block ahead: loads take as long
        s = warpgroup_mma_wait(2 * len(CONFIG.HEAD_PARTS), deps=(s_pending,))
        release(shared.k, use, STAGES)
        s = masked_scores(s, factor, tile, block, params, CONFIG)
        m_old = m_i
        m_i = gl.maximum(m_i, row_maximum(row_max(s), scale_log2, terms.large_scores))
        pivot = finite_max(m_i)
        alpha = gl.exp2(rescale_exponent(m_old, pivot, scale_log2, terms.large_scores))
        pivot = p_pivot(pivot, terms, CONFIG)
        left, right = split_columns(s)
        p_left, l_left = weights(left, pivot, scale_log2, dropout_words, key, terms)
        l_i = l_i * broadcast_rows(alpha, l_i) + l_left
        # The wait for the next K stands here because its branch keeps the left weights before the wait for P V and the
        # right ones after it: compilers move arithmetic across a wgmma wait, but not across a branch.
        wait_full(shared.k, use + 1, STAGES, use + 1 < end_use)
        acc = finish_pv(acc_pending, p, acc, rescaling, CONFIG)
        release(shared.v, use - 1, STAGES)
        p_right, l_right = weights(right, pivot, scale_log2, dropout_words, key + BLOCK_N // 2, terms)
        l_i += l_right
        if CONFIG.FP8:
            rescaling = alpha * (v_factor_old / v_factor)
        elif not CONFIG.RESCALE_LATE:
            acc = rescale(acc, alpha, CONFIG.LAZY_RESCALE)
        p = p_operands(p_left, p_right, outputs.o.dtype, CONFIG)
    arrive(shared.q.empty.index(q_slot))
    if CONFIG.RESCALE_LATE:
        acc = rescale(acc, alpha, CONFIG.LAZY_RESCALE)
    wait_full(shared.v, end_use - 1, STAGES)
    acc = finish_pv(issue_pv(p, shared.v, end_use - 1, acc, WG, CONFIG), p, acc, rescaling, CONFIG)
    release(shared.v, end_use - 1, STAGES)
    n += hi - lo
    skip_blocks(shared, end_use, n, WG, CONFIG)

    # read again instead of kept in registers through the loop
    w = read_tile_info(shared.tile_info, t, params.n_q, params.n_k, is_varlen(params.cu_q, params.cache.lengths))
    flags = outputs.repair.pointers.flags
    flag = None if flags is None else flag_pointer(flags, WG, CONFIG)
    out_tile = (w, first, (WG - SLOT) * CONFIG.BLOCK_DV)
    epilogue((acc, m_i, l_i, v_factor), out_tile, shared.o.index(WG), flag, outputs, params, CONFIG)
    return n


@gluon.jit
def produce(shared, inputs, params, scheduler, tiles, CONFIG: gl.constexpr):
    """Producer warp: draws tiles, and loads K_0, Q, K_1, V_0, K_2, V_1 .., the order in which consumers need them. It
    lists its tiles in `tiles`, unless that is None (`record_tile`)."""
    STAGES: gl.constexpr = CONFIG.STAGES
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    VARLEN: gl.constexpr = is_varlen(params.cu_q, params.cache.lengths)
    lists = params.terms.blocks
    tile_id = gl.program_id(0)
    gl.assume(tile_id < scheduler.num_tiles)  # else a value is spilled for a loop that is not entered
    last_id = gl.to_tensor(-1)
    n = gl.to_tensor(0)
    t = gl.to_tensor(0)
    while tile_id < scheduler.num_tiles:
        w = tile_work(tile_id, scheduler, params, CONFIG)
        if w.first < w.n_q:
            last_id = record_tile(tiles, tile_id, last_id)
            write_tile_info(shared.tile_info, t, w, VARLEN)
            keys = Tokens(w.b, w.h // CONFIG.GROUP, w.k0, w.n_k)
            if CONFIG.FP8:
                keys = fp8_key_tokens(w, params, CONFIG)
            lo, hi, _span = block_range(w.first, w, params, CONFIG.BLOCK_M, BLOCK_N)
            key, _partial = find_block(lo, w, lists, BLOCK_N)
            load_keys(shared.k, n, inputs.k, params.cache.k_page_stride, keys, key, params.cache, CONFIG)
            for slot in gl.static_range(CONFIG.BLOCK_M // ROWS):
                q_slot = t % CONFIG.Q_STAGES * (CONFIG.BLOCK_M // ROWS) + slot
                mbarrier.wait(shared.q.empty.index(q_slot), phase(t, CONFIG.Q_STAGES) ^ 1)
                if CONFIG.FP8:
                    load_tile(shared.q, q_slot, inputs.q, fp8_query_tokens(w, params), slot * ROWS)
                else:
                    load_tile(shared.q, q_slot, inputs.q, Tokens(w.b, w.h, w.q0, w.n_q), w.first + slot * ROWS)
            # The next tile is drawn before the last loads of this one; if this one has few blocks, before all loads but
            # the first, because the consumers would finish these blocks and wait during the draw.
            is_short = hi - lo <= 2 * STAGES
            if is_short:
                tile_id = next_tile_id(scheduler)
            for j in range(lo + 1, hi):
                key_before = key
                key, _partial = find_block(j, w, lists, BLOCK_N)
                load_keys(shared.k, n + 1, inputs.k, params.cache.k_page_stride, keys, key, params.cache, CONFIG)
                load_keys(shared.v, n, inputs.v, params.cache.v_page_stride, keys, key_before, params.cache, CONFIG)
                n += 1
            if not is_short:
                tile_id = next_tile_id(scheduler)
            load_keys(shared.v, n, inputs.v, params.cache.v_page_stride, keys, key, params.cache, CONFIG)
            n += 1
            t += 1
        else:
            tile_id = next_tile_id(scheduler)
    # first = -1 ends the loops of the consumers; the id is that of this program's last tile, where repair_tiles starts
    write_tile_info(shared.tile_info, t, Work(last_id, 0, -1, 0, 0, 0, 0, 0), VARLEN)


@gluon.jit
def specialize_warps(inputs, outputs, params, scheduler, CONFIG: gl.constexpr):
    """Allocates shared memory and starts the consumer warpgroups and the producer warp, with their registers.

    The first function runs on the 4 warps of the launch. The two lists have the warps, and the registers of a thread,
    of each of the other functions: 240 for the second of two consumers, 160 for those of three, 24 for the producer. If
    the producer loads page numbers, it has more (kv_launches.prefill_launch limits PAGE_PREFETCH to what fits), and the
    consumers less. The first function gets what is left."""
    WARPGROUPS: gl.constexpr = CONFIG.WARPGROUPS
    SLOTS: gl.constexpr = CONFIG.BLOCK_M // ROWS
    q_pipeline = make_pipeline(inputs.q, SLOTS * CONFIG.Q_STAGES, WARPGROUPS // SLOTS)
    k_pipeline = make_pipeline(inputs.k, CONFIG.STAGES, WARPGROUPS, CONFIG.PAGE_BOXES)
    v_pipeline = make_pipeline(inputs.v, CONFIG.STAGES, WARPGROUPS, CONFIG.PAGE_BOXES)
    o_tiles = allocate_tiles(outputs.o, WARPGROUPS)
    shared = Shared(q_pipeline, k_pipeline, v_pipeline, o_tiles, make_tile_info(WARPGROUPS))
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()  # after the wait: the next kernel may read what the previous one wrote without waiting
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (consume, (shared, outputs, params, scheduler, 0, CONFIG)),
                (produce, (shared, inputs, params, scheduler, outputs.repair.pointers.tiles, CONFIG)),
            ],
            [1],
            [24],
        )
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (shared, outputs, params, scheduler, 0, CONFIG)),
                (consume, (shared, outputs, params, scheduler, 1, CONFIG)),
                (produce, (shared, inputs, params, scheduler, outputs.repair.pointers.tiles, CONFIG)),
            ],
            [4, 1],
            [240, 24] if CONFIG.PAGE_BOXES == 1 else [232, 40] if CONFIG.PAGE_PREFETCH < 8 else [224, 56],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (shared, outputs, params, scheduler, 0, CONFIG)),
                (consume, (shared, outputs, params, scheduler, 1, CONFIG)),
                (consume, (shared, outputs, params, scheduler, 2, CONFIG)),
                (produce, (shared, inputs, params, scheduler, outputs.repair.pointers.tiles, CONFIG)),
            ],
            [4, 4, 1],
            [160, 160, 32] if CONFIG.PAGE_BOXES > 1 else [160, 160, 24],
        )


@gluon.jit(**ANY_VALUE)
def forward_kernel(
    q,
    q_rest,
    k,
    k_rest,
    v,
    v_rest,
    o,
    o_float32,
    lse,
    counter,
    repair,
    max_logit,
    cu_q,
    cu_k,
    n_q,
    n_k,
    before,
    after,
    scale,
    num_tiles,
    rows,
    tiles_per_row,
    heads,
    batch,
    rows_in_l2,
    terms,
    cache,
    fp8,
    new_tokens,
    max_length,
    table_stride,
    num_pages,
    k_page_stride,
    v_page_stride,
    SCORE_MOD: gl.constexpr,
    MASK_MOD: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """The arguments in the form in which Triton takes them (see ANY_VALUE): TMA descriptors and integers one by one."""
    specialize_warps(
        Inputs(as_parts(q, q_rest), as_parts(k, k_rest), as_parts(v, v_rest)),
        Outputs(o, o_float32, lse, Repair(repair, q, k, v), max_logit),
        Params(
            *(cu_q, cu_k, n_q, n_k, heads, before, after, scale, terms),
            KvCache(*cache, new_tokens, max_length, table_stride, num_pages, k_page_stride, v_page_stride),
            Fp8Scales(*fp8),
            SCORE_MOD,
            MASK_MOD,
        ),
        TileScheduler(counter, num_tiles, rows, tiles_per_row, heads, batch, rows_in_l2, None),
        CONFIG,
    )
