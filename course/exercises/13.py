"""Lesson 13: the backward.

S = q kᵀ / √D, P = softmax(S), O = P V. The forward keeps `lse`, the logsumexp
of each row of S, and not P. E is the head dim of v and do.

---

第 13 课：反向传播。

S = q kᵀ / √D，P = softmax(S)，O = P V。前向保存的是 `lse`，即 S 每一行的
logsumexp，而不是 P。E 是 v 和 do 的 head dim。
"""

import math  # noqa: F401

import torch  # noqa: F401
from torch import Tensor


def weights(q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
    """Exercise 1. A block of P, computed again.

    q (N, D) and lse (N,) belong to a block of queries, k (M, D) to a block of
    keys, which are not all keys of the row.

    ---
    练习 1。重新算出 P 的一块。

    q (N, D) 和 lse (N,) 属于一块查询，k (M, D) 属于一块键，并不是这一行全部的
    键。
    """
    raise NotImplementedError


def block_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Exercise 2. What a block adds to dQ (N, D), dK (M, D), dV (M, E).

    do (N, E) and delta (N,) belong to the block of queries, v (M, E) to the
    block of keys. `delta` is rowsum(dO ∘ O), over the whole row.

    ---
    练习 2。一块对 dQ (N, D)、dK (M, D)、dV (M, E) 的贡献。

    do (N, E) 和 delta (N,) 属于这一块查询，v (M, E) 属于这一块键。`delta` 是
    整行的 rowsum(dO ∘ O)。
    """
    raise NotImplementedError


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    rows: int, columns: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Exercise 3. FlashAttention's backward: (dQ, dK, dV).

    Outside the blocks of keys, inside the blocks of queries. Nothing of size
    N × M, please: only blocks of `rows` × `columns`. Blocks need not divide
    the lengths.

    ---
    练习 3。FlashAttention 的反向：(dQ, dK, dV)。

    外层是键块，内层是查询块。不要产生 N × M 大小的东西，只许有 `rows` ×
    `columns` 的块。块大小不必整除长度。
    """
    raise NotImplementedError
