"""Lesson 3: online softmax, on plain floats.

A state is (m, l): the maximum of some numbers, and the sum of exp(x - m) over
them. The state of no numbers is (-inf, 0.0).

---

第 3 课：在线 softmax，用普通浮点数。

状态是 (m, l)：一些数的最大值，以及它们的 exp(x - m) 之和。一个数也没有时，
状态是 (-inf, 0.0)。
"""

import math  # noqa: F401
from collections.abc import Iterator

State = tuple[float, float]


def merge(a: State, b: State) -> State:
    """Exercise 1. The state of the numbers of a and b together.

    ---
    练习 1。a 和 b 的数合在一起的状态。
    """
    raise NotImplementedError


def denominator(xs: Iterator[float]) -> State:
    """Exercise 2. The state of all numbers, which can be read once.

    One step for each: the new maximum, and l corrected before exp(x - m) is
    added.

    ---
    练习 2。所有数的状态；这些数只能读一遍。

    每个数一步：求新的最大值，修正 l，再加上 exp(x - m)。
    """
    raise NotImplementedError


def weighted_mean(pairs: Iterator[tuple[float, float]]) -> float:
    """Exercise 3. Σ softmax(x)_i · v_i of pairs (x, v) that are read once.

    This is attention of one query with scores x and values v. Keep (m, l, o),
    with o = Σ exp(x - m) v, and divide at the end.

    ---
    练习 3。对只能读一遍的 (x, v)，求 Σ softmax(x)_i · v_i。

    这就是一个查询的注意力：分数 x，值 v。保持 (m, l, o)，其中
    o = Σ exp(x - m) v，最后再除。
    """
    raise NotImplementedError
