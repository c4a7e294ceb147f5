"""What one pair is worth: its score with the terms, the slope of that, and whether dropout keeps its weight."""

import triton
import triton.language as tl

from .mask import place


@triton.jit
def scores(product, w, h, i, j, scale, FOLD: tl.constexpr):
    """From q.k to what the softmax exponentiates, up to the factor `unit_of`.

    FOLD: the scale is positive and nothing stands between the product and the softmax, so scale, log2(e) and the
    subtraction of the maximum become one multiply-add.
    """
    if FOLD:
        return product
    else:
        return product * scale


@triton.jit
def worth(product, w, h, i, j, scale, terms, FOLD: tl.constexpr, SCORE_MOD: tl.constexpr):
    """`scores`, then the score mod and the bias."""
    s = scores(product, w, h, i, j, scale, FOLD)
    if SCORE_MOD is not None:
        at = place(i, j, w, h, terms)
        s = SCORE_MOD(s, at.b, at.h, at.i, at.j, at.n_q, at.n_k, terms.score)
    if terms.bias.ptr is not None:
        s += biases(terms.bias, w, h, i, j)
    return s


@triton.jit
def worth_and_slope(product, w, h, i, j, scale, terms, FOLD: tl.constexpr, SCORE_MOD: tl.constexpr):
    """`worth`, and the slope of the score mod, which returns both (of nothing where there is none)."""
    s = scores(product, w, h, i, j, scale, FOLD)
    slope = s
    if SCORE_MOD is not None:
        at = place(i, j, w, h, terms)
        s, slope = SCORE_MOD(s, at.b, at.h, at.i, at.j, at.n_q, at.n_k, terms.score)
    if terms.bias.ptr is not None:
        s += biases(terms.bias, w, h, i, j)
    return s, slope


@triton.jit
def steepened(p, slope, terms):
    """p * slope: what a weight passes on to the score that went into the mod. A weight of 0 passes on nothing, though
    its slope be infinite, as those of rows that do not exist may be."""
    if terms.steep is None:
        return p
    elif terms.wild is None:
        return p * slope
    else:
        return tl.where(p == 0.0, 0.0, p * slope)


@triton.jit
def biases(bias, w, h, i, j):
    """bias[b, h, i, j]; nothing is read outside the sequence, nor outside the bias: 0 there."""
    p = bias.ptr + tl.cast(w.b, tl.int64) * bias.strides[0] + tl.cast(h, tl.int64) * bias.strides[1]
    p = p + i.to(tl.int64) * bias.strides[2] + j.to(tl.int64) * bias.strides[3]
    rows = tl.minimum(w.n_q, bias.rows // 16)
    columns = tl.minimum(w.n_k, bias.columns // 16)
    return tl.load(p, mask=(i < rows) & (j < columns), other=0.0).to(tl.float32)


@triton.jit
def dropped(p, w, h, i, j, terms):
    """p with every weight either dropped or divided by the probability to stay; see `tilewise.mods.dropout`."""
    if terms.seed is None:
        return p
    else:
        seed = tl.load(terms.seed)
        word = mix((seed & 0xFFFFFFFF).to(tl.uint32))
        word = mix(word ^ ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
        at = place(i, j, w, h, terms)
        word = mix(word ^ tl.cast(at.b, tl.uint32))
        word = mix(word ^ tl.cast(at.h, tl.uint32))
        word = mix(word ^ at.i.to(tl.uint32))
        bits = mix(word + at.j.to(tl.uint32) * 0x9E3779B9) >> 1
        return tl.where(bits.to(tl.int32) >= terms.threshold, p * terms.rescale, 0.0)


@triton.jit
def mix(x):
    """A bijection of 32-bit integers, as in `tilewise.mods.dropout`."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)
