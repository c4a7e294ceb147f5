"""Online softmax in log2 units.

The running maximum m is kept in log2 units, m = qk_scale * max(s), so that s * qk_scale - m is one multiply-add. With
`large_scores` (1, or None) m stays in the units of s: qk_scale * max(s) could overflow, or be rounded by more than the
scores of a row differ, as where they are all torch.finfo(dtype).min.
"""

import triton
import triton.language as tl

from .structs import LN2, LOG2E

LARGEST_SINK: tl.constexpr = tl.constexpr(2e38)


@triton.jit
def log2_scale(scale, FOLD: tl.constexpr):
    """The factor from what `scores` returns to log2 units."""
    if FOLD:
        return scale * LOG2E
    else:
        return LOG2E


@triton.jit
def row_maximum(x, qk_scale, large_scores):
    """The maximum score x in the units of m."""
    if large_scores is None:
        return x * qk_scale
    else:
        return x


@triton.jit
def sink_maximum(sink, large_scores):
    """The score of a sink in the units of m. In log2 units sinks beyond +-2e38 would be inf: they count as +-2e38. In
    natural units they stay, since scores may be as small."""
    x = sink
    if large_scores is None:
        x = tl.minimum(tl.maximum(sink, -LARGEST_SINK), LARGEST_SINK)
        x = tl.where((sink == float("-inf")) | (sink != sink), sink, x)
    return row_maximum(x, LOG2E, large_scores)


@triton.jit
def exponent(s, m, qk_scale, large_scores):
    """log2(p) of the score s."""
    if large_scores is None:
        return s * qk_scale - m
    else:
        return (s - m) * qk_scale


@triton.jit
def rescale_exponent(m_old, m, qk_scale, large_scores):
    """log2(alpha) where the maximum changes from m_old to m."""
    if large_scores is None:
        return m_old - m
    else:
        return (m_old - m) * qk_scale


@triton.jit
def row_sums(p, l):
    """What a tile adds to l: its row sums, or p itself where l has a column for each of its keys."""
    if len(l.shape) == 1:
        return tl.sum(p, 1)
    else:
        return p


@triton.jit
def softmax_step(m, l, s, qk_scale, large_scores, BOUNDED: tl.constexpr):
    """(p, alpha, m, l) after a tile of scores. A row without visible keys keeps m = -inf and l = 0.

    alpha is computed from m as it was subtracted: with s * qk_scale once more, the compiler would fuse the product with
    the difference, and alpha would not be exactly 1 where the maximum stays, an error that grows with every tile.

    BOUNDED: p fits into a float without a maximum, so m stays 0 and nothing is rescaled (see `rounding_correction`).
    """
    if BOUNDED:
        p = tl.exp2(s * qk_scale)
        return p, tl.full([s.shape[0]], 1.0, tl.float32), m, l + row_sums(p, l)
    m_new = tl.maximum(m, row_maximum(tl.max(s, 1), qk_scale, large_scores))
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(exponent(s, pivot[:, None], qk_scale, large_scores))
    alpha = tl.exp2(rescale_exponent(m, pivot, qk_scale, large_scores))
    return p, alpha, m_new, l * (alpha if len(l.shape) == 1 else alpha[:, None]) + row_sums(p, l)


@triton.jit
def rounding_correction(l, rounded):
    """l / sum(bf16(p)), the factor of acc = sum(bf16(p) v) before it is divided by l = sum(p). With a maximum
    subtracted, the largest p is 1, which is exact. Without, each p is off by up to 2^-9: for a row that sees one key,
    out would be v * bf16(p) / p. lse needs l without the correction."""
    return l / tl.where(rounded == 0.0, 1.0, rounded)


@triton.jit
def logsumexp(m, l):
    """m + log2(l) in natural units, for m in log2 units.

    The hardware's log2 is off by up to 2^-22 of its result; one Newton step against its exp2 corrects that.
    """
    some = tl.where(l == 0.0, 1.0, l)
    y = tl.log2(some)
    y += (some * tl.exp2(-y) - 1.0) * LOG2E
    return tl.where(l == 0.0, float("-inf"), (m + y) * LN2)


@triton.jit
def row_logsumexp(m, l, large_scores):
    """The logsumexp of rows in natural units."""
    if large_scores is None:
        return logsumexp(m, l)
    else:
        return m + logsumexp(0.0, l)
