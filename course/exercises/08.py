"""Lesson 8: views by arithmetic. Return (shape, strides), as lists; no tensors.

---

第 8 课：用算术算出视图。返回 (shape, strides)，都是列表；不用张量。
"""

View = tuple[list[int], list[int]]


def split_heads(shape: list[int], strides: list[int], heads: int) -> View:
    """(B, N, H·d) -> (B, N, H, d): the last axis becomes two. --- (B, N, H·d) -> (B, N, H, d)：最后一轴一分为二。"""
    raise NotImplementedError


def swap(shape: list[int], strides: list[int], a: int, b: int) -> View:
    """Exchange two axes. --- 交换两个轴。"""
    raise NotImplementedError
