"""Lesson 11: what a Triton program does, in torch.

---

第 11 课：用 torch 写出一个 Triton 程序所做的事。
"""

import torch  # noqa: F401
from torch import Tensor


def tile_offsets(first: int, rows: int, n: int, d: int) -> Tensor:
    """Exercise 1. Where the elements of a tile lie; -1 past the end.

    The (n, d) matrix is contiguous. The tile has rows first ..
    first + rows - 1 and all d columns; the result is a (rows, d) tensor of
    integers, with -1 for rows that the matrix does not have.

    ---
    练习 1。一块的元素在内存的哪里；超出末尾的为 -1。

    (n, d) 矩阵是连续的。这一块有第 first .. first + rows - 1 行和全部 d 列；
    结果是 (rows, d) 的整数张量，矩阵没有的行填 -1。
    """
    raise NotImplementedError


def masked_scores(
    s: Tensor, first_i: int, first_j: int, n_q: int, n_k: int
) -> Tensor:
    """Exercise 2. A tile of scores, -inf where a query sees no key.

    s (M, N) are the scores of queries first_i + ... and keys first_j + ...
    Query i sits at key position i + n_k - n_q and sees the keys up to there.
    Keys past n_k do not exist, whatever the query.

    ---
    练习 2。一块分数，查询看不到键的位置为 -inf。

    s (M, N) 是查询 first_i + … 与键 first_j + … 的分数。查询 i 位于键的位置
    i + n_k - n_q，能看到到那里为止的键。不论哪个查询，n_k 之后都没有键。
    """
    raise NotImplementedError


def span(
    first: int, rows: int, n_q: int, n_k: int, block: int
) -> tuple[int, int]:
    """Exercise 3. (full, visited) blocks of keys of a block of queries.

    The block has rows first .. first + rows - 1 of n_q queries, which see
    keys as in exercise 2. Keys come in blocks of `block`. `full` blocks are
    seen completely by all rows and need no mask; of `visited` blocks some row
    sees a part.

    ---
    练习 3。一块查询的 (full, visited) 键块数。

    这一块有 n_q 个查询中的第 first .. first + rows - 1 行，看得到的键如练习 2。
    键按 `block` 个一块。`full` 块所有行都完整看到，不需要掩码；`visited` 块至
    少有一行看到一部分。
    """
    raise NotImplementedError
