"""The quantising pass of precision="fp8": mean keys, then q, k and v in float8_e4m3fn (`fp8_format`)."""

from typing import NamedTuple

import triton
import triton.language as tl

from .device.fp8 import MAX_FP8, key_scales_at, row_scales
from .device.structs import ANY_SIZE, PAD, Grid, Rows, Sequences
from .device.tile_io import index, load_rows
from .device.tile_range import locate, sequence_bounds
from .fp8_format import LARGE_KEY, LEAST_MAXIMUM, OWN_SCALES
from .pdl import gdc_launch_dependents, gdc_wait

LEAST: tl.constexpr = tl.constexpr(LEAST_MAXIMUM)
LARGE: tl.constexpr = tl.constexpr(LARGE_KEY)
OWN: tl.constexpr = tl.constexpr(OWN_SCALES)


class Fp8Tensors(NamedTuple):
    """Views of q, k and v; the stored values: q (blocks, heads, PAD, BLOCK_D), k (blocks, KV heads, PAD, BLOCK_D) and v
    (blocks, KV heads, BLOCK_DV, PAD); the scales; and the mean keys, (batch, KV heads, BLOCK_D), or None."""

    q: tl.tuple
    k: tl.tuple
    v: tl.tuple
    q8: tl.tensor
    k8: tl.tensor
    v8: tl.tensor
    scales: tl.tuple
    means: tl.tensor


class Fp8Config(NamedTuple):
    GROUP: int
    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    MEAN_KEYS: int
    FIRST_KEYS: int
    MEDIAN_KEYS: int
    ORDER: bool  # values are stored in the order of `stored_key`
    OVERLAP: bool
    PACKED: bool  # four values at a time become fp8, in PTX


@triton.jit
def stored_key(i, C: tl.constexpr, ORDER: tl.constexpr):
    """The key at position 4 i + C. Of 16 scores of a row, a lane has 2 t, 2 t + 1, 8 + 2 t and 8 + 2 t + 1 in its
    registers after S = Q K^T, and must have the positions 4 t .. 4 t + 3 for P V: with ORDER the values are stored so.
    """
    if ORDER:
        return i // 4 * 16 + i % 4 * 2 + C // 2 * 8 + C % 2
    else:
        return 4 * i + C


@triton.jit
def mean_step(n, MEAN_KEYS: tl.constexpr):
    return tl.maximum(n // MEAN_KEYS, 1)


@triton.jit
def finite(x):
    """x, with nan for what is not finite: maxima do not count it, and its fp8 is nan."""
    return tl.where(tl.abs(x) < float("inf"), x, float("nan"))


@triton.jit
def largest_of_rows(x):
    """x, with nan for what is not finite, and the largest value of each row. Only where a value is inf, all are
    compared with it."""
    largest = tl.max(tl.abs(x), 1)
    if tl.max(largest, 0) == float("inf"):
        x = finite(x)
        largest = tl.max(tl.abs(x), 1)
    return x, tl.maximum(largest, 0.0)


@triton.jit
def largest_of_parts(x):
    """The largest of every eight values of a row, which one thread has."""
    return tl.max(tl.abs(x).reshape([x.shape[0], x.shape[1] // 8, 8]), 2)


@triton.jit
def above_zero(x):
    """x, with inf for what is not above 0."""
    return tl.where(x > 0.0, x, float("inf"))


@triton.jit
def factor_of(largest):
    largest = tl.maximum(largest, LEAST)
    return tl.div_rn(MAX_FP8 + largest * 0.0, largest)


@triton.jit
def scale_of(largest):
    largest = tl.maximum(largest, LEAST)
    return tl.div_rn(largest, MAX_FP8 + largest * 0.0)


@triton.jit
def mean_key(tensors, b, h, kv_heads, CONFIG: tl.constexpr):
    """Pointers to the mean key of sequence b and KV head h."""
    return tensors.means + tl.cast(b * kv_heads + h, tl.int64) * CONFIG.BLOCK_D + tl.arange(0, CONFIG.BLOCK_D)


@triton.jit
def load_keys(x, base, token, exists, CONFIG: tl.constexpr):
    """Keys in float32, with 0 for values that are not finite and in rows that do not exist; and the largest of each."""
    d = tl.arange(0, CONFIG.BLOCK_D)
    p = base + token.to(tl.int64)[:, None] * x.strides[1] + d[None, :].to(tl.int64) * x.strides[3]
    y = tl.load(p, mask=exists[:, None] & (d < CONFIG.D)[None, :], other=0.0).to(tl.float32)
    y = tl.where(tl.abs(y) < float("inf"), y, 0.0)
    return y, tl.max(tl.abs(y), 1)


@triton.jit(**ANY_SIZE)
def mean_keys_kernel(tensors, cu_q, cu_k, n_q, n_k, after, kv_heads, CONFIG: tl.constexpr):
    """The mean key of one sequence and KV head, see `fp8_format`."""
    if CONFIG.OVERLAP:
        gdc_wait()  # before the next launch starts, which reads what earlier ones wrote
        gdc_launch_dependents()
    BLOCK: tl.constexpr = 32768 // CONFIG.BLOCK_D
    pid = tl.program_id(0)
    h = pid % kv_heads
    b = pid // kv_heads
    start = 0
    queries = n_q
    n = n_k
    if cu_k is not None:
        _, queries = sequence_bounds(cu_q + b, n_q)
        start, n = sequence_bounds(cu_k + b, n_k)
    if after is not None:
        n = tl.minimum(tl.maximum(n - queries + tl.minimum(after, queries) + 1, CONFIG.FIRST_KEYS), n)
    step = mean_step(n, CONFIG.MEAN_KEYS)
    count = tl.cdiv(n, step)
    x = tensors.k
    base = x.ptr + tl.cast(b, tl.int64) * x.strides[0] + tl.cast(h, tl.int64) * x.strides[2]

    each = tl.cdiv(count, CONFIG.MEDIAN_KEYS)  # of the samples, one in so many counts for the median
    i = tl.arange(0, CONFIG.MEDIAN_KEYS)
    exists = i * each < count
    _, largest = load_keys(x, base, start + i * each * step, exists, CONFIG)
    largest = tl.where(exists, largest, float("inf"))
    other = tl.trans(largest[:, None].broadcast_to([CONFIG.MEDIAN_KEYS, CONFIG.MEDIAN_KEYS]))
    below = tl.sum((other <= largest[:, None]).to(tl.int32), 1)
    half = (tl.sum(exists.to(tl.int32), 0) + 1) // 2
    most = LARGE * tl.min(tl.where(below >= half, largest, float("inf")), 0)

    acc = tl.full([BLOCK, CONFIG.BLOCK_D], 0.0, tl.float32)
    found = tl.full([BLOCK], 0, tl.int32)
    for first in range(0, count, BLOCK):
        r = first + tl.arange(0, BLOCK)
        y, size = load_keys(x, base, start + r * step, r < count, CONFIG)
        counts = (r < count) & (size <= most)
        acc += tl.where(counts[:, None], y, 0.0)
        found += counts.to(tl.int32)
    mean = tl.sum(acc, 0) / tl.maximum(tl.sum(found, 0), 1)
    tl.store(mean_key(tensors, b, h, kv_heads, CONFIG), mean)


@triton.jit(**ANY_SIZE)
def quantise_kernel(
    tensors, cu_q, cu_k, n_q, n_k, scale, q_tiles, k_tiles, heads, kv_heads, batch, k_total, CONFIG: tl.constexpr
):
    """The first k_total programs quantise a block of values of a head each, as many others a block of keys, and the
    others a block of queries. Values do not need the mean key: their programs run while it is computed."""
    pid = tl.program_id(0)
    EARLY: tl.constexpr = tensors.means is not None
    if CONFIG.OVERLAP:
        gdc_launch_dependents()
        if not EARLY or pid >= k_total:
            gdc_wait()
    seqs = Sequences(cu_q, cu_k, n_q, n_k)
    if pid < 2 * k_total:
        tile = pid % k_total
        w = locate(tile, Grid(k_tiles, kv_heads, batch), seqs, cu_k, PAD)
        block = tile % k_tiles if cu_k is not None else w.b * k_tiles + tile % k_tiles
        line = tl.cast(block, tl.int64) * kv_heads + w.h
        if pid < k_total:
            quantise_values(tensors, w, line, CONFIG)
            if CONFIG.OVERLAP and EARLY:
                gdc_wait()
        else:
            quantise_keys(tensors, w, line, kv_heads, CONFIG)
    else:
        tile = pid - 2 * k_total
        w = locate(tile, Grid(q_tiles, heads, batch), seqs, cu_q, PAD)
        block = tile % q_tiles if cu_q is not None else w.b * q_tiles + tile % q_tiles
        quantise_queries(tensors, w, block, Sizes(scale, heads, kv_heads), CONFIG)


class Sizes(NamedTuple):
    scale: tl.tensor
    heads: tl.tensor
    kv_heads: tl.tensor


@triton.jit
def quantise_queries(tensors, w, block, sizes, CONFIG: tl.constexpr):
    """A block of queries in two halves, and what the mean key takes from their scores."""
    HALF: tl.constexpr = PAD // 2
    r = tl.arange(0, HALF)
    d = tl.arange(0, CONFIG.BLOCK_D)
    line = (tl.cast(block, tl.int64) * sizes.heads + w.h) * PAD
    factors = row_scales(tensors.scales, block, w.h, sizes.heads)
    halves = ()
    for n in tl.static_range(2):
        rows = Rows(tensors.q, w.b, w.h, w.q0, w.first + n * HALF, w.n_q)
        halves += (load_rows(rows, CONFIG.D, HALF, CONFIG.BLOCK_D, False),)
    if tensors.scales.shift is not None:
        mean = tl.load(mean_key(tensors, w.b, w.h // CONFIG.GROUP, sizes.kv_heads, CONFIG))
    for n in tl.static_range(2):
        x = halves[n].to(tl.float32)
        if tensors.scales.shift is not None:
            tl.store(factors + PAD + n * HALF + r, tl.sum(x * mean[None, :], 1) * sizes.scale)
        x, largest = largest_of_rows(x)
        y = (x * factor_of(largest)[:, None]).to(tl.float8e4nv)
        tl.store(tensors.q8 + (line + n * HALF + r[:, None]) * CONFIG.BLOCK_D + d[None, :], y)
        tl.store(factors + n * HALF + r, scale_of(largest))


@triton.jit
def quantise_keys(tensors, w, line, kv_heads, CONFIG: tl.constexpr):
    r = tl.arange(0, PAD)
    d = tl.arange(0, CONFIG.BLOCK_D)
    rows = Rows(tensors.k, w.b, w.h, w.k0, w.first, w.n_k)
    x = load_rows(rows, CONFIG.D, PAD, CONFIG.BLOCK_D, False).to(tl.float32)
    if tensors.means is not None:
        mean = tl.load(mean_key(tensors, w.b, w.h, kv_heads, CONFIG))
        x -= mean[None, :] * (w.first + r < w.n_k).to(tl.float32)[:, None]
    parts = largest_of_parts(x)
    largest = tl.max(parts)
    if largest == float("inf"):
        x = finite(x)
        parts = largest_of_parts(x)
        largest = tl.max(parts)
    scale = scale_of(largest)
    factor = factor_of(largest)
    scales = key_scales_at(tensors.scales, line)
    if tensors.scales.own is not None:
        may_have_own = tl.min(above_zero(parts)) < largest * OWN  # of a row that is small all parts are
        if may_have_own:
            rows_largest = tl.maximum(tl.max(tl.abs(x), 1), 0.0)
            if tl.min(above_zero(rows_largest)) < largest * OWN:
                tl.store(scales + 2 + r, scale_of(rows_largest))
                x *= factor_of(rows_largest)[:, None]
                scale = -1.0
                factor = 1.0
    y = (x * factor).to(tl.float8e4nv)
    tl.store(tensors.k8 + (line * PAD + r[:, None]) * CONFIG.BLOCK_D + d[None, :], y)
    tl.store(scales, scale)


@triton.jit
def quantise_values(tensors, w, line, CONFIG: tl.constexpr):
    """A block of values, transposed: tensor cores read fp8 operands along the keys. The four values of a word are in
    four tensors, so that words and not bytes are transposed."""
    a = load_values(tensors.v, w, 0, CONFIG)
    b = load_values(tensors.v, w, 1, CONFIG)
    c = load_values(tensors.v, w, 2, CONFIG)
    d = load_values(tensors.v, w, 3, CONFIG)
    largest, least = extremes(a, b, c, d)
    if largest == float("inf"):
        a = finite(a)
        b = finite(b)
        c = finite(c)
        d = finite(d)
        largest, least = extremes(a, b, c, d)
    scale = scale_of(largest)
    i = tl.arange(0, PAD // 4)
    e = tl.arange(0, CONFIG.BLOCK_DV)
    scales = key_scales_at(tensors.scales, line)
    if tensors.scales.own is not None:
        if least < largest * OWN:  # of a row that is small all parts are
            least = tl.minimum(tl.minimum(least_row(a), least_row(b)), tl.minimum(least_row(c), least_row(d)))
        if least < largest * OWN:
            rows = scales + 2 + PAD
            a = own_scales(a, scale, rows + stored_key(i, 0, CONFIG.ORDER))
            b = own_scales(b, scale, rows + stored_key(i, 1, CONFIG.ORDER))
            c = own_scales(c, scale, rows + stored_key(i, 2, CONFIG.ORDER))
            d = own_scales(d, scale, rows + stored_key(i, 3, CONFIG.ORDER))
            scale = -scale
    factor = tl.where(scale < 0.0, 1.0, factor_of(largest))
    words = fp8_words(a * factor, b * factor, c * factor, d * factor, CONFIG.PACKED)
    p = tensors.v8.to(tl.pointer_type(tl.int32)) + (line * CONFIG.BLOCK_DV + e[:, None]) * (PAD // 4) + i[None, :]
    tl.store(p, tl.trans(words))
    tl.store(scales + 1, scale)


@triton.jit
def least_row(x):
    """The smallest of the largest values of the rows of x, but 0."""
    return tl.min(above_zero(tl.max(tl.abs(x), 1)))


@triton.jit
def own_scales(x, scale, pointers):
    """The rows of x as fp8 holds them, each with a scale of its own, which is stored in units of `scale`."""
    largest = tl.maximum(tl.max(tl.abs(x), 1), 0.0)
    tl.store(pointers, scale_of(largest) / scale)
    return x * factor_of(largest)[:, None]


@triton.jit
def load_values(v, w, C: tl.constexpr, CONFIG: tl.constexpr):
    """The values at the positions C, 4 + C, .. of a block, in float32."""
    key = stored_key(tl.arange(0, PAD // 4), C, CONFIG.ORDER)
    e = tl.arange(0, CONFIG.BLOCK_DV)
    p = v.ptr + tl.cast(w.b, tl.int64) * v.strides[0] + tl.cast(w.h, tl.int64) * v.strides[2]
    p += tl.cast(w.k0 + w.first, tl.int64) * v.strides[1]
    p = p + index(v, key)[:, None] * v.strides[1] + index(v, e)[None, :] * v.strides[3]
    seen = (w.first + key < w.n_k)[:, None] & (e < CONFIG.DV)[None, :]
    return tl.load(p, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def extremes(a, b, c, d):
    """The largest value, and the smallest but 0 of `largest_of_parts`."""
    a = largest_of_parts(a)
    b = largest_of_parts(b)
    c = largest_of_parts(c)
    d = largest_of_parts(d)
    least = tl.minimum(
        tl.minimum(above_zero(a), above_zero(b)),
        tl.minimum(above_zero(c), above_zero(d)),
    )
    return tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, d))), tl.min(least)


@triton.jit
def fp8_words(a, b, c, d, PACKED: tl.constexpr):
    """a, b, c and d in fp8, as the bytes of int32 words."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return byte(a, 0) | byte(b, 1) | byte(c, 2) | byte(d, 3)


@triton.jit
def byte(x, C: tl.constexpr):
    """x in fp8, as byte C of int32 words."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << (8 * C)
