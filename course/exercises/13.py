"""Lesson 13: one block of the backward.

q (N, D), do (N, E), lse (N,), delta (N,) belong to a block of queries; k (M, D), v (M, E) to a block of keys. S = q kᵀ / √D.
`delta` is rowsum(dO ∘ O) over the *whole* row, `lse` the logsumexp over the whole row.
"""

from torch import Tensor


def block_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What this block adds to dQ (N, D), dK (M, D) and dV (M, E)."""
    raise NotImplementedError
