"""The score of a pair, its derivative by q.k, and dropout."""

import triton
import triton.language as tl

from .mask import mod_indices

GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B9)


@triton.jit
def scaled(product, scale, FOLD: tl.constexpr):
    """scale * product. FOLD: the product as it is, because the scale is positive and no term comes between it and the
    softmax: scale, log2(e) and the subtraction of the maximum are one multiply-add there (`log2_scale`)."""
    if FOLD:
        return product
    else:
        return product * scale


@triton.jit
def scores(product, pairs, scale, terms, SCORE_MOD: tl.constexpr, FOLD: tl.constexpr):
    """scale * q.k, then the score mod and the bias."""
    s = scaled(product, scale, FOLD)
    if SCORE_MOD is not None:
        at = mod_indices(pairs, terms)
        s = SCORE_MOD(s, at.b, at.h, at.i, at.j, at.n_q, at.n_k, terms.score)
    if terms.bias.ptr is not None:
        s += load_bias(terms.bias, pairs)
    return s


@triton.jit
def scores_and_derivative(product, pairs, scale, terms, SCORE_MOD: tl.constexpr, FOLD: tl.constexpr):
    """The same, with a score mod that returns its value and its derivative. Without a mod, the latter is not used."""
    s = scaled(product, scale, FOLD)
    derivative = s
    if SCORE_MOD is not None:
        at = mod_indices(pairs, terms)
        s, derivative = SCORE_MOD(s, at.b, at.h, at.i, at.j, at.n_q, at.n_k, terms.score)
    if terms.bias.ptr is not None:
        s += load_bias(terms.bias, pairs)
    return s, derivative


@triton.jit
def times_derivative(p, derivative, terms):
    """p * derivative; 0 where p is 0 although the derivative is infinite, as past the end of a sequence."""
    if terms.has_derivative is None:
        return p
    elif terms.infinite_derivative is None:
        return p * derivative
    else:
        return tl.where(p == 0.0, 0.0, p * derivative)


@triton.jit
def load_bias(bias, pairs):
    """bias[b, h, i, j]; 0 past the end of the sequence or of the bias, where nothing is read."""
    p = bias.ptr + tl.cast(pairs.w.b, tl.int64) * bias.strides[0] + tl.cast(pairs.h, tl.int64) * bias.strides[1]
    p = p + pairs.i.to(tl.int64) * bias.strides[2] + pairs.j.to(tl.int64) * bias.strides[3]
    rows = tl.minimum(pairs.w.n_q, bias.rows // 16)
    columns = tl.minimum(pairs.w.n_k, bias.columns // 16)
    return tl.load(p, mask=(pairs.i < rows) & (pairs.j < columns), other=0.0).to(tl.float32)


@triton.jit
def dropout(p, pairs, terms):
    """p times `kept_factor` where the pair is kept, and 0 where it is dropped; see `tilewise.mods.dropout`."""
    if terms.seed is None:
        return p
    else:
        at = mod_indices(pairs, terms)
        row = dropout_row(mix(dropout_word(terms.seed, at.b) ^ tl.cast(at.h, tl.uint32)), at.i)
        return tl.where(is_kept(row, at.i, at.j, terms.threshold), p * terms.rescale, 0.0)


@triton.jit
def dropout_word(seed, b):
    """What the seed and the batch row are mixed into. The head is next, then the query."""
    value = tl.load(seed)
    word = mix((value & 0xFFFFFFFF).to(tl.uint32))
    word = mix(word ^ ((value >> 32) & 0xFFFFFFFF).to(tl.uint32))
    return mix(word ^ tl.cast(b, tl.uint32))


@triton.jit
def dropout_row(word, i):
    """The start of the stream of query i, and of i with its bit 3 set."""
    return half_mix(word ^ (i & -9).to(tl.uint32), 0x7FEB352D)


@triton.jit
def is_kept(row, i, j, threshold):
    """Whether the weight of query i and key j is kept; row: `dropout_row`. The four pairs that share a hash also share
    its instructions, where the compiler knows bit 3 of i and j."""
    bits = mix(row + (j & -9).to(tl.uint32) * GOLDEN)
    bits = tl.where(i & 8 == 0, bits, half_mix(bits, 0x2C1B3C6D))
    bits = tl.where(j & 8 == 0, bits, (bits & 0xFFFF) * 65536)
    return bits >= tl.cast(threshold, tl.uint32) * 65536  # as many instructions as without the lower 16 bits


@triton.jit
def mix(x):
    """A bijection of 32-bit integers, as in `tilewise.mods.dropout`."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def half_mix(x, FACTOR: tl.constexpr):
    """`step` of `tilewise.mods.dropout`."""
    x = x * FACTOR
    return x ^ (x >> 16)
