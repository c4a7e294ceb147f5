"""Lesson 5: one step of tiled attention.

`state` is (m, l, o): running maximum (N,), denominator (N,), numerator (N, E). `s` (N, M) are the scores of the next block
of keys, -inf where a pair is masked; `v` (M, E) its values.

---

第 5 课：分块注意力的一步。

`state` 是 (m, l, o)：到目前为止的最大值 (N,)、分母 (N,)、分子 (N, E)。`s` (N, M) 是下一块键的分数，被遮住的位置是 -inf；`v` (M, E)
是这一块的值。
"""

import torch  # noqa: F401
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]


def step(state: State, s: Tensor, v: Tensor) -> State:
    raise NotImplementedError
