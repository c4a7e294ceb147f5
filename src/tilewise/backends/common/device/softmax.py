"""Scores become weights, tile by tile, in log2 units."""

import triton
import triton.language as tl

from .structs import LN2, LOG2E


@triton.jit
def unit_of(scale, FOLD: tl.constexpr):
    """Log2 units per unit of what `scores` returns."""
    if FOLD:
        return scale * LOG2E
    else:
        return LOG2E


@triton.jit
def measured(x, unit, far):
    """What scores are measured from, x being one of them: in log2 units, so that `exponent` is one multiply-add. Where
    scores may be `far` out (1, or None), -3e38 for a whole row, it stays as it is: the product would be infinite, or
    rounded by more than scores differ."""
    if far is None:
        return x * unit
    else:
        return x


@triton.jit
def exponent(s, origin, unit, far):
    """By how many log2 units a score lies above what is `measured`."""
    if far is None:
        return s * unit - origin
    else:
        return (s - origin) * unit


@triton.jit
def gap(a, b, unit, far):
    """By how many log2 units one that is `measured` lies above another."""
    if far is None:
        return a - b
    else:
        return (a - b) * unit


@triton.jit
def softmax_step(m, l, s, unit, far, BOUNDED: tl.constexpr):
    """Fold one tile of scores into the running (maximum, sum). A row that has seen nothing keeps m = -inf, l = 0.

    m is `measured`, as it was subtracted: a product of s and unit once more would be fused with the difference, not
    rounded, and alpha would not be 1 where the maximum stays, an error that grows with every tile.

    BOUNDED: the weights of such scores fit into a float as they are; m stays 0 and nothing is ever rescaled. Then the
    largest weight is not 1, and 16 bits round it: see `unrounded`.
    """
    if BOUNDED:
        p = tl.exp2(s * unit)
        return p, tl.full([s.shape[0]], 1.0, tl.float32), m, l + tl.sum(p, 1)
    m_new = tl.maximum(m, measured(tl.max(s, 1), unit, far))
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(exponent(s, pivot[:, None], unit, far))
    alpha = tl.exp2(gap(m, pivot, unit, far))
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def unrounded(l, rounded):
    """l / sum(bf16(p)): what acc = sum(bf16(p) v) is multiplied by before it is divided by l = sum(p). With a maximum
    subtracted, the largest p is 1, which is exact. Without, each p is off by up to 2^-9: of a row that sees one key,
    out would be v * bf16(p) / p. lse needs l as it is."""
    return l / tl.where(rounded == 0.0, 1.0, rounded)


@triton.jit
def logsumexp(m, l):
    """What the running (maximum, sum) amount to, in natural units.

    The hardware's log2 is off by up to 2^-22 of its result; one Newton step against its exp2 mends that.
    """
    some = tl.where(l == 0.0, 1.0, l)
    y = tl.log2(some)
    y += (some * tl.exp2(-y) - 1.0) * LOG2E
    return tl.where(l == 0.0, float("-inf"), (m + y) * LN2)


@triton.jit
def row_logsumexp(m, l, far):
    """The same, m being `measured`."""
    if far is None:
        return logsumexp(m, l)
    else:
        return m + logsumexp(0.0, l)
