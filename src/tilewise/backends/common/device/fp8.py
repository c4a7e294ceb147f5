"""fp8 operands in device memory: see `fp8_format` and `fp8_quantise`. They lie in blocks of PAD tokens, with zeros
after the last token of a sequence.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .structs import PAD

MAX_FP8: tl.constexpr = tl.constexpr(448.0)
LEAST_TOP: tl.constexpr = tl.constexpr(2.0**-110)  # of a row of P times the scales of its values


class Fp8Scales(NamedTuple):
    """Two tensors of float32, because every pointer takes registers of the Hopper forward; each once more, or None, as
    a flag. (Triton loses an integer that is a constant of a tuple in a tuple where a function is called in a branch.)

    rows: of each block and head of q, the scales of its PAD rows; with `shift` also what the mean key takes from their
    scores. keys: of each block and KV head, the scale of k and that of v; with `own`, in calls that hide keys, also
    those of PAD rows of k and of v. Where these count, the scale of a block is negative: -1, or minus the scale of the
    block of v, in whose units the scales of its rows are.
    """

    rows: tl.tensor = None
    keys: tl.tensor = None
    shift: tl.tensor = None
    own: tl.tensor = None


@triton.jit
def row_scales(scales, block, h, heads):
    """Pointer to the scale of the first row of q of a block; the shifts lie PAD behind the scales."""
    SIZE: tl.constexpr = PAD if scales.shift is None else 2 * PAD
    return scales.rows + (tl.cast(block, tl.int64) * heads + h) * SIZE


@triton.jit
def key_scales_at(scales, line):
    """Pointer to the scale of k of a block and KV head, `line`. That of v is next, then (2) rows of k, then of v."""
    SIZE: tl.constexpr = 2 if scales.own is None else 2 + 2 * PAD
    return scales.keys + tl.cast(line, tl.int64) * SIZE


@triton.jit
def padded_block(start, b, n, cu):
    """The first block of sequence b, which starts at token `start` if it is packed; else sequences have n tokens."""
    if cu is None:
        return b * tl.cdiv(n, PAD)
    else:
        return start // PAD + b
