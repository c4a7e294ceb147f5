"""How a tensor lies in memory: a shape, and for each axis the distance between neighbours.

>>> strides([2, 3]), strides([2, 4, 3])
([3, 1], [12, 3, 1])
>>> m = Layout.row_major([2, 3])
>>> m.transpose(), m.reshape([3, 2])
(Layout(shape=[3, 2], strides=[1, 3]), Layout(shape=[3, 2], strides=[2, 1]))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.errors import AttentionError


def strides(shape: Sequence[int]) -> list[int]:
    """stride[i] = Π shape[i+1:], for the row-major layout: the last axis is contiguous."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


@dataclass(frozen=True)
class Layout:
    shape: list[int]
    strides: list[int]

    @staticmethod
    def row_major(shape: Sequence[int]) -> Layout:
        return Layout(list(shape), strides(shape))

    @staticmethod
    def column_major(shape: Sequence[int]) -> Layout:
        """The first axis is contiguous: shape [2, 3] has strides [1, 2]."""
        return Layout(list(shape), strides(shape[::-1])[::-1])

    def offset(self, index: Sequence[int]) -> int:
        """Where an element lies: Σ index · stride.

        >>> Layout.row_major([2, 3]).offset([1, 2])
        5
        """
        return sum(i * s for i, s in zip(index, self.strides, strict=True))

    def offsets(self) -> list[int]:
        """Offsets of all elements, in logical order."""
        return [self.offset(index) for index in itertools.product(*map(range, self.shape))]

    @property
    def contiguous(self) -> bool:
        return self.offsets() == list(range(math.prod(self.shape)))

    def transpose(self, a: int = 0, b: int = 1) -> Layout:
        """Swap two axes: their sizes and strides change places, the data stays."""
        shape, step = list(self.shape), list(self.strides)
        shape[a], shape[b], step[a], step[b] = shape[b], shape[a], step[b], step[a]
        return Layout(shape, step)

    def reshape(self, shape: Sequence[int]) -> Layout:
        """Another shape for the same data, which must be contiguous.

        >>> Layout.row_major([2, 3]).transpose().reshape([6])
        Traceback (most recent call last):
        ...
        tilewise.errors.AttentionError: view of a layout: found shape [3, 2], ...
        """
        if math.prod(shape) != math.prod(self.shape):
            raise AttentionError("shape", list(shape), f"{math.prod(self.shape)} elements, as {self.shape} has")
        if not self.contiguous:
            found = f"shape {self.shape}, strides {self.strides}"
            raise AttentionError(
                "view of a layout", found, "contiguous data, or a copy (torch: reshape instead of view)"
            )
        return Layout.row_major(shape)
