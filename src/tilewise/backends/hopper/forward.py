"""The forward pass on Hopper: persistent programs, one producer warp and one to three consumer warpgroups.

The producer draws tiles of queries, 64 for each warpgroup, and loads their Q and then K and V, block by block, into
shared memory. A warpgroup turns K_j into scores, scores into P, and P with V_j into O. The scores of one block and the
output of the block before are issued to the tensor cores together, so that the softmax of one block overlaps with the
products of another:

    issue S_j = Q K_j^T;  issue O += P_{j-1} V_{j-1};  wait S_j;  half of P_j = softmax(S_j);  wait O;  the other half

docs/hopper-forward.md has the timeline and says why each barrier is there.

The softmax and the epilogue work on the tiles in a warpgroup's registers. A tile of S or P is 64 queries by BLOCK_N
keys, one of O 64 by a power of two, in wgmma's register layouts: threads exchange values of a row only for its maximum
and its sum.

The NaN repair computes tiles of O again, without the values that their rows do not see. A matrix product cannot leave a
value out: 0 * nan and 0 * inf are nan. The epilogue of a tile raises a flag of its warpgroup in global memory where O
may be nan and the softmax is not. A warpgroup whose flag is raised looks for nan in O of all its tiles after the last
one. Where it finds one, it computes O again with multiply-adds, from global memory and the stored lse, and leaves out
hidden pairs. That is slow, and rarely needed. In the loop over tiles, the code of the repair took 2 to 8 % of causal
calls.

The tiles of a program are a linked list in global memory, which its producer writes.
"""

from typing import NamedTuple

import triton.language as tl

from ..common.device.fp8 import Fp8Scales
from ..common.device.score import scores
from ..common.device.softmax import exponent, log2_scale, rescale_exponent, row_maximum, sink_maximum
from ..common.device.structs import LN2, LOG2E, Pairs, Work
from ..common.device.tile_io import row_pointers
from .dropout import kept_weights, query_words
from .fp8 import (
    fp8_key_tokens,
    fp8_query_tokens,
    key_scales,
    p_offset,
    p_pivot,
    query_factors,
    score_factors,
    score_shift,
    times_key_scales,
    times_value_scales,
)
from .gluon_compat import (
    arrive,
    barrier,
    column_indices,
    downcast,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    keep_bits,
    keep_column_range,
    mbarrier,
    opaque,
    pack_fp8,
    program_id_here,
    tma,
    tma_store,
    tma_stores_done,
    unpack_fp8,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .mask_words import load_key_block, part_of, seen_blocks
from .pipeline import (
    ANY_VALUE,
    KvCache,
    Pipeline,
    TileInfo,
    TileScheduler,
    Tokens,
    allocate_tiles,
    apply_mask_mod,
    as_parts,
    block_range,
    find_block,
    global_rows,
    is_varlen,
    load_global,
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
    stage_tile,
    store_global,
    tensor_of,
    tile_work,
    tma_coordinates,
    wait_full,
    wait_tile_info,
    write_tile_info,
)

ROWS: gl.constexpr = gl.constexpr(64)  # queries of one warpgroup: the M of a wgmma


class ForwardConfig(NamedTuple):
    """The compile-time config of the forward. HEAD_PARTS: the columns of V and O of a warpgroup as powers of two, 128
    and 64 for 192. BLOCK_DV: the power of two that holds them all. FOLD_SCALE: the softmax multiplies q.k by the scale.
    A tile has BLOCK_M queries: 64 for each warpgroup; or 64 in all, and each warpgroup computes half of O's columns.
    """

    BLOCK_M: int
    BLOCK_DV: int
    HEAD_PARTS: tuple[int, ...]
    BLOCK_N: int
    GROUP: int  # query heads per KV head
    WARPGROUPS: int
    STAGES: int
    FOLD_SCALE: bool
    O_STORES: int  # TMA stores of a tile of O, one after the other through the same shared memory
    PING_PONG: bool  # the warpgroups issue their products one after the other
    LAZY_RESCALE: bool  # a warp none of whose rows has a new maximum does not rescale O
    Q_IN_REGISTERS: bool = False  # Q is loaded into registers once per tile: S reads half as much shared memory
    RESCALE_LATE: bool = False  # O is rescaled while the next scores are computed, right before P V
    Q_STAGES: int = 1  # tiles of Q that a warpgroup has room for
    PROGRAMS: int = 1  # on an SM at a time
    PAGE_SIZE: int | None = None  # tokens of a page; None: no paged cache
    PAGE_BOXES: int = 1  # TMA boxes of a block of keys, each within one page
    PAGE_PREFETCH: int = 1  # boxes whose page numbers are loaded together
    MAX_DECODE_QUERIES: int = 0  # sequences with at most so many queries are left to the decode kernels
    FP8: bool = False  # the operands are in float8_e4m3fn, with scales: see `fp8`


class Inputs(NamedTuple):
    """TMA descriptors, one or two column parts each."""

    q: tl.tuple
    k: tl.tuple
    v: tl.tuple


@gluon.jit
def issue_qk(q, k, use, CONFIG: gl.constexpr):
    """Issues S = Q K^T, one wgmma for each column part."""
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, acc_layout(BLOCK_N, 32 if CONFIG.FP8 else 16))
    k_tile = stage_tile(k.parts[0], use, CONFIG.STAGES)
    s = warpgroup_mma(q[0], k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    if len(q) == 2:
        k_tile = stage_tile(k.parts[1], use, CONFIG.STAGES)
        s = warpgroup_mma(q[1], k_tile.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def q_operands(q, use, CONFIG: gl.constexpr):
    """The column parts of a warpgroup's Q as left operands, in shared memory or in registers."""
    left = q_operand(q.parts[0], use, CONFIG)
    if len(q.parts) == 1:
        return (left,)
    else:
        return left, q_operand(q.parts[1], use, CONFIG)


@gluon.jit
def q_operand(tiles, use, CONFIG: gl.constexpr):
    tile = stage_tile(tiles, use, CONFIG.BLOCK_M // ROWS * CONFIG.Q_STAGES)
    if CONFIG.Q_IN_REGISTERS:
        return tile.load(gl.DotOperandLayout(0, acc_layout(CONFIG.BLOCK_N), 2))
    else:
        return tile


@gluon.jit
def masked_scores(s, factor, tile, block, params, CONFIG: gl.constexpr):
    """The scores of the queries of `tile` (work, first query, span of keys) and the keys of `block`, with all terms;
    -inf where a pair is masked. `factor` of q.k: the scales of fp8 operands."""
    w, first, _span = tile
    i = (first + gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout)))[:, None]
    j = (block.start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)))[None, :]
    if CONFIG.FP8:
        factor = factor[:, None]
    s = scores(s, Pairs(w, w.h, i, j), params.scale * factor, params.terms, params.SCORE_MOD, CONFIG.FOLD_SCALE)
    return mask_scores(s, tile, block, params)


@gluon.jit
def mask_scores(s, tile, block, params):
    """s, with -inf where a pair is masked."""
    if params.terms.mask_words is not None:
        if block.may_be_partial:  # a branch, not a select
            s = keep_bits(s, block.mask_words, block.shift)
        else:
            s = mask_band(s, tile, block.start, params)
    else:
        if params.MASK_MOD is not None:
            w, first, _span = tile
            i = (first + gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout)))[:, None]
            j = (block.start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)))[None, :]
            s = apply_mask_mod(s, block.may_be_partial, i, j, w, w.h, params)
        s = mask_band(s, tile, block.start, params)
    return s


@gluon.jit
def mask_band(s, tile, start, params):
    """s, with -inf for keys from `start` on that do not exist or are outside of the band."""
    BLOCK_N: gl.constexpr = s.shape[1]
    w, first, span = tile
    row = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
    if (start < span.full_lo) | (start + BLOCK_N > span.full_hi):
        diagonal = opaque(row) + (first + w.n_k - w.n_q - start)
        end = opaque(diagonal * 0 + (w.n_k - start))  # in the layout of `diagonal`, see docs/gotchas.md
        if params.after is not None:
            end = gl.minimum(diagonal + params.after + 1, end)
        s = keep_column_range(s, None if params.before is None else diagonal - params.before, end)
    return s


@gluon.jit
def row_max(s):
    """The maximum of each row: of the two halves element by element first, which shortens the chain of dependent
    instructions."""
    left, right = split_columns(s)
    return gl.convert_layout(gl.max(gl.maximum(left, right), 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def finite_max(m_i):
    """m_i, or 0 for rows that have seen no key."""
    return gl.where(m_i == float("-inf"), 0.0, m_i)


@gluon.jit
def weights(s, pivot, scale_log2, dropout_words, start, terms, CONFIG: gl.constexpr):
    """P = exp(s - pivot) of the keys from `start` on, without the dropped weights, and the `lane_sums` of all."""
    if CONFIG.FP8 and CONFIG.FOLD_SCALE:  # a scale for each row
        scale_log2 = broadcast_rows(scale_log2, s)
    p = gl.exp2(exponent(s, broadcast_rows(pivot, s), scale_log2, terms.large_scores))
    return kept_weights(p, dropout_words, start, terms), lane_sums(p)


@gluon.jit
def lane_sums(p):
    """[M, N] -> [M, 4], the sum of the columns that each of a row's four lanes holds: bits 1 and 2 of a column tell the
    lane, the others the register. The four are added once, in the epilogue.
    """
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def add_sink(m_i, l_i, sink, terms):
    """The factor of acc, the new m_i and the new l_i with a sink in the denominator."""
    m_new = gl.maximum(m_i, sink)
    pivot = gl.where(m_new == float("-inf"), 0.0, m_new)
    lanes: gl.constexpr = l_i.type.layout
    alpha = gl.convert_layout(gl.exp2(rescale_exponent(m_i, pivot, LOG2E, terms.large_scores)), lanes)
    return (
        alpha,
        m_new,
        l_i * alpha + gl.convert_layout(gl.exp2(rescale_exponent(sink, pivot, LOG2E, terms.large_scores)), lanes),
    )


@gluon.jit
def rescale(acc, alpha, LAZY: gl.constexpr):
    """acc * alpha. LAZY: skipped by a warp all of whose factors are 1, as most are in the blocks of a long row."""
    if len(acc) == 1:
        return (rescale_part(acc[0], alpha, LAZY),)
    else:
        return rescale_part(acc[0], alpha, LAZY), rescale_part(acc[1], alpha, LAZY)


@gluon.jit
def rescale_part(acc, alpha, LAZY: gl.constexpr):
    if LAZY:
        return gl.map_elementwise(rescale_lane, acc, broadcast_rows(alpha, acc), pack=4)[0]
    else:
        return acc * broadcast_rows(alpha, acc)


@gluon.jit
def rescale_lane(a, b, c, d, x, x_, y, y_):
    """Rescales two neighbouring columns in each of the two rows that a lane holds. The compiler joins the branches of
    all columns."""
    if (x != 1.0) | (y != 1.0):
        a = a * x
        b = b * x
        c = c * y
        d = d * y
    return a, b, c, d


@gluon.jit
def broadcast_rows(x, tile):
    """x[r] as a column in the layout of `tile`."""
    return gl.convert_layout(x, gl.SliceLayout(1, tile.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def p_operands(left, right, DTYPE: gl.constexpr, CONFIG: gl.constexpr):
    """P, rounded to DTYPE, as left operands of P V: for each column part of V, one for its upper and one for its lower
    rows. They stay in the registers of S, from which wgmma reads them. In fp8 they are words, see `fp8_words`.
    """
    WIDTHS: gl.constexpr = CONFIG.HEAD_PARTS
    if CONFIG.FP8:
        return fp8_words(left), fp8_words(right)
    else:
        left = downcast(left, DTYPE)
        right = downcast(right, DTYPE)
        if len(WIDTHS) == 1:
            return operand(left, WIDTHS[0]), operand(right, WIDTHS[0])
        else:
            more = operand(left, WIDTHS[1]), operand(right, WIDTHS[1])
            return operand(left, WIDTHS[0]), operand(right, WIDTHS[0]), more[0], more[1]


@gluon.jit
def operand(p, WIDTH: gl.constexpr):
    return gl.convert_layout(p, gl.DotOperandLayout(0, acc_layout(WIDTH), 2), assert_trivial=True)


@gluon.jit
def fp8_words(p):
    """P in fp8, four values to an int32 word, [64, N / 4]: the values of 16 keys in the order of `stored_key`. A loop
    that carries bytes instead keeps each in a register of its own."""
    N: gl.constexpr = p.shape[1]
    even, odd = gl.split(p.reshape([ROWS, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return pack_fp8(a, b, c, d).reshape([ROWS, N // 4])


@gluon.jit
def fp8_operand(words, WIDTH: gl.constexpr):
    """The left operand of P V that `words` hold."""
    N: gl.constexpr = words.shape[1] * 4
    twice = gl.join(words, words)
    words = gl.join(twice, twice).reshape([ROWS, N])
    return unpack_fp8(gl.convert_layout(words, gl.DotOperandLayout(0, acc_layout(WIDTH, 32), 4)))


@gluon.constexpr_function
def acc_layout(WIDTH, K=16):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, K])


@gluon.jit
def zero_acc(CONFIG: gl.constexpr):
    K: gl.constexpr = 32 if CONFIG.FP8 else 16
    if len(CONFIG.HEAD_PARTS) == 1:
        return (zero_part(CONFIG.HEAD_PARTS[0], K),)
    else:
        return zero_part(CONFIG.HEAD_PARTS[0], K), zero_part(CONFIG.HEAD_PARTS[1], K)


@gluon.jit
def zero_part(WIDTH: gl.constexpr, K: gl.constexpr):
    return gl.zeros([ROWS, WIDTH], gl.float32, acc_layout(WIDTH, K))


@gluon.jit
def issue_pv(p, v, use, acc, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Issues acc + P V, two wgmmas for each column part. In fp8 it issues P V alone, and `finish_pv` adds acc, because
    wgmma accumulates fp8 products with 13 bits only."""
    v_tile = stage_tile(v.parts[0], use, CONFIG.STAGES)
    if CONFIG.BLOCK_M < ROWS * CONFIG.WARPGROUPS:
        v_tile = v_tile.slice(WG * CONFIG.BLOCK_DV, CONFIG.BLOCK_DV, dim=1)
    if CONFIG.FP8:
        WIDTH: gl.constexpr = CONFIG.HEAD_PARTS[0]
        left = fp8_operand(p[0], WIDTH)
        right = fp8_operand(p[1], WIDTH)
        return (issue_pv_part(left, right, v_tile.permute((1, 0)), zero_acc(CONFIG)[0], False, CONFIG),)
    elif len(v.parts) == 1:
        return (issue_pv_part(p[0], p[1], v_tile, acc[0], True, CONFIG),)
    else:
        left = issue_pv_part(p[0], p[1], v_tile, acc[0], True, CONFIG)
        return left, issue_pv_part(p[2], p[3], stage_tile(v.parts[1], use, CONFIG.STAGES), acc[1], True, CONFIG)


@gluon.jit
def issue_pv_part(left, right, v_tile, acc, USE_ACC: gl.constexpr, CONFIG: gl.constexpr):
    HALF: gl.constexpr = CONFIG.BLOCK_N // 2
    acc = warpgroup_mma(left, v_tile.slice(0, HALF, dim=0), acc, use_acc=USE_ACC, is_async=True)
    return warpgroup_mma(right, v_tile.slice(HALF, HALF, dim=0), acc, is_async=True)


@gluon.jit
def wait_pv(acc, p):
    """acc, once its wgmmas are done; p stays in its registers until then."""
    if len(acc) == 1:
        left, _p, _q = warpgroup_mma_wait(0, deps=(acc[0], p[0], p[1]))
        return (left,)
    else:
        left, right, _p, _q, _r, _s = warpgroup_mma_wait(0, deps=(acc[0], acc[1], p[0], p[1], p[2], p[3]))
        return left, right


@gluon.jit
def finish_pv(pending, p, acc, factor, CONFIG: gl.constexpr):
    """acc after `issue_pv`. In fp8, factor * acc + P V in float32."""
    found = wait_pv(pending, p)
    if CONFIG.FP8:
        return (acc[0] * broadcast_rows(factor, acc[0]) + found[0],)
    else:
        return found


@gluon.jit
def split_columns(acc):
    """The left and the right half of the columns, in the registers where they are."""
    WIDTH: gl.constexpr = acc.shape[1] // 2
    left, right = gl.split(acc.reshape([ROWS, 2, WIDTH]).permute((0, 2, 1)))
    left = gl.convert_layout(left, acc_layout(WIDTH), assert_trivial=True)
    return left, gl.convert_layout(right, acc_layout(WIDTH), assert_trivial=True)


@gluon.jit
def split_rows(x):
    """Rows 0 to 7 of every 16, and rows 8 to 15, in the registers where they are: a thread has one of each."""
    M: gl.constexpr = x.shape[0] // 2
    N: gl.constexpr = x.shape[1]
    first, second = gl.split(x.reshape([M // 8, 2, 8, N]).permute((0, 2, 3, 1)))
    return first.reshape([M, N]), second.reshape([M, N])


@gluon.jit
def epilogue(state, tile, o_tile, flag, outputs, params, CONFIG: gl.constexpr):
    """Stores O = factor * acc / l_i and lse = m_i (`row_maximum`) + log l_i. Sets *flag, unless `flag` is None, where a
    hidden nan or inf of V may have reached O. `state`: acc, m_i, l_i, and the factor, the scale of V in fp8 and
    otherwise 1. `tile`: work, first query, first column of O."""
    acc, m_i, l_i, factor = state
    w, first, first_column = tile
    terms = params.terms
    total = gl.sum(l_i, 1)
    if CONFIG.FP8:
        factor = gl.abs(factor)
    if terms.seed is not None:
        factor *= terms.rescale
    alpha = factor
    if outputs.max_logit is not None:
        store_max_logit(m_i, w, first, outputs.max_logit, params)
    if CONFIG.FP8:
        m_i -= p_offset(terms)
    if terms.sinks.ptr is not None:
        sink = gl.load(terms.sinks.ptr + w.h * terms.sinks.stride).to(gl.float32)
        alpha, m_i, total = add_sink(m_i, total, sink_maximum(sink, terms.large_scores), terms)
        alpha *= factor
    divisor = gl.where(total == 0.0, 1.0, total)
    tokens = Tokens(w.b, w.h, w.q0, w.n_q)
    WIDTH: gl.constexpr = CONFIG.BLOCK_DV // CONFIG.O_STORES
    if outputs.o_float32.ptr is not None:
        sums = store_to_global(acc[0], alpha / divisor, outputs.o_float32, tokens, first, first_column)
        if len(acc) == 2:
            more = store_to_global(acc[1], alpha / divisor, outputs.o_float32, tokens, first, CONFIG.HEAD_PARTS[0])
            sums += gl.convert_layout(more, sums.type.layout, assert_trivial=True)
    else:
        if CONFIG.O_STORES == 2 and len(acc) == 1:
            acc = split_columns(acc[0])
        tma.store_wait(0)  # the last tile has left this memory
        sums = store_to_shared(acc[0], alpha / divisor, o_tile.reshape([ROWS, WIDTH]), 0)
        if CONFIG.O_STORES == 2:
            fence_async_shared()
            tma_store(outputs.o, tma_coordinates(outputs.o, tokens, first, first_column), o_tile)
            tma.store_wait(0)
        if len(acc) == 2:
            COLUMN: gl.constexpr = 0 if CONFIG.O_STORES == 2 else CONFIG.HEAD_PARTS[0]
            more = store_to_shared(acc[1], alpha / divisor, o_tile.reshape([ROWS, WIDTH]), COLUMN)
            sums += gl.convert_layout(more, sums.type.layout, assert_trivial=True)
        fence_async_shared()
        column = first_column + WIDTH * (CONFIG.O_STORES - 1)
        tma_store(outputs.o, tma_coordinates(outputs.o, tokens, first, column), o_tile)
    if flag is not None:
        first_total, second_total = split_rows(total[:, None])
        has_softmax = (first_total == first_total) | (second_total == second_total)
        bad = (sums * 0.0 != 0.0) & gl.convert_layout(has_softmax, sums.type.layout, assert_trivial=True)
        gl.store(flag + bad.to(gl.int32) * 0, bad.to(gl.int32), mask=bad)
    i = first + gl.arange(0, ROWS, m_i.type.layout)
    divisor = gl.convert_layout(divisor, m_i.type.layout)
    log = gl.log2(divisor)
    log += (divisor * gl.exp2(-log) - 1.0) * LOG2E  # a Newton step: the hardware's log2 is off by 2^-22
    has_keys = gl.convert_layout(total, m_i.type.layout) != 0.0
    log = (m_i + log) * LN2 if terms.large_scores is None else m_i + log * LN2
    if params.fp8.shift is not None:
        log += gl.load(score_shift(w, i, params))
    PACKED: gl.constexpr = params.cu_q is not None
    rows = row_pointers(outputs.lse, params.n_q, params.heads, w.b, w.h, w.q0, i, PACKED)
    gl.store(rows, gl.where(has_keys, log, float("-inf")), mask=i < w.n_q)


@gluon.jit
def store_max_logit(m_i, w, first, max_logit, params):
    """max_logit[b, h], or packed [h], becomes the maximum of itself and m_i, in natural units: one atomic for each
    warp, which has 16 rows. NaNs do not count."""
    i = first + gl.arange(0, ROWS, m_i.type.layout)
    top = m_i * LN2 if params.terms.large_scores is None else m_i
    top = gl.max(gl.where((i < w.n_q) & (top > float("-inf")), top, float("-inf")).reshape([4, 16]), 1)
    head = w.h if params.cu_q is not None else w.b * params.heads + w.h
    gl.atomic_max(max_logit + head + gl.arange(0, 4, top.type.layout) * 0, top, sem="relaxed")


@gluon.jit
def store_to_shared(acc, factor, o_tile, COLUMN: gl.constexpr):
    """Stores O = factor * acc to its columns of the tile in shared memory. Returns the `lane_sums` of every second row:
    a hidden nan or inf makes its column of O nan or inf in all rows, because 0 * nan and 0 * inf are nan."""
    out = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    o_tile.slice(COLUMN, acc.shape[1], dim=1).store(out.to(o_tile.dtype))
    return lane_sums(split_rows(out)[0])


@gluon.jit
def store_to_global(acc, factor, o_float32, tokens, first, COLUMN: gl.constexpr):
    """The same to global memory, in float32."""
    out = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    store_global(o_float32, out, tokens, first, COLUMN)
    return lane_sums(split_rows(out)[0])


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
    q_factors = query_factors(w, first, params, gl.SliceLayout(1, acc_layout(BLOCK_N, 32)), CONFIG)
    scales = key_scales(w, key, params, CONFIG)
    # fp8 has no block mask (support.unsupported_fp8), so that the next block begins here
    next_scales = key_scales(w, key + BLOCK_N, params, CONFIG)
    factor = score_factors(q_factors, scales, params, CONFIG)
    scale_log2 = log2_scale(params.scale * factor, CONFIG.FOLD_SCALE)
    dropout_words = query_words(w, first, gl.SliceLayout(1, acc_layout(BLOCK_N)), ROWS, terms)
    q_slot = t % CONFIG.Q_STAGES * (CONFIG.BLOCK_M // ROWS) + SLOT
    mbarrier.wait(shared.q.full.index(q_slot), phase(t, CONFIG.Q_STAGES))
    wait_full(shared.k, first_use, STAGES)
    q = q_operands(shared.q, q_slot, CONFIG)
    s = warpgroup_mma_wait(0, deps=(issue_qk(q, shared.k, first_use, CONFIG),))
    release(shared.k, first_use, STAGES)
    s = times_key_scales(s, scales, w, key, params, CONFIG)
    s = masked_scores(s, factor, tile, block, params, CONFIG)
    m_i = row_maximum(row_max(s), scale_log2, terms.large_scores)
    left, right = split_columns(s)
    pivot = p_pivot(finite_max(m_i), terms, CONFIG)
    p_left, l_left = weights(left, pivot, scale_log2, dropout_words, key, terms, CONFIG)
    p_right, l_i = weights(right, pivot, scale_log2, dropout_words, key + BLOCK_N // 2, terms, CONFIG)
    l_i += l_left
    v_factor = scales[1]
    p_left, p_right, state = times_value_scales(p_left, p_right, (m_i, l_i, m_i), v_factor, w, key, params, CONFIG)
    m_i, l_i, _alpha = state
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
            scales = next_scales
            factor = score_factors(q_factors, scales, params, CONFIG)
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
            next_scales = key_scales(w, key + BLOCK_N, params, CONFIG)  # a block ahead: loads take as long
        s = warpgroup_mma_wait(2 * len(CONFIG.HEAD_PARTS), deps=(s_pending,))
        release(shared.k, use, STAGES)
        s = times_key_scales(s, scales, w, key, params, CONFIG)
        s = masked_scores(s, factor, tile, block, params, CONFIG)
        m_old = m_i
        m_i = gl.maximum(m_i, row_maximum(row_max(s), scale_log2, terms.large_scores))
        pivot = finite_max(m_i)
        alpha = gl.exp2(rescale_exponent(m_old, pivot, scale_log2, terms.large_scores))
        pivot = p_pivot(pivot, terms, CONFIG)
        left, right = split_columns(s)
        p_left, l_left = weights(left, pivot, scale_log2, dropout_words, key, terms, CONFIG)
        l_i = l_i * broadcast_rows(alpha, l_i) + l_left
        # The wait for the next K stands here because its branch keeps the left weights before the wait for P V and the
        # right ones after it: compilers move arithmetic across a wgmma wait, but not across a branch.
        wait_full(shared.k, use + 1, STAGES, use + 1 < end_use)
        acc = finish_pv(acc_pending, p, acc, rescaling, CONFIG)
        release(shared.v, use - 1, STAGES)
        p_right, l_right = weights(right, pivot, scale_log2, dropout_words, key + BLOCK_N // 2, terms, CONFIG)
        l_i += l_right
        if CONFIG.FP8:
            v_factor_old = v_factor
            v_factor = scales[1]
            state = m_i, l_i, alpha
            p_left, p_right, state = times_value_scales(p_left, p_right, state, v_factor, w, key, params, CONFIG)
            m_i, l_i, alpha = state
            rescaling = alpha * gl.abs(v_factor_old / v_factor)
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


# keys and columns of V at a time: few registers
REPAIR_KEYS: gl.constexpr = gl.constexpr(16)
REPAIR_COLUMNS: gl.constexpr = gl.constexpr(64)


class RepairPointers(NamedTuple):
    """q, k, v and out; a flag for each warpgroup of each program, which are 0 between launches; and for each tile, the
    tile that its program computed before. All are None where every row sees every key. In fp8, q, k and v are
    GlobalTensors, because there the TMA descriptors are those of the quantised operands."""

    q: tl.tensor = None
    k: tl.tensor = None
    v: tl.tensor = None
    o: tl.tensor = None
    flags: tl.tensor = None
    tiles: tl.tensor = None


class Repair(NamedTuple):
    """The pointers, and the TMA descriptors of q, k and v, from which their strides are taken."""

    pointers: RepairPointers
    q: tl.tensor
    k: tl.tensor
    v: tl.tensor


@gluon.jit
def flag_pointer(flags, WG: gl.constexpr, CONFIG: gl.constexpr):
    """The flag of this warpgroup."""
    return flags + program_id_here() * CONFIG.WARPGROUPS + WG


@gluon.jit
def record_tile(tiles, tile_id, last_id):
    """Producer: appends a tile to the list of its program, unless `tiles` is None. Returns its id, now the last one."""
    if tiles is not None:
        gl.store(tiles + tile_id, last_id)
    return tile_id


@gluon.jit
def repair_tiles(last_id, outputs, params, scheduler, WG: gl.constexpr, CONFIG: gl.constexpr):
    """This warpgroup, after its last tile (-1: it had none): if its flag is raised, repairs its tiles and clears it."""
    pointers = outputs.repair.pointers
    flag = flag_pointer(pointers.flags, WG, CONFIG)
    tma.store_wait(0)
    barrier()  # all warps have stored their flags
    if gl.load(flag, volatile=True) > 0:
        tma_stores_done()
        barrier()  # O is in memory, and all warps have read the flag
        gl.store(flag, 0)
        tile_id = last_id
        # opaque, because what follows from arguments alone is computed before the loop over tiles, and spilled there
        per_row, in_l2 = opaque(scheduler.tiles_per_row), opaque(scheduler.rows_in_l2)
        scheduler = TileScheduler(
            *(scheduler.counter, scheduler.num_tiles, scheduler.rows, per_row),
            *(scheduler.heads, scheduler.batch, in_l2, scheduler.grouped_rows),
        )
        while tile_id >= 0:
            repair_tile(tile_work(tile_id, scheduler, params, CONFIG), outputs, params, WG, CONFIG)
            tile_id = gl.load(pointers.tiles + tile_id, volatile=True)


@gluon.jit
def repair_tile(w, outputs, params, WG: gl.constexpr, CONFIG: gl.constexpr):
    """Computes and stores the columns of this warpgroup's O again that have a nan in a row whose softmax has none."""
    pointers = outputs.repair.pointers
    if CONFIG.FP8:
        inputs = (pointers.q, pointers.k, pointers.v)
    else:
        inputs = (
            tensor_of(pointers.q, outputs.repair.q),
            tensor_of(pointers.k, outputs.repair.k),
            tensor_of(pointers.v, outputs.repair.v),
        )
    terms = params.terms
    SLOT: gl.constexpr = WG % (CONFIG.BLOCK_M // ROWS)
    FIRST_COLUMN: gl.constexpr = (WG - SLOT) * CONFIG.BLOCK_DV
    first = opaque(w.first + SLOT * ROWS)
    out = outputs.o_float32
    if out.ptr is None:
        out = tensor_of(pointers.o, outputs.o)
    tokens = Tokens(w.b, w.h, w.q0, w.n_q)

    layout: gl.constexpr = acc_layout(REPAIR_KEYS)
    lse2 = load_lse2(w, first, outputs.lse, params, gl.SliceLayout(1, layout))
    sink = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    if terms.sinks.ptr is not None:
        score = gl.load(terms.sinks.ptr + w.h * terms.sinks.stride).to(gl.float32)
        score = sink_maximum(score, terms.large_scores)
        sink += gl.exp2(rescale_exponent(score, lse2, LOG2E, terms.large_scores))
    dropout_words = query_words(w, first, gl.SliceLayout(1, layout), ROWS, terms)
    # opaque: max(n_k, 0) would likewise be computed before the loop over tiles
    keys = Work(w.b, w.h, w.first, w.q0, w.n_q, w.k0, opaque(w.n_k), w.r0)
    lo, hi, span = block_range(first, keys, params, ROWS, CONFIG.BLOCK_N)
    for column in range(FIRST_COLUMN, gl.minimum(inputs[2].columns, FIRST_COLUMN + CONFIG.BLOCK_DV), REPAIR_COLUMNS):
        acc = gl.zeros([ROWS, REPAIR_COLUMNS], gl.float32, acc_layout(REPAIR_COLUMNS))
        total = sink
        end = gl.where(has_nan(out, tokens, first, column, lse2), hi, lo)
        for n in range(lo, end):
            found = find_block(n, w, terms.blocks, CONFIG.BLOCK_N)
            block = load_key_block(n, found, first, terms, CONFIG.BLOCK_N, REPAIR_KEYS, layout)
            for j in range(block.start, block.start + CONFIG.BLOCK_N, REPAIR_KEYS):
                p = visible_p((w, first, span), part_of(block, opaque(j)), lse2, inputs, params, CONFIG)
                total += gl.sum(gl.maximum(p, 0.0), 1)
                p = gl.where(p > 0.0, kept_weights(p, dropout_words, opaque(j), terms), p)
                for key in range(j, j + REPAIR_KEYS):
                    acc = add_value(acc, p, j, opaque(key), w, column, inputs[2], CONFIG)
        factor = 1.0 if terms.seed is None else terms.rescale
        acc *= broadcast_rows(factor / gl.where(total == 0.0, 1.0, total), acc)
        if end > lo:
            store_global(out, acc, tokens, first, column)


@gluon.jit
def has_nan(out, tokens, first, column, lse2):
    """Whether REPAIR_COLUMNS columns of the rows `first` and on of O have a nan, except in rows whose lse is one."""
    layout: gl.constexpr = acc_layout(REPAIR_COLUMNS)
    x = load_global(out, tokens, first, column, gl.zeros([ROWS, REPAIR_COLUMNS], gl.float32, layout))
    rows = broadcast_rows(lse2, x)
    bad = (x != x) & (rows == rows)
    return gl.max(gl.max(bad.to(gl.int32), 1), 0) > 0


@gluon.jit
def load_lse2(w, first, lse, params, layout: gl.constexpr):
    """lse of the queries from `first` on in the units of the exponent; +inf, which makes p 0, for rows without keys."""
    i = first + gl.arange(0, ROWS, layout)
    rows = row_pointers(lse, params.n_q, params.heads, w.b, w.h, w.q0, i, params.cu_q is not None)
    x = gl.load(rows, mask=i < w.n_q, other=float("inf"))
    x = row_maximum(x, LOG2E, params.terms.large_scores)
    return gl.where(x == float("-inf"), float("inf"), x)


@gluon.jit
def visible_p(tile, block, lse2, inputs, params, CONFIG: gl.constexpr):
    """p of the REPAIR_KEYS keys of `block`; -1 for hidden pairs. A p that is nan becomes inf, because a maximum drops
    nan and keeps inf; O, a quotient, is then nan."""
    w, first, _span = tile
    q, k, _v = inputs
    layout: gl.constexpr = acc_layout(REPAIR_KEYS)
    i = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    s = gl.zeros([ROWS, REPAIR_KEYS], gl.float32, layout)
    j = column_indices(block.start, s)
    q_rows = global_rows(q, w.b, w.h, w.q0, i)
    k_rows = global_rows(k, w.b, w.h // CONFIG.GROUP, w.k0, j)
    for d in range(k.columns):
        q_column = gl.load(q_rows + d, mask=i < w.n_q, other=0.0).to(gl.float32)
        k_column = gl.load(k_rows + d, mask=j < w.n_k, other=0.0).to(gl.float32)
        s += q_column[:, None] * k_column[None, :]
    pairs = Pairs(w, w.h, i[:, None], j[None, :])
    visible = mask_scores(gl.zeros([ROWS, REPAIR_KEYS], gl.float32, layout), tile, block, params) == 0.0
    s = scores(s, pairs, params.scale, params.terms, params.SCORE_MOD, CONFIG.FOLD_SCALE)
    p = gl.exp2(exponent(s, lse2[:, None], log2_scale(params.scale, CONFIG.FOLD_SCALE), params.terms.large_scores))
    p = gl.where(p == p, p, float("inf"))
    return gl.where(visible, p, -1.0)


@gluon.jit
def add_value(acc, p, start, j, w, column, v, CONFIG: gl.constexpr):
    """acc + p_j * v_j where p_j is not negative; the columns of v from `column` on. p: of the keys from `start` on."""
    is_j = column_indices(start, p) == j
    p_column = broadcast_rows(gl.max(gl.where(is_j[None, :], p, -1.0), 1), acc)
    columns = column_indices(opaque(column), acc)
    row = global_rows(v, w.b, w.h // CONFIG.GROUP, w.k0, j)
    value = gl.load(row + columns, mask=(columns < v.columns) & (j < w.n_k), other=0.0).to(gl.float32)
    return gl.where(p_column >= 0.0, acc + p_column * value[None, :], acc)
