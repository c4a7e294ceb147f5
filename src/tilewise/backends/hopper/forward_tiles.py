"""What a warpgroup of the Hopper forward does to the tiles in its registers: scores, weights, output. And the plan.

A tile of S or P is 64 queries by BLOCK_N keys, one of O 64 by a power of two, where wgmma leaves and wants them: the
values of a row meet other threads' only in its maximum and its sum.
"""

from typing import NamedTuple

from ..common.device.score import scores
from ..common.device.softmax import exponent, rescale_exponent
from ..common.device.structs import LOG2E, Pairs
from .gluon_compat import gl, gluon, here, hide_from, hide_until, narrow, warpgroup_mma, warpgroup_mma_wait
from .pipeline import matrix, unless_hidden

ROWS: gl.constexpr = gl.constexpr(64)  # queries of one warpgroup: the M of a wgmma


class Plan(NamedTuple):
    """What is known at compile time. WIDTHS: how the columns of V and O are cut into powers of two, 128 and 64 for 192.
    BLOCK_DV: the power of two that holds them all.
    """

    BLOCK_DV: int
    WIDTHS: tuple[int, ...]
    BLOCK_N: int
    GROUP: int
    WARPGROUPS: int
    STAGES: int
    FOLD: bool
    PARTS: int  # O leaves in so many parts, one after the other through the same shared memory
    TURNS: bool  # the warpgroups ask for their products one after the other
    LAZY: bool  # a warp none of whose rows has a new maximum leaves O as it is
    PAGE: int | None = None  # tokens of a page, where K and V are a cache of pages
    BOXES: int = 1  # in which a tile of keys comes, each from one page
    AHEAD: int = 1  # boxes whose pages are asked for together
    FEW: int = 0  # queries of a sequence that is not computed here


@gluon.jit
def product(q, wg, k, use, PLAN: gl.constexpr):
    """S = Q K^T, on its way, in as many products as their columns have parts."""
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    q_tile = matrix(q.parts[0], wg, PLAN.WARPGROUPS)
    k_tile = matrix(k.parts[0], use, PLAN.STAGES)
    s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    if len(q.parts) == 2:
        q_tile = matrix(q.parts[1], wg, PLAN.WARPGROUPS)
        k_tile = matrix(k.parts[1], use, PLAN.STAGES)
        s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def score(
    s, w, span, first, start, picky, before, after, scale, terms,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """What the softmax exponentiates: the scores of the keys from `start` on, -inf where a query does not see a key.
    The mask mod is asked of blocks that are `picky`."""
    BLOCK_N: gl.constexpr = PLAN.BLOCK_N
    row = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
    i = (first + row)[:, None]
    j = (start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout)))[None, :]
    s = scores(s, Pairs(w, w.h, i, j), scale, terms, SCORE_MOD, PLAN.FOLD)
    if MASK_MOD is not None:
        s = unless_hidden(s, picky, i, j, w, w.h, terms, MASK_MOD)
    if (start < span.full_lo) | (start + BLOCK_N > span.full_hi):
        last = here(row) + (first + w.n_k - w.n_q - start)
        end = last * 0 + (w.n_k - start)
        s = hide_from(s, end if after is None else gl.minimum(last + after + 1, end))
        if before is not None:
            s = hide_until(s, last - before)
    return s


@gluon.jit
def row_max(s):
    """The largest score of each row; of two halves first, so that no maximum waits for all those before it."""
    left, right = halves(s)
    return gl.convert_layout(gl.max(gl.maximum(left, right), 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def origin(m):
    """What the scores of a row are measured from: its maximum, if it has seen any key."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def weights(s, pivot, unit, terms):
    return gl.exp2(exponent(s, by_row(pivot, s), unit, terms.large_scores))


@gluon.jit
def lane_sums(p):
    """[M, N] -> [M, 4], the sum of the columns that each of a row's four lanes holds: bits 1 and 2 of a column tell the
    lane, the others the register. The lanes' sums meet once, at the end of the tile.
    """
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def with_sink(m, total, sink, terms):
    """The factor of what was summed so far, the new maximum and the new total."""
    m_new = gl.maximum(m, sink)
    pivot = gl.where(m_new == float("-inf"), 0.0, m_new)
    lanes: gl.constexpr = total.type.layout
    factor = gl.convert_layout(gl.exp2(rescale_exponent(m, pivot, LOG2E, terms.large_scores)), lanes)
    weight = gl.exp2(rescale_exponent(sink, pivot, LOG2E, terms.large_scores))
    return factor, m_new, total * factor + gl.convert_layout(weight, lanes)


@gluon.jit
def rescale(acc, factor, LAZY: gl.constexpr):
    """acc * factor. LAZY: skipped by a warp all of whose factors are 1, as most are in the blocks of a long row."""
    if len(acc) == 1:
        return (rescale_part(acc[0], factor, LAZY),)
    else:
        return rescale_part(acc[0], factor, LAZY), rescale_part(acc[1], factor, LAZY)


@gluon.jit
def rescale_part(acc, factor, LAZY: gl.constexpr):
    if LAZY:
        return gl.map_elementwise(rescale_lane, acc, by_row(factor, acc), pack=4)[0]
    else:
        return acc * by_row(factor, acc)


@gluon.jit
def rescale_lane(a, b, c, d, x, x_, y, y_):
    """Two neighbours in each of the two rows that a lane holds. The compiler joins the branches of all the columns."""
    if (x != 1.0) | (y != 1.0):
        a = a * x
        b = b * x
        c = c * y
        d = d * y
    return a, b, c, d


@gluon.jit
def by_row(x, tile):
    """x[r] beside tile[r, :]."""
    return gl.convert_layout(x, gl.SliceLayout(1, tile.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def operands(left, right, DTYPE: gl.constexpr, PLAN: gl.constexpr):
    """P as left operands of P V, for each part of V's columns those of its upper and of its lower rows: the registers
    of S, narrowed, are where wgmma wants them.
    """
    left = narrow(left, DTYPE)
    right = narrow(right, DTYPE)
    WIDTHS: gl.constexpr = PLAN.WIDTHS
    if len(WIDTHS) == 1:
        return operand(left, WIDTHS[0]), operand(right, WIDTHS[0])
    else:
        return operand(left, WIDTHS[0]), operand(right, WIDTHS[0]), operand(left, WIDTHS[1]), operand(right, WIDTHS[1])


@gluon.jit
def operand(p, WIDTH: gl.constexpr):
    return gl.convert_layout(p, gl.DotOperandLayout(0, o_layout(WIDTH), 2), assert_trivial=True)


@gluon.constexpr_function
def o_layout(WIDTH):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])


@gluon.jit
def nothing(PLAN: gl.constexpr):
    if len(PLAN.WIDTHS) == 1:
        return (nothing_part(PLAN.WIDTHS[0]),)
    else:
        return nothing_part(PLAN.WIDTHS[0]), nothing_part(PLAN.WIDTHS[1])


@gluon.jit
def nothing_part(WIDTH: gl.constexpr):
    return gl.zeros([ROWS, WIDTH], gl.float32, o_layout(WIDTH))


@gluon.jit
def weigh(p, v, use, acc, PLAN: gl.constexpr):
    """acc + P V, on its way, in two products for each part."""
    left = weigh_part(p[0], p[1], matrix(v.parts[0], use, PLAN.STAGES), acc[0], PLAN)
    if len(v.parts) == 1:
        return (left,)
    else:
        return left, weigh_part(p[2], p[3], matrix(v.parts[1], use, PLAN.STAGES), acc[1], PLAN)


@gluon.jit
def weigh_part(left, right, v_tile, acc, PLAN: gl.constexpr):
    HALF: gl.constexpr = PLAN.BLOCK_N // 2
    acc = warpgroup_mma(left, v_tile.slice(0, HALF, dim=0), acc, is_async=True)
    return warpgroup_mma(right, v_tile.slice(HALF, HALF, dim=0), acc, is_async=True)


@gluon.jit
def settled(acc, p):
    """acc, once it is there; p stays where it is until then."""
    if len(acc) == 1:
        left, _p, _q = warpgroup_mma_wait(0, deps=(acc[0], p[0], p[1]))
        return (left,)
    else:
        left, right, _p, _q, _r, _s = warpgroup_mma_wait(0, deps=(acc[0], acc[1], p[0], p[1], p[2], p[3]))
        return left, right


@gluon.jit
def halves(acc):
    """The left and the right columns, in the registers where they are."""
    WIDTH: gl.constexpr = acc.shape[1] // 2
    left, right = gl.split(acc.reshape([ROWS, 2, WIDTH]).permute((0, 2, 1)))
    left = gl.convert_layout(left, o_layout(WIDTH), assert_trivial=True)
    return left, gl.convert_layout(right, o_layout(WIDTH), assert_trivial=True)
