"""Online softmax of the Hopper forward on the tiles in a warpgroup's registers, the epilogue, and the config.

A tile of S or P is 64 queries by BLOCK_N keys, one of O 64 by a power of two, in wgmma's register layouts: threads
exchange values of a row only for its maximum and its sum.
"""

from typing import NamedTuple

import triton.language as tl

from ..common.device.score import scores
from ..common.device.softmax import exponent, rescale_exponent, row_maximum
from ..common.device.structs import LN2, LOG2E, Pairs
from ..common.device.tile_io import row_pointers
from .dropout import kept_weights
from .fp8 import p_offset, score_shift
from .gluon_compat import (
    downcast,
    fence_async_shared,
    gl,
    gluon,
    keep_bits,
    keep_column_range,
    opaque,
    pack_fp8,
    tma,
    tma_store,
    unpack_fp8,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .pipeline import apply_mask_mod, stage_tile
from .token_rows import Tokens, store_global, tma_coordinates

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
def weights(s, pivot, scale_log2, dropout_words, start, terms):
    """P = exp(s - pivot) of the keys from `start` on, without the dropped weights, and the `lane_sums` of all."""
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
    if terms.seed is not None:
        factor *= terms.rescale
    alpha = factor
    if outputs.max_logit is not None:
        store_max_logit(m_i, w, first, outputs.max_logit, params)
    if CONFIG.FP8:
        m_i -= p_offset(terms)
    if terms.sinks.ptr is not None:
        sink = gl.load(terms.sinks.ptr + w.h * terms.sinks.stride).to(gl.float32)
        alpha, m_i, total = add_sink(m_i, total, row_maximum(sink, LOG2E, terms.large_scores), terms)
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
