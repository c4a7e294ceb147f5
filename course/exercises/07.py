"""Lesson 7: coalescing.

A row-major matrix starts at address 0. At one instant, lane t of a warp reads element (0, t) if lane_axis is 1, and element
(t, 0) if it is 0, for t = 0 .. 31. Memory comes in lines of 128 bytes.

---

第 7 课：合并访存。

一个行主序矩阵从地址 0 开始。在同一时刻，warp 的第 t 个 lane（t = 0 .. 31）读取元素 (0, t)（lane_axis 为 1 时）或 (t, 0)（为 0 时）。
内存以 128 字节的行为单位。
"""


def lines(columns: int, itemsize: int, lane_axis: int) -> int:
    """How many lines the warp touches. --- 这个 warp 碰到多少行。"""
    raise NotImplementedError
