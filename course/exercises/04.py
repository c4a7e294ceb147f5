"""Lesson 4: products in blocks.

---

第 4 课：分块的矩阵乘法。
"""

import torch  # noqa: F401
from torch import Tensor


def fetched(n: int, tile: int) -> int:
    """Exercise 1. Elements read for an n × n product in tiles.

    Each of the (n / tile)² output tiles reads the blocks of A and of B that
    it is the sum of; nothing is kept from one output tile to the next.

    ---
    练习 1。按块做 n × n 的矩阵乘法，一共读多少个元素。

    (n / tile)² 个输出块，每个都要读它所求和的 A 的块和 B 的块；从一个输出块
    到下一个，什么都不保留。
    """
    raise NotImplementedError


def blocked_matmul(far, blocks: int, tile: int) -> Tensor:
    """Exercise 2. A @ B, with at most 2 · blocks³ loads.

    A and B are blocks × blocks blocks of (tile, tile). `far.load("a", i, k)`
    returns a block of A, and every call is counted. One block of the output,
    one of A and one of B may be kept near.

    ---
    练习 2。A @ B，最多读 2 · blocks³ 次。

    A 和 B 各有 blocks × blocks 块，每块 (tile, tile)。
    `far.load("a", i, k)` 返回 A 的一块，每次调用都会计数。近处可以放一块输出、
    一块 A 和一块 B。
    """
    raise NotImplementedError


def two_products(far, blocks: int, tile: int) -> Tensor:
    """Exercise 3. (Q Kᵀ) V without ever holding Q Kᵀ.

    Q, K and V are `blocks` blocks of (tile, tile), one below the other:
    `far.load("q", i)` returns one. At most blocks + 2 · blocks² loads.

    ---
    练习 3。(Q Kᵀ) V，而任何时候都不持有整个 Q Kᵀ。

    Q、K、V 各是上下排列的 `blocks` 块，每块 (tile, tile)：
    `far.load("q", i)` 返回一块。最多读 blocks + 2 · blocks² 次。
    """
    raise NotImplementedError
