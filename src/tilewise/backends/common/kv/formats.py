"""Numbers of a quantised KV cache on the device (their formats: tilewise.kv_formats).

A tile of the decode kernel has words of 16 bits, each with PARTS numbers: two of 8 bits, four of 4 bits. Part c of all
words is a tile of its own, for its own product. So numbers are never moved between threads or rows: shared memory is
read as for 16-bit caches (ldmatrix transposes values of 16 bits only), and a part is a few logical operations away.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.matmul import dot
from .combine import columns


class Scale(NamedTuple):
    """The scale of a cache: a view of a tensor by (sequence, head) or by (page, token, head, group), or a number."""

    x: tl.tuple
    number: tl.tensor


class Stored(NamedTuple):
    """What the decode kernel is compiled for in K, or in V.

    FORMAT: None for floats that attention computes in; INTEGER: its numbers are integers. PARTS of a word. OPERAND and
    PRECISION: of the product. SCALE: None, "head" (the same for all keys of a sequence and head) or "token". GROUPS of
    dims that have a scale of their own, 1 or 2. FACTOR: K's products are multiplied by a factor of each row. PAIRS: two
    words at a time are unpacked, in PTX.
    """

    FORMAT: str | None
    INTEGER: bool
    PARTS: int
    OPERAND: str
    PRECISION: str
    SCALE: str | None
    GROUPS: int
    FACTOR: bool
    PAIRS: bool


class QueryTile(NamedTuple):
    """Queries of a tile, in PARTS tiles of the dims that the parts of K's words hold; with FACTOR, the factor of each
    row's products."""

    parts: tl.tuple
    factor: tl.tensor


@triton.jit
def unpack_words(x, C: tl.constexpr, FORMAT: tl.constexpr):
    """Part C of words, in float16, which holds the numbers of every format exactly. e4m3: its exponent and fraction as
    those of a float16 are the number / 256. Integers: with 0x6400 above them they are the fraction of 1024 + n."""
    x = x.to(tl.int16)  # bytes that are not read as words
    if FORMAT == "int4":
        n = ((x >> 4 * C) & 15) ^ 0x6408
        return n.to(tl.int16).to(tl.float16, bitcast=True) - 1032.0
    n = (x >> 8 * C) & 255
    if FORMAT == "int8":
        return (n ^ 0x6480).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    elif FORMAT == "e5m2":
        return (n << 8).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        y = (((n & 128) << 8) | ((n & 127) << 7)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
        return tl.where((n & 127) == 127, float("nan"), y).to(tl.float16)


@triton.jit
def unpack_pairs(x, FORMAT: tl.constexpr):
    """All parts of two words in a 32-bit register at once, in PTX: Triton's own code works on one word at a time.
    (Without the subtractions of 1024 + n, the sums of products with K would lose 3 bits of int8 and 7 of int4.)"""
    if FORMAT == "int4":
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, even, odd;
            mov.b32 even, 0x64086408;
            mov.b32 odd, 0x54805480;
            shr.b32 t, $4, 8;
            lop3.b32 $0, $4, 0x000F000F, even, 0x6A;
            lop3.b32 $1, $4, 0x00F000F0, odd, 0x6A;
            lop3.b32 $2, t, 0x000F000F, even, 0x6A;
            lop3.b32 $3, t, 0x00F000F0, odd, 0x6A;
            sub.f16x2 $0, $0, even;
            sub.f16x2 $1, $1, odd;
            sub.f16x2 $2, $2, even;
            sub.f16x2 $3, $3, odd;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [x],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif FORMAT == "int8":
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, one;
            mov.b32 one, 0x64806480;
            shr.b32 t, $2, 8;
            lop3.b32 $0, $2, 0x00FF00FF, one, 0x6A;
            lop3.b32 $1, t, 0x00FF00FF, one, 0x6A;
            sub.f16x2 $0, $0, one;
            sub.f16x2 $1, $1, one;
            }""",
            "=&r,=&r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif FORMAT == "e5m2":
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;",
            "=&r,=&r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            .reg .b16 low, high;
            prmt.b32 t, $2, 0, 0x3120;
            mov.b32 {low, high}, t;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=&r,=&r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def unpack(x, STORED: tl.constexpr):
    """The parts of a tile of K or V, as operands of products."""
    FORMAT: tl.constexpr = STORED.FORMAT
    PARTS: tl.constexpr = STORED.PARTS
    found = ()
    if FORMAT is None:
        found = (x,)
    elif STORED.PAIRS:
        found = unpack_pairs(x, FORMAT)
    else:
        for c in tl.static_range(PARTS):
            found += (unpack_words(x, c, FORMAT),)
    if STORED.OPERAND == "float32":
        floats = ()
        for c in tl.static_range(PARTS):
            floats += (found[c].to(tl.float32),)
        return floats
    else:
        return found


@triton.jit
def part_dims(i, C: tl.constexpr, D: tl.constexpr, STORED: tl.constexpr):
    """The dims of columns i of part C: bytes 2 i and 2 i + 1 make a word."""
    if STORED.PARTS == 1:
        return i
    elif STORED.PARTS == 2:
        return 2 * i + C
    else:
        return C % 2 * (D // 2) + 2 * i + C // 2


@triton.jit
def power_of_two(x):
    """(f, 1 / f) with f the largest power of two that is not above x >= 0, within the range of normal floats."""
    exponent = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x00800000), 0x7E800000)
    return exponent.to(tl.float32, bitcast=True), (0x7F000000 - exponent).to(tl.float32, bitcast=True)


@triton.jit
def load_queries(q, rows, exists, scale, D: tl.constexpr, BLOCK_D: tl.constexpr, STORED: tl.constexpr):
    """The QueryTile of rows. `scale`: of K, if it is the same for all of its keys. If q is bfloat16 and keys are
    float16, rows are divided by a power of two: no query is too large for float16 then, and none loses more than
    float32 would."""
    PARTS: tl.constexpr = STORED.PARTS
    i = tl.arange(0, BLOCK_D // PARTS)[None, :]
    parts = ()
    for c in tl.static_range(PARTS):
        p = rows[:, None] + columns(q, part_dims(i, c, D, STORED))
        parts += (tl.load(p, mask=exists[:, None] & (i < D // PARTS), other=0.0),)
    factor = tl.full([rows.shape[0]], 1.0, tl.float32)
    if STORED.SCALE == "head":
        factor *= scale
    if STORED.OPERAND == "float32":
        floats = ()
        for c in tl.static_range(PARTS):
            floats += (parts[c].to(tl.float32),)
        return QueryTile(floats, factor)
    elif STORED.OPERAND == "float16" and q.ptr.dtype.element_ty == tl.bfloat16:
        most = tl.max(tl.abs(parts[0].to(tl.float32)), 1)
        for c in tl.static_range(1, PARTS):
            most = tl.maximum(most, tl.max(tl.abs(parts[c].to(tl.float32)), 1))
        power, inverse = power_of_two(most)
        halves = ()
        for c in tl.static_range(PARTS):
            halves += ((parts[c].to(tl.float32) * inverse[:, None]).to(tl.float16),)
        return QueryTile(halves, factor * power)
    else:
        return QueryTile(parts, factor)


@triton.jit
def head_scale(scale, b, h):
    """The scale of all keys or values of a sequence and head."""
    if scale.x.ptr is None:
        return scale.number
    else:
        p = scale.x.ptr + tl.cast(b, tl.int64) * scale.x.strides[0] + tl.cast(h, tl.int64) * scale.x.strides[1]
        return tl.load(p)


@triton.jit
def token_scales(scale, base, rows, inside, STORED: tl.constexpr):
    """The scales of a tile's tokens, for each group of dims."""
    p = scale.x.ptr + base + rows
    found = (tl.load(p, mask=inside, other=0.0),)
    if STORED.GROUPS == 2:
        found += (tl.load(p + scale.x.strides[3], mask=inside, other=0.0),)
    return found


@triton.jit
def times_keys(q, k, acc, PRECISION: tl.constexpr):
    """acc + q k^T. Of less than 16 rows, the product of matrix units has keys as its rows and queries as its 8 columns:
    half as many instructions as with queries as its 16 rows."""
    if q.shape[0] < 16:
        return tl.trans(tl.dot(k, tl.trans(q), tl.trans(acc), input_precision=PRECISION))
    else:
        return tl.dot(q, tl.trans(k), acc, input_precision=PRECISION)


@triton.jit
def key_product(queries, words, scales, N: tl.constexpr, STORED: tl.constexpr):
    """q.k of a tile of N keys, with the scales of its tokens and the factors of its rows."""
    PRECISION: tl.constexpr = STORED.PRECISION
    PARTS: tl.constexpr = STORED.PARTS
    M: tl.constexpr = queries.parts[0].shape[0]
    parts = queries.parts
    keys = unpack(words, STORED)
    product = tl.zeros([M, N], tl.float32)
    upper = product
    for c in tl.static_range(PARTS):
        if STORED.GROUPS == 2 and c % 2 == 1:
            upper = times_keys(parts[c], keys[c], upper, PRECISION)
        else:
            product = times_keys(parts[c], keys[c], product, PRECISION)
    if STORED.GROUPS == 2:
        product = product * scales[0][None, :] + upper * scales[1][None, :]
    elif STORED.SCALE == "token":
        product *= scales[0][None, :]
    if STORED.FACTOR:
        product *= queries.factor[:, None]
    return product


@triton.jit
def scaled_weights(p, alpha, scales, unit, mask, STORED: tl.constexpr):
    """(the weights p of each group of dims, times the scales of its tokens; alpha; unit). In float16 the products could
    be too small: they, and the sums, are divided by `unit`, the largest scale so far. With a mask (the repair launch),
    scales that are not finite count as 0."""
    if STORED.SCALE != "token":
        return (p,), alpha, unit
    else:
        lower = scales[0]
        upper = scales[STORED.GROUPS - 1]
        if mask is not None:
            lower = tl.where(tl.abs(lower) < float("inf"), lower, 0.0)
            upper = tl.where(tl.abs(upper) < float("inf"), upper, 0.0)
        if STORED.OPERAND == "float16":
            largest = tl.maximum(unit, tl.max(tl.maximum(tl.abs(lower), tl.abs(upper)), 0))
            inverse = 1.0 / largest
            lower = lower * inverse
            upper = upper * inverse
            alpha = alpha * (unit / largest)
            unit = largest
        weights = (p * lower[None, :],)
        if STORED.GROUPS == 2:
            weights += (p * upper[None, :],)
        return weights, alpha, unit


@triton.jit
def add_values(acc, weights, alpha, words, scales, mask, STORED: tl.constexpr):
    """acc * alpha + weights @ v, for each part of V's words; of less than 16 rows, `words` are transposed, and so is
    the product. `mask` (repair): see `dot`; a scale that is not finite is a value that is not."""
    if STORED.OPERAND == "float32":
        lower = weights[0].to(tl.float32)
        upper = weights[STORED.GROUPS - 1].to(tl.float32)
    elif STORED.OPERAND == "float16":
        lower = weights[0].to(tl.float16)
        upper = weights[STORED.GROUPS - 1].to(tl.float16)
    else:
        lower = weights[0].to(tl.bfloat16)
        upper = weights[STORED.GROUPS - 1].to(tl.bfloat16)
    found = ()
    PARTS: tl.constexpr = STORED.PARTS
    TURNED: tl.constexpr = lower.shape[0] < 16
    values = unpack(words, STORED)
    for c in tl.static_range(PARTS):
        weight = upper if c % 2 == 1 else lower
        x = acc[c] * alpha[:, None]
        if TURNED and mask is None:
            x = tl.trans(tl.dot(values[c], tl.trans(weight), tl.trans(x), input_precision=STORED.PRECISION))
        else:
            x = dot(weight, tl.trans(values[c]) if TURNED else values[c], x, mask, STORED)
        if STORED.SCALE == "token" and mask is not None:
            scale = scales[c % STORED.GROUPS]
            sees = tl.max(tl.where(mask & (tl.abs(scale) < float("inf"))[None, :], 0, mask.to(tl.int32)), 1)
            x = tl.where(sees[:, None] > 0, float("nan"), x)
        found += (x,)
    return found


@triton.jit
def join_parts(acc, STORED: tl.constexpr):
    """The parts of acc, column by column in the order of `value_dims`."""
    M: tl.constexpr = acc[0].shape[0]
    W: tl.constexpr = acc[0].shape[1]
    if STORED.PARTS == 1:
        return acc[0]
    elif STORED.PARTS == 2:
        return tl.join(acc[0], acc[1]).reshape(M, 2 * W)
    else:
        lower = tl.join(acc[0], acc[2]).reshape(M, 2 * W)
        upper = tl.join(acc[1], acc[3]).reshape(M, 2 * W)
        return tl.join(lower, upper).permute(0, 2, 1).reshape(M, 4 * W)


@triton.jit
def value_dims(d, DV: tl.constexpr, BLOCK_DV: tl.constexpr, STORED: tl.constexpr):
    """The dims of the columns d of joined parts; DV, which does not exist, for padding."""
    if STORED.PARTS <= 2 or DV == BLOCK_DV:
        return d
    else:
        i = d % (BLOCK_DV // 2)
        return tl.where(i < DV // 2, d // (BLOCK_DV // 2) * (DV // 2) + i, DV)


@triton.jit
def encode_float(y, SIGNIFICAND: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """The float8 nearest to y, ties to even, as an integer: in software, for the same bits on every GPU."""
    a = tl.abs(y)
    a = tl.where(a > LARGEST, LARGEST, a)
    bits = a.to(tl.int32, bitcast=True)
    SHIFT: tl.constexpr = 23 - SIGNIFICAND
    HALF: tl.constexpr = (1 << (SHIFT - 1)) - 1
    REBIAS: tl.constexpr = (127 - BIAS) << SIGNIFICAND
    normal = ((bits + HALF + ((bits >> SHIFT) & 1)) >> SHIFT) - REBIAS
    STEPS: tl.constexpr = 2.0 ** (BIAS - 1 + SIGNIFICAND)  # subnormal numbers are multiples of 1 / STEPS
    subnormal = (a * STEPS + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(a < (1 << SIGNIFICAND) / STEPS, subnormal, normal)
    code = tl.where(y != y, 127, code)
    return code | ((y.to(tl.int32, bitcast=True) >> 24) & 128)


@triton.jit
def encode(y, FORMAT: tl.constexpr):
    """y, already divided by its scale, as stored: the lowest bits of an int32."""
    if FORMAT == "e4m3":
        return encode_float(y, 3, 7, 448.0)
    elif FORMAT == "e5m2":
        return encode_float(y, 2, 15, 57344.0)
    else:
        MOST: tl.constexpr = 127.0 if FORMAT == "int8" else 7.0
        y = tl.where(y != y, 0.0, y)
        y = tl.where(y > MOST, MOST, tl.where(y < -MOST - 1.0, -MOST - 1.0, y))
        n = (y + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2^23: the sum is rounded to an integer
        return n & (255 if FORMAT == "int8" else 15)
