"""Lesson 6: FlashAttention, 1 and 2.

One head: q, k, v and o are (n, d). Queries come in blocks of `rows`, keys in
blocks of `columns`.

---

第 6 课：FlashAttention 1 与 2。

单个头：q、k、v、o 是 (n, d)。查询每 `rows` 个一块，键每 `columns` 个一块。
"""

import math  # noqa: F401

import torch  # noqa: F401
from torch import Tensor


def hbm_bytes(
    n: int, d: int, rows: int, columns: int, order: str, itemsize: int = 4
) -> int:
    """Exercise 1. Bytes that the forward loads and stores; blocks divide n.

    fa1: for each block of keys (loaded once): for each block of queries: load
    q, o, m, l; store o, m, l.
    fa2: for each block of queries (loaded once): for each block of keys: load
    k, v; at the end store o and lse.
    m, l and lse have n numbers each, of `itemsize` bytes as everything else.

    ---
    练习 1。前向读写多少字节；块大小整除 n。

    fa1：对每块键（读一次）：对每块查询：读 q、o、m、l；写 o、m、l。
    fa2：对每块查询（读一次）：对每块键：读 k、v；最后写 o 和 lse。
    m、l、lse 各有 n 个数，和其他的一样每个 `itemsize` 字节。
    """
    raise NotImplementedError


def fa2(
    q: Tensor, k: Tensor, v: Tensor, rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    """Exercise 2. FlashAttention-2's loops: (o, lse).

    Outside the blocks of queries, inside the blocks of keys, with the state
    (m, l, o) of lesson 5. The scores are q kᵀ / √d. Divide once, after the
    last block of keys; lse = m + log l. Blocks need not divide n.

    ---
    练习 2。FlashAttention-2 的循环：返回 (o, lse)。

    外层是查询块，内层是键块，状态是第 5 课的 (m, l, o)。分数是 q kᵀ / √d。
    最后一块键之后只除一次；lse = m + log l。块大小不必整除 n。
    """
    raise NotImplementedError


def fa2_causal(
    q: Tensor, k: Tensor, v: Tensor, rows: int, columns: int
) -> tuple[Tensor, int]:
    """Exercise 3. (o, visited): query i sees the keys j <= i.

    q and k have the same length. A block of keys that no query of the block
    sees is not visited; `visited` counts the pairs of blocks that are.

    ---
    练习 3。(o, visited)：查询 i 看得到键 j <= i。

    q 和 k 一样长。整块查询都看不到的键块不访问；`visited` 是访问过的
    （查询块, 键块）有多少对。
    """
    raise NotImplementedError
