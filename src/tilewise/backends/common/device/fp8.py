"""fp8 operands in device memory: see `fp8_format` and `fp8_quantise`. They lie in blocks of PAD tokens, with zeros
after the last token of a sequence.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .structs import PAD

MAX_FP8: tl.constexpr = tl.constexpr(448.0)


class Fp8Scales(NamedTuple):
    """Float32 scales by block and head: (2 blocks of queries, heads), (blocks, KV heads) twice; and what the mean key
    takes from the scores, (blocks, heads, PAD), or None."""

    q: tl.tensor = None
    k: tl.tensor = None
    v: tl.tensor = None
    shift: tl.tensor = None


@triton.jit
def padded_block(start, b, n, cu):
    """The first block of sequence b, which starts at token `start` if it is packed; else sequences have n tokens."""
    if cu is None:
        return b * tl.cdiv(n, PAD)
    else:
        return start // PAD + b
