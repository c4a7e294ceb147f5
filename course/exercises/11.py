"""Lesson 11: the keys of a causal block of queries.

Rows first .. first + rows - 1 of n_q queries; query i sits at key position i + n_k - n_q and sees the keys up to there.
Keys come in blocks of `block`.
"""


def span(first: int, rows: int, n_q: int, n_k: int, block: int) -> tuple[int, int]:
    """(full, visited): how many blocks of keys all rows see completely, and how many some row sees a part of."""
    raise NotImplementedError
