"""Lesson 13: one block of the backward.

q (N, D), do (N, E), lse (N,), delta (N,) belong to a block of queries; k (M, D), v (M, E) to a block of keys. S = q kᵀ / √D.
`delta` is rowsum(dO ∘ O) over the *whole* row, `lse` the logsumexp over the whole row.

---

第 13 课：反向传播的一块。

q (N, D)、do (N, E)、lse (N,)、delta (N,) 属于一块查询；k (M, D)、v (M, E) 属于一块键。S = q kᵀ / √D。
`delta` 是*整行*的 rowsum(dO ∘ O)，`lse` 是整行的 logsumexp。
"""

from torch import Tensor


def block_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What this block adds to dQ (N, D), dK (M, D) and dV (M, E). --- 这一块对 dQ (N, D)、dK (M, D) 和 dV (M, E) 的贡献。"""
    raise NotImplementedError
