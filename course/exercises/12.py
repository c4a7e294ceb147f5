"""Lesson 12: two operations for the micro autograd engine.

Return a `Value` with its number and `made_from`: pairs of (input, derivative with respect to that input).
`Value(number, op="name", made_from=((x, local), ...))` is all you need.

---

第 12 课：给微型自动求导引擎加两个运算。

返回一个 `Value`，带着它的数值和 `made_from`：若干对 (输入, 对该输入的导数)。
只需要 `Value(number, op="name", made_from=((x, local), ...))`。
"""

from tilewise_lab.trace.graph import Value


def tanh(x: Value) -> Value:
    raise NotImplementedError


def maximum(x: Value, y: Value) -> Value:
    """The larger of two; where they are equal, x's. --- 两者中较大的；相等时取 x。"""
    raise NotImplementedError
