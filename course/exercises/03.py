"""Lesson 3: the merge of two softmax states, on plain floats.

A state is (m, l): the maximum of some numbers, and the sum of exp(x - m) over them. No numbers at all: (-inf, 0.0).
"""

import math  # noqa: F401

State = tuple[float, float]


def merge(a: State, b: State) -> State:
    """The state of both together."""
    raise NotImplementedError


def denominator(xs: list[float]) -> State:
    """The state of a list, one merge per element."""
    raise NotImplementedError
