"""What every attention kernel shares: who am I, which tiles do I visit, what is one score worth.

Names: `q k v` are views (pointer and strides), `q_tile` values; i counts queries and j keys of one sequence, both from
0; n_q and n_k are its lengths; SHOUT is known at compile time. Absence is the flag: cu_q=None is a dense batch,
before=None an unbounded band.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
FAR = 2**30  # beyond every sequence, in sixteenths too
# How a kernel is compiled once for calls of all sizes: Triton would make other ones for a 1, or where 16 divides.
ANY_SIZE = {
    "do_not_specialize": [
        "n_q", "n_k", "before", "after", "tiles", "q_tiles", "k_tiles", "heads", "kv_heads", "batch", "parts", "total",
        "q_total", "k_total", "padded", "rising", "rows", "row0", "columns", "lines", "cohort", "x_size", "y_size",
        "z_size", "new", "most", "line", "count", "step_k", "step_v",
    ],
    "do_not_specialize_on_alignment": ["cu_q", "cu_k", "cu_x", "cu_y"],
}  # fmt: skip
PAD: tl.constexpr = tl.constexpr(128)  # row statistics of the backward start at multiples of this, in every sequence


class View(NamedTuple):
    """A (batch, token, head, dim) tensor; or the padded row statistics, (batch, head).

    Offsets inside a tile are 32-bit, which saves the backward its last registers, unless the view is `wide`.
    """

    ptr: tl.tensor
    strides: tl.tuple
    wide: tl.constexpr = None


class Work(NamedTuple):
    """One program's share: batch row, head, first row of its tile, where both sequences and its row statistics lie."""

    b: tl.tensor
    h: tl.tensor
    first: tl.tensor
    q0: tl.tensor
    n_q: tl.tensor
    k0: tl.tensor
    n_k: tl.tensor
    r0: tl.tensor


class Place(NamedTuple):
    """A pair as mods and dropout count it: batch row, head, query, key; and the lengths."""

    b: tl.tensor
    h: tl.tensor
    i: tl.tensor
    j: tl.tensor
    n_q: tl.tensor
    n_k: tl.tensor


class Rows(NamedTuple):
    """Where a tile lies: rows `first` and on of the sequence that starts at token t, which has n of them. Of several
    `heads`, row r is token r // heads of head h * heads + r % heads; None: of one."""

    x: tl.tuple
    b: tl.tensor
    h: tl.tensor
    t: tl.tensor
    first: tl.tensor
    n: tl.tensor
    heads: tl.constexpr = None


class Span(NamedTuple):
    """Columns [lo, hi) are visited, tile by tile; those in [full_lo, full_hi) need no mask."""

    lo: tl.tensor
    full_lo: tl.tensor
    full_hi: tl.tensor
    hi: tl.tensor


class Bias(NamedTuple):
    """A (batch, head, query, key) tensor; axes along which it broadcasts have stride 0. `rows`, `columns`: its sizes,
    for packed sequences, any of which may be longer than the caller says; FAR where that cannot be. In sixteenths, and
    never None beside a pointer: of a tuple with a None or a 1 in it Triton 3.6 may hand on the wrong ones."""

    ptr: tl.tensor = None
    rows: tl.tensor = None
    columns: tl.tensor = None
    strides: tl.tuple = ()


class Blocks(NamedTuple):
    """The tile lists of a block mask, seen from one side: row r of tiles visits entries[offsets[r] : offsets[r + 1]],
    each 4 * position + its kind, which has a 2 where the mask mod hides nothing that the band shows. Tiles are 2^own
    rows by 2^other columns. The rows of a head, and by how many a batch row and a head move, are counted in sixteenths:
    Triton 3.6 loses a 1 in a tuple that a loop within a loop reads."""

    offsets: tl.tensor = None
    entries: tl.tensor = None
    batch_rows: tl.tensor = None
    head_rows: tl.tensor = None
    own: tl.tensor = None
    other: tl.tensor = None
    rows: tl.tensor = None


class Sinks(NamedTuple):
    """(heads,), at any stride."""

    ptr: tl.tensor = None
    stride: tl.tensor = 0


class Terms(NamedTuple):
    """What a call has beside q, k, v and the band; None where it does not (in a pointer: of a tuple, Triton cannot ask
    whether it is None). `score` and `mask` are read by the mods; `steep`: the slope of the score mod is not 1;
    `wild`: it may be infinite. `origin`: see tilewise.spec.ORIGIN."""

    bias: tl.tuple = Bias()
    sinks: tl.tuple = Sinks()
    seed: tl.tensor = None
    threshold: tl.tensor = None
    rescale: tl.tensor = None
    score: tl.tuple = ()
    mask: tl.tuple = ()
    blocks: tl.tuple = Blocks()
    steep: tl.constexpr = None
    wild: tl.constexpr = None
    origin: tl.tensor = None


class Law(NamedTuple):
    """What holds for every pair of a query and a key: the band and the mask mod say who sees whom, the scale, the score
    mod and the other terms what a score is worth. Made where it is handed on: a kernel cannot give functions a name."""

    before: tl.tensor
    after: tl.tensor
    scale: tl.tensor
    terms: tl.tuple
    SCORE_MOD: tl.constexpr
    MASK_MOD: tl.constexpr


class Plan(NamedTuple):
    """What a kernel is compiled for: query heads per KV head; head dims, and the powers of two that hold them; queries
    and keys of a tile; how `scores` and `inner` work; whether the tiles of the other side all lie inside the sequence
    (EVEN), sequences are packed, scores so small that nobody needs a maximum (BOUNDED), kernels overlap; of the owner
    of keys, which sums it takes; and of the forward, how many HEADS have their queries in one tile: one, or a group."""

    GROUP: int
    D: int
    DV: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_DV: int
    FOLD: bool
    PRECISION: str
    CHUNK: int
    EVEN: bool = False
    PACKED: bool = False
    BOUNDED: bool = False
    OVERLAP: bool = False
    SUM_K: bool = True
    SUM_V: bool = True
    HEADS: int = 1


@triton.jit
def locate(pid, tiles, heads, batch, cu_q, cu_k, n_q, n_k, cu, BLOCK: tl.constexpr, ROWS: tl.constexpr = 1):
    """The pid-th of tiles * heads * batch programs; the tiles of one head are neighbours, so its K and V stay in L2.

    `cu` is the cu_seqlens of the side being tiled, whose tokens have ROWS each. Packed sequences share one row of
    tiles: sequence b starts at tile cu[b] * ROWS // BLOCK + b, which leaves it as many tiles as it needs, and tells the
    grid's size without its lengths. Then n_q and n_k are the tokens of all, which no sequence leaves, whatever cu_q and
    cu_k say.
    """
    tile = pid % tiles
    h = pid // tiles % heads
    b = pid // tiles // heads
    if cu is None:
        return Work(b, h, tile * BLOCK, 0, n_q, 0, n_k, 0)
    else:
        above = batch
        while above - b > 1:  # the last b whose first tile is not past this one
            mid = (b + above) // 2
            past = tl.load(cu + mid) * ROWS // BLOCK + mid > tile
            b = tl.where(past, b, mid)
            above = tl.where(past, mid, above)
        start = tl.where(b == 0, 0, tl.load(cu + b) * ROWS // BLOCK)
        return sequence(b, h, (tile - start - b) * BLOCK, cu_q, cu_k, n_q, n_k)


@triton.jit
def sequence(b, h, first, cu_q, cu_k, n_q, n_k):
    """The Work at row `first` of the packed sequence b, in buffers of n_q and n_k tokens."""
    q0, n_q = stretch(cu_q + b, n_q)
    k0, n_k = stretch(cu_k + b, n_k)
    return Work(b, h, first, q0, n_q, k0, n_k, (q0 // PAD + b) * PAD)


@triton.jit
def stretch(cu, n):
    """The tokens from cu[0] to cu[1], of the n that exist: the first, and how many; fewer than 0 are none."""
    start = tl.minimum(tl.maximum(tl.load(cu), 0), n)
    return start, tl.minimum(tl.load(cu + 1), n) - start


@triton.jit
def clamp(x, lo, hi):
    return tl.minimum(tl.maximum(x, lo), hi)


@triton.jit
def band(first, last, n, before, after, BLOCK: tl.constexpr):
    """The columns that rows first..last see when row r sees the columns r - before .. r + after of 0 .. n - 1."""
    lo = 0
    full_lo = 0
    hi = n
    full_hi = n
    if before is not None:
        lo = tl.maximum(first - before, 0)
        full_lo = tl.maximum(last - before, 0)
    if after is not None:
        hi = tl.minimum(last + after + 1, n)
        full_hi = tl.minimum(first + after + 1, n)
    lo = lo // BLOCK * BLOCK
    return Span(lo, full_lo, full_hi, tl.maximum(hi, lo))


@triton.jit
def share(span, part, parts, BLOCK: tl.constexpr):
    """One of so many parts of the columns, as even as whole blocks allow."""
    each = tl.cdiv(tl.cdiv(span.hi - span.lo, parts), BLOCK) * BLOCK
    lo = tl.minimum(span.lo + part * each, span.hi)
    return Span(lo, span.full_lo, span.full_hi, tl.minimum(lo + each, span.hi))


@triton.jit
def walk(span, w, h, blocks, BLOCK: tl.constexpr):
    """What the loop over columns counts: columns, or with tile lists the columns of the listed tiles, end to end. The
    band may begin within the first of them and end within the last (the upper half of a causal tile's rows see nothing
    of its right half)."""
    if blocks.offsets is None:
        return span.lo, span.hi
    else:
        tile = tl.minimum(w.first >> blocks.own, blocks.rows // 16 - 1)  # of sequences that it was not made for, some
        row = blocks.offsets + (tile + (w.b * blocks.batch_rows + h * blocks.head_rows) // 16)
        lo = tl.load(row)
        hi = tl.load(row + 1)
        width = 1 << blocks.other
        start = tl.load(blocks.entries + lo, mask=lo < hi, other=0) >> 2 << blocks.other
        end = ((tl.load(blocks.entries + (hi - 1), mask=lo < hi, other=0) >> 2) + 1) << blocks.other
        skip = tl.minimum(tl.maximum(span.lo - start, 0), width) // BLOCK * BLOCK
        drop = tl.minimum(tl.maximum(end - span.hi, 0), width) // BLOCK * BLOCK
        return (lo << blocks.other) + skip, (hi << blocks.other) - drop


@triton.jit
def listed(at, blocks, BLOCK: tl.constexpr, SOME: tl.constexpr = True):
    """The first column of the tile at this place of the walk, and whether the mask mod may hide some pair of it
    (`picky`). Not SOME: at places below 0, of rows that list nothing, there is none."""
    if blocks.offsets is None:
        return at, True
    else:
        entry = tl.load(blocks.entries + (at >> blocks.other), mask=None if SOME else at >= 0)
        first = tl.multiple_of((entry >> 2 << blocks.other) + (at & ((1 << blocks.other) - 1)), BLOCK)
        return first, entry & 2 == 0


@triton.jit
def column(at, span, blocks, BLOCK: tl.constexpr, CAREFUL: tl.constexpr):
    """`listed`, and whether the band may hide some pair of the tile (`edge`)."""
    first, picky = listed(at, blocks, BLOCK)
    edge = CAREFUL or (first < span.full_lo) or (first + BLOCK > span.full_hi)
    return first, edge, picky


@triton.jit
def masked(x, hidden, edge, picky, i, j, w, h, law):
    """x, with `hidden` for the pairs that do not see each other. The branches are the same for the whole program: the
    mask mod is asked only where it hides something, and where nothing is hidden nothing is done."""
    if law.MASK_MOD is None:
        if edge:
            x = tl.where(visible(i, j, w, law.before, law.after), x, hidden)
    else:
        if edge or picky:
            if picky:
                x = tl.where(pleases(i, j, w, h, law.terms, law.MASK_MOD), x, hidden)
            x = tl.where(visible(i, j, w, law.before, law.after), x, hidden)
    return x


@triton.jit
def pleases(i, j, w, h, terms, MASK_MOD: tl.constexpr):
    """Which keys j the mask mod shows the queries i."""
    at = place(i, j, w, h, terms)
    return MASK_MOD(None, at.b, at.h, at.i, at.j, at.n_q, at.n_k, terms.mask)


@triton.jit
def place(i, j, w, h, terms):
    """Where mods and dropout find the pair: here, or where `origin` says that this call lies in a larger one."""
    if terms.origin is None:
        return Place(w.b, h, i, j, w.n_q, w.n_k)
    else:
        row = terms.origin + w.b * 7
        step = tl.load(row + 4)
        i = tl.load(row + 2) + step * i
        j = tl.load(row + 3) + step * j
        return Place(tl.load(row), tl.load(row + 1) + h, i, j, tl.load(row + 5), tl.load(row + 6))


@triton.jit
def visible(i, j, w, before, after):
    """Which keys j the band shows the queries i: those that exist and lie in it. (Queries that do not exist see what
    the last one's neighbours would; their weights are 0 for other reasons.)"""
    at = i + (w.n_k - w.n_q)
    last = w.n_k - 1
    if after is not None:
        last = tl.minimum(at + after, last)
    keep = (j <= last) & (at == at)
    if before is not None:
        keep &= j >= at - before
    return keep


@triton.jit
def seen(i, j, w, h, law):
    """Which keys j the queries i see: both exist, the band shows the key, and the mask mod does."""
    keep = visible(i, j, w, law.before, law.after) & (i < w.n_q)
    if law.MASK_MOD is not None:
        keep &= pleases(i, j, w, h, law.terms, law.MASK_MOD)
    return keep


@triton.jit
def head_of(w, r, HEADS: tl.constexpr):
    """Of row r: the program's or, of several, its own."""
    if HEADS == 1:
        return w.h
    else:
        return w.h * HEADS + r % HEADS


@triton.jit
def tile_pointers(rows, ROWS: tl.constexpr, COLS: tl.constexpr):
    x = rows.x
    r = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, COLS)[None, :]
    if x.wide is not None:
        d = d.to(tl.int64)
    if rows.heads is None:
        if x.wide is not None:
            r = r.to(tl.int64)
        p = x.ptr + rows.b.to(tl.int64) * x.strides[0] + rows.h.to(tl.int64) * x.strides[2]
        p += tl.cast(rows.t + rows.first, tl.int64) * x.strides[1]
        return p + r * x.strides[1] + d * x.strides[3]
    else:
        r += rows.first
        p = x.ptr + rows.b.to(tl.int64) * x.strides[0] + (rows.t + r // rows.heads).to(tl.int64) * x.strides[1]
        p += (rows.h * rows.heads + r % rows.heads).to(tl.int64) * x.strides[2]
        return p + d * x.strides[3]


@triton.jit
def load_rows(rows, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr):
    """ROWS of them: zero past the sequence's end and past D columns."""
    p = tile_pointers(rows, ROWS, COLS)
    r = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, COLS)[None, :]
    if EVEN:
        if D == COLS:
            return tl.load(p)
        else:
            return tl.load(p, mask=d < D, other=0.0)
    else:
        return tl.load(p, mask=(rows.first + r < rows.n) & (d < D), other=0.0)


@triton.jit
def inner(a_tile, b_tile, a, b, D: tl.constexpr, PLAN: tl.constexpr):
    """a b^T of the tiles at a and b; of more than CHUNK columns, so many at a time, read when their turn comes: wide
    operands, of float32 in two halves each, would not fit into the registers. Then nobody needs the whole tiles."""
    A: tl.constexpr = a_tile.shape[0]
    B: tl.constexpr = b_tile.shape[0]
    CHUNK: tl.constexpr = PLAN.CHUNK
    if a_tile.shape[1] <= CHUNK:
        return tl.dot(a_tile, tl.trans(b_tile), input_precision=PLAN.PRECISION)
    else:
        acc = tl.zeros([A, B], tl.float32)
        for c in tl.range(0, D, CHUNK, num_stages=1, disable_licm=True):
            b_columns = load_columns(b, c, D, B, CHUNK)
            acc = tl.dot(load_columns(a, c, D, A, CHUNK), tl.trans(b_columns), acc, input_precision=PLAN.PRECISION)
        return acc


@triton.jit
def load_columns(rows, c, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Columns c .. c + COLS of ROWS rows; zero past the sequence's end and past D columns."""
    p = tile_pointers(rows, ROWS, COLS) + c * rows.x.strides[3]
    r = tl.arange(0, ROWS)[:, None]
    d = c + tl.arange(0, COLS)[None, :]
    return tl.load(p, mask=(rows.first + r < rows.n) & (d < D), other=0.0)


@triton.jit
def store_rows(rows, tile, D: tl.constexpr):
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    first = rows.first * tl.num_programs(1)  # times 1: addresses are computed here, not kept since the tile was loaded
    r = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, COLS)[None, :]
    p = tile_pointers(Rows(rows.x, rows.b, rows.h, rows.t, first, rows.n, rows.heads), ROWS, COLS)
    tl.store(p, tile.to(rows.x.ptr.dtype.element_ty), mask=(first + r < rows.n) & (d < D))


@triton.jit
def row_pointers(x, tokens, heads, b, h, t, i, PACKED: tl.constexpr):
    """Pointers to x[b, h, t + i] of a contiguous (batch, heads, tokens) tensor; packed sequences have one batch row. Of
    strides among the arguments Triton would compile one kernel for those that 16 divides, and one for the others."""
    line = tl.cast(h, tl.int64)
    if not PACKED:
        line += tl.cast(b, tl.int64) * heads
    return x + line * tokens + t + i


@triton.jit
def statistic_pointers(x, w, h, first, ROWS: tl.constexpr, PACKED: tl.constexpr):
    """Pointers to ROWS of the padded row statistics of head h, from row `first` of the sequence."""
    b = 0 if PACKED else w.b
    return (
        x.ptr
        + tl.cast(b, tl.int64) * x.strides[0]
        + h.to(tl.int64) * x.strides[1]
        + (w.r0 + first)
        + tl.arange(0, ROWS)
    )


@triton.jit
def unit_of(scale, FOLD: tl.constexpr):
    """Log2 units per unit of what `scores` returns."""
    if FOLD:
        return scale * LOG2E
    else:
        return LOG2E


@triton.jit
def measured(x, unit, bias):
    """What scores are measured from, x being one of them: in log2 units, so that `exponent` is one multiply-add. With a
    bias (a pointer, or None), which may be -3e38 for a whole row, it stays as it is: the product would be infinite, or
    rounded by more than scores differ."""
    if bias is None:
        return x * unit
    else:
        return x


@triton.jit
def exponent(s, origin, unit, bias):
    """By how many log2 units a score lies above what is `measured`."""
    if bias is None:
        return s * unit - origin
    else:
        return (s - origin) * unit


@triton.jit
def gap(a, b, unit, bias):
    """By how many log2 units one that is `measured` lies above another."""
    if bias is None:
        return a - b
    else:
        return (a - b) * unit


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
def biases(bias, w, h, i, j):
    """bias[b, h, i, j]; nothing is read outside the sequence, nor outside the bias: 0 there."""
    p = bias.ptr + tl.cast(w.b, tl.int64) * bias.strides[0] + tl.cast(h, tl.int64) * bias.strides[1]
    p = p + i.to(tl.int64) * bias.strides[2] + j.to(tl.int64) * bias.strides[3]
    rows = tl.minimum(w.n_q, bias.rows // 16)
    columns = tl.minimum(w.n_k, bias.columns // 16)
    return tl.load(p, mask=(i < rows) & (j < columns), other=0.0).to(tl.float32)


@triton.jit
def mix(x):
    """A bijection of 32-bit integers, as in `tilewise.mods.dropout`."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


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
def softmax_step(m, l, s, unit, bias, BOUNDED: tl.constexpr):
    """Fold one tile of scores into the running (maximum, sum). A row that has seen nothing keeps m = -inf, l = 0.

    m is `measured`, as it was subtracted: a product of s and unit once more would be fused with the difference, not
    rounded, and alpha would not be 1 where the maximum stays, an error that grows with every tile.

    BOUNDED: the weights of such scores fit into a float as they are; m stays 0 and nothing is ever rescaled.
    """
    if BOUNDED:
        p = tl.exp2(s * unit)
        return p, tl.full([s.shape[0]], 1.0, tl.float32), m, l + tl.sum(p, 1)
    m_new = tl.maximum(m, measured(tl.max(s, 1), unit, bias))
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(exponent(s, pivot[:, None], unit, bias))
    alpha = tl.exp2(gap(m, pivot, unit, bias))
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def dot(a, b, acc, met, PLAN: tl.constexpr):
    """acc + a @ b. With `met` (which rows of a meet which rows of b), a non-finite row of b makes the rows that see it
    nan and leaves the others alone. A matrix product by itself cannot keep that promise: 0 * nan is nan.
    """
    if met is None:
        return tl.dot(a, b, acc, input_precision=PLAN.PRECISION)
    else:
        finite = tl.abs(b.to(tl.float32)) < float("inf")
        acc = tl.dot(a, tl.where(finite, b, 0.0).to(b.dtype), acc, input_precision=PLAN.PRECISION)
        bad = tl.max(tl.where(finite, 0, 1), 1)
        spoilt = tl.max(tl.where(met, bad[None, :], 0), 1)
        return tl.where(spoilt[:, None] > 0, float("nan"), acc)


@triton.jit
def raise_flag(flag, x):
    """*flag, which this program has set to 0, = 1 where the sum of some row is nan: where an element is, and where
    infinities of both signs meet. Nothing is reduced over the warps, which would cost time, and the compiler for
    sm_100 (Triton 3.6) its life."""
    rows = tl.sum(x, 1)
    bad = rows != rows
    tl.debug_barrier()  # the 0 first
    tl.store(flag + bad.to(tl.int32) * 0, 1, mask=bad)
