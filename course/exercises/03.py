"""Lesson 3: the merge of two softmax states, on plain floats.

A state is (m, l): the maximum of some numbers, and the sum of exp(x - m) over them. No numbers at all: (-inf, 0.0).

---

第 3 课：合并两个 softmax 状态，用普通浮点数。

状态是 (m, l)：一些数的最大值，以及它们的 exp(x - m) 之和。一个数也没有时：(-inf, 0.0)。
"""

import math  # noqa: F401

State = tuple[float, float]


def merge(a: State, b: State) -> State:
    """The state of both together. --- 两者合在一起的状态。"""
    raise NotImplementedError


def denominator(xs: list[float]) -> State:
    """The state of a list, one merge per element. --- 一个列表的状态，每个元素合并一次。"""
    raise NotImplementedError
