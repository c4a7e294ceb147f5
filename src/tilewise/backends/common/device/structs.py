"""What the functions of a kernel hand each other, and the constants that they share."""

from typing import NamedTuple

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
    `wild`: it may be infinite. `far`: scores may be so large that no multiply-add may round them (see `measured`).
    `origin`: see tilewise.request.ORIGIN."""

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
    far: tl.constexpr = None
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
