"""Lesson 4: a blocked product that does not waste its loads.

`far` holds two n × n matrices in `tile` × `tile` blocks. `far.load("a", i, k)` returns a block of A, and every call is
counted. Each output block may be kept near while you sum into it, and so may one block of A and one of B; nothing else.
"""

import torch  # noqa: F401
from torch import Tensor


def blocked_matmul(far, blocks: int, tile: int) -> Tensor:
    """A @ B, with at most 2 · blocks³ loads. A is blocks × blocks blocks of (tile, tile), and so is B."""
    raise NotImplementedError
