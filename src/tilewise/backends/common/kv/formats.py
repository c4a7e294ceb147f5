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
    dims that have a scale of their own, 1 or an even number. BLOCKS of words, each a tile with the words of one group
    in the lower half of the dims and of one in the upper half. JOINED: BLOCKS rounded up to a power of two. FACTOR: K's
    products are multiplied by a factor of each row. PAIRS: two words at a time are unpacked, in PTX.
    """

    FORMAT: str | None
    INTEGER: bool
    PARTS: int
    OPERAND: str
    PRECISION: str
    SCALE: str | None
    GROUPS: int
    BLOCKS: int
    JOINED: int
    FACTOR: bool
    PAIRS: bool


class QueryTile(NamedTuple):
    """Queries of a tile, in PARTS tiles for each of K's BLOCKS, of the dims that the parts of its words hold; with
    FACTOR, the factor of each row's products."""

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
    """The dims of words i in part C: bytes 2 i and 2 i + 1 make a word."""
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
    TILES: tl.constexpr = PARTS * STORED.BLOCKS
    WORDS: tl.constexpr = D // TILES  # of a block
    i = tl.arange(0, BLOCK_D // TILES)[None, :]
    parts = ()
    for n in tl.static_range(TILES):
        p = rows[:, None] + columns(q, part_dims(i + n // PARTS * WORDS, n % PARTS, D, STORED))
        parts += (tl.load(p, mask=exists[:, None] & (i < WORDS), other=0.0),)
    factor = tl.full([rows.shape[0]], 1.0, tl.float32)
    if STORED.SCALE == "head":
        factor *= scale
    if STORED.OPERAND == "float32":
        floats = ()
        for n in tl.static_range(TILES):
            floats += (parts[n].to(tl.float32),)
        return QueryTile(floats, factor)
    elif STORED.OPERAND == "float16" and q.ptr.dtype.element_ty == tl.bfloat16:
        most = tl.max(tl.abs(parts[0].to(tl.float32)), 1)
        for n in tl.static_range(1, TILES):
            most = tl.maximum(most, tl.max(tl.abs(parts[n].to(tl.float32)), 1))
        power, inverse = power_of_two(most)
        halves = ()
        for n in tl.static_range(TILES):
            halves += ((parts[n].to(tl.float32) * inverse[:, None]).to(tl.float16),)
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
    GROUPS: tl.constexpr = STORED.GROUPS
    found = ()
    for g in tl.static_range(GROUPS):
        found += (tl.load(p + g * scale.x.strides[3], mask=inside, other=0.0),)
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
    """q.k of a tile of N keys, of words in BLOCKS, with the scales of its tokens and the factors of its rows."""
    PRECISION: tl.constexpr = STORED.PRECISION
    PARTS: tl.constexpr = STORED.PARTS
    M: tl.constexpr = queries.parts[0].shape[0]
    parts = queries.parts
    BLOCKS: tl.constexpr = STORED.BLOCKS
    product = tl.zeros([M, N], tl.float32)
    for n in tl.static_range(BLOCKS):
        keys = unpack(words[n], STORED)
        if STORED.GROUPS == 1:
            for c in tl.static_range(PARTS):
                product = times_keys(parts[c], keys[c], product, PRECISION)
        else:
            lower = tl.zeros([M, N], tl.float32)
            upper = lower
            for c in tl.static_range(PARTS):
                if c % 2 == 1:
                    upper = times_keys(parts[n * PARTS + c], keys[c], upper, PRECISION)
                else:
                    lower = times_keys(parts[n * PARTS + c], keys[c], lower, PRECISION)
            product += lower * scales[n][None, :] + upper * scales[BLOCKS + n][None, :]
    if STORED.GROUPS == 1 and STORED.SCALE == "token":
        product *= scales[0][None, :]
    if STORED.FACTOR:
        product *= queries.factor[:, None]
    return product


@triton.jit
def factors_of_weights(alpha, scales, unit, mask, STORED: tl.constexpr):
    """(what the weights of the tokens are multiplied by for each group of dims: their scales; alpha; unit). In float16
    the products could be too small: they, and the sums, are divided by `unit`, the largest scale so far. With a mask
    (the repair launch), scales that are not finite count as 0."""
    if STORED.SCALE != "token":
        return (), alpha, unit
    else:
        GROUPS: tl.constexpr = STORED.GROUPS
        finite = ()
        for g in tl.static_range(GROUPS):
            scale = scales[g]
            if mask is not None:
                scale = tl.where(tl.abs(scale) < float("inf"), scale, 0.0)
            finite += (scale,)
        if STORED.OPERAND == "float16":
            most = tl.abs(finite[0])
            for g in tl.static_range(1, GROUPS):
                most = tl.maximum(most, tl.abs(finite[g]))
            largest = tl.maximum(unit, tl.max(most, 0))
            inverse = 1.0 / largest
            factors = ()
            for g in tl.static_range(GROUPS):
                factors += (finite[g] * inverse,)
            return factors, alpha * (unit / largest), largest
        else:
            return finite, alpha, unit


@triton.jit
def scaled_weights(p, factors, G: tl.constexpr, STORED: tl.constexpr):
    """The weights p of the values' dims in group G, as an operand."""
    if STORED.SCALE == "token":
        p = p * factors[G][None, :]
    if STORED.OPERAND == "float32":
        return p.to(tl.float32)
    elif STORED.OPERAND == "float16":
        return p.to(tl.float16)
    else:
        return p.to(tl.bfloat16)


@triton.jit
def add_values(acc, p, factors, alpha, words, scales, mask, STORED: tl.constexpr):
    """acc * alpha + the scaled weights @ v, for each part of V's words in BLOCKS; of less than 16 rows, `words` are
    transposed, and so is the product. `mask` (repair): see `dot`; a scale that is not finite is a value that is not."""
    found = ()
    PARTS: tl.constexpr = STORED.PARTS
    BLOCKS: tl.constexpr = STORED.BLOCKS
    TURNED: tl.constexpr = p.shape[0] < 16
    for n in tl.static_range(BLOCKS):
        lower = scaled_weights(p, factors, n, STORED)
        upper = lower
        if STORED.GROUPS > 1:
            upper = scaled_weights(p, factors, BLOCKS + n, STORED)
        values = unpack(words[n], STORED)
        for c in tl.static_range(PARTS):
            weight = upper if c % 2 == 1 else lower
            x = acc[n * PARTS + c] * alpha[:, None]
            if TURNED and mask is None:
                x = tl.trans(tl.dot(values[c], tl.trans(weight), tl.trans(x), input_precision=STORED.PRECISION))
            else:
                x = dot(weight, tl.trans(values[c]) if TURNED else values[c], x, mask, STORED)
            if STORED.SCALE == "token" and mask is not None:
                scale = scales[0 if STORED.GROUPS == 1 else c % 2 * BLOCKS + n]
                sees = tl.max(tl.where(mask & (tl.abs(scale) < float("inf"))[None, :], 0, mask.to(tl.int32)), 1)
                x = tl.where(sees[:, None] > 0, float("nan"), x)
            found += (x,)
    return found


@triton.jit
def side_by_side(a, b):
    """The columns of a, then those of b."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def join_parts(acc, STORED: tl.constexpr):
    """The parts of acc, column by column in the order of `value_dims`; zeros past BLOCKS."""
    M: tl.constexpr = acc[0].shape[0]
    W: tl.constexpr = acc[0].shape[1]
    if STORED.PARTS == 1:
        return acc[0]
    elif STORED.PARTS == 2:
        return tl.join(acc[0], acc[1]).reshape(M, 2 * W)
    else:
        BLOCKS: tl.constexpr = STORED.BLOCKS
        JOINED: tl.constexpr = STORED.JOINED
        tiles = ()
        for n in tl.static_range(BLOCKS):
            lower = tl.join(acc[4 * n], acc[4 * n + 2]).reshape(M, 2 * W)
            upper = tl.join(acc[4 * n + 1], acc[4 * n + 3]).reshape(M, 2 * W)
            tiles += (side_by_side(lower, upper),)
        for _ in tl.static_range(JOINED - BLOCKS):
            tiles += (tl.zeros([M, 4 * W], tl.float32),)
        for level in tl.static_range(5):
            if JOINED >> level > 1:
                pairs = ()
                for n in tl.static_range(JOINED >> (level + 1)):
                    pairs += (side_by_side(tiles[2 * n], tiles[2 * n + 1]),)
                tiles = pairs
        return tiles[0]


@triton.jit
def value_dims(d, DV: tl.constexpr, BLOCK_DV: tl.constexpr, STORED: tl.constexpr):
    """The dims of the columns d of joined parts; DV, which does not exist, for padding."""
    if STORED.PARTS <= 2 or (STORED.BLOCKS == 1 and DV == BLOCK_DV):
        return d
    else:
        WIDTH: tl.constexpr = BLOCK_DV // STORED.JOINED  # of a block
        GROUP: tl.constexpr = DV // 2 // STORED.BLOCKS
        block = d // WIDTH
        i = d % (WIDTH // 2)
        upper = d % WIDTH // (WIDTH // 2)
        return tl.where((i < GROUP) & (block < STORED.BLOCKS), upper * (DV // 2) + block * GROUP + i, DV)


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
