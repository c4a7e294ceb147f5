"""Lesson 8: views by arithmetic. Shapes and strides are lists; no tensors.

---

第 8 课：用算术算出视图。形状和步长都是列表；不用张量。
"""

View = tuple[list[int], list[int]]


def swap(shape: list[int], strides: list[int], a: int, b: int) -> View:
    """Exercise 1. (shape, strides) after axes a and b are exchanged.

    ---
    练习 1。交换轴 a 和轴 b 之后的 (shape, strides)。
    """
    raise NotImplementedError


def split_heads(shape: list[int], strides: list[int], heads: int) -> View:
    """Exercise 2. (B, N, H·d) -> (B, N, H, d): the last axis becomes two.

    ---
    练习 2。(B, N, H·d) -> (B, N, H, d)：最后一轴一分为二。
    """
    raise NotImplementedError


def merge_axes(shape: list[int], strides: list[int]) -> int | None:
    """Exercise 3. The stride of all axes as one, or None if it needs a copy.

    Elements are counted in row-major order of the axes. Axes of length 1 may
    have any stride. Of axes that are all of length 1 the stride is 1.

    ---
    练习 3。把所有轴合成一轴时的步长；需要复制时返回 None。

    元素按各轴的行主序排列。长度为 1 的轴，步长可以是任意值。所有轴长度都为 1
    时，步长为 1。
    """
    raise NotImplementedError
