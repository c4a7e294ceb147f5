"""One load instruction of a warp is 32 addresses. Memory answers in lines: what counts is how many lines they touch.

>>> touched(contiguous(), itemsize=4).lines
1
>>> touched(strided(4096), itemsize=4).lines
32
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tilewise_lab.machine.warps import WARP

LINE, SECTOR = 128, 32  # bytes: of a cache line, and of the least that DRAM gives


class Touched(NamedTuple):
    """Lines and sectors that an instruction touches, and the share of the fetched bytes it asked for."""

    lines: int
    sectors: int
    efficiency: float


def touched(elements: Sequence[int], itemsize: int) -> Touched:
    """`elements`: the index that each lane reads, at one instant."""
    bytes_read = {b for e in elements for b in range(e * itemsize, (e + 1) * itemsize)}
    sectors = {b // SECTOR for b in bytes_read}
    return Touched(len({b // LINE for b in bytes_read}), len(sectors), len(bytes_read) / (SECTOR * len(sectors)))


def contiguous(first: int = 0) -> list[int]:
    """Each lane reads the element after that of the lane before."""
    return strided(1, first)


def strided(stride: int, first: int = 0) -> list[int]:
    return [first + lane * stride for lane in range(WARP)]


def row_per_thread(columns: int, instant: int) -> list[int]:
    """Every thread walks along a row of its own: at each instant the lanes are a whole row apart.

    "Threads move along rows" reads like the good case, and is the bad one:

    >>> [touched(row_per_thread(4096, t), itemsize=4).lines for t in range(3)]
    [32, 32, 32]
    """
    return [lane * columns + instant for lane in range(WARP)]


def row_per_warp(columns: int, instant: int) -> list[int]:
    """The lanes share a row and move along it together: neighbours read neighbours, and one line serves all 32.

    >>> [touched(row_per_warp(4096, t), itemsize=4).lines for t in range(3)]
    [1, 1, 1]
    """
    return [instant * WARP % columns + lane for lane in range(WARP)]
