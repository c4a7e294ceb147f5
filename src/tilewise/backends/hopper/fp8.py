"""fp8 operands in the Hopper forward: where their blocks and scales are, and the offset of P.

Q, K and V are the results of the quantising pass (`common/fp8_quantise.py`). S is the product of the stored values,
times the scale of the queries and that of the block of keys. P is at most 448, the largest fp8 value: l_i is 448 times
the sum of softmax weights as well. The sum O of stored values is in units of the scale of the last block of V, so that
a new block changes the factor of O alone.
"""

import triton
import triton.language as tl

from ..common.device.fp8 import padded_block
from ..common.device.structs import LN2, PAD
from .gluon_compat import gl, gluon
from .token_rows import Tokens

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
def query_factor(w, first, params, CONFIG: gl.constexpr):
    """The scale of the 64 queries from `first` on."""
    if CONFIG.FP8:
        block = 2 * fp8_query_block(w, params) + first // (PAD // 2)
        return gl.load(params.fp8.q + block * params.heads + w.h)
    else:
        return 1.0


@gluon.jit
def key_scales(w, key, params, CONFIG: gl.constexpr):
    """The scales of the keys and of the values from `key` on, or of the last ones."""
    if CONFIG.FP8:
        block = fp8_key_block(w, gl.maximum(gl.minimum(key, w.n_k - 1), 0), params)
        at = block * (params.heads // CONFIG.GROUP) + w.h // CONFIG.GROUP
        return gl.load(params.fp8.k + at), gl.load(params.fp8.v + at)
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
    line = (fp8_query_block(w, params) + i // PAD).to(gl.int64) * params.heads + w.h
    return params.fp8.shift + line * PAD + i % PAD


@gluon.jit
def fp8_query_tokens(w, params):
    return Tokens(fp8_query_block(w, params) + w.first // PAD, w.h, 0, 0)


@gluon.jit
def fp8_key_tokens(w, params, CONFIG: gl.constexpr):
    """The first block of the keys, in the place of the batch row."""
    return Tokens(fp8_key_block(w, 0, params), w.h // CONFIG.GROUP, 0, 0)
