"""Dropout on the tiles in a warpgroup's registers; see `tilewise.mods.dropout`.

The factor of the kept weights (`kept_factor`) is left to the results: O in the forward; dV, dK and dQ in the backward.
A thread holds the queries i and i + 8 and the keys j and j + 8 of a tile, whose four weights share a hash. For the
compiler to see this, bit 3 is cleared before the first query or key of the tile, a multiple of 16, is added.
"""

import triton.language as tl

from ..common.device.score import GOLDEN, dropout_row, dropout_word, is_kept, mix
from .gluon_compat import downcast, downcast_positive, gl, gluon, negate_dropped


@gluon.jit
def sequence_word(w, terms):
    """What the seed and the sequence are mixed into; 0 without dropout."""
    if terms.seed is None:
        return 0
    else:
        return dropout_word(terms.seed, w.b)


@gluon.jit
def query_words(w, first, layout: gl.constexpr, ROWS: gl.constexpr, terms):
    """The start of the streams of ROWS queries from `first` on; 0 without dropout."""
    if terms.seed is None:
        return 0
    else:
        word = mix(sequence_word(w, terms) ^ w.h.to(tl.uint32))
        return dropout_row(word, first + (gl.arange(0, ROWS, layout) & -9))


@gluon.jit
def kept_weights(p, words, start, terms):
    """P [queries, keys from `start` on], with 0 where a weight is dropped. `words`: of the queries."""
    if terms.seed is None:
        return p
    else:
        layout: gl.constexpr = p.type.layout
        words = gl.convert_layout(words, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]
        i = gl.arange(0, p.shape[0], gl.SliceLayout(1, layout))[:, None]
        j = gl.arange(0, p.shape[1], gl.SliceLayout(0, layout))[None, :]
        words = words + start.to(tl.uint32) * GOLDEN
        return gl.where(is_kept(words, i, j, terms.threshold), p, 0.0)


@gluon.jit
def with_signs(p, keys, block, terms):
    """P^T [keys, queries], negative where a weight is dropped."""
    if terms.seed is None:
        return p
    else:
        layout: gl.constexpr = p.type.layout
        j = gl.arange(0, p.shape[0], gl.SliceLayout(1, layout))[:, None]
        i = gl.arange(0, p.shape[1], gl.SliceLayout(0, layout))[None, :]
        word = mix(keys.word ^ block.h.to(tl.uint32))
        words = dropout_row(word, block.first + (i & -9)) + (keys.work.n_k - keys.left).to(tl.uint32) * GOLDEN
        words = words + (j & -9).to(tl.uint32) * GOLDEN
        return negate_dropped(p, words, terms.threshold)


@gluon.jit
def downcast_weights(p, DTYPE: gl.constexpr, terms):
    """The kept weights of P^T with signs in 16 bits, 0 where one is dropped."""
    return downcast(p, DTYPE) if terms.seed is None else downcast_positive(p, DTYPE)


@gluon.jit
def score_gradients(p, dp, delta, terms):
    """dS^T from P^T with signs."""
    if terms.seed is None:
        return p * (dp - delta)
    else:
        return gl.abs(p) * (dp * gl.where(p < 0.0, 0.0, terms.rescale) - delta)
