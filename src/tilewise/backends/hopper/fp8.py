"""fp8 operands in the Hopper forward: where their blocks and scales are, and the offset of P.

Q, K and V are the results of the quantising pass (`common/fp8_quantise.py`). S is the product of the stored values,
times the scale of the query and that of the block of keys. P is at most 448, the largest fp8 value: l_i is 448 times
the sum of softmax weights as well. The sum O of stored values is in units of the scale of the last block of V, so that
a new block changes the factor of O alone. Rows of K and V with scales of their own are in `times_key_scales` and
`times_value_scales`.
"""

import triton
import triton.language as tl

from ..common.device.fp8 import LEAST_TOP, key_scales_at, padded_block, row_scales
from ..common.device.structs import LN2, PAD
from .gluon_compat import gl, gluon
from .pipeline import Tokens

LOG2_448: tl.constexpr = tl.constexpr(8.807354922057604)


@triton.jit
def fp8_query_block(w, params):
    """The first block of PAD tokens of a sequence in the stored Q."""
    return padded_block(w.q0, w.b, params.n_q, params.cu_q)


@triton.jit
def fp8_key_block(w, key, params):
    """The block of PAD tokens that has this key, in the stored K and V."""
    return padded_block(w.k0, w.b, params.n_k, params.cu_k) + key // PAD


@gluon.jit
def query_factors(w, first, params, layout: gl.constexpr, CONFIG: gl.constexpr):
    """The scales of the 64 queries from `first` on."""
    if CONFIG.FP8:
        block = fp8_query_block(w, params) + first // PAD
        return gl.load(row_scales(params.fp8, block, w.h, params.heads) + first % PAD + gl.arange(0, 64, layout))
    else:
        return 1.0


@gluon.jit
def fp8_key_scales(w, key, params, CONFIG: gl.constexpr):
    """Where the block of `key`, or the last one, has its scales."""
    block = fp8_key_block(w, gl.maximum(gl.minimum(key, w.n_k - 1), 0), params)
    return key_scales_at(params.fp8, block * (params.heads // CONFIG.GROUP) + w.h // CONFIG.GROUP)


@gluon.jit
def score_factors(q_factors, scales, params, CONFIG: gl.constexpr):
    """The factors of the products of rows of q with a block of keys."""
    if not CONFIG.FP8:
        return 1.0
    elif params.fp8.own is None:
        return q_factors * scales[0]
    else:
        return q_factors * gl.abs(scales[0])


@gluon.jit
def times_key_scales(s, scales, w, key, params, CONFIG: gl.constexpr):
    """The products s of stored values, times the scales of keys that have one each. A branch: few blocks have them."""
    if params.fp8.own is None:
        return s
    else:
        if scales[0] < 0.0:
            rows = fp8_key_scales(w, key, params, CONFIG) + 2
            s = s * gl.load(rows + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)))[None, :]
        return s


@gluon.jit
def times_value_scales(left, right, state, v_factor, w, key, params, CONFIG: gl.constexpr):
    """P and `state` (m_i, l_i, alpha), where each value of a block has a scale, at most 1, of its own: P is multiplied
    by them. So that a row which does not see the largest values keeps its 3 bits, its m_i is lowered by what makes its
    largest weight 448 again. It stays so close to the maximum that l_i is a float32."""
    if params.fp8.own is None:
        return left, right, state
    else:
        HALF: gl.constexpr = left.shape[1]
        m_i, l_i, alpha = state
        if v_factor < 0.0:
            rows = fp8_key_scales(w, key, params, CONFIG) + 2 + PAD
            rows_left = rows + gl.arange(0, HALF, gl.SliceLayout(0, left.type.layout))
            left = left * gl.load(rows_left)[None, :]
            right = right * gl.load(rows_left + HALF)[None, :]
            top = gl.max(gl.maximum(left, right), 1)
            total = gl.convert_layout(gl.sum(l_i, 1), top.type.layout)
            top = gl.maximum(top * (1.0 / 448.0), total * LEAST_TOP)
            top = gl.where(top > 0.0, top, 1.0)
            more = 1.0 / top
            left = left * more[:, None]
            right = right * more[:, None]
            lower = gl.log2(top) if params.terms.large_scores is None else gl.log2(top) * LN2
            m_i = m_i + gl.convert_layout(lower, m_i.type.layout, assert_trivial=True)
            l_i = l_i * gl.convert_layout(more, gl.SliceLayout(1, l_i.type.layout))[:, None]
            alpha = alpha * gl.convert_layout(more, alpha.type.layout, assert_trivial=True)
        return left, right, (m_i, l_i, alpha)


@gluon.jit
def key_scales(w, key, params, CONFIG: gl.constexpr):
    """The scales of the keys and of the values from `key` on, or of the last ones; negative where each row has one."""
    if CONFIG.FP8:
        at = fp8_key_scales(w, key, params, CONFIG)
        return gl.load(at), gl.load(at + 1)
    else:
        return 1.0, 1.0


@gluon.jit
def p_offset(terms):
    """log(448) in the units of m."""
    if terms.large_scores is None:
        return LOG2_448
    else:
        return LOG2_448 * LN2


@gluon.jit
def p_pivot(pivot, terms, CONFIG: gl.constexpr):
    """What is subtracted from scores before the exponential."""
    if CONFIG.FP8:
        return pivot - p_offset(terms)
    else:
        return pivot


@gluon.jit
def score_shift(w, i, params):
    """Pointers to what the mean key has taken from the scores of the queries i."""
    return row_scales(params.fp8, fp8_query_block(w, params) + i // PAD, w.h, params.heads) + PAD + i % PAD


@gluon.jit
def fp8_query_tokens(w, params):
    return Tokens(fp8_query_block(w, params) + w.first // PAD, w.h, 0, 0)


@gluon.jit
def fp8_key_tokens(w, params, CONFIG: gl.constexpr):
    """The first block of the keys, in the place of the batch row."""
    return Tokens(fp8_key_block(w, 0, params), w.h // CONFIG.GROUP, 0, 0)
