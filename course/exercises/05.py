"""Lesson 5: one step of tiled attention.

`state` is (m, l, o): running maximum (N,), denominator (N,), numerator (N, E). `s` (N, M) are the scores of the next block
of keys, -inf where a pair is masked; `v` (M, E) its values.
"""

import torch  # noqa: F401
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]


def step(state: State, s: Tensor, v: Tensor) -> State:
    raise NotImplementedError
