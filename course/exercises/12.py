"""Lesson 12: derivatives.

Exercises 1 and 2 are operations for the small autograd engine: return a
`Value` with its number and `made_from`, pairs of (input, derivative with
respect to that input). `Value(number, op="name", made_from=((x, local),))` is
all you need.

---

第 12 课：导数。

练习 1 和 2 是微型自动求导引擎的运算：返回一个 `Value`，带着它的数值和
`made_from`，即若干对 (输入, 对该输入的导数)。只需要
`Value(number, op="name", made_from=((x, local),))`。
"""

import math  # noqa: F401

from torch import Tensor

from tilewise_lab.trace.graph import Value


def tanh(x: Value) -> Value:
    """Exercise 1. The hyperbolic tangent.

    ---
    练习 1。双曲正切。
    """
    raise NotImplementedError


def maximum(x: Value, y: Value) -> Value:
    """Exercise 2. The larger of two; where they are equal, x.

    ---
    练习 2。两者中较大的；相等时取 x。
    """
    raise NotImplementedError


def linear_backward(
    x: Tensor, w: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Exercise 3. (dX, dW, db) of Y = X W + b, given dY.

    X is (N, K), W (K, M), b (M,) and dY (N, M). No autograd, please.

    ---
    练习 3。已知 dY，求 Y = X W + b 的 (dX, dW, db)。

    X 是 (N, K)，W 是 (K, M)，b 是 (M,)，dY 是 (N, M)。不要用自动求导。
    """
    raise NotImplementedError
