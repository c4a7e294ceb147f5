"""Lesson 10: the batch that leaves no tail.

Attention runs ⌈tokens / tile⌉ · heads · batch blocks of equal work, `slots` at a time. A wave with one block in it lasts as
long as a full one.
"""


def best_batch(tokens: int, heads: int, tile: int, slots: int, limit: int) -> int:
    """The batch size in 1 .. limit with the largest busy share of the slots; the smallest of several."""
    raise NotImplementedError
