"""Lesson 11: the keys of a causal block of queries.

Rows first .. first + rows - 1 of n_q queries; query i sits at key position i + n_k - n_q and sees the keys up to there.
Keys come in blocks of `block`.

---

第 11 课：因果掩码下，一块查询要看哪些键。

n_q 个查询中的第 first .. first + rows - 1 行；查询 i 位于键的位置 i + n_k - n_q，能看到到那里为止的键。键按 `block` 个一块。
"""


def span(
    first: int, rows: int, n_q: int, n_k: int, block: int
) -> tuple[int, int]:
    """(full, visited): how many blocks of keys all rows see completely, and how many some row sees a part of. --- (full, visited)：所有行都完整看到的键块有几个，以及至少有一行看到一部分的键块有几个。"""
    raise NotImplementedError
