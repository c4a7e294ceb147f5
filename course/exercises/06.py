"""Lesson 6: the forward's traffic, in closed form.

One head: q, k, v, o are (n, d). Blocks of `rows` queries and `columns` keys divide n.

fa1: for each block of keys (loaded once): for each block of queries: load q, o, m, l; store o, m, l.
fa2: for each block of queries (loaded once): for each block of keys: load k, v; at the end store o and lse.

m, l and lse have n numbers each, of `itemsize` bytes as everything else.
"""


def hbm_bytes(n: int, d: int, rows: int, columns: int, order: str, itemsize: int = 4) -> int:
    raise NotImplementedError
