"""The NamedTuples that device functions exchange, and the constants that they share."""

from typing import NamedTuple

import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
FAR = 2**30  # longer than any sequence, also after a division by 16
PAD: tl.constexpr = tl.constexpr(128)  # in the padded row statistics, sequences start at multiples of PAD
# Triton compiles another kernel for an integer that is 1 or a multiple of 16, unless it is named here. This works for
# integers that are arguments of their own only: Triton 3.6 specialises every integer inside a tuple. Hence kernels take
# sizes one by one, and pass them on as `Grid` and `Sequences`.
SIZES = """
    n_q n_k before after tiles q_tiles k_tiles heads kv_heads batch splits total q_total k_total padded rising rows row0
    columns lines cohort x_size y_size z_size new most line count step_k step_v
"""
ANY_SIZE = {
    "do_not_specialize": SIZES.split(),
    "do_not_specialize_on_alignment": ["cu_q", "cu_k", "cu_x", "cu_y"],
}


class View(NamedTuple):
    """A (batch, token, head, dim) tensor; or padded row statistics, (batch, head, row) with the last stride 1.

    The strides of a tensor have a fifth entry, 1 if offsets inside a tile may exceed 32 bits, else None (see `index`),
    and a sixth, 1 if rows begin at multiples of 8 elements, else None (see `stride`). They are not fields of their own:
    Triton forgets the constants of a struct inside a struct (docs/gotchas.md).
    """

    ptr: tl.tensor
    strides: tl.tuple


class Grid(NamedTuple):
    """The programs of a launch: tiles per head (of packed sequences, of all of them), heads, batch rows."""

    tiles: tl.tensor
    heads: tl.tensor
    batch: tl.tensor


class Sequences(NamedTuple):
    """cu_seqlens, or None for a dense batch; the lengths, or of packed sequences the number of tokens of all."""

    cu_q: tl.tensor
    cu_k: tl.tensor
    n_q: tl.tensor
    n_k: tl.tensor


class Work(NamedTuple):
    """The tile of one program: batch row, head, first row; the start and length of both sequences; and the start of the
    sequence in the padded row statistics."""

    b: tl.tensor
    h: tl.tensor
    first: tl.tensor
    q0: tl.tensor
    n_q: tl.tensor
    k0: tl.tensor
    n_k: tl.tensor
    r0: tl.tensor


class Pairs(NamedTuple):
    """The pairs of a tile of scores: the sequence (a Work), the head, and the queries i and keys j, which broadcast."""

    w: tl.tuple
    h: tl.tensor
    i: tl.tensor
    j: tl.tensor


class ModIndices(NamedTuple):
    """The indices of pairs as mods and dropout count them: batch row, head, query, key; and the lengths."""

    b: tl.tensor
    h: tl.tensor
    i: tl.tensor
    j: tl.tensor
    n_q: tl.tensor
    n_k: tl.tensor


class Rows(NamedTuple):
    """The rows of a tile: from row `first` of a sequence that starts at token t and has n rows. If `heads` is not None,
    row r is token r // heads of head h * heads + r % heads."""

    x: tl.tuple
    b: tl.tensor
    h: tl.tensor
    t: tl.tensor
    first: tl.tensor
    n: tl.tensor
    heads: tl.constexpr = None


class Span(NamedTuple):
    """A program loops over the columns [lo, hi); those in [full_lo, full_hi) need no mask."""

    lo: tl.tensor
    full_lo: tl.tensor
    full_hi: tl.tensor
    hi: tl.tensor


class Bias(NamedTuple):
    """A (batch, head, query, key) tensor; axes along which it broadcasts have stride 0. `rows` and `columns` are 16
    times its sizes for packed sequences, which may be longer than the bias, and FAR otherwise. Never 1, and never None
    beside a pointer: Triton 3.6 may read the wrong fields of a tuple that has either."""

    ptr: tl.tensor = None
    rows: tl.tensor = None
    columns: tl.tensor = None
    strides: tl.tuple = ()


class Blocks(NamedTuple):
    """The tile lists of a block mask, by queries or by keys: row r of tiles has entries[offsets[r] : offsets[r + 1]],
    each 4 * position + kind; bit 1 of the kind is set where the mask mod hides nothing (a full tile). Tiles have 2^own
    rows and 2^other columns. `rows` of tiles per head, and the steps from one batch row and head to the next, are 16
    times their values: Triton 3.6 loses a 1 in a tuple that a nested loop reads."""

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
    """The score terms of a call. Absent ones are None (bias, sinks and blocks: their pointer, because Triton cannot
    compare a tuple with None).

    `score` and `mask` are the arguments of the mods. `has_derivative`: the derivative of the score mod is not 1;
    `infinite_derivative`: it may be infinite. `large_scores`: scores may be so large that a fused multiply-add would
    round them by more than they differ (see `softmax.py`). `position_offsets`: see tilewise.request.POSITION_OFFSETS.
    `mask_words`: the visible pairs of partial tiles as bits (Hopper, `mask_words.py`); `mask_seen`: for each tile and
    64 queries of it, whether they see a key.
    """

    bias: tl.tuple = Bias()
    sinks: tl.tuple = Sinks()
    seed: tl.tensor = None
    threshold: tl.tensor = None
    rescale: tl.tensor = None
    score: tl.tuple = ()
    mask: tl.tuple = ()
    blocks: tl.tuple = Blocks()
    has_derivative: tl.constexpr = None
    infinite_derivative: tl.constexpr = None
    large_scores: tl.constexpr = None
    position_offsets: tl.tensor = None
    mask_words: tl.tensor = None
    mask_seen: tl.tensor = None


class ScoreParams(NamedTuple):
    """What decides the score of a pair. Query i, at key position p = i + n_k - n_q, sees the keys p - before ..
    p + after that the mask mod shows. Kernels build it in the call that takes it: Triton has no variables that hold
    functions."""

    before: tl.tensor
    after: tl.tensor
    scale: tl.tensor
    terms: tl.tuple
    SCORE_MOD: tl.constexpr
    MASK_MOD: tl.constexpr


class KernelConfig(NamedTuple):
    """The compile-time configuration of a kernel."""

    GROUP: int  # query heads per KV head
    D: int  # head dims of q and k, and of v
    DV: int
    BLOCK_M: int  # queries and keys of a tile
    BLOCK_N: int
    BLOCK_D: int  # powers of two that hold D and DV
    BLOCK_DV: int
    FOLD: bool  # scale and log2(e) are one factor: see `scaled`
    PRECISION: str  # of tl.dot
    CHUNK: int  # columns of a product at a time: see `dot_nt`
    EVEN: bool = False  # the loop's tiles end with the sequence
    PACKED: bool = False  # packed sequences
    BOUNDED: bool = False  # scores are so small that softmax needs no maximum
    OVERLAP: bool = False  # programmatic dependent launch
    SUM_K: bool = True  # which of dK and dV a key kernel computes
    SUM_V: bool = True
    HEADS: int = 1  # query heads whose queries share a tile: 1 or GROUP
    MAX_LOGIT: bool = False  # the largest score of each head is computed
    PIECE: int = 512  # columns of a sum along the head dim, and
    BRANCH: bool = True  # whether a branch skips the mask where it hides nothing: see `tiles.Tile`
