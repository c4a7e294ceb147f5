"""Lesson 6: the forward's traffic, in closed form.

One head: q, k, v, o are (n, d). Blocks of `rows` queries and `columns` keys divide n.

fa1: for each block of keys (loaded once): for each block of queries: load q, o, m, l; store o, m, l.
fa2: for each block of queries (loaded once): for each block of keys: load k, v; at the end store o and lse.

m, l and lse have n numbers each, of `itemsize` bytes as everything else.

---

第 6 课：前向的数据搬运量，写成公式。

单个头：q、k、v、o 是 (n, d)。`rows` 个查询一块，`columns` 个键一块，都整除 n。

fa1：对每块键（读一次）：对每块查询：读 q、o、m、l；写 o、m、l。
fa2：对每块查询（读一次）：对每块键：读 k、v；最后写 o 和 lse。

m、l、lse 各有 n 个数，和其他的一样每个 `itemsize` 字节。
"""


def hbm_bytes(
    n: int, d: int, rows: int, columns: int, order: str, itemsize: int = 4
) -> int:
    raise NotImplementedError
