"""Lesson 8: views by arithmetic. Return (shape, strides), as lists; no tensors."""

View = tuple[list[int], list[int]]


def split_heads(shape: list[int], strides: list[int], heads: int) -> View:
    """(B, N, H·d) -> (B, N, H, d): the last axis becomes two."""
    raise NotImplementedError


def swap(shape: list[int], strides: list[int], a: int, b: int) -> View:
    """Exchange two axes."""
    raise NotImplementedError
